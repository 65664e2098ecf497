"""`Pipe`, in the form that PyTorch had it until 2.3."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_pipetransformer.pipe.micro_batches import MicroBatch
from hf_pipetransformer.pipe.module import Pipelined, prepared
from hf_pipetransformer.pipe.output import as_output
from hf_pipetransformer.pipe.stages import split_by_device


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
