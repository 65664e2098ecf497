"""State shared by the parts of a run: a view of the trainer, event journal, collective timeouts, RNG seeds."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from hf_pipetransformer.comm.errors import OUT_OF_MEMORY_REMEDY, PipelineError, is_second_hand
from hf_pipetransformer.comm.fault_board import FaultBoard
from hf_pipetransformer.report import failure, logger
from hf_pipetransformer.report.files import FindCheckpoint, note_space


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups, Topology
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.report.events import EventLog
    from hf_pipetransformer.runtime.pipeline import PipelineShell


# Not of a trainer, which may be pickled.
_RECORDING = threading.Lock()


class RunView(Protocol):
    """State, data and loss of a trainer's present run.

    Read its properties when they are needed and do not keep them: a trainer replaces its arguments, model and state
    between two trainings.
    """

    @property
    def args(self) -> PipeTransformerArguments: ...

    @property
    def state(self) -> TrainerState:
        """Optimizer steps done (`global_step`), epochs done with a fraction (`epoch`), and `max_steps`."""

    @property
    def control(self) -> TrainerControl: ...

    @property
    def model(self) -> nn.Module:
        """The user's model, with its adapters."""

    @property
    def train_dataset(self) -> Any: ...

    @property
    def lr_scheduler(self) -> Any: ...

    @property
    def scaler(self) -> Any:
        """Scaler of gradients in float16; None without one."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first group of parameters in the next step."""

    @property
    def decaying(self) -> list[str]:
        """Names of the parameters with weight decay."""

    def log(self, logs: dict[str, float]) -> None:
        """Add an entry to Trainer's log."""

    def forward_of(self, shell: PipelineShell, batch: Mapping[str, Any]) -> Callable[[], Any]:
        """Return a function that runs the model itself on a batch, which is prepared now, not the script's loss."""

    def changer_of_batches(self, sees_parts: bool) -> str | None:
        """Return code of the script's that may change a batch before the model gets it; None without.

        With `sees_parts` its loss is given micro-batches.
        """

    def hides_batches_of(self, dataset: Any) -> bool:
        """Return True for an evaluation set of the trainer's own if no code of the user's gets its batches."""


@dataclass
class Journal:
    """Writer of events, stamped with the run's current step and epoch."""

    run: RunView
    log: EventLog
    tried: dict[str, Any] = field(default_factory=dict, init=False)
    """Layout in force or being moved to, and its memory conditions, as JSON values; added to fault events."""
    _place: tuple[int, float | None] | None = field(default=None, init=False)

    @contextmanager
    def at(self, step: int, epoch: float | None) -> Iterator[None]:
        """Stamp events inside with this step and epoch. Before a run begins, Trainer's state is an earlier run's."""
        self._place = (step, epoch)
        try:
            yield
        finally:
            self._place = None

    def write(self, kind: str, **fields: Any) -> None:
        state = self.run.state
        self.log.write(kind, *(self._place or (state.global_step, state.epoch)), **fields)


class CollectiveTimeouts:
    """Timeouts of waits for other ranks, and the report of the first fault. Construct it on every rank.

    `step_seconds` is the timeout inside training steps, `rest_seconds` the one elsewhere; a rank without a heartbeat
    for `silent_seconds` ends the run in either. `find_checkpoint` tells how much space a checkpoint takes.
    """

    def __init__(
        self,
        topology: Topology,
        journal: Journal,
        step_seconds: float,
        rest_seconds: float,
        silent_seconds: float = math.inf,
        find_checkpoint: FindCheckpoint = lambda _folder: None,
    ) -> None:
        self.topology = topology
        self.journal = journal
        self.find_checkpoint = find_checkpoint
        self.step_seconds = step_seconds
        self.rest_seconds = rest_seconds
        self.is_resting = True
        self._board = FaultBoard(topology.rank, topology.world_size, self._record, topology.abort, silent_seconds)
        self._depth = 0
        self._is_recorded = False
        self._cause: str | None = None
        self.details = ""
        """Traceback of the rank where the first cause lies."""

    def find_cause(self) -> str | None:
        """Return the first cause, after a look for ranks that are gone; None if there is no fault."""
        return self._cause or self._board.find_lost()

    def rest(self) -> None:
        """Switch to the long timeout before saving, evaluating, a callback or compilation. Call on every rank."""
        self.is_resting = True
        self.topology.limit_waits(self.rest_seconds)

    def enter_step(self) -> None:
        """Switch to the step timeout, after a barrier if the ranks were at rest. Collective: call on every rank."""
        if self.is_resting:
            # Under the long timeout: another rank may still be saving or compiling.
            self.topology.barrier("waiting for all ranks to begin a step")
            self.is_resting = False
            self.topology.limit_waits(self.step_seconds)

    @contextmanager
    def reporting_faults(self, together: bool = True) -> Iterator[None]:
        """Report an error inside to all ranks; with `together=False`, where only some ranks enter, to this one only.

        Raises:
            PipelineError: the error inside only says that another rank is gone.
        """
        # An evaluation within a training enters again: the outermost reports for all.
        self._depth += 1
        if self._depth == 1:
            self._is_recorded = False
            self._cause, self.details = None, ""
            self._board.begin(together)
            self.rest()
        try:
            with failure.recorded(), self._reported():
                yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._board.end()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # A script that leaves by itself is no fault.
            if self._depth == 1 and not isinstance(error, (SystemExit, GeneratorExit)):
                self._report(error)
            raise

    def _report(self, error: BaseException) -> None:
        is_short = isinstance(error, torch.OutOfMemoryError)
        if is_short:
            error.add_note(OUT_OF_MEMORY_REMEDY)
        # A full disk shows as many kinds of errors, none of which says how much is missing.
        note_space(error, self.journal.run.args.output_dir, self.find_checkpoint)
        first_line = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        text = " ".join([first_line, *getattr(error, "__notes__", [])])
        second_hand = is_second_hand(error)
        details = failure.traceback_of(error) if failure.is_of_users(error) else ""
        # The board answers with the first cause: this error may follow from that of another rank.
        cause = self._board.report(text, not second_hand, details)
        self._record(cause, self._board.details, is_short)
        if second_hand:
            raise PipelineError(f"The run ended on rank {self.topology.rank}. First cause: {cause}") from error

    def _record(self, cause: str, details: str, is_short: bool = False) -> None:
        """Write the fault event, once: this thread or the board's, which goes on while this one waits for a device."""
        self._cause, self.details = cause, details
        with _RECORDING:
            if self._is_recorded:
                return
            self._is_recorded = True
            # The fault of another rank comes as text.
            is_short |= torch.OutOfMemoryError.__name__ in cause
            try:
                self.journal.write("fault", cause=cause, out_of_memory=is_short, **self.journal.tried)
            # A full disk may be the very fault, which this error must not hide.
            except OSError as error:
                logger.debug(f"The events file cannot take the fault {cause!r}: {error}")


class Seeds:
    """RNG seeds that differ by rank, by training, and by transition within a training.

    With one process torch is not reseeded, so that random numbers equal those of plain Trainer.
    """

    def __init__(self, topology: Topology, seed: int) -> None:
        self.topology = topology
        self.seed = seed
        self.num_starts = 0
        self.num_transitions = 0

    def begin(self, groups: PipelineGroups) -> None:
        """Seed this rank for a training."""
        self.num_transitions = 0
        self.part(groups)
        self.num_starts += 1

    def part(self, groups: PipelineGroups) -> None:
        """Give this rank its own RNG state."""
        if self.topology.world_size > 1:
            place = groups.replica * groups.pipeline_size + groups.position
            # Different primes for ranks, starts and transitions: seeds of two ranks would take many transitions to
            # meet.
            times = self.num_starts + 1_009 * self.num_transitions
            torch.manual_seed(self.seed + 1_000_003 * (1 + place) + 7_919 * times)


class PlanPrinted(SystemExit):
    """End of a script whose run was only planned: status 0."""


@dataclass(frozen=True)
class Context:
    """Parts that live as long as a trainer and that most of a run's constructors need."""

    run: RunView
    topology: Topology
    journal: Journal
    timeouts: CollectiveTimeouts
    seeds: Seeds

    @property
    def args(self) -> PipeTransformerArguments:
        """Arguments of the trainer, which it may replace between two trainings."""
        return self.run.args

    def end_plan(self) -> NoReturn:
        """Leave the script on every rank, after a plan. Collective."""
        # Ranks leave together: one that ends early would look lost to the others.
        self.topology.barrier()
        raise PlanPrinted
