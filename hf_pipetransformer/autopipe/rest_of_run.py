"""How long the rest of a run takes under a layout, whose cache must be filled before it is read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_pipetransformer.autocache.passes import Pass
from hf_pipetransformer.autopipe.costs import Overheads, UnitCosts, predict_step
from hf_pipetransformer.layout import Layout


def seconds_left(
    layout: Layout,
    passes: Sequence[Pass],
    costs: UnitCosts,
    overheads: Overheads,
    samples_per_device: int,
    accumulation: int = 1,
) -> float:
    """Predicted seconds of all steps of `passes`; the transition to the layout is not counted.

    A step of which a share of the samples has rows takes that share of a step that reads all, and the rest of one that
    computes all. What rows save of reading samples is at most what a step takes beside its computation.

    Args:
        layout: how the model lies on the ranks.
        passes: the steps to come.
        costs: of the model's units.
        overheads: of this machine.
        samples_per_device: samples of a batch, by device.
        accumulation: batches per optimizer step.
    """
    samples = samples_per_device * layout.pipeline_size

    def step_seconds(level: int) -> float:
        return predict_step(replace(layout, cache_level=level), costs, overheads, samples, accumulation).seconds

    total = 0.0
    for each in passes:
        reads = each.share * step_seconds(each.level) if each.share else 0.0
        computes = (1 - each.share) * step_seconds(0) if each.share < 1 else 0.0
        rows = max(accumulation * samples * each.row_seconds, -overheads.per_step)
        total += each.steps * (reads + computes + rows)
    return total
