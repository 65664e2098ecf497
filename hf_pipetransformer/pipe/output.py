"""What `Pipe` returns: the result itself, which also answers to what old code asks a remote reference for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import register_pytree_node


class LocalTensor(torch.Tensor):
    """A tensor with `local_value()`. Operations on it give plain tensors."""

    _value: torch.Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def local_value(self) -> torch.Tensor:
        """The result as a plain tensor, the same object each time."""
        return self._value

    def to_here(self) -> torch.Tensor:
        """As `local_value`: everything is in this process."""
        return self._value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._value.__deepcopy__(memo)


class LocalTuple(tuple[Any, ...]):
    """A tuple with `local_value()`."""

    def local_value(self) -> tuple[Any, ...]:
        """The values as a plain tuple."""
        return tuple(self)

    def to_here(self) -> tuple[Any, ...]:
        """As `local_value`: everything is in this process."""
        return tuple(self)


# Wrappers such as DistributedDataParallel look for tensors in what a module returns.
register_pytree_node(LocalTuple, lambda values: (list(values), None), lambda values, _: LocalTuple(values))


def as_output(value: Any) -> Any:
    """The result of a pipeline with `local_value()`."""
    if isinstance(value, (LocalTensor, LocalTuple)):
        return value
    if isinstance(value, tuple):
        return LocalTuple(value)
    output = value.as_subclass(LocalTensor)
    output._value = value
    return output
