"""`GPipe`, in the form that torchgpipe had it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.pipe.micro_batches import MicroBatch
from hf_pipetransformer.pipe.module import Pipelined, prepared
from hf_pipetransformer.pipe.stages import normalised, split_by_balance


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
