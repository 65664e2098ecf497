"""Search for the next layout: when layers freeze, on resuming, in a plan and in forecasts.

It looks at each number of stages K with each way to store what is frozen, and compares the seconds until the end of
the run, those that write records and move weights included. A start takes the shortest pipeline that fits
(`first_layout`). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from hf_pipetransformer.planning.blocks import BlockCosts, active_seconds, trained_elements
from hf_pipetransformer.planning.costs import with_launches
from hf_pipetransformer.planning.layouts import (
    Choice,
    PlanInputs,
    choose_num_chunks,
    is_worth_moving,
    largest_rank_size,
)
from hf_pipetransformer.planning.storing import COMPUTE, Pass, Storing, Way, choose_way, ways_of_storing
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import attention_of, first_above, num_layers, pipeline_sizes


MOVED_BYTES = 12
"""Bytes per trained parameter that moves to another rank: the weight and two moments of Adam."""

TIE = 0.01
"""Costs within this share of the least are equal; the pipeline with fewer ranks then wins."""


def search(
    current: Layout, num_frozen: int, steps_left: int, inputs: PlanInputs, storing: Storing | None = None
) -> Choice:
    """Return the layout to move to when `num_frozen` layers are frozen. Equal inputs give an equal choice.

    Candidates are the divisors K of the current pipeline size (of the initial one when layers unfreeze) that the nodes
    allow, each with its most even boundaries, and for each the ways to store that `storing` allows. Stages may consist
    of frozen blocks, but there are at most as many stages as active blocks: V shrinks, or K is not considered. Ranks
    that a shorter pipeline frees become replicas. If no candidate fits the memory and the current boundaries do, they
    stay. K follows the rule of the run (`compression`), and where results may not depend on measured times, the
    work of the blocks. The decision is for `steps_left` optimizer steps.
    """

    def as_it_is(level: int) -> Layout:
        return replace(current, num_frozen_layers=num_frozen, cache_level=level)

    look = _Look(current, num_frozen, steps_left, inputs, storing)
    found = []
    for size, num_chunks in _shapes(current, num_frozen, inputs).items() if inputs.elastic else ():
        found.append(look.best(partial(look.recut, size, num_chunks)))
    if not any(each.fits for each in found):
        kept = look.best(as_it_is)
        found += [kept] if kept.fits or not found else []
    by_time = inputs.compression == "throughput"
    chosen = choose_by_throughput(found) if by_time else choose_by_memory(found, inputs)
    seconds = {each.layout.pipeline_size: inputs.predict(each.layout).seconds for each in found}
    return replace(chosen, alternatives=seconds)


def first_layout(sizes: Sequence[int], lay_out: Callable[[int], Layout], fits: Callable[[Layout], bool]) -> Layout:
    """Return the layout of the shortest pipeline whose fullest rank fits a device; the longest if none does."""
    layouts = [lay_out(size) for size in sorted(sizes)]
    return next(filter(fits, layouts), layouts[-1])


@dataclass(frozen=True)
class _Look:
    """The question that a search answers, and the steps to an answer."""

    current: Layout
    num_frozen: int
    steps_left: int
    inputs: PlanInputs
    storing: Storing | None

    def recut(self, size: int, num_chunks: int, level: int) -> Layout:
        """Return the layout of another shape, with the present boundaries where new ones save too little."""
        inputs, current = self.inputs, self.current
        num_replicas = current.pipeline_size * current.num_replicas // size
        layout = inputs.lay_out(current.schedule, size, num_replicas, num_chunks, self.num_frozen, level)
        # Another number of stages moves weights in any case; whether that pays is for the choice among them to say.
        if layout.places != current.places:
            return layout
        unmoved, cut_by = replace(layout, boundaries=current.boundaries), inputs.cut_by
        before, after = cut_by.judge(unmoved), cut_by.judge(layout)
        if not is_worth_moving(before, after):
            return unmoved
        # Where boundaries follow the blocks' work, no measured time may decide on them.
        if inputs.work or not before.fits:
            return layout
        pays = (before.cost - after.cost) * self.steps_left > moving_seconds(current, layout, inputs)
        return layout if pays else unmoved

    def best(self, lay_out: Callable[[int], Layout]) -> Choice:
        """Return the fastest of the allowed ways to store, with the layout that `lay_out` returns for its level."""
        plain, storing, num_frozen, steps = lay_out(0), self.storing, self.num_frozen, self.steps_left
        # A pipeline over several nodes stores nothing: stages elsewhere could not read the store of the first.
        if storing is None or self.inputs.overheads.spans_nodes(plain.pipeline_size):
            return self._judged(plain, replace(COMPUTE, passes=(Pass(steps),)))
        blocks = with_launches(self.inputs.blocks, plain, self.inputs.samples_per_device)
        costs = replace(storing, prefix=prefix_seconds(blocks))
        costs = costs.beside(active_seconds(blocks, num_frozen), plain.pipeline_size)
        ways = ways_of_storing(costs, num_frozen, steps)
        found = {name: self._judged(lay_out(way.level) if way.level else plain, way) for name, way in ways.items()}
        seconds = {name: each.seconds_left for name, each in found.items()}
        fitting = {name for name, each in found.items() if each.fits}
        way = choose_way(costs, ways, seconds, num_frozen, steps, "the rest of the run", fitting)
        return replace(found[way.name], way=way)

    def _judged(self, layout: Layout, way: Way) -> Choice:
        inputs = self.inputs
        moving = moving_seconds(self.current, layout, inputs)
        # Passes have a reading of their own, in place of the one that is a part of the measured overhead.
        seconds = seconds_left(layout, way.passes, without_reading(inputs, self.current, self.storing)) + moving
        judged = inputs.cut_by.judge(layout)
        # Where no measured time may decide, the operations of a step stand for the rest of the run.
        cost = judged.cost if inputs.is_timeless else seconds
        return replace(judged, cost=cost, way=way, seconds_left=seconds, moving=moving)


def _shapes(current: Layout, num_frozen: int, inputs: PlanInputs) -> dict[int, int]:
    """Return the K to consider, in increasing order, with their V. The current and the longest K are never unfit."""
    most = min(current.num_blocks - first_above(num_frozen), len(inputs.cut_positions) - 1)
    # Only layers that train again need more ranks than now, at most those of the start.
    is_unfreezing = num_frozen < current.num_frozen_layers
    longest = max(current.pipeline_size, inputs.initial_size if is_unfreezing else 0)
    sizes = pipeline_sizes(longest, inputs.overheads.node_size or longest)
    chunks = {k: choose_num_chunks(current.schedule, inputs.num_chunks, k, most) for k in sizes}
    possible = {k: v for k, v in chunks.items() if v and (k in (current.pipeline_size, longest) or k > inputs.unfit)}
    return possible or {current.pipeline_size: current.num_chunks}


def choose_by_throughput(candidates: Sequence[Choice]) -> Choice:
    """Return the fitting candidate with the least cost; among equals (`TIE`) the shortest pipeline.

    If none fits, return the longest pipeline, which needs the least memory.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return max(candidates, key=lambda candidate: candidate.layout.pipeline_size)
    # Predictions err by more than a percent; of equals, fewer ranks wait for each other.
    limit = (1 + TIE) * min(candidate.cost for candidate in fitting)
    equals = [candidate for candidate in fitting if candidate.cost <= limit]
    return min(equals, key=lambda candidate: (candidate.layout.pipeline_size, candidate.cost))


def choose_by_memory(candidates: Sequence[Choice], inputs: PlanInputs) -> Choice:
    """Halve the pipeline size K, from the longest, while no rank needs more memory than the fullest had at the start.

    PipeTransformer, Eq. 2 (`<=`; Algorithm 1, line 30, has `<`), with elements as the measure of memory, see
    `largest_rank_size`.
    """
    by_size = {candidate.layout.pipeline_size: candidate for candidate in candidates}
    size, parameters = max(by_size), inputs.blocks.parameters
    while size % 2 == 0 and size // 2 in by_size:
        if largest_rank_size(parameters, by_size[size // 2].layout) > inputs.initial_largest_size:
            break
        size //= 2
    return by_size[size]


# ---- seconds ----


def seconds_left(layout: Layout, passes: Iterable[Pass], inputs: PlanInputs) -> float:
    """Return the predicted seconds of all steps of `passes`, without the transition to the layout.

    A step in which a share of the samples has records takes that share of the time of a step that reads all of
    them, plus the rest of one that computes all. `inputs` have no reading in the overhead of a step.
    """
    samples = inputs.samples(layout)

    # Each level is simulated: a bubble does not shrink in proportion to what is computed.
    def step_seconds(level: int) -> float:
        return inputs.predict(replace(layout, cache_level=level)).seconds

    total = 0.0
    for each in passes:
        # A simulation takes time: none is run for a level that no sample has.
        reads = each.share * step_seconds(each.level) if each.share else 0.0
        computes = (1 - each.share) * step_seconds(0) if each.share < 1 else 0.0
        records = inputs.accumulation * samples * each.record_seconds
        total += each.steps * (reads + computes + records)
    return total


def without_reading(inputs: PlanInputs, current: Layout, storing: Storing | None) -> PlanInputs:
    """Return the inputs without the reading of the measured steps, which ran under `current`; see `Storing.now`."""
    if storing is None:
        return inputs
    # The first stage reads the batch of its whole pipeline.
    read = inputs.accumulation * inputs.samples(current) * storing.now
    return replace(inputs, overheads=replace(inputs.overheads, per_step=max(0.0, inputs.overheads.per_step - read)))


def moving_seconds(old: Layout, new: Layout, inputs: PlanInputs) -> float:
    """Return the seconds to move weights and optimizer state; 0 if no rank gets other blocks."""
    if (old.places, old.boundaries) == (new.places, new.boundaries):
        return 0.0
    # No move is timed at the start: a byte is taken to move as fast as one of an all-reduce.
    return MOVED_BYTES * inputs.overheads.reduction_per_byte * sum(trained_elements(new, inputs.blocks))


def prefix_seconds(blocks: BlockCosts) -> tuple[float, ...]:
    """Return the forward of the embeddings and the first `f` layers in seconds per sample, for each `f`."""
    sums = [0.0, *accumulate(blocks.forward)]
    return tuple(sums[attention_of(level)] for level in range(num_layers(len(blocks.forward)) + 1))
