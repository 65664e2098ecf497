"""Keeping on a rank only what its stages own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.splitters.structure import Structure


def frozen_names(structure: Structure, layout: Layout) -> frozenset[str]:
    """Parameters that a layout freezes: all that any unit of the frozen prefix uses, wherever else they are used."""
    units = structure.units_of_parameter
    return frozenset(name for name, users in units.items() if users[0] < layout.first_active_unit)


def is_whole(model: nn.Module) -> bool:
    """Whether this rank holds all parameters of a model."""
    return not any(parameter.is_meta for parameter in model.parameters())


class ParameterStore:
    """The parameters of a model of which a rank may hold only a part; the others are meta tensors without storage.

    Names, shapes, dtypes and ties stay visible on every rank, so code that counts or names parameters works anywhere.
    A parameter that is not held has `requires_grad=False`, so that no optimizer takes it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        self.frozen: frozenset[str] = frozenset()

    def named(self) -> dict[str, nn.Parameter]:
        """All parameters by their first name, held or not."""
        return dict(self.model.named_parameters())

    def held(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds."""
        return {name: p for name, p in self.named().items() if not p.is_meta}

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of them."""
        return is_whole(self.model)

    def is_active(self, name: str) -> bool:
        """Whether a parameter is trained: neither frozen by the user nor by the run."""
        return self.trainable[name] and name not in self.frozen

    @property
    def trains_all(self) -> bool:
        """Whether everything is trained that the user did not freeze."""
        return not any(self.trainable[name] for name in self.frozen)

    def freeze(self, names: frozenset[str]) -> None:
        """Freeze exactly these parameters, beside those that the user froze."""
        self.frozen = names
        for name, parameter in self.held().items():
            parameter.requires_grad_(self.is_active(name))
            if not parameter.requires_grad:
                parameter.grad = None

    @contextmanager
    def all_active(self) -> Iterator[None]:
        """All that the user trains counts as trained inside: an optimizer that is made there has a group for it."""
        frozen = self.frozen
        self.freeze(frozenset())
        try:
            yield
        finally:
            self.freeze(frozen)

    def release(self, keep: set[str]) -> None:
        """Free all parameters whose names are not in `keep`."""
        self._replace(
            {
                name: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
                for name, p in self.named().items()
                if name not in keep and not p.is_meta
            }
        )

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        """Hold the given parameters; one that is held already keeps its object and gets the values."""
        current = self.named()
        with torch.no_grad():
            for name, tensor in tensors.items():
                if not current[name].is_meta:
                    current[name].copy_(tensor)
        self._replace(
            {
                name: nn.Parameter(tensor.to(current[name].dtype), requires_grad=self.is_active(name))
                for name, tensor in tensors.items()
                if current[name].is_meta
            }
        )

    def move(self, names: set[str], device: torch.device) -> None:
        """Move the named parameters, and all buffers, to `device`; parameters keep their identity."""
        for name, parameter in self.held().items():
            if name in names:
                parameter.data = parameter.data.to(device)
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(device)

    def _replace(self, by_name: dict[str, nn.Parameter]) -> None:
        current = self.named()
        by_id: dict[int, Any] = {id(current[name]): new for name, new in by_name.items()}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in by_id:
                    module._parameters[name] = by_id[id(parameter)]
