"""Evaluation: forwards alone."""

from __future__ import annotations

from hf_pipetransformer.pipeline.schedules.actions import Action, Op
from hf_pipetransformer.pipeline.schedules.interleaved import MAX_CHUNKS
from hf_pipetransformer.pipeline.schedules.schedule import Computations, Schedule
from hf_pipetransformer.placement import Placement


def _lay(placement: Placement, num_microbatches: int, _first_active_stage: int) -> Computations:
    """Every rank runs all forwards, K micro-batches at a time through all of its chunks.

    K=2, M=3; and K=2, M=4 with two chunks a rank:

        rank 0   F0 F1 F2 .          rank 0   F0   F1   F0.1 F1.1 F2   F3   F2.1 F3.1 .
        rank 1   .  F0 F1 F2         rank 1   .    F0   F1   F0.1 F1.1 F2   F3   F2.1 F3.1
    """
    starts = range(0, num_microbatches, placement.pipeline_size)
    row = [
        Action(Op.FORWARD, i, chunk)
        for start in starts
        for chunk in range(placement.num_chunks)
        for i in range(start, min(start + placement.pipeline_size, num_microbatches))
    ]
    return [row] * placement.pipeline_size


FORWARD_ONLY = {kind: Schedule("forward_only", _lay, placement=kind, max_chunks=MAX_CHUNKS) for kind in ("loop", "v")}
"""The schedule of evaluation by how the stages lie."""
