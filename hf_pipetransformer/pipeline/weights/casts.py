"""Weights that autocast has cast: the backward casts again what is there then.

Autograd keeps a weight by reference, but its cast to a lower precision is a copy of the forward's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch


_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Expand", "Permute", "Select", "Slice", "Squeeze", "T", "Transpose", "Unsqueeze"),
        *("UnsafeView", "View", "ReshapeAlias"),
    )
)
_CAST = "ToCopyBackward0"


def is_autocast_on(device_type: str) -> bool:
    """Whether computations on such a device are cast here."""
    return torch.is_autocast_enabled(device_type)


def casting_again(parameters: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Forwards inside keep, in place of a cast of one of `parameters`, what makes it anew in the backward."""
    by_identity = {id(parameter): parameter for parameter in parameters}

    def pack(saved: torch.Tensor) -> torch.Tensor | _Cast:
        parameter = cast_parameter(saved, by_identity)
        if parameter is not None:
            return _Cast(parameter, saved.dtype, saved.size(), saved.stride(), int(saved.storage_offset()))
        # What is kept as it is would keep itself alive.
        return saved.detach()

    def unpack(kept: torch.Tensor | _Cast) -> torch.Tensor:
        return kept.again() if isinstance(kept, _Cast) else kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def cast_parameter(tensor: torch.Tensor, parameters: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The parameter, one of `parameters` by identity, that `tensor` is a view of a cast of; else None."""
    node: Any = tensor.grad_fn
    num_casts = 0
    while node is not None and (name := node.name()) in _VIEWS | {_CAST}:
        if name == _CAST:
            num_casts += 1
        elif num_casts:
            return None  # A view of the parameter before it was cast: the strides tell nothing of it.
        node = node.next_functions[0][0]
    if num_casts != 1 or node is None or not node.name().endswith("AccumulateGrad"):
        return None
    return parameters.get(id(node.variable))


@dataclass(frozen=True)
class _Cast:
    """A view of the cast of a parameter."""

    parameter: torch.Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def again(self) -> torch.Tensor:
        """With the values of now."""
        return self.parameter.detach().to(self.dtype).as_strided(self.size, self.stride, self.offset)
