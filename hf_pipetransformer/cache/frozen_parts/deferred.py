"""Outputs of frozen parts that are computed, or read from a store, only when somebody uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from hf_pipetransformer.cache.frozen_parts.values import rebuilt


if TYPE_CHECKING:
    from hf_pipetransformer.cache.frozen_parts.call import PartCall


_ATTRIBUTES = (
    *("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "itemsize", "names"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_nested", "is_quantized", "is_sparse", "nbytes"),
)
_METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__", "__hash__")
_OF_THE_FORM = {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)}
_OF_THE_FORM |= {getattr(torch.Tensor, name) for name in _METHODS}
"""Functions of a tensor that need no value of it."""


class Deferred(torch.Tensor):
    """Output `number` of a call of a frozen part: a tensor without values until other code than frozen parts uses it.

    What then is used in its place, in this use and in all later ones, is one ordinary tensor.
    """

    call: PartCall
    number: int

    @staticmethod
    def __new__(cls, call: PartCall, number: int, shape: torch.Size | list[int], like: torch.Tensor) -> Deferred:
        found: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        found.call, found.number = call, number
        return found

    def value(self, first: bool = False) -> torch.Tensor:
        """Return the tensor, or of each row the first position alone."""
        return self.call.value(self.number, first)

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_THE_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__getitem__ and type(args[0]) is Deferred and _is_first(args[1], args[0].dim()):
            args[0].call.note(args[0].number, is_first=True)
            return args[0].value(first=True)
        return _used(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _used(func, args, kwargs)


def _used(func: Any, args: Any, kwargs: Any) -> Any:
    def value(given: Any) -> Any:
        if type(given) is not Deferred:
            return given
        given.call.note(given.number)
        return given.value()

    args, kwargs = tree_map(value, (args, kwargs or {}))
    return func(*args, **kwargs)


def _is_first(index: Any, dims: int) -> bool:
    """Return True for `[:, 0]` of a tensor with more dimensions than two."""
    if dims < 3 or type(index) is not tuple or len(index) < 2 or type(index[1]) is not int or index[1] != 0:
        return False
    return all(type(each) is slice and each == slice(None) for place, each in enumerate(index) if place != 1)


def undeferred(value: Any) -> Any:
    """Return a value of tensors with ordinary ones in place of those that are deferred, whose use is not noted."""
    return rebuilt(value, lambda tensor: tensor.value() if type(tensor) is Deferred else tensor)
