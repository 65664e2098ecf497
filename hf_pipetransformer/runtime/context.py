"""What the parts of a run share: the event journal, the collective timeouts, the seeds of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Trainer

from hf_pipetransformer.comm.errors import OUT_OF_MEMORY_REMEDY, PipelineError
from hf_pipetransformer.comm.faults import FaultBoard, is_second_hand
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.report.events import EventLog
from hf_pipetransformer.runtime.stage import Stage


@dataclass
class Journal:
    """Writes events with the trainer's present step and epoch.

    Args:
        trainer: tells them.
        log: the file.
    """

    trainer: Trainer
    log: EventLog
    tried: dict[str, Any] = field(default_factory=dict, init=False)
    """The layout in force, or that the run moves to, and the conditions of its memory, as JSON values."""
    _place: tuple[int, float | None] | None = field(default=None, init=False)

    @contextmanager
    def at(self, step: int, epoch: float | None) -> Iterator[None]:
        """Events are of this step inside: before a run has begun, Trainer's state is that of an earlier one."""
        self._place = (step, epoch)
        try:
            yield
        finally:
            self._place = None

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event with its inputs."""
        state = self.trainer.state
        self.log.write(kind, *(self._place or (state.global_step, state.epoch)), **fields)


class Patience:
    """The limits of waits in a step and at rest, and the report of the first fault. Made by all ranks together.

    Args:
        topology: the ranks.
        journal: for the fault event.
        step_seconds: that a rank waits for another in a step.
        rest_seconds: that it waits otherwise.
    """

    def __init__(self, topology: Topology, journal: Journal, step_seconds: float, rest_seconds: float) -> None:
        self.topology = topology
        self.journal = journal
        self.step_seconds = step_seconds
        self.rest_seconds = rest_seconds
        self.is_resting = True
        self._board = FaultBoard(topology.rank, topology.world_size)
        self._depth = 0

    def rest(self) -> None:
        """Something long may follow on any rank: saving, evaluating, a callback, compiling. All ranks come by."""
        self.is_resting = True
        self.topology.limit_waits(self.rest_seconds)

    def enter_step(self) -> None:
        """From here on the ranks wait as long as in a step; after a rest they first gather here."""
        if self.is_resting:
            self.topology.barrier("waiting for all ranks to begin a step")
            self.is_resting = False
            self.topology.limit_waits(self.step_seconds)

    @contextmanager
    def reporting_faults(self, together: bool = True) -> Iterator[None]:
        """An error inside ends the run on every rank, with the first cause named.

        Args:
            together: whether all ranks come here.
        """
        self._depth += 1
        if self._depth == 1:
            self._board.begin(together)
            self.rest()
        try:
            yield
        except BaseException as error:
            if self._depth == 1 and not isinstance(error, (SystemExit, GeneratorExit)):
                self._report(error)
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._board.end()

    def _report(self, error: BaseException) -> None:
        is_short = isinstance(error, torch.OutOfMemoryError)
        if is_short:
            error.add_note(OUT_OF_MEMORY_REMEDY)
        first_line = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        text = " ".join([first_line, *getattr(error, "__notes__", [])])
        second_hand = is_second_hand(error)
        cause = self._board.report(text, is_first_hand=not second_hand)
        is_short |= torch.OutOfMemoryError.__name__ in cause
        self.journal.write("fault", cause=cause, out_of_memory=is_short, **self.journal.tried)
        if second_hand:
            raise PipelineError(f"The run ended on rank {self.topology.rank}. First cause: {cause}") from error


class Seeds:
    """Seeds this rank's generator by its place, the trainings that began, and the transitions of this one.

    One process draws what Trainer draws.

    Args:
        topology: the ranks.
        seed: of the run.
    """

    def __init__(self, topology: Topology, seed: int) -> None:
        self.topology = topology
        self.seed = seed
        self.num_starts = 0
        self.num_transitions = 0

    def begin(self, stage: Stage) -> None:
        """A training begins on `stage`."""
        self.num_transitions = 0
        self.part(stage)
        self.num_starts += 1

    def part(self, stage: Stage) -> None:
        """From now on this rank draws what no other does."""
        if self.topology.world_size > 1:
            place = stage.groups.replica * stage.groups.pipeline_size + stage.groups.position
            times = self.num_starts + 1_009 * self.num_transitions
            torch.manual_seed(self.seed + 1_000_003 * (1 + place) + 7_919 * times)
