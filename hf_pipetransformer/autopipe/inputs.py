"""What the plans of one run start from."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pipetransformer.autopipe.costs import Overheads, UnitCosts
from hf_pipetransformer.autopipe.planner import PlanRules


@dataclass(frozen=True)
class PlanInputs:
    """Measured at the start, the same for all plans of a run.

    Args:
        units: measured on one micro-batch.
        overheads: of the machine.
        rules: what a plan may do.
        samples_per_device: samples of a loader batch by rank.
        measures_microbatches: whether M is tried on training steps; else it follows a rule.
    """

    units: UnitCosts
    overheads: Overheads
    rules: PlanRules
    samples_per_device: int
    measures_microbatches: bool = True
