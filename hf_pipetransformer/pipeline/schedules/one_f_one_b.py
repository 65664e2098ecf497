"""1F1B: each rank alternates forwards and backwards."""

from __future__ import annotations

from hf_pipetransformer.pipeline.schedules.actions import Action, Op
from hf_pipetransformer.pipeline.schedules.schedule import Computations, Schedule
from hf_pipetransformer.placement import Placement


def _lay(placement: Placement, num_microbatches: int, _first_active_stage: int) -> Computations:
    """Synchronous 1F1B: after a warm-up of `K - 1 - k` forwards, rank `k` alternates forward and backward.

    It computes what `gpipe` computes and holds the activations of at most `K - k` micro-batches instead of `M`.
    K=2, M=3, computation only; and K=3, M=3 with stage 0 frozen:

        rank 0   F0 F1 .  B0 F2 B1 .  B2         rank 0   F0 F1 F2 .  .  .  .  .  .
        rank 1   .  F0 B0 F1 B1 F2 B2 .          rank 1   .  F0 F1 .  B0 F2 B1 .  B2
                                                 rank 2   .  .  F0 B0 F1 B1 F2 B2 .
    """
    rows = []
    for rank in range(placement.pipeline_size):
        num_warmup = min(placement.pipeline_size - 1 - rank, num_microbatches)
        row = [Action(Op.FORWARD, i) for i in range(num_warmup)]
        for i in range(num_microbatches - num_warmup):
            row += [Action(Op.FORWARD, num_warmup + i), Action(Op.BACKWARD, i)]
        row += [Action(Op.BACKWARD, i) for i in range(num_microbatches - num_warmup, num_microbatches)]
        rows.append(row)
    return rows


ONE_F_ONE_B = Schedule("1f1b", _lay)
