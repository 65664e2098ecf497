"""Schedules outside the package, in one file: all forwards first, with one stage a rank and with several."""

from __future__ import annotations

from hf_pipetransformer.schedules.abilities import Abilities
from hf_pipetransformer.schedules.actions import Action, Op
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.schedule import Schedule


def _in_order(placement: Placement, num_microbatches: int, _first_active_stage: int) -> list[list[Action]]:
    """K=2, M=2:

    rank 0   F0 F1 .  .  B0 B1
    rank 1   .  F0 F1 B0 B1 .
    """
    actions = [Action(op, i) for op in (Op.FORWARD, Op.BACKWARD) for i in range(num_microbatches)]
    return [actions] * placement.pipeline_size


def _breadth_first(placement: Placement, num_microbatches: int, _first_active_stage: int) -> list[list[Action]]:
    """Each chunk takes all micro-batches at once (Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022).

    K=2, V=2, M=2:

        rank 0   F0   F1   F0.1 F1.1 .    B0.1 B1.1 B0   B1   .
        rank 1   .    F0   F1   F0.1 F1.1 B0.1 B1.1 B0   B1
    """
    actions = [
        Action(op, i, chunk)
        for op, step in ((Op.FORWARD, 1), (Op.BACKWARD, -1))
        for chunk in range(placement.num_chunks)[::step]
        for i in range(num_microbatches)
    ]
    return [actions] * placement.pipeline_size


GPIPE_IN_ORDER = Schedule("gpipe_in_order", _in_order)
BREADTH_FIRST = Schedule("breadth_first", _breadth_first, Abilities(default_chunks=2, min_chunks=2, max_chunks=8))
