"""Choosing a layout: pipeline length, stage boundaries, number of micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hf_pipetransformer.autopipe.compression import Candidate, choose_by_throughput, compress_by_memory
from hf_pipetransformer.autopipe.costs import (
    Overheads,
    Prediction,
    UnitCosts,
    predict_step,
    stage_bytes,
    unit_loads,
)
from hf_pipetransformer.autopipe.partition import partition
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.units import first_above


MEMORY_RESERVE = 0.1
"""Share of a device's memory that a plan leaves free."""

SAMPLES_PER_MICROBATCH = 4
"""A micro-batch is not made smaller than this by choice: below it, launch costs outweigh the smaller bubble."""

WORTH_MOVING = 0.02
"""Share of a step that new cuts of the same number of stages must save: less is not worth moving the weights."""

FROZEN_FACTOR = 1 / 6
"""Memory of a frozen layer over that of the same layer active (PipeTransformer, section 3.2.1, lambda_frozen)."""


@dataclass(frozen=True)
class PlanRules:
    """What a plan may do.

    Args:
        compression: how K is chosen: `memory` (PipeTransformer, Eq. 2) or `throughput` (least predicted seconds).
        cut_positions: unit indices where a stage may begin, from 0 to the number of units.
        device_bytes: memory of one device.
        elastic: False keeps K and the boundaries for the whole run.
        num_microbatches: M if the user fixed it, else None.
        known_microbatches: the M that trials found best, by K.
        unfit: lengths K that ran out of memory.
        initial_largest_size: `largest_stage_size` of the layout of the start.

    Raises:
        ValueError: unknown compression.
    """

    compression: str
    cut_positions: tuple[int, ...]
    device_bytes: float
    elastic: bool = True
    num_microbatches: int | None = None
    known_microbatches: Mapping[int, int] = field(default_factory=dict)
    unfit: frozenset[int] = frozenset()
    initial_largest_size: float = 0.0

    def __post_init__(self) -> None:
        if self.compression not in ("memory", "throughput"):
            raise ValueError(f"Unknown compression {self.compression!r}: expected 'memory' or 'throughput'.")


@dataclass(frozen=True)
class Plan:
    """The next layout, and why.

    Args:
        layout: the layout to move to.
        prediction: what a step of it is expected to take.
        alternatives: predicted seconds of a step for every K considered, the chosen one included.
    """

    layout: Layout
    prediction: Prediction
    alternatives: dict[int, float]


def stage_boundaries(unit_costs: Sequence[float], cut_positions: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Boundaries of `num_stages` stages of even cost that fall on allowed cut positions only.

    Args:
        unit_costs: cost of every unit.
        cut_positions: unit indices where a stage may begin, from 0 to the number of units.
        num_stages: K.

    Raises:
        ValueError: more stages than pieces between allowed cuts.
    """
    pieces = [sum(unit_costs[a:b]) for a, b in zip(cut_positions, cut_positions[1:], strict=False)]
    if num_stages > len(pieces):
        raise ValueError(
            f"pipeline_parallel_size={num_stages}, but this model can be cut into {len(pieces)} stages at most. "
            "Choose a smaller pipeline_parallel_size."
        )
    return tuple(cut_positions[index] for index in partition(pieces, num_stages))


def choose_num_stages(
    candidates: Sequence[int], largest_stage_bytes: Callable[[int], float], device_bytes: float
) -> int:
    """The smallest K whose largest stage fits a device; the largest candidate if none does.

    Args:
        candidates: allowed pipeline lengths.
        largest_stage_bytes: training bytes of the largest stage for a K.
        device_bytes: memory of one device.
    """
    budget = device_bytes * (1 - MEMORY_RESERVE)
    fitting = [k for k in sorted(candidates) if largest_stage_bytes(k) <= budget]
    return fitting[0] if fitting else max(candidates)


def choose_num_microbatches(num_stages: int, pipeline_batch_size: int) -> int:
    """M by rule of thumb: 4K (GPipe) as long as a micro-batch keeps `SAMPLES_PER_MICROBATCH`, at least K."""
    if num_stages == 1:
        return 1
    wanted = min(4 * num_stages, pipeline_batch_size // SAMPLES_PER_MICROBATCH)
    return max(1, min(max(wanted, num_stages), pipeline_batch_size))


def plan_layout(
    unit_costs: Sequence[float],
    cut_positions: Sequence[int],
    num_layers: int,
    num_stages: int,
    num_replicas: int,
    num_microbatches: int,
    schedule: str,
    num_frozen_layers: int = 0,
) -> Layout:
    """The layout with evenly loaded stages."""
    return Layout(
        num_layers=num_layers,
        num_frozen_layers=num_frozen_layers,
        num_stages=num_stages,
        num_replicas=num_replicas,
        boundaries=stage_boundaries(unit_costs, cut_positions, num_stages),
        num_microbatches=num_microbatches,
        schedule=schedule,
    )


def largest_stage_size(
    parameters: Sequence[float],
    num_frozen_layers: int,
    boundaries: Sequence[int],
    frozen_factor: float = FROZEN_FACTOR,
) -> float:
    """Size of the largest stage, a frozen unit counted `frozen_factor` times: M_GPU of PipeTransformer, Eq. 2.

    Args:
        parameters: elements of each unit.
        num_frozen_layers: F.
        boundaries: of the stages.
        frozen_factor: lambda_frozen.
    """
    first = first_above(num_frozen_layers)
    sizes = [size * frozen_factor for size in parameters[:first]] + list(parameters[first:])
    return max(sum(sizes[start:end]) for start, end in zip(boundaries, boundaries[1:], strict=False))


def plan_transition(
    current: Layout,
    num_frozen_layers: int,
    costs: UnitCosts,
    overheads: Overheads,
    rules: PlanRules,
    world_size: int,
    samples_per_device: int,
    accumulation: int = 1,
    cache_level: int = 0,
) -> Plan:
    """The layout to move to when `num_frozen_layers` are frozen. Deterministic: equal inputs give an equal plan.

    Every divisor of the current K is considered, each with its most even cuts, frozen units at the cost of their
    forward. Stages may hold frozen units only, but there are no more stages than active units (unless every shorter
    pipeline is unfit).

    Args:
        current: the layout that runs now.
        num_frozen_layers: F from now on.
        costs: of the model's units.
        overheads: of this machine.
        rules: what the plan may do.
        world_size: ranks; those that a shorter pipeline frees become replicas.
        samples_per_device: samples of a batch, by device; a pipeline's batch has K times as many.
        accumulation: batches per optimizer step.
        cache_level: layers whose activations will be stored; the plan is for the passes that read them.
    """

    def predict(layout: Layout) -> Prediction:
        return predict_step(layout, costs, overheads, samples_per_device * layout.pipeline_size, accumulation)

    if not rules.elastic:
        layout = replace(current, num_frozen_layers=num_frozen_layers, cache_level=cache_level)
        prediction = predict(layout)
        return Plan(layout, prediction, {layout.pipeline_size: prediction.seconds})

    def judge(layout: Layout) -> Candidate:
        needed = max(stage_bytes(layout, costs, samples_per_device * layout.pipeline_size))
        return Candidate(layout, predict(layout).seconds, needed <= rules.device_bytes * (1 - MEMORY_RESERVE))

    loads = unit_loads(costs, num_frozen_layers, cache_level)
    candidates = []
    for num_stages in _lengths(current, num_frozen_layers, rules):
        known = rules.num_microbatches or rules.known_microbatches.get(num_stages)
        layout = Layout(
            num_layers=current.num_layers,
            num_frozen_layers=num_frozen_layers,
            num_stages=num_stages,
            num_replicas=world_size // num_stages,
            boundaries=stage_boundaries(loads, rules.cut_positions, num_stages),
            num_microbatches=known or choose_num_microbatches(num_stages, samples_per_device * num_stages),
            schedule=current.schedule,
            cache_level=cache_level,
        )
        candidate = judge(layout)
        if num_stages == current.num_stages:
            unmoved = judge(replace(layout, boundaries=current.boundaries))
            candidate = candidate if _is_worth_moving(unmoved, candidate) else unmoved
        candidates.append(candidate)
    chosen = _choose(candidates, costs, rules).layout
    alternatives = {candidate.layout.pipeline_size: candidate.predicted_seconds for candidate in candidates}
    return Plan(chosen, predict(chosen), alternatives)


def _is_worth_moving(unmoved: Candidate, recut: Candidate) -> bool:
    """Whether new cuts of the same number of stages save enough, and do not cost the memory that the old ones fit."""
    saves = recut.predicted_seconds <= (1 - WORTH_MOVING) * unmoved.predicted_seconds
    return saves and (recut.fits or not unmoved.fits)


def _lengths(current: Layout, num_frozen_layers: int, rules: PlanRules) -> list[int]:
    """The K to consider, from short to long: the current one is running, so it is not unfit, and the last resort."""
    num_active_units = current.num_units - first_above(num_frozen_layers)
    most = min(num_active_units, len(rules.cut_positions) - 1)
    divisors = [k for k in range(1, current.num_stages + 1) if current.num_stages % k == 0]
    lengths = [k for k in divisors if k <= most and (k == current.num_stages or k not in rules.unfit)]
    return lengths or [current.num_stages]


def _choose(candidates: Sequence[Candidate], costs: UnitCosts, rules: PlanRules) -> Candidate:
    """The candidate that `rules.compression` prefers."""
    if rules.compression == "throughput":
        return choose_by_throughput(candidates)
    by_length = {candidate.layout.pipeline_size: candidate for candidate in candidates}

    def size(num_stages: int) -> float:
        layout = by_length[num_stages].layout
        return largest_stage_size(costs.parameters, layout.num_frozen_layers, layout.boundaries)

    return by_length[compress_by_memory(max(by_length), size, rules.initial_largest_size, list(by_length))]
