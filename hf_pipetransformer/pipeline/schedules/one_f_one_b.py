"""1F1B: each rank alternates forwards and backwards."""

from __future__ import annotations

from hf_pipetransformer.pipeline.schedules.phases import in_phases
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
    warmups = [min(placement.pipeline_size - 1 - rank, num_microbatches) for rank in range(placement.pipeline_size)]
    return [
        in_phases(num_microbatches, ("F", warmup), ("F B", num_microbatches - warmup), ("B", warmup))
        for warmup in warmups
    ]


ONE_F_ONE_B = Schedule("1f1b", _lay)
