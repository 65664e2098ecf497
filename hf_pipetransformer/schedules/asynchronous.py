"""Asynchronous 1F1B: no flush between optimizer steps, so no bubble but at the start and at a drain."""

from __future__ import annotations

from functools import lru_cache

from hf_pipetransformer.schedules.actions import Op, Row, Table, add_transfers, add_updates
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.schedule import ONE_F_ONE_B, Schedule, drop_frozen


ASYNC_1F1B = Schedule("async_1f1b", ONE_F_ONE_B.lay, is_asynchronous=True)
"""1F1B that goes on from step to step: each stage updates its weights once it has the gradients of a step, while other
stages are at other steps (PipeOptim, Figure 4; PipeDream, Figure 4). Its table is a window of M steps of a micro-batch
each; rank `k` holds the activations of `K - k` micro-batches. K=2, M=3, computation only:

    rank 0   F0 F1 .  B0 U0 F2 B1 U1 .  B2 U2
    rank 1   .  F0 B0 U0 F1 B1 U1 F2 B2 U2 .
"""


@lru_cache(maxsize=256)
def window_table(placement: Placement, first_active_stage: int, step_sizes: tuple[int, ...]) -> Table:
    """What every rank does from one drain to the next: 1F1B over all units of the steps, and the updates.

    A unit is what a synchronous table calls a micro-batch. Units and steps are numbered from 0 in the window. K=2, two
    units a step, and K=3 with stage 0 frozen, one unit a step; computation only:

        rank 0   F0 F1 .  B0 F2 B1 U0 F3 B2 .  B3 U1         rank 0   F0 F1 F2 U0 F3 U1 U2 U3
        rank 1   .  F0 B0 F1 B1 U0 F2 B2 F3 B3 U1            rank 1   .  F0 F1 .  B0 U0 F2 B1 U1 F3 B2 U2 .  B3 U3
                                                             rank 2   .  .  F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3

    Args:
        placement: one stage on each rank.
        first_active_stage: stages below it run forwards only; they have updates for the sake of counting.
        step_sizes: units of each step.

    Raises:
        ValueError: a step with less than no units, or several stages a rank.
    """
    if placement.num_chunks != 1 or min(step_sizes, default=0) < 0:
        raise ValueError(f"A window has one stage a rank and steps of 0 units or more, found {placement, step_sizes}.")
    rows = drop_frozen(ONE_F_ONE_B.lay(placement, sum(step_sizes), first_active_stage), placement, first_active_stage)
    return add_updates(add_transfers(rows, placement, first_active_stage), step_sizes, first_active_stage)


def step_row(
    placement: Placement,
    first_active_stage: int,
    rank: int,
    sizes_before: tuple[int, ...],
    size: int,
    sizes_after: tuple[int, ...],
) -> Row:
    """What one rank does for one step of a window: all after the update before it, its own included.

    Units are numbered from the first of this step on, and its update is `U0`. Forwards run ahead, so that there may be
    receives and forwards of units of later steps, and there is no forward of a unit that an earlier step ran ahead to.

    Args:
        placement: one stage on each rank.
        first_active_stage: stages below it run forwards only.
        rank: whose row.
        sizes_before: units of the steps before in the window; of the last ones, `enough` units suffice.
        size: units of this step.
        sizes_after: units of the steps that follow; `enough` units suffice. Fewer mean that the window ends there.
    """
    look = enough(placement.pipeline_size)
    # Only how many units there are around the step counts, not which steps they are of.
    before = (min(sum(sizes_before), look),) if sizes_before else ()
    return _slice(placement, first_active_stage, rank, before, size, min(sum(sizes_after), look))


@lru_cache(maxsize=1024)
def _slice(
    placement: Placement, first_active_stage: int, rank: int, before: tuple[int, ...], size: int, after: int
) -> Row:
    row = window_table(placement, first_active_stage, (*before, size, after))[rank]
    ends = [position for position, action in enumerate(row) if action.op is Op.UPDATE]
    start = ends[0] + 1 if before else 0
    own = row[start : ends[len(before)] + 1]
    first = sum(before)
    return tuple(
        action._replace(micro_batch=0 if action.op is Op.UPDATE else action.micro_batch - first) for action in own
    )


def enough(pipeline_size: int) -> int:
    """How many units before a step, and after it, decide about its row; what lies further off changes nothing."""
    return pipeline_size


def units_ahead(pipeline_size: int, rank: int) -> int:
    """How many units beyond those of its own step a `step_row` of `rank` may name, receives posted ahead included.

    `K - 1 - k` forwards run ahead. Receives are posted two computations ahead: that of one more forward, or of two
    where the rank runs forwards only, as the last one never does. Rank 0 receives no activations.
    """
    posted = 0 if rank == 0 else 1 if rank == pipeline_size - 1 else 2
    return pipeline_size - 1 - rank + posted
