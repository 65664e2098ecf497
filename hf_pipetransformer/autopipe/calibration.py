"""From what a step took under one layout to what the units cost: the start of a prediction. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hf_pipetransformer.autopipe.costs import GRADIENT_BYTES, Overheads, UnitCosts, unit_backwards, unit_forwards
from hf_pipetransformer.layout import Layout


Report = Mapping[str, float]
"""Median seconds of the parts of a step on one rank (`pipeline.timing.PARTS`), and its `samples`."""


def calibrate(
    costs: UnitCosts, overheads: Overheads, layout: Layout, reports: Sequence[Report]
) -> tuple[UnitCosts, Overheads]:
    """Scale unit costs so that they add up to what was measured, and split the rest of the step into its causes.

    Forwards and backwards have one factor each, over all ranks: the shares of the units come from the profile, the
    level from real steps.

    Args:
        costs: relative costs of the units.
        overheads: what is known so far; kept where this layout tells nothing (no reduction without replicas).
        layout: under which was measured.
        reports: by rank; empty ones did not measure.
    """
    ranks = [rank for rank, report in enumerate(reports) if report]
    if not ranks:
        return costs, overheads
    forwards = unit_forwards(costs, layout.cache_level)
    backwards = unit_backwards(costs, layout.num_frozen_layers)
    factors = {}
    for part, units in (("forward", forwards), ("backward", backwards)):
        measured = sum(reports[rank][part] for rank in ranks)
        modelled = sum(reports[rank]["samples"] * _sum(units, layout, rank) for rank in ranks)
        factors[part] = measured / modelled if measured and modelled else 1.0
    scaled = costs.scaled(factors["forward"], factors["backward"])
    trained = [
        sum(costs.trained[unit] for unit in _units(layout, rank) if unit >= layout.first_active_unit)
        for rank in range(len(reports))
    ]
    largest = max((rank for rank in ranks), key=lambda rank: trained[rank])
    if trained[largest]:
        overheads = replace(overheads, optimizer_per_parameter=reports[largest]["optimizer"] / trained[largest])
        if layout.num_replicas > 1:
            ring = 2 * (layout.num_replicas - 1) / layout.num_replicas
            waited = statistics.median(reports[rank]["reduction"] for rank in ranks if trained[rank])
            overheads = replace(overheads, reduction_per_byte=waited / (trained[largest] * GRADIENT_BYTES * ring))
    return scaled, replace(overheads, per_step=statistics.median(_other(layout, reports[rank]) for rank in ranks))


def _other(layout: Layout, report: Report) -> float:
    """Seconds of a step that no part explains. With one rank, all that the pipeline does is compute."""
    inside = report["forward"] + report["backward"] if layout.pipeline_size == 1 else report["pipeline"]
    return max(0.0, report["total"] - inside - report["reduction"] - report["optimizer"])


def _units(layout: Layout, rank: int) -> list[int]:
    return [unit for part in layout.units_of_rank(rank % layout.pipeline_size) for unit in part]


def _sum(values: Sequence[float], layout: Layout, rank: int) -> float:
    return sum(values[unit] for unit in _units(layout, rank))
