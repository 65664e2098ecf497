"""Use of measured step times: trials of numbers of micro-batches, and calibration of the cost model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hf_pipetransformer.planning.blocks import (
    BlockCosts,
    block_backwards,
    block_forwards,
    by_rank,
    by_stage,
    gradient_bytes,
    trained_elements,
)
from hf_pipetransformer.planning.costs import Overheads


if TYPE_CHECKING:
    from hf_pipetransformer.planning.layouts import PlanInputs
    from hf_pipetransformer.schedules.layout import Layout


Report = Mapping[str, float]
"""Median seconds of the parts of a step on one rank (`engine.timing.PARTS`), and its `samples`."""


def calibrate(
    costs: BlockCosts, overheads: Overheads, layout: Layout, reports: Sequence[Report], accumulation: int = 1
) -> tuple[BlockCosts, Overheads]:
    """Scale block costs to match measured times, and attribute the rest of the step to the overheads.

    Forwards and backwards have one factor each over all ranks, for blocks and for what a pass takes besides them: the
    shares come from the profile, the scale from real steps. Overheads stay where this layout does not measure them
    (the reduction without replicas).

    Args:
        reports: by rank, empty if a rank did not measure.
        accumulation: batches of an optimizer step.
    """
    ranks = [rank for rank, report in enumerate(reports) if report]
    if not ranks:
        return costs, overheads
    forwards, backwards = block_forwards(costs, layout.cache_level), block_backwards(costs, layout.num_frozen_layers)

    def factor(part: str, blocks: Sequence[float], per_pass: float, first: int, times: int = 1) -> float:
        """Return the measured seconds over those of blocks and of passes of stages with blocks from `first` on."""
        modelled, of_rank = 0.0, by_rank(layout, by_stage(layout, blocks))
        for rank in ranks:
            samples = reports[rank]["samples"]
            # A small batch has fewer micro-batches than M, one for each sample.
            passes = min(accumulation * layout.num_microbatches, samples) * _num_chunks(layout, rank, first)
            modelled += times * (samples * of_rank[rank % layout.pipeline_size] + passes * per_pass)
        measured = sum(reports[rank][part] for rank in ranks)
        return measured / modelled if measured and modelled else 1.0

    # Forwards run on all stages, frozen ones too, and once more for the reference.
    forward = factor("forward", forwards, overheads.per_forward, 0, 1 + overheads.has_reference)
    backward = factor("backward", backwards, overheads.per_backward, layout.first_active_block)
    scaled = costs.scaled(forward, backward)
    overheads = replace(
        overheads, per_forward=forward * overheads.per_forward, per_backward=backward * overheads.per_backward
    )
    # The rank with most to update is the one that the others wait for, and that a prediction is made of.
    by_position = trained_elements(layout, costs)
    trained = [by_position[rank % layout.pipeline_size] for rank in range(len(reports))]
    largest = max(ranks, key=trained.__getitem__)
    if trained[largest]:
        # Clipping is measured with the optimizer, but its sum over the stages has a cost of its own.
        updating = max(0.0, reports[largest]["optimizer"] - overheads.of_norms(layout))
        overheads = replace(overheads, optimizer_per_parameter=updating / trained[largest])
        if layout.num_replicas > 1:
            ring = 2 * (layout.num_replicas - 1) / layout.num_replicas
            size = gradient_bytes(layout, costs)[largest % layout.pipeline_size]
            # Ranks that train nothing reduce nothing.
            waited = statistics.median(reports[rank]["reduction"] for rank in ranks if trained[rank])
            # The latency of a collective has a cost of its own, whatever it carries.
            waited = max(0.0, waited - overheads.of_sum(layout.num_replicas))
            overheads = replace(overheads, reduction_per_byte=waited / (size * ring))
    other = statistics.median(_other(layout, reports[rank]) for rank in ranks) - overheads.of_batch(layout)
    return scaled, replace(overheads, per_step=max(0.0, other))


def _other(layout: Layout, report: Report) -> float:
    """Return the seconds of a step that no part explains."""
    # A pipeline of one rank does nothing but compute.
    inside = report["forward"] + report["backward"] if layout.pipeline_size == 1 else report["pipeline"]
    return max(0.0, report["total"] - inside - report["reduction"] - report["optimizer"])


def _num_chunks(layout: Layout, rank: int, first: int) -> int:
    """Return how many stages of a rank have blocks from `first` on."""
    return sum(part.stop > first for part in layout.blocks_of_rank(rank % layout.pipeline_size))


MULTIPLES = (6, 4, 3, 2, 1)
"""Multiples of K that are tried as the number of micro-batches M, 6K down to K (PipeTransformer, section 3.2.3)."""


def candidates(pipeline_size: int, samples_per_pipeline: int) -> list[int]:
    """Return the M to try for `pipeline_size` ranks, at most the number of samples, in decreasing order.

    Large M comes first because the smallest micro-batches need the least memory.
    """
    # A set, because small batches limit several multiples to the same number.
    tried = {max(1, min(multiple * pipeline_size, samples_per_pipeline)) for multiple in MULTIPLES}
    return sorted(tried, reverse=True)


def fitting_candidates(layout: Layout, inputs: PlanInputs) -> list[int]:
    """Return the M to try that fit the smallest device's memory; at least the largest, which needs the least."""
    tried = candidates(layout.pipeline_size, inputs.samples(layout))
    return [count for count in tried if inputs.fits(replace(layout, num_microbatches=count))] or tried[:1]


class MicrobatchTrial:
    """Trial of each number of micro-batches M for a few optimizer steps; the caller runs and times them.

    Times count per token, since batches differ in length. The first step of each M is a warm-up and dropped. Of the
    others the fastest counts, because disturbances only make a step slower.
    """

    def __init__(self, candidates: Sequence[int], steps_each: int = 3) -> None:
        self._steps = [count for count in candidates for _ in range(steps_each)]
        self._steps_each = steps_each
        self._position = 0
        self.least: dict[int, float] = {}
        """Seconds per token of each M measured so far."""

    @property
    def is_done(self) -> bool:
        return self._position == len(self._steps)

    def current(self) -> int:
        """Return the M of the next step: the one on trial, or the best once all are done."""
        return self.best() if self.is_done else self._steps[self._position]

    def record(self, seconds: float, tokens: int) -> None:
        """Record a step with `current()`. A step without tokens is not counted."""
        if self.is_done or tokens < 1:
            return
        if self._position % self._steps_each > 0:
            tried = self._steps[self._position]
            self.least[tried] = min(seconds / tokens, self.least.get(tried, float("inf")))
        self._position += 1

    def best(self) -> int:
        """Return the M with the least seconds per token so far; before any measurement, the first to try."""
        return min(self.least, key=self.least.__getitem__) if self.least else self._steps[0]
