"""ZB-H1: 1F1B whose gradients of weights are computed while a rank would wait."""

from __future__ import annotations

from hf_pipetransformer.pipeline.schedules.one_f_one_b import ONE_F_ONE_B
from hf_pipetransformer.pipeline.schedules.phases import in_phases
from hf_pipetransformer.pipeline.schedules.schedule import Computations, Schedule
from hf_pipetransformer.placement import Placement


def _lay(placement: Placement, num_microbatches: int, first_active_stage: int) -> Computations:
    """Like 1F1B with a split backward; the weights of rank `k` follow `k` micro-batches behind the inputs.

    The gradient of the input is sent before that of the weights is computed, so the first backward is back at rank 0
    sooner, and what is left of the weights fills the end. Every rank holds up to K micro-batches, as rank 0 does under
    1F1B (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024: ZB-H1). K=3, M=4, all durations alike:

        rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    size = placement.pipeline_size
    if size == 1:
        return ONE_F_ONE_B.lay(placement, num_microbatches, first_active_stage)
    rows = []
    for rank in range(size):
        warmup, behind = size - 1 - rank, max(0, rank - first_active_stage)
        steady = max(0, num_microbatches - warmup - behind)
        phases = ("F", warmup), ("F I", behind), ("F I W", steady), ("I W", warmup), ("W", behind)
        rows.append(in_phases(num_microbatches, *phases))
    return rows


ZB_H1 = Schedule("zb_h1", _lay, splits_backward=True)
