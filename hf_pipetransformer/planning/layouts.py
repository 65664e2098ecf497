"""Layouts of a shape: stage boundaries and number of micro-batches, with the rules that hold for a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_pipetransformer.planning.blocks import BlockCosts, block_loads, by_rank, by_stage
from hf_pipetransformer.planning.costs import WORK_OVERHEADS, Overheads, Prediction, costs_by_work, predict_step
from hf_pipetransformer.planning.memory import MEMORY_RESERVE, MemoryRules, RankMemory, rank_memory
from hf_pipetransformer.planning.partition import partition
from hf_pipetransformer.planning.storing import COMPUTE, Way
from hf_pipetransformer.planning.token_slices import cut_layout
from hf_pipetransformer.schedules.abilities import abilities_of
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import Plans, num_layers
from hf_pipetransformer.schedules.weight_kinds import WeightKind, weights_under


SAMPLES_PER_MICROBATCH = 4
"""Least samples of a micro-batch chosen by rule: below it, launch costs outweigh the smaller bubble."""

WORTH_MOVING = 0.02
"""Share of a step that new boundaries of the same number of stages must save to be worth moving the weights."""

FROZEN_FACTOR = 1 / 6
"""Memory of a frozen layer relative to an active one (PipeTransformer, section 3.2.1, lambda_frozen)."""


@dataclass(frozen=True)
class Choice:
    """Layout that could come next, and what speaks for it.

    Args:
        cost: what it is chosen by, in seconds, or in operations where boundaries follow the blocks' work
            (`PlanInputs.cut_by`): it compares with other costs of one question alone.
        fits: True if its fullest rank fits a device.
        way: to get the output of the frozen layers.
        seconds_left: predicted until the end of the run, with the move to the layout.
        moving: the seconds of that move.
        alternatives: predicted seconds of a step that reads all its records, for every K considered.
    """

    layout: Layout
    cost: float = 0.0
    fits: bool = True
    way: Way = COMPUTE
    seconds_left: float = 0.0
    moving: float = 0.0
    alternatives: Mapping[int, float] = field(default_factory=dict)


def stage_boundaries(block_costs: Sequence[float], cut_positions: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return boundaries of stages of even cost, at allowed cut positions only."""
    pieces = [sum(block_costs[a:b]) for a, b in zip(cut_positions, cut_positions[1:], strict=False)]
    return tuple(cut_positions[index] for index in partition(pieces, num_stages))


def choose_num_chunks(schedule: str, wanted: int, pipeline_size: int, most_stages: int) -> int:
    """Return the number of stages per rank V: `wanted`, or less where the model has too few cuts.

    Returns 0 if the schedule needs more stages than `most_stages`. A pipeline of one rank has one stage.
    """
    if pipeline_size == 1:
        return 1
    num_chunks = min(wanted, most_stages // pipeline_size)
    return num_chunks if num_chunks >= abilities_of(schedule).min_chunks else 0


def reachable_shapes(schedule: str, wanted: int, sizes: Sequence[int], most_stages: int) -> list[tuple[int, int]]:
    """Return K and V of every layout of these `sizes`; see `choose_num_chunks`."""
    counts = range(1, most_stages + 1)
    return sorted({(k, v) for k in sizes for most in counts if (v := choose_num_chunks(schedule, wanted, k, most))})


def choose_num_microbatches(
    pipeline_size: int, pipeline_batch_size: int, weights: WeightKind | None = None, accumulation: int = 1
) -> int:
    """Return the number of micro-batches M by a rule of thumb.

    It is 4K (GPipe) as long as a micro-batch keeps `SAMPLES_PER_MICROBATCH`, and at least K. Where steps overlap there
    is no bubble to shrink: batches stay whole, unless the kind of `weights` needs more micro-batches per optimizer
    step, which has `accumulation` batches.
    """
    if pipeline_size == 1:
        return 1
    if weights is not None:
        # Where samples are too few for it, the training refuses the run with the reason (`WeightKind.check`).
        needed = -(-weights.fewest_in_a_step(pipeline_size) // accumulation)
        return max(1, min(needed, pipeline_batch_size))
    # Below this size a launch takes longer than what it computes, and a smaller bubble gains nothing.
    wanted = min(4 * pipeline_size, pipeline_batch_size // SAMPLES_PER_MICROBATCH)
    return max(1, min(max(wanted, pipeline_size), pipeline_batch_size))


def evaluation_microbatches(layout: Layout, pipeline_batch_size: int) -> int:
    """Return M of evaluation: that of training, or at least M by rule if steps fill the pipeline by overlapping."""
    if not layout.abilities.overlaps_steps:
        return layout.num_microbatches
    by_rule = choose_num_microbatches(layout.pipeline_size, pipeline_batch_size)
    return max(layout.num_microbatches, by_rule)


def plan_layout(
    block_costs: Sequence[float],
    cut_positions: Sequence[int],
    schedule: str,
    pipeline_size: int,
    num_replicas: int,
    num_microbatches: int,
    num_chunks: int = 1,
    num_frozen_layers: int = 0,
    cache_level: int = 0,
) -> Layout:
    """Return the layout with evenly loaded stages.

    Raises:
        ValueError: more stages than the model can be cut into.
    """
    num_stages, most = pipeline_size * num_chunks, len(cut_positions) - 1
    if not 0 < num_stages <= most:
        # V is 0 where the model is too short for the least V of its schedule.
        needed = num_stages or pipeline_size * abilities_of(schedule).min_chunks
        raise ValueError(
            f"pipeline_parallel_size={pipeline_size} under {schedule} needs {needed} stages, but this model can be "
            f"cut into {most} stages at most. Choose a smaller pipeline_parallel_size."
        )
    return Layout(
        num_layers=num_layers(len(block_costs)),
        num_frozen_layers=num_frozen_layers,
        num_stages=num_stages,
        num_replicas=num_replicas,
        boundaries=stage_boundaries(block_costs, cut_positions, num_stages),
        num_microbatches=num_microbatches,
        schedule=schedule,
        cache_level=cache_level,
        num_chunks=num_chunks,
        placement=abilities_of(schedule).placement,
    )


def largest_rank_size(parameters: Sequence[float], layout: Layout, frozen_factor: float = FROZEN_FACTOR) -> float:
    """Return the elements on the fullest rank, M_GPU of Eq. 2: each frozen block counts `frozen_factor` times."""
    first = layout.first_active_block
    sizes = [size * frozen_factor for size in parameters[:first]] + list(parameters[first:])
    return max(by_rank(layout, by_stage(layout, sizes)))


@dataclass(frozen=True)
class PlanInputs:
    """Measurements and rules from the start of a run, shared by all of its plans.

    Args:
        samples_per_device: samples of a batch per device; a pipeline's batch has K times as many.
        compression: rule for the pipeline size K: `memory` (PipeTransformer, Eq. 2) or `throughput` (least predicted
            seconds).
        cut_positions: block indices where a stage may begin, from 0 to the number of blocks.
        accumulation: batches per optimizer step.
        elastic: False keeps K and the boundaries for the whole run.
        measures_microbatches: True if M is tried on training steps, False if it follows the rule of thumb.
        num_microbatches: the number of micro-batches M if the user fixed it, else None.
        known_microbatches: the M that trials found best, by K and stages per rank V; those of the run are added.
        unfit: the largest K that ran out of memory: shorter pipelines need more on each rank; 0 if none did.
        initial_largest_size: `largest_rank_size` of the initial layout.
        initial_size: K of the initial layout, to which unfreezing may return; 0 keeps pipelines from growing.
        num_chunks: V for pipelines of several ranks.
        token_slices: token slices if the user fixed them.
        weights: weight versions that passes see under an asynchronous schedule, a value of `pipeline_weights`.
        work: operations per sample of each block's forward, which decide the boundaries instead of measured times;
            empty where boundaries do not affect results.
        is_timeless: True if `work` decides K too.
    """

    blocks: BlockCosts
    overheads: Overheads
    samples_per_device: int
    compression: str
    cut_positions: tuple[int, ...]
    device_bytes: float
    accumulation: int = 1
    elastic: bool = True
    measures_microbatches: bool = True
    num_microbatches: int | None = None
    known_microbatches: dict[tuple[int, int], int] = field(default_factory=dict)
    unfit: int = 0
    initial_largest_size: float = 0.0
    initial_size: int = 0
    num_chunks: int = 1
    token_slices: Plans | None = None
    weights: str = "pipeoptim"
    memory_rules: MemoryRules = MemoryRules()
    work: tuple[float, ...] = ()
    is_timeless: bool = False

    def samples(self, layout: Layout) -> int:
        """Return the samples of a pipeline's batch."""
        return self.samples_per_device * layout.pipeline_size

    def predict(self, layout: Layout) -> Prediction:
        """Predict a step under `layout`."""
        return predict_step(layout, self.blocks, self.overheads, self.samples(layout), self.accumulation)

    def memory(self, layout: Layout) -> list[RankMemory]:
        """Return what each rank of a pipeline needs for training."""
        samples, rules = self.samples(layout), self.memory_rules
        return rank_memory(layout, self.blocks, samples, self.accumulation, self.weights, rules)

    def needed_bytes(self, layout: Layout) -> float:
        """Return the bytes of the fullest rank."""
        return max(rank.total for rank in self.memory(layout))

    def fits(self, layout: Layout) -> bool:
        """Return True if the fullest rank fits the smallest device."""
        return self.needed_bytes(layout) <= self.device_bytes * (1 - MEMORY_RESERVE)

    def judge(self, layout: Layout) -> Choice:
        """Return the cost of a step, and if the fullest rank fits a device."""
        return Choice(layout, self.predict(layout).seconds, self.fits(layout))

    @property
    def cut_by(self) -> PlanInputs:
        """Inputs that place stage boundaries: by the blocks' work where these affect results, else by measured times.

        Their seconds are operations then.
        """
        if not self.work:
            return self
        # The pass of the reference is work as well, and no clock decides whether there is one.
        by_work = replace(WORK_OVERHEADS, has_reference=self.overheads.has_reference)
        return replace(self, blocks=costs_by_work(self.blocks, self.work), overheads=by_work)

    def lay_out(
        self,
        schedule: str,
        pipeline_size: int,
        num_replicas: int,
        num_chunks: int,
        num_frozen: int,
        cache_level: int = 0,
    ) -> Layout:
        """Return the layout of a shape, with M by rule where nothing fixes it, and its most even boundaries.

        Frozen blocks count with their forward only, and not even that where their output is stored.
        """
        weights = weights_under(abilities_of(schedule), self.weights)
        samples = self.samples_per_device * pipeline_size
        # M of the user comes before M of a trial, which comes before the rule.
        known = self.num_microbatches or self.known_microbatches.get((pipeline_size, num_chunks))
        by_rule = choose_num_microbatches(pipeline_size, samples, weights, self.accumulation)
        cut_by = self.cut_by
        # Where steps overlap, each stage waits for its own update: the update is a part of its load.
        # Loads are per sample, and an update comes once a step.
        per_sample = cut_by.overheads.optimizer_per_parameter / (samples * self.accumulation)
        loads = block_loads(cut_by.blocks, num_frozen, cache_level, 0.0 if weights is None else per_sample)
        shape = schedule, pipeline_size, num_replicas, known or by_rule, num_chunks
        layout = plan_layout(loads, self.cut_positions, *shape, num_frozen, cache_level)
        # Slices are planned with one time for all messages: that of the slowest, which the others wait for.
        hop, is_free = self.overheads.slowest_hop(layout, self.blocks, samples), self.num_microbatches is None
        layout = cut_layout(layout, self.token_slices, self.blocks.slices, samples, is_free, hop)
        return self.cut_at_nodes(layout, loads)

    def cut_at_nodes(self, layout: Layout, loads: Sequence[float]) -> Layout:
        """Move the boundaries between nodes to where a step is fastest, with even stages on either side.

        A message to another node takes long, so that the boundary of a smaller activation, or other stages before and
        after it, may beat even ones. The layout stays as it is if that saves too little or does not fit, and on one
        node. `loads` are the costs of the blocks, which even stages share.
        """
        overheads, cuts, last = self.overheads, self.cut_positions, layout.num_stages
        # Where cuts follow the blocks' work, no measured speed of a message may move them.
        if self.work or not overheads.spans_nodes(layout.pipeline_size):
            return layout
        even = self.judge(layout)
        # If messages to other nodes took no longer than inside one: even then there has to be enough to gain.
        near = replace(self, overheads=replace(overheads, node_size=0)).predict(layout).seconds
        if even.cost * (1 - WORTH_MOVING) < near:
            return layout
        leaves = layout.places.leaves_node
        far = [0, *(n + 1 for n in range(last - 1) if leaves(n, overheads.node_size))]
        # A boundary moves its neighbors, so that all are tried again until none gets better.
        best, is_better = even, True
        while is_better:
            is_better = False
            for before, middle, after in zip(far, far[1:], [*far[2:], last], strict=False):
                ends = best.layout.boundaries
                within = [cut for cut in cuts if ends[before] <= cut <= ends[after]]
                # Stages on either side keep one piece between cuts at least.
                for at in range(middle - before, len(within) - (after - middle)):
                    below = stage_boundaries(loads, within[: at + 1], middle - before)
                    above = stage_boundaries(loads, within[at:], after - middle)
                    boundaries = (*ends[:before], *below, *above[1:], *ends[after + 1 :])
                    moved = self.judge(replace(layout, boundaries=boundaries))
                    if moved.cost < best.cost and (moved.fits or not even.fits):
                        best, is_better = moved, True
        return best.layout if is_worth_moving(even, best) else layout


def is_worth_moving(unmoved: Choice, recut: Choice) -> bool:
    """Return True if new boundaries save enough time and still fit the memory if the old ones do."""
    saves = recut.cost <= (1 - WORTH_MOVING) * unmoved.cost
    return saves and (recut.fits or not unmoved.fits)
