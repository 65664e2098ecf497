"""Cost model of a layout: seconds of an optimizer step, computed from the costs of each block. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hf_pipetransformer.planning.blocks import (
    BlockCosts,
    block_backwards,
    block_forwards,
    by_rank,
    by_stage,
    gradient_bytes,
    trained_elements,
)
from hf_pipetransformer.planning.simulator import Durations, Timeline, simulate, steady_seconds
from hf_pipetransformer.schedules.asynchronous import window_table
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import first_above, num_layers, slice_bounds
from hf_pipetransformer.schedules.tables import FORWARD_ONLY, find_schedule


WEIGHT_SHARE = 0.5
"""Share of a block's backward for the gradients of its weights: one of the two equal products of a linear layer."""

UPDATE_WORK = 280.0
"""Operations in the time of one trained parameter's update: Adam reads and writes some 28 bytes, and a device computes
about ten operations in the time of a byte."""

REDUCTION_WORK = 1000.0
"""Operations in the time in which two replicas reduce one byte of gradient."""


@dataclass(frozen=True)
class Overheads:
    """Costs of a step besides the computation of its samples.

    Args:
        hop: seconds of a message between neighboring stages on a node.
        per_forward: seconds of each forward of a stage besides those of its blocks.
        per_backward: likewise of each backward.
        reduction_per_byte: seconds per byte of gradient of the all-reduce over 2 replicas, as far as the backward does
            not hide it; over R replicas a ring takes `2 (R - 1) / R` times that.
        ring_step: seconds of each of the 2 (W - 1) steps of an all-reduce over W ranks besides those for its bytes.
        sums_norms: True if gradient norms are summed over the stages in every step, as for clipping.
        optimizer_per_parameter: seconds per trained parameter.
        per_step: seconds of everything else: loader, logging, callbacks.
        hidden_reduction: share of the last micro-batch's backward, 0 to 1, that an all-reduce of its gradients runs
            beside; 0 where `reduction_per_byte` is what the backward does not hide.
        node_size: ranks of a node; 0 if all ranks are on one.
        node_hop: seconds of a message to another node, besides `node_hop_per_byte` for each byte of it.
        has_reference: True if a pass of all blocks without gradients comes before each batch, as for DPO's reference.
    """

    hop: float = 0.0
    per_forward: float = 0.0
    per_backward: float = 0.0
    reduction_per_byte: float = 0.0
    ring_step: float = 0.0
    sums_norms: bool = False
    optimizer_per_parameter: float = 0.0
    per_step: float = 0.0
    hidden_reduction: float = 0.0
    node_size: int = 0
    node_hop: float = 0.0
    node_hop_per_byte: float = 0.0
    has_reference: bool = False

    def spans_nodes(self, pipeline_size: int) -> bool:
        """Return True if pipelines of this many ranks lie on several nodes."""
        return 0 < self.node_size < pipeline_size

    def of_sum(self, num_ranks: int) -> float:
        """Return the seconds of the all-reduce of a few numbers over some ranks."""
        return 2 * (num_ranks - 1) * self.ring_step

    def of_norms(self, layout: Layout) -> float:
        """Return the seconds in which the stages sum the gradient norms of a step."""
        return self.of_sum(layout.pipeline_size) if self.sums_norms else 0.0

    def of_batch(self, layout: Layout) -> float:
        """Return the seconds until a batch that the first stage read is on the other nodes of its pipeline."""
        if not self.spans_nodes(layout.pipeline_size):
            return 0.0
        return (-(-layout.pipeline_size // self.node_size) - 1) * self.node_hop

    def hops(self, layout: Layout, costs: BlockCosts, samples: float) -> tuple[float, ...]:
        """Return the seconds of a message of `samples` samples by boundary, the number of its lower stage."""
        found = []
        for lower, block in enumerate(layout.boundaries[1:-1]):
            is_far = self.spans_nodes(layout.pipeline_size) and layout.places.leaves_node(lower, self.node_size)
            # `hop` is that of a micro-batch's message as a whole: only those to other nodes have their bytes apart.
            size = samples * costs.boundary_bytes[block]
            found.append(self.node_hop + self.node_hop_per_byte * size if is_far else self.hop)
        return tuple(found)

    def slowest_hop(self, layout: Layout, costs: BlockCosts, samples_per_pipeline: int) -> float:
        """Return the most seconds that a message of one micro-batch takes."""
        return max(self.hops(layout, costs, samples_per_pipeline / layout.num_microbatches), default=self.hop)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one optimizer step: the total, its four parts, and the compute time of each rank.

    `pipeline` includes the bubble, over all batches of the step. If steps overlap, it is the time of the slowest
    stage, its reduction and optimizer step included. `timeline` says when each rank of a pipeline computes what in one
    batch; if steps overlap, in two optimizer steps.
    """

    seconds: float
    pipeline: float
    reduction: float
    optimizer: float
    other: float
    rank_seconds: tuple[float, ...]
    timeline: Timeline = field(compare=False)


WORK_OVERHEADS = Overheads(reduction_per_byte=REDUCTION_WORK, optimizer_per_parameter=UPDATE_WORK)
"""`Overheads` in operations instead of seconds, for plans that must not depend on measured times."""


def costs_by_work(costs: BlockCosts, work: Sequence[float]) -> BlockCosts:
    """Return the costs in operations instead of seconds: a backward takes two forwards, for weights alone one."""
    forward = tuple(work)
    backward = tuple(2 * each for each in forward)
    # Times of slices and launches are in seconds, which must not be added to operations.
    return replace(costs, forward=forward, backward=backward, edge_backward=forward, slices=None, launch=())


def with_launches(costs: BlockCosts, layout: Layout, samples_per_device: int) -> BlockCosts:
    """Return the costs in which no block takes less time than its launches, with the layout's micro-batches."""
    if not costs.launch:
        return costs
    # A launch is paid once a micro-batch, while costs are per sample.
    samples = max(1.0, samples_per_device * layout.pipeline_size / layout.num_microbatches)
    forwards, backwards = zip(
        *((forward / samples, backward / samples) for forward, backward in costs.launch), strict=True
    )
    return replace(
        costs,
        forward=tuple(map(max, costs.forward, forwards)),
        backward=tuple(map(max, costs.backward, backwards)),
        edge_backward=tuple(map(max, costs.edge_backward, backwards)),
    )


def predict_step(
    layout: Layout, costs: BlockCosts, overheads: Overheads, samples_per_pipeline: int, accumulation: int = 1
) -> Prediction:
    """Predict one optimizer step: simulate the schedule's table and add the costs after it.

    The all-reduce and the optimizer step take the time of the rank with the most trained parameters. If steps overlap,
    each stage runs both on its own, and the result is the steady-state time per step of a long window. A pipeline's
    batch has `samples_per_pipeline` samples, an optimizer step `accumulation` batches.
    """
    microbatches, durations = _durations(layout, costs, overheads, samples_per_pipeline)
    # The rate is measured over two ranks, where this factor is 1.
    ring = 2 * (layout.num_replicas - 1) / layout.num_replicas
    # Gradients of a block can be reduced while the last micro-batch's backward runs through the blocks below it.
    hidden = by_rank(layout, [overheads.hidden_reduction * each for each in durations.backward])
    exposed = zip(gradient_bytes(layout, costs), hidden, strict=True)
    of_ring = overheads.of_sum(layout.num_replicas)
    reductions = [max(0.0, of_ring + overheads.reduction_per_byte * size * ring - beside) for size, beside in exposed]
    updates = [overheads.optimizer_per_parameter * count for count in trained_elements(layout, costs)]
    if layout.abilities.overlaps_steps:
        # A window knows no batches: all micro-batches of an optimizer step come in a row.
        step_size = accumulation * microbatches
        table = window_table(layout.places, layout.first_active_stage, (step_size,) * 2)
        timeline = simulate(table, replace(durations, update=tuple(updates)), layout.places)
        durations = replace(durations, update=tuple(map(sum, zip(reductions, updates, strict=True))))
        pipeline = steady_seconds(layout.places, layout.first_active_stage, step_size, durations)
        # Both are in the stages' updates; by default these stages clip by their own norms, and sum none.
        reduction = optimizer = 0.0
        # `durations` has a time of the backward for frozen stages too, which launch none.
        whole = [each if stage >= layout.first_active_stage else 0.0 for stage, each in enumerate(durations.backward)]
        busy = [step_size * sum(both) for both in zip(durations.forward, whole, strict=True)]
    else:
        shape = layout.pipeline_size, microbatches, layout.num_chunks, layout.first_active_stage
        num_slices = max(1, len(durations.factors) // microbatches)
        passes = [(find_schedule(layout.schedule).table(*shape, num_slices), durations)]
        if overheads.has_reference:
            # The reference reads whole micro-batches: the shares of token slices are those of the training pass.
            passes.append((FORWARD_ONLY[layout.placement].table(*shape), replace(durations, factors=())))
        timelines = [simulate(*each, layout.places) for each in passes]
        timeline = timelines[0]
        # Batches of a step run one after the other: each fills and drains the pipeline again.
        pipeline = accumulation * sum(each.end for each in timelines)
        reduction, optimizer = max(reductions), max(updates) + overheads.of_norms(layout)
        busy = [accumulation * sum(each) for each in zip(*(each.busy for each in timelines), strict=True)]
    other = overheads.per_step + overheads.of_batch(layout)
    return Prediction(
        seconds=pipeline + reduction + optimizer + other,
        pipeline=pipeline,
        reduction=reduction,
        optimizer=optimizer,
        other=other,
        rank_seconds=tuple(busy),
        timeline=timeline,
    )


def _durations(
    layout: Layout, costs: BlockCosts, overheads: Overheads, samples_per_pipeline: int
) -> tuple[int, Durations]:
    """Return the micro-batches of a batch, and the durations of the stages' passes over one of them."""
    # A micro-batch has one sample at least.
    microbatches = max(1, min(layout.num_microbatches, samples_per_pipeline))
    samples = samples_per_pipeline / microbatches
    backwards = block_backwards(costs, layout.num_frozen_layers)
    # The first active block's backward computes weight gradients only, at the cost they have in a full backward.
    weights = [min(whole, WEIGHT_SHARE * full) for whole, full in zip(backwards, costs.backward, strict=True)]
    inputs = [whole - weight for whole, weight in zip(backwards, weights, strict=True)]

    launches = costs.launch or ((0.0, 0.0),) * len(backwards)
    # Of the operations of a backward without recomputation, which are as many as the forward's.
    of_weights = [WEIGHT_SHARE * forward for forward, _ in launches]

    def seconds(of_blocks: Sequence[float], least: Iterable[float], first: int, fixed: float) -> tuple[float, ...]:
        """Return the seconds of each stage's pass, of which blocks from `first` on run."""
        pairs = enumerate(zip(of_blocks, least, strict=True))
        # Python launches one operation after the other, however little each computes.
        blocks = [max(samples * each, launch) if block >= first else 0.0 for block, (each, launch) in pairs]
        return tuple(each + fixed for each in by_stage(layout, blocks))

    stored, active = first_above(layout.cache_level), layout.first_active_block
    forwards = seconds(
        block_forwards(costs, layout.cache_level), (each for each, _ in launches), stored, overheads.per_forward
    )
    parts = (
        forwards,
        seconds(backwards, (each for _, each in launches), active, overheads.per_backward),
        overheads.hop,
        seconds(
            inputs, (b - w for (_, b), w in zip(launches, of_weights, strict=True)), active, overheads.per_backward
        ),
        seconds(weights, of_weights, active, 0.0),  # The products that the other part has put off.
    )
    shares = _shares(layout, costs, samples)
    hops = overheads.hops(layout, costs, samples / max(1, len(shares)))
    return microbatches, Durations(*parts, factors=shares * microbatches, hops=hops)


def _shares(layout: Layout, costs: BlockCosts, samples: float) -> tuple[float, ...]:
    if costs.slices is None or not layout.token_slices:
        return ()
    bounds = slice_bounds(layout.token_slices, costs.slices.length)
    return tuple(costs.slices.shares(samples, [stop - start for start, stop in pairwise(bounds)]))


# ---- sharded data parallelism ----

NUM_GATHERS = 2
"""Of all weights in a batch: before the forward, and again before the backward. Gradients are summed once."""


def shard_seconds(
    alone: Prediction, costs: BlockCosts, overheads: Overheads, world_size: int, accumulation: int, casts: bool
) -> float:
    """Return the seconds of a step whose messages run beside the computation, as far as that takes long enough.

    `alone` is that of a process that neither shards nor reduces.
    """
    scale = 0.5 if casts else 1.0
    all_bytes, trained = scale * (sum(costs.trained_bytes) + sum(costs.kept_bytes)), scale * sum(costs.trained_bytes)
    # The pass of the reference reads all weights once more.
    gathers = NUM_GATHERS + overheads.has_reference
    # A gather, like a sum into shards, moves half of the bytes of an all-reduce.
    ring = (world_size - 1) / world_size * overheads.reduction_per_byte
    # Half of an all-reduce's ring each, for every layer and for the outermost module.
    latency = (gathers + 1) * (num_layers(len(costs.parameters)) + 1) * overheads.of_sum(world_size) / 2
    messages = accumulation * (ring * (gathers * all_bytes + trained) + latency)
    # Each process updates its own shard alone.
    return max(alone.pipeline, messages) + alone.optimizer / world_size + alone.other
