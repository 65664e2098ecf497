"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from hf_pipetransformer.pipeline.schedules.actions import Action, Op
from hf_pipetransformer.pipeline.schedules.schedule import Computations, Schedule
from hf_pipetransformer.placement import Placement


def _lay(placement: Placement, num_microbatches: int, _first_active_stage: int) -> Computations:
    """All forwards, then all backwards in reverse order (GPipe; PipeTransformer, Figure 6).

    K=2, M=3, computation only, time from left to right:

        rank 0   F0 F1 F2 .  .  B2 B1 B0
        rank 1   .  F0 F1 F2 B2 B1 B0 .
    """
    forwards = [Action(Op.FORWARD, i) for i in range(num_microbatches)]
    backwards = [Action(Op.BACKWARD, i) for i in reversed(range(num_microbatches))]
    return [forwards + backwards for _ in range(placement.pipeline_size)]


GPIPE = Schedule("gpipe", _lay)
