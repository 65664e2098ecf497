"""Simulator of schedule tables, the ones the engine runs, with given durations of the computations. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hf_pipetransformer.schedules.actions import GIVES, NEEDS, SENDS, Action, Op, ScheduleError, Table, source_of
from hf_pipetransformer.schedules.asynchronous import window_table
from hf_pipetransformer.schedules.placement import Placement


@dataclass(frozen=True)
class Durations:
    """Durations of a table's actions in seconds, one entry per stage.

    Args:
        backward: whole backward; unused at frozen stages.
        hop: time from a send to its arrival on another rank.
        hops: this time by boundary, the number of its lower stage; empty if `hop` holds for all.
        backward_input: part of a backward for the gradient of the input, `backward_weight` that for the gradients of
            the weights; only for tables that split backwards.
        factors: multiplier of all computations by number of the micro-batch; empty if all are alike.
        update: optimizer step of the stage, where the table has updates; empty if updates take no time.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hop: float = 0.0
    backward_input: tuple[float, ...] = ()
    backward_weight: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    hops: tuple[float, ...] = ()

    def of(self, stage: int, op: Op, micro_batch: int) -> float:
        if op is Op.UPDATE:
            return self.update[stage] if self.update else 0.0
        by_op = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.backward_input,
            Op.BACKWARD_WEIGHT: self.backward_weight,
        }
        return by_op[op][stage] * (self.factors[micro_batch] if self.factors else 1.0)


class Span(NamedTuple):
    """One computation or update, from `start` to `end` in seconds since the first rank began."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Computations and updates of every rank, sorted by start and rank; `busy` is each rank's compute time."""

    spans: tuple[Span, ...]
    end: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time spent waiting, 0 to 1; `(K - 1) / (M + K - 1)` for 1F1B with equal stages."""
        return 1 - sum(self.busy) / (len(self.busy) * self.end) if self.end else 0.0


def simulate(table: Table, durations: Durations, placement: Placement | None = None) -> Timeline:
    """Run `table` as the engine does; stages without backwards are frozen.

    A rank takes its actions in order. A computation waits for its input, then takes its duration. A send costs the
    sender nothing and arrives a hop later; posting a receive costs nothing. `placement` defaults to one stage per
    rank.

    Raises:
        ScheduleError: a computation waits for a message that is never sent.
    """
    placement = placement or Placement(len(table))
    run = _Run(table, durations, placement)
    # In whatever order the ranks are looked at, the times are the same: each computation starts as soon as its rank
    # and its input allow. So any() may begin again with rank 0 after each move.
    while any(run.advance(rank) for rank in range(len(table))):
        pass
    if waiting := run.waiting():
        raise ScheduleError(f"Computations that wait for a message that nobody sends: {waiting}.")
    # By their ends too: an update that takes no time starts together with the pass after it.
    spans = tuple(sorted(run.spans, key=lambda span: (span.start, span.rank, span.end)))
    return Timeline(spans, max(run.clock), tuple(run.busy))


def equal_durations(
    placement: Placement, backward: float = 2.0, hop: float = 0.0, num_token_slices: int = 1
) -> Durations:
    """Return the durations of stages with equal loads, where a forward through all stages of a rank takes 1.

    Args:
        backward: time of a backward through all stages of a rank; half of it is for the gradients of weights.
        num_token_slices: number of equal token slices S of a micro-batch.
    """
    share = 1 / (placement.num_chunks * num_token_slices)
    forward, whole, half = ((each * share,) * placement.num_stages for each in (1.0, backward, backward / 2))
    return Durations(forward, whole, hop, half, half)


STEADY_BLOCKS = 24
"""Difference in micro-batches between the two windows of `steady_seconds`, at least. It is a multiple of the periods
that delays between neighbors create in pipelines of up to 4, 6 and 8 ranks."""


def steady_seconds(placement: Placement, first_active_stage: int, step_size: int, durations: Durations) -> float:
    """Return the steady-state seconds of an optimizer step under an asynchronous schedule, without fill and drain.

    It is the slope between two windows, one twice as long as the other, which drain equally. The result is the time of
    the slowest stage, its update included, or more if messages are slow: a rank that alternates forwards and backwards
    waits for both. The placement must have one stage per rank, each step `step_size` micro-batches, 1 or more.
    """
    steps = -(-STEADY_BLOCKS // step_size)
    once, twice = (
        simulate(window_table(placement, first_active_stage, (step_size,) * count), durations, placement).end
        for count in (steps, 2 * steps)
    )
    return (twice - once) / steps


class _Run:
    def __init__(self, table: Table, durations: Durations, placement: Placement) -> None:
        self.table = table
        self.durations = durations
        self.placement = placement
        self.stages = [placement.stages_of(rank) for rank in range(len(table))]
        self.position = [0] * len(table)
        self.clock = [0.0] * len(table)
        self.busy = [0.0] * len(table)
        self.arrival: dict[tuple[int, Op, int], float] = {}
        self.spans: list[Span] = []

    def advance(self, rank: int) -> bool:
        """Run `rank` until it waits or ends; return False if it could not move."""
        actions, before = self.table[rank], self.position[rank]
        while self.position[rank] < len(actions) and self._run_one(rank, actions[self.position[rank]]):
            self.position[rank] += 1
        return self.position[rank] > before

    def waiting(self) -> dict[int, str]:
        action_lists = zip(self.table, self.position, strict=True)
        return {rank: str(actions[at]) for rank, (actions, at) in enumerate(action_lists) if at < len(actions)}

    def _run_one(self, rank: int, action: Action) -> bool:
        op, i, chunk = action
        stage = self.stages[rank][chunk]
        if op in SENDS:
            # A gradient goes down over the boundary that its activation came up.
            lower = stage if op is Op.SEND_FORWARD else stage - 1
            hop = self.durations.hops[lower] if self.durations.hops else self.durations.hop
            self.arrival[stage, op, i] = self.clock[rank] + hop
        # A message takes none of the rank's own time: only the computation that needs it waits.
        if op in NEEDS.values() or op in SENDS:
            return True
        start, source = self.clock[rank], source_of(op, stage, self.placement.num_stages)
        # Between stages of one rank nothing travels, and their order is that of the table.
        if source is not None and self.placement.rank_of(source) != rank:
            arrival = self.arrival.get((source, GIVES[op], i))
            if arrival is None:
                return False
            start = max(start, arrival)
        self.clock[rank] = start + self.durations.of(stage, op, i)
        self.busy[rank] += self.clock[rank] - start
        self.spans.append(Span(rank, action, start, self.clock[rank]))
        return True


def draw(timeline: Timeline, columns: int = 80) -> str:
    """Draw a text chart, one line per rank, time from left to right.

    Each computation is its name, filled up to its length with `-` (forward), `=` (backward), `+` (weight gradients
    alone) or `~` (update); `.` is waiting. Computations shorter than their name are truncated. `1f1b`, K=2, M=2, a
    backward twice a forward:

        rank 0 |F0-F1-......B0====...B1====|
        rank 1 |...F0-B0====F1-B1====......|
    """
    labels = [f"rank {rank} |" for rank in range(len(timeline.busy))]
    margin = max(map(len, labels))
    width = max(1, columns - margin - 1)
    lines = [["."] * width for _ in labels]
    scale = width / timeline.end if timeline.end else 0.0
    for rank, action, start, end in timeline.spans:
        # Both ends are rounded, not the length, so that a pass begins where the one before it ends.
        first, last = round(start * scale), round(end * scale)
        fill = {Op.FORWARD: "-", Op.BACKWARD_WEIGHT: "+", Op.UPDATE: "~"}.get(action.op, "=")
        lines[rank][first:last] = str(action).ljust(last - first, fill)[: last - first]
    return "\n".join(label.rjust(margin) + "".join(line) + "|" for label, line in zip(labels, lines, strict=True))
