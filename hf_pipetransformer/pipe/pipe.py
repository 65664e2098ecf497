"""`Pipe` and `GPipe`, which replace `torch.distributed.pipeline.sync.Pipe` and `torchgpipe.GPipe`."""

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
    """Tensor with the `local_value()` of an RRef. Operations on it return plain tensors."""

    _value: torch.Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def local_value(self) -> torch.Tensor:
        """Return the plain tensor, the same object on each call."""
        return self._value

    def to_here(self) -> torch.Tensor:
        """Return `local_value()`: everything is in this process."""
        return self._value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._value.__deepcopy__(memo)


class LocalTuple(tuple[Any, ...]):
    """Tuple with the `local_value()` of an RRef."""

    def local_value(self) -> tuple[Any, ...]:
        """Return a plain tuple."""
        return tuple(self)

    def to_here(self) -> tuple[Any, ...]:
        """Return `local_value()`: everything is in this process."""
        return tuple(self)


# DistributedDataParallel and other wrappers look for tensors in a module's output through pytree.
register_pytree_node(LocalTuple, lambda values: (list(values), None), lambda values, _: LocalTuple(values))


def as_output(value: Any) -> Any:
    """Give a pipeline's output, a tensor or a tuple, the method `local_value()`."""
    if isinstance(value, (LocalTensor, LocalTuple)):
        return value
    if isinstance(value, tuple):
        return LocalTuple(value)
    output = value.as_subclass(LocalTensor)
    output._value = value
    return output


class Pipe(Pipelined):
    """Pipeline of an `nn.Sequential` over the devices that its modules are on, in one process (GPipe).

    Each mini-batch is cut into micro-batches. While a stage computes one micro-batch, the stage before it computes
    the next one. Output and gradients are those of the Sequential, except that batch norms see micro-batches.

    Consecutive modules on one GPU form a stage; on the CPU each child is a stage. A module without parameters and
    buffers runs on the CPU unless it is wrapped in `WithDevice`. The calling thread serves the CPU, and each GPU has
    a thread.

    Args:
        module: all parameters of a child must be on one device.
        chunks: number of micro-batches of a mini-batch.
        checkpoint: micro-batches that keep only their stages' inputs and are recomputed in the backward: `always`,
            `except_last` (all but the last) or `never`. In training mode with gradients only.
        deferred_batch_norm: True to update the running statistics of batch norms once per mini-batch, with the mean
            and variance of the whole mini-batch.

    Raises:
        TypeError: `module` is not an `nn.Sequential`, or a skip tensor has not exactly one stash and one pop.
        ValueError: `chunks` is below 1, `checkpoint` is unknown, or a child appears twice or is on several devices.
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
        """Run a mini-batch.

        Args:
            inputs: arguments of the first module, on its device. Tensors are cut along their first dimension; all
                other values, and tensors in `NoChunk`, go to every micro-batch unchanged.

        Returns:
            The tensor or tuple that the Sequential returns, also with `local_value()`. A value that is not a tensor
            becomes a list with one entry per micro-batch.

        Raises:
            TypeError: no tensor among the inputs, or among the values between two stages.
            ValueError: an input is not on the first stage's device.
            RuntimeError: the inputs give different numbers of micro-batches.
        """
        return self._run(MicroBatch(inputs, is_single=len(inputs) == 1))

    def __call__(self, *inputs: Any) -> Any:
        """Run `forward` and the module's hooks, and give the output `local_value()`."""
        return as_output(super().__call__(*inputs))


class GPipe(Pipelined):
    """Pipeline of an `nn.Sequential` that is moved to the given devices, with the interface of torchgpipe.

    Differs from `Pipe`: a tuple is one argument of the next module, all values must be tensors, and the output has no
    `local_value()`. `chunks`, `checkpoint` and `deferred_batch_norm` are as in `Pipe`.

    Args:
        balance: number of children of each stage, from `balance_by_time` or `balance_by_size`. Required.
        devices: one per stage; by default all GPUs.

    Raises:
        TypeError: as in `Pipe`.
        ValueError: as in `Pipe`, or `balance` is missing or does not fit the module.
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
        """Run a mini-batch and return the tensor or tuple that the Sequential returns.

        Raises:
            TypeError: a value among the inputs or between two stages is not a tensor.
            ValueError: an input is not on the first stage's device.
        """
        return self._run(MicroBatch.of(input))
