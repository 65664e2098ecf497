"""`Pipe` and `GPipe`, the modules of the public interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from hf_pipetransformer.pipe.micro_batches import MicroBatch
from hf_pipetransformer.pipe.module import Pipelined, prepared
from hf_pipetransformer.pipe.stages import normalised, split_by_balance, split_by_device


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


class Pipe(Pipelined):
    """Runs an `nn.Sequential` as a pipeline over the devices that its modules lie on, in one process (GPipe).

    Each mini-batch is cut into micro-batches; while one stage computes a micro-batch, the stage before computes the
    next one. The result and the gradients are those of the Sequential.

    Neighbours on one GPU are a stage; on the CPU every child is one. A module without parameters and buffers runs on
    the CPU, unless `WithDevice` says otherwise. The calling thread works for the CPU, every GPU has a thread.

    Args:
        module: each child with its parameters on one device.
        chunks: micro-batches of a mini-batch.
        checkpoint: `always`, `except_last` (all micro-batches but the last) or `never`: which keep only the inputs of
            their stages, and are computed again in the backward. In training alone.
        deferred_batch_norm: whether running statistics of batch norms are updated once a mini-batch, with its mean
            and variance.

    Raises:
        TypeError: no Sequential, or skip tensors without exactly one stash and one pop.
        ValueError: less than one chunk, an unknown `checkpoint`, a child that appears twice or lies on several
            devices.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        module = prepared(module, chunks, checkpoint, deferred_batch_norm)
        super().__init__(split_by_device(module), chunks, checkpoint, expands=True)

    def forward(self, *inputs: Any) -> Any:
        """The result of a mini-batch.

        Args:
            inputs: the first module's arguments. Tensors are cut along their first dimension; every micro-batch gets
                other values, and tensors in `NoChunk`, as they are.

        Returns:
            The tensor or tuple that the Sequential gives, which also has `local_value()`. Values that are no tensors
            come as a list, one for each micro-batch.

        Raises:
            TypeError: no tensor is given, or passes between two stages.
            ValueError: a tensor is not on the first stage's device.
            RuntimeError: the tensors do not fall into equally many micro-batches.
        """
        return self._run(MicroBatch(inputs, is_single=len(inputs) == 1))

    def __call__(self, *inputs: Any) -> Any:
        """As `forward`, with the hooks of the module."""
        return as_output(super().__call__(*inputs))


class GPipe(Pipelined):
    """Runs an `nn.Sequential` as a pipeline over devices that it is moved to; see `Pipe`.

    Unlike with `Pipe` a tuple is one argument of the next module, all values are tensors, and the result is plain.

    Args:
        module: what is cut into stages.
        balance: how many of its children each stage takes; `balance_by_time` and `balance_by_size` find it.
        devices: of the stages; the GPUs unless given.
        chunks: micro-batches of a mini-batch.
        checkpoint: as of `Pipe`.
        deferred_batch_norm: as of `Pipe`.

    Raises:
        TypeError: as of `Pipe`.
        ValueError: as of `Pipe`, or a balance that does not fit the module.
        IndexError: fewer devices than stages.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        *,
        devices: Sequence[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        module = prepared(module, chunks, checkpoint, deferred_batch_norm)
        if balance is None:
            raise ValueError(
                "balance is required: how many children each stage takes. One is found by "
                "hf_pipetransformer.pipe.balance_by_time."
            )
        places = range(torch.cuda.device_count()) if devices is None else devices
        stages = split_by_balance(module, list(balance), [normalised(torch.device(each)) for each in places])
        super().__init__(stages, chunks, checkpoint, expands=False)
        self.balance = list(balance)

    def forward(self, input: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """The result of a mini-batch, a tensor or a tuple as the Sequential gives it.

        Raises:
            TypeError: something else than tensors is given, or passes between two stages.
            ValueError: a tensor is not on the first stage's device.
        """
        return self._run(MicroBatch.of(input))
