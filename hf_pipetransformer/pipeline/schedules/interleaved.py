"""Interleaved 1F1B: each rank holds several chunks of the model and alternates forwards and backwards over them."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hf_pipetransformer.pipeline.schedules.actions import Action, Op
from hf_pipetransformer.pipeline.schedules.one_f_one_b import ONE_F_ONE_B
from hf_pipetransformer.pipeline.schedules.schedule import Computations, Schedule
from hf_pipetransformer.placement import Placement


MAX_CHUNKS = 8


def _lay(placement: Placement, num_microbatches: int, first_active_stage: int) -> Computations:
    """Interleaved 1F1B: groups of micro-batches go through a rank's chunks one after the other.

    The bubble is that of 1F1B over V, activations are held for about K - 1 forwards of a chunk more (Narayanan et al.,
    Efficient Large-Scale Language Model Training, SC 2021, section 2.2). Groups have K micro-batches; what K does not
    divide makes some larger, so that a group always goes round without a wait. K=2, V=2, M=2, computation only:

        rank 0   F0   F1   F0.1 F1.1 .    B0.1 .    B1.1 B0   B1
        rank 1   .    F0   F1   F0.1 B0.1 F1.1 B1.1 B0   B1   .
    """
    size, num_chunks = placement.pipeline_size, placement.num_chunks
    if size == 1:
        return ONE_F_ONE_B.lay(placement, num_microbatches, first_active_stage)
    num_groups = max(1, num_microbatches // size)
    sizes = [(num_microbatches + later) // num_groups for later in reversed(range(num_groups))]
    groups = [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
    chunks = range(num_chunks)
    forwards = [Action(Op.FORWARD, i, chunk) for group in groups for chunk in chunks for i in group]
    backwards = [Action(Op.BACKWARD, i, chunk) for group in groups for chunk in reversed(chunks) for i in group]
    rows = []
    for rank in range(size):
        warmup = min(len(forwards), (num_chunks - 1) * sizes[0] + 2 * (size - 1 - rank))
        alternating = [each for pair in zip(forwards[warmup:], backwards, strict=False) for each in pair]
        rows.append([*forwards[:warmup], *alternating, *backwards[len(forwards) - warmup :]])
    return rows


INTERLEAVED_1F1B = Schedule("interleaved_1f1b", _lay, default_chunks=2, min_chunks=2, max_chunks=MAX_CHUNKS)
