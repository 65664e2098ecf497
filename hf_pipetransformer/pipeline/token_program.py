"""Token slices: a program whose micro-batches are slices of sequences, run one after the other (TeraPipe)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_pipetransformer.pipeline.kept_context import KeptContext
from hf_pipetransformer.pipeline.program import MicroBatch, StageProgram
from hf_pipetransformer.pipeline.schedules import BEGINS_BACKWARD, Row


class TokenSliceProgram:
    """Runs another program on slices, with what earlier slices of the same sequences left; and on whole sequences.

    Args:
        program: runs a slice.
        num_layers: of the model.
    """

    def __init__(self, program: StageProgram, num_layers: int) -> None:
        self.program = program
        self.num_layers = num_layers
        self._contexts: dict[int, KeptContext] = {}
        self._is_trained = False

    def begin(self, row: Row) -> None:
        self.program.begin(row)
        self._contexts.clear()
        self._is_trained = any(action.op in BEGINS_BACKWARD for action in row)

    def extend(self, row: Row) -> None:
        self.program.extend(row)
        self._is_trained |= any(action.op in BEGINS_BACKWARD for action in row)

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        return self.program.forward(self._in_context(micro_batch), received)

    def predict(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        return self.program.predict(self._in_context(micro_batch), received)

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        sent = self.backward_input(micro_batch, gradient)
        self.program.backward_weight(micro_batch)
        return sent

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        place = micro_batch.place
        if place is None:
            return self.program.backward_input(micro_batch, gradient)
        context = self._contexts[place.batch_slice]
        if gradient is None and not micro_batch.weight:
            context.backward_of_context(place.start)
        sent = self.program.backward_input(micro_batch, gradient)
        context.forget(place.start)
        if place.start == 0:
            del self._contexts[place.batch_slice]
        return sent

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self.program.backward_weight(micro_batch)

    def _in_context(self, micro_batch: MicroBatch) -> MicroBatch:
        place = micro_batch.place
        if place is None:
            return micro_batch
        if place.batch_slice not in self._contexts:
            self._contexts[place.batch_slice] = KeptContext(self.num_layers, place.length)
        context = self._contexts[place.batch_slice]
        inputs = {**micro_batch.inputs, "past_key_values": context.from_token(place.start)}
        if place.stop == place.length and not self._is_trained:
            del self._contexts[place.batch_slice]
        return replace(micro_batch, inputs=inputs)
