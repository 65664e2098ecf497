"""ZB-V: two chunks a rank, laid in a V, gradients of weights computed while a rank would wait."""

from __future__ import annotations

from hf_pipetransformer.pipeline.schedules.greedy import lay_greedily, shortest
from hf_pipetransformer.pipeline.schedules.one_f_one_b import ONE_F_ONE_B
from hf_pipetransformer.pipeline.schedules.phases import in_phases
from hf_pipetransformer.pipeline.schedules.schedule import Computations, Schedule, drop_frozen
from hf_pipetransformer.placement import Placement


def _lay(placement: Placement, num_microbatches: int, first_active_stage: int) -> Computations:
    """The V-schedule of Qi et al. (Zero Bubble Pipeline Parallelism, ICLR 2024, section 6).

    With durations alike no rank waits once it has begun. A rank holds up to 2 K activations of half its layers, as
    much as rank 0 under 1F1B. The pattern wants 2 K - 1 micro-batches and no chunk wholly frozen; without them the
    order in which things get ready may end sooner. K=2, M=3:

        rank 0   F0   F1   F2   F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0   W0   F2.1 I2.1 W2.1 I1   W1   I2   W2   .
        rank 1   .    F0   F0.1 F1   F1.1 I0.1 W0.1 F2   I0   W0   F2.1 I1.1 W1.1 I1   I2.1 I2   W1   W2.1 W2
    """
    size = placement.pipeline_size
    if size == 1:
        return ONE_F_ONE_B.lay(placement, num_microbatches, first_active_stage)
    wanted = max(num_microbatches, 2 * size - 1)
    pattern = [
        in_phases(
            num_microbatches,
            *(("F", 2 * (size - rank) - 1), ("F1 F", rank), ("F1 I1 W1", size - rank)),
            *(("F I W F1 I1 W1", wanted - 2 * size + 1 + rank), ("I W F1 I1 W1", size - 1 - rank)),
            *(("I I1", rank), ("I W", size - rank), ("W1", rank), ("W", rank)),
        )
        for rank in range(size)
    ]
    if num_microbatches == wanted and first_active_stage < size:
        return pattern
    greedy = lay_greedily(placement, num_microbatches, first_active_stage, limit=2 * size)
    return shortest(placement, first_active_stage, [drop_frozen(pattern, placement, first_active_stage), greedy])


ZB_V = Schedule("zb_v", _lay, splits_backward=True, placement="v", default_chunks=2, min_chunks=2, max_chunks=2)
