"""Activation recomputation: a program that keeps a stage's input in place of what its backward needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hf_pipetransformer.pipeline.program import MicroBatch, StageProgram
from hf_pipetransformer.pipeline.schedules import BEGINS_BACKWARD, COMPUTATIONS, Op, Row


_RUNS_AGAIN: ContextVar[bool] = ContextVar("runs_again", default=False)


def runs_again() -> bool:
    """Whether a forward is under way that has run before."""
    return _RUNS_AGAIN.get()


def recomputed_micro_batches(row: Row, chunk: int, mode: str) -> frozenset[int]:
    """The micro-batches of a row whose forward is run again before their backward.

    Those are left out whose backward follows at once: there is nothing to free in between.

    Args:
        row: of a rank.
        chunk: which of its stages.
        mode: `never`, `always`, or `except_last` (all but the last micro-batch).
    """
    forwards = {i for op, i, own in row if (op, own) == (Op.FORWARD, chunk)}
    computations = [action for action in row if action.op in COMPUTATIONS]
    at_once = {
        i
        for (op, i, own), following in pairwise(computations)
        if (op, own) == (Op.FORWARD, chunk) and following in [(begin, i, own) for begin in BEGINS_BACKWARD]
    }
    last = {max(forwards, default=0)} if mode == "except_last" else set()
    return frozenset() if mode == "never" else frozenset(forwards - at_once - last)


@dataclass(frozen=True)
class _Start:
    """What a forward that is run again starts from."""

    received: torch.Tensor | None
    random_state: Mapping[str, torch.Tensor]


class RecomputingProgram:
    """Runs another program's forward without keeping anything, and again before its backward.

    Args:
        program: what is recomputed.
        mode: see `recomputed_micro_batches`.
        chunk: which of its rank's stages it is.
        device: whose random state is restored with the CPU's.
    """

    def __init__(self, program: StageProgram, mode: str, chunk: int, device: torch.device) -> None:
        self.program = program
        self.mode = mode
        self.chunk = chunk
        self.device = device
        self._row: Row = ()
        self._recomputed: frozenset[int] = frozenset()
        self._starts: dict[int, _Start] = {}

    def begin(self, row: Row) -> None:
        self.program.begin(row)
        self._starts.clear()
        if row is not self._row:
            self._row, self._recomputed = row, recomputed_micro_batches(row, self.chunk, self.mode)

    def extend(self, row: Row) -> None:
        self.program.extend(row)
        self._row, self._recomputed = row, recomputed_micro_batches(row, self.chunk, self.mode)

    def forward(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> torch.Tensor:
        if not torch.is_grad_enabled() or micro_batch.index not in self._recomputed:
            return self.program.forward(micro_batch, received)
        self._starts[micro_batch.index] = _Start(received, _random_state(self.device))
        with torch.no_grad():
            return self.program.forward(micro_batch, received)

    def predict(self, micro_batch: MicroBatch, received: torch.Tensor | None) -> Any:
        return self.program.predict(micro_batch, received)

    def backward(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._run_again(micro_batch)
        return self.program.backward(micro_batch, gradient)

    def backward_input(self, micro_batch: MicroBatch, gradient: torch.Tensor | None) -> torch.Tensor | None:
        self._run_again(micro_batch)
        return self.program.backward_input(micro_batch, gradient)

    def backward_weight(self, micro_batch: MicroBatch) -> None:
        self.program.backward_weight(micro_batch)

    def _run_again(self, micro_batch: MicroBatch) -> None:
        start = self._starts.pop(micro_batch.index, None)
        if start is not None:
            token = _RUNS_AGAIN.set(True)
            try:
                with _restored(start.random_state, self.device), torch.enable_grad():
                    self.program.forward(micro_batch, start.received)
            finally:
                _RUNS_AGAIN.reset(token)


def _random_state(device: torch.device) -> Mapping[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


@contextmanager
def _restored(states: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(states["cpu"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
        yield
