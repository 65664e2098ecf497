"""How long the ranks wait for each other, and what all of them say when one fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_pipetransformer.autodp.faults import FaultBoard, is_second_hand
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.errors import OUT_OF_MEMORY_REMEDY, PipelineError
from hf_pipetransformer.run.journal import Journal


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
