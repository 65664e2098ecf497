"""Choosing a layout: pipeline length, stage boundaries, number of micro-batches. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_pipetransformer.autopipe.partition import partition
from hf_pipetransformer.layout import Layout


MEMORY_RESERVE = 0.1
"""Share of a device's memory that a plan leaves free."""

SAMPLES_PER_MICROBATCH = 4
"""A micro-batch is not made smaller than this by choice: below it, launch costs outweigh the smaller bubble."""


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
) -> Layout:
    """The layout with evenly loaded stages."""
    return Layout(
        num_layers=num_layers,
        num_frozen_layers=0,
        num_stages=num_stages,
        num_replicas=num_replicas,
        boundaries=stage_boundaries(unit_costs, cut_positions, num_stages),
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
