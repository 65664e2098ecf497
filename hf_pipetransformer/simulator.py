"""A schedule table and how long its computations take, as a timeline. Pure; the table is the one the engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hf_pipetransformer.pipeline.checker import ScheduleError
from hf_pipetransformer.pipeline.schedules import NEEDS, SENDS, Action, Op, Table
from hf_pipetransformer.pipeline.schedules.actions import has_input


@dataclass(frozen=True)
class Durations:
    """How long a table's actions take.

    Args:
        forward: seconds of one micro-batch's forward, by stage.
        backward: seconds of one micro-batch's backward, by stage; what stands at a frozen stage is not read.
        hop: seconds from a send to the arrival at the neighbour.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hop: float = 0.0

    def of(self, stage: int, op: Op) -> float:
        """Seconds that the computation `op` takes on `stage`."""
        return (self.forward if op is Op.FORWARD else self.backward)[stage]


class Span(NamedTuple):
    """One computation: from `start` to `end`, in seconds since the first stage began."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every stage computes when.

    Args:
        spans: all computations, by start and stage.
        end: seconds until the last computation ends.
        busy: seconds that each stage computes.
    """

    spans: tuple[Span, ...]
    end: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they wait, 0 to 1; `(K - 1) / (M + K - 1)` if all stages are equal."""
        return 1 - sum(self.busy) / (len(self.busy) * self.end) if self.end else 0.0


def simulate(table: Table, durations: Durations) -> Timeline:
    """Run `table` as the engine does.

    A stage takes its actions in order. A forward or backward waits until its input has arrived, then takes its
    duration. A send costs the sender nothing and arrives `hop` later; posting a receive costs nothing.

    Args:
        table: one row of actions per stage; rows without backwards are frozen stages.
        durations: one entry per stage.

    Raises:
        ValueError: the durations are not one a stage.
        ScheduleError: a computation waits for a message that is never sent.
    """
    num_stages = len(table)
    if len(durations.forward) != num_stages or len(durations.backward) != num_stages:
        raise ValueError(
            f"Expected a forward and a backward duration for each of {num_stages} stages, found "
            f"{len(durations.forward)} and {len(durations.backward)}."
        )
    run = _Run(table, durations)
    while any(run.advance(stage) for stage in range(num_stages)):
        pass
    if waiting := run.waiting():
        raise ScheduleError(f"Computations that wait for a message that nobody sends: {waiting}.")
    spans = tuple(sorted(run.spans, key=lambda span: (span.start, span.stage, span.end)))
    busy = tuple(sum(span.end - span.start for span in spans if span.stage == stage) for stage in range(num_stages))
    return Timeline(spans, max(run.clock), busy)


class _Run:
    """State of one simulation."""

    def __init__(self, table: Table, durations: Durations) -> None:
        self.table = table
        self.durations = durations
        self.position = [0] * len(table)
        self.clock = [0.0] * len(table)
        self.arrival: dict[tuple[int, Op, int], float] = {}
        self.spans: list[Span] = []

    def advance(self, stage: int) -> bool:
        """Run `stage` until it waits or ends; False if it could not move."""
        row, before = self.table[stage], self.position[stage]
        while self.position[stage] < len(row) and self._run_one(stage, row[self.position[stage]]):
            self.position[stage] += 1
        return self.position[stage] > before

    def waiting(self) -> dict[int, str]:
        """The action that each stage stands before, of those that have not ended."""
        rows = zip(self.table, self.position, strict=True)
        return {stage: str(row[at]) for stage, (row, at) in enumerate(rows) if at < len(row)}

    def _run_one(self, stage: int, action: Action) -> bool:
        op, i, _ = action
        if op in SENDS:
            offset, receive = SENDS[op]
            self.arrival[stage + offset, receive, i] = self.clock[stage] + self.durations.hop
        elif op in NEEDS:
            start = self.clock[stage]
            if has_input(stage, op, len(self.table)):
                arrival = self.arrival.get((stage, NEEDS[op], i))
                if arrival is None:
                    return False
                start = max(start, arrival)
            self.clock[stage] = start + self.durations.of(stage, op)
            self.spans.append(Span(stage, action, start, self.clock[stage]))
        return True


def draw(timeline: Timeline, columns: int = 80) -> str:
    """A text chart, one line per stage, time from left to right.

    Each computation is its name, filled up with `-` (forward) or `=` (backward) to its length; `.` is waiting. A
    computation shorter than its name shows the beginning of it. `1f1b`, K=2, M=2, a backward twice a forward:

        stage 0 |F0-F1-......B0====...B1====|
        stage 1 |...F0-B0====F1-B1====......|

    Args:
        timeline: what `simulate` returned.
        columns: width of a line, in characters.
    """
    labels = [f"stage {stage} |" for stage in range(len(timeline.busy))]
    margin = max(map(len, labels))
    width = max(1, columns - margin - 1)
    lines = [["."] * width for _ in labels]
    scale = width / timeline.end if timeline.end else 0.0
    for stage, action, start, end in timeline.spans:
        first, last = round(start * scale), round(end * scale)
        fill = "-" if action.op is Op.FORWARD else "="
        lines[stage][first:last] = str(action).ljust(last - first, fill)[: last - first]
    return "\n".join(label.rjust(margin) + "".join(line) + "|" for label, line in zip(labels, lines, strict=True))
