"""Parameter storage of a rank: real tensors for the parameters of its stages, meta tensors for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_pipetransformer.splitters.quantized import like, move_scales


if TYPE_CHECKING:
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.splitters.structure import Structure


def frozen_names(structure: Structure, layout: Layout) -> frozenset[str]:
    """Return the parameters that a layout freezes: all that the frozen prefix uses, even if later blocks do too."""
    blocks = structure.blocks_of_parameter
    return frozenset(name for name, users in blocks.items() if users[0] < layout.first_active_block)


def is_whole(model: nn.Module) -> bool:
    """Return True if no parameter of a model is a meta tensor."""
    return not any(parameter.is_meta for parameter in model.parameters())


class ParameterSlots:
    """Places of a model's parameters, which a step looks up often; walking through the modules takes a millisecond.

    Args:
        model: its modules stay the same; parameters may be replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        found: dict[int, tuple[str, dict[str, nn.Parameter | None], str]] = {}
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                # A tied parameter has several places; it goes by the first, as in `named_parameters`.
                if parameter is not None and id(parameter) not in found:
                    found[id(parameter)] = (f"{prefix}.{key}" if prefix else key, module._parameters, key)
        self._places = list(found.values())

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return what `named_parameters` gives: parameters by first name."""
        return [(name, parameter) for name, own, key in self._places if (parameter := own.get(key)) is not None]


class ParameterStore:
    """Parameters of a model of which this rank may hold only a part; the others are meta tensors.

    Names, shapes, dtypes and ties stay visible on every rank, so code that counts or names parameters works anywhere.
    Parameters that are not held have `requires_grad=False`, which keeps them out of the optimizer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._slots = ParameterSlots(model)
        # Noted while all are held: parameters that are not held require no gradient, whatever the user said.
        self.trainable = {name: p.requires_grad for name, p in model.named_parameters()}
        self.frozen: frozenset[str] = frozenset()
        self.is_divided = False
        """True while each rank of a pipeline holds its own stages' parameters only. The same on every rank."""

    def named(self) -> dict[str, nn.Parameter]:
        """Return all parameters by first name, held or not."""
        return dict(self._slots.named())

    def held(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named().items() if not p.is_meta}

    def is_active(self, name: str) -> bool:
        """Return True if a parameter is frozen neither by the user nor by the run."""
        return self.trainable[name] and name not in self.frozen

    @property
    def trains_all(self) -> bool:
        """True if the run freezes nothing beyond what the user froze."""
        return not any(self.trainable[name] for name in self.frozen)

    def freeze(self, names: frozenset[str]) -> None:
        """Freeze these parameters and drop their `.grad`; unfreeze all others except those that the user froze."""
        self.frozen = names
        for name, parameter in self.held().items():
            parameter.requires_grad_(self.is_active(name))
            if not parameter.requires_grad:
                # What is left over would count in the norm by which gradients are clipped.
                parameter.grad = None

    @contextmanager
    def all_active(self) -> Iterator[None]:
        """Lift the run's freezing inside, so that an optimizer created there has groups for all parameters."""
        frozen = self.frozen
        self.freeze(frozenset())
        try:
            yield
        finally:
            self.freeze(frozen)

    @contextmanager
    def trained_shown(self) -> Iterator[None]:
        """Let what other ranks train ask for gradients inside, by which code of the script's may choose parameters."""
        elsewhere = [p for name, p in self.named().items() if p.is_meta and self.is_active(name)]
        for parameter in elsewhere:
            parameter.requires_grad_()
        try:
            yield
        finally:
            for parameter in elsewhere:
                parameter.requires_grad_(False)

    def release(self, keep: set[str]) -> None:
        """Replace all parameters not in `keep` by meta tensors; what scales quantized ones stays on the host."""
        gone = {name: p for name, p in self.named().items() if name not in keep and not p.is_meta}
        for parameter in gone.values():
            move_scales(parameter, torch.device("cpu"))
        self._replace({name: like(p, torch.empty_like(p.data, device="meta")) for name, p in gone.items()})

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        """Hold the given parameters. Those already held keep their object and get the new values."""
        current = self.named()
        with torch.no_grad():
            for name, tensor in tensors.items():
                if not current[name].is_meta:
                    # In place, as optimizer and hooks know the object.
                    current[name].copy_(tensor)
        missing = {name: tensor for name, tensor in tensors.items() if current[name].is_meta}
        for name, tensor in missing.items():
            move_scales(current[name], tensor.device)
        self._replace(
            {
                name: like(current[name], tensor.to(current[name].dtype), self.is_active(name))
                for name, tensor in missing.items()
            }
        )

    def move(self, names: set[str], device: torch.device) -> None:
        """Move the named parameters and all buffers to `device`. Parameters stay the same objects."""
        for name, parameter in self.held().items():
            if name in names:
                parameter.data = parameter.data.to(device)
                move_scales(parameter, device)
        # Buffers are small, and every rank keeps all of them.
        for module in self.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(device)

    @contextmanager
    def lent_to(self, device: torch.device, names: set[str]) -> Iterator[None]:
        """Hold the named parameters and all buffers on `device` inside; changes to them are kept.

        Afterward each parameter has the tensor that it had. One that nothing changed is not written, so that weights
        that are mapped from a file stay mapped.
        """
        homes = {name: p.data for name, p in self.held().items() if name in names and p.device != device}
        buffers = [
            (module, key, buffer.device)
            for module in self.model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.device != device
        ]
        self.move(set(homes), device)
        try:
            yield
        finally:
            held = self.held()
            for name, home in homes.items():
                value = held[name].data.to(home.device)
                if not torch.equal(value, home):
                    home.copy_(value)
                held[name].data = home
                move_scales(held[name], home.device)
            for module, key, own in buffers:
                buffer = module._buffers[key]
                if buffer is not None:
                    module._buffers[key] = buffer.to(own)

    def _replace(self, by_name: dict[str, nn.Parameter]) -> None:
        current = self.named()
        # By identity: tied parameters stay tied.
        by_id: dict[int, Any] = {id(current[name]): new for name, new in by_name.items()}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in by_id:
                    module._parameters[name] = by_id[id(parameter)]
