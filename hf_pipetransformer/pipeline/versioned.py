"""Weight versions: a program whose forwards and backwards see the weights that asynchronous training wants them to."""

from __future__ import annotations

from typing import Any

import torch

from hf_pipetransformer.pipeline.program import MicroBatch, StageProgram
from hf_pipetransformer.pipeline.schedules import Row
from hf_pipetransformer.pipeline.weights import StageWeights


class VersionedProgram:
    """Runs another program's forwards and backwards, each with weights of its own.

    A forward that is run again before its backward sees the weights of the backward.

    Args:
        program: what is run.
        weights: of the stage.
    """

    def __init__(self, program: StageProgram, weights: StageWeights) -> None:
        self.program = program
        self.weights = weights

    def begin(self, row: Row) -> None:
        self.program.begin(row)

    def extend(self, row: Row) -> None:
        self.program.extend(row)

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        with self.weights.forward(micro_batch.index, micro_batch.step):
            return self.program.forward(micro_batch, received)

    def predict(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        return self.program.predict(micro_batch, received)

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.weights.backward(micro_batch.index, micro_batch.step):
            return self.program.backward(micro_batch, gradient)

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.weights.backward(micro_batch.index, micro_batch.step):
            return self.program.backward_input(micro_batch, gradient)

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self.program.backward_weight(micro_batch)
