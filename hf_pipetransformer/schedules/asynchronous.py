"""Asynchronous 1F1B: no flush between optimizer steps, so bubbles only at the start and at a drain."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from hf_pipetransformer.schedules.abilities import ABILITIES
from hf_pipetransformer.schedules.actions import ActionList, Op, Table, add_transfers, add_updates
from hf_pipetransformer.schedules.schedule import ONE_F_ONE_B, Schedule, drop_frozen


if TYPE_CHECKING:
    from hf_pipetransformer.schedules.placement import Placement


class _Overlapping(Schedule):
    """Schedule whose table covers M optimizer steps of one micro-batch each, with the updates."""

    @lru_cache(maxsize=256)  # noqa: B019  # There is one, which lives as long as the program.
    def table(
        self,
        pipeline_size: int,
        num_microbatches: int,
        num_chunks: int = 1,
        first_active_stage: int = 0,
        num_token_slices: int = 1,
    ) -> Table:
        table = super().table(pipeline_size, num_microbatches, num_chunks, first_active_stage, num_token_slices)
        return add_updates(table, (1,) * num_microbatches, first_active_stage)

    def fullest_table(
        self, pipeline_size: int, num_microbatches: int, num_chunks: int = 1, first_active_stage: int = 0
    ) -> Table:
        # Without a flush, forwards of later steps start before the backwards of these have ended. One rank waits for
        # no other, and runs its steps whole.
        schedule, most = (
            (self, max(num_microbatches, pipeline_size)) if pipeline_size > 1 else (ONE_F_ONE_B, num_microbatches)
        )
        return schedule.table(pipeline_size, most, num_chunks, first_active_stage)


ASYNC_1F1B = _Overlapping("async_1f1b", ONE_F_ONE_B.lay, ABILITIES["async_1f1b"])
"""1F1B that continues across optimizer steps: each stage updates its weights once it has the gradients of a step,
while other stages are at other steps (PipeOptim, Figure 4; PipeDream, Figure 4). Its table covers a window of M steps
of one micro-batch each; rank `k` holds the activations of `K - k` micro-batches. K=2, M=3, computation only:

    rank 0   F0 F1 .  B0 U0 F2 B1 U1 .  B2 U2
    rank 1   .  F0 B0 U0 F1 B1 U1 F2 B2 U2 .
"""


@lru_cache(maxsize=256)
def window_table(placement: Placement, first_active_stage: int, step_sizes: tuple[int, ...]) -> Table:
    """Return the action lists from one drain to the next: 1F1B over all micro-batches of the steps, and the updates.

    Micro-batches and steps are numbered from 0 in the window. Stages below `first_active_stage` run forwards only;
    their updates only count steps. K=2, two micro-batches per step, and K=3 with stage 0 frozen, one micro-batch per
    step; computation only:

        rank 0   F0 F1 .  B0 F2 B1 U0 F3 B2 .  B3 U1         rank 0   F0 F1 F2 U0 F3 U1 U2 U3
        rank 1   .  F0 B0 F1 B1 U0 F2 B2 F3 B3 U1            rank 1   .  F0 F1 .  B0 U0 F2 B1 U1 F3 B2 U2 .  B3 U3
                                                             rank 2   .  .  F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3

    Raises:
        ValueError: a negative number of micro-batches, or several stages per rank.
    """
    if placement.num_chunks != 1 or min(step_sizes, default=0) < 0:
        raise ValueError(
            f"A window has one stage a rank and steps of 0 micro-batches or more, found {placement, step_sizes}."
        )
    action_lists = drop_frozen(
        ONE_F_ONE_B.lay(placement, sum(step_sizes), first_active_stage), placement, first_active_stage
    )
    return add_updates(add_transfers(action_lists, placement, first_active_stage), step_sizes, first_active_stage)


def step_actions(
    placement: Placement,
    first_active_stage: int,
    rank: int,
    sizes_before: tuple[int, ...],
    size: int,
    sizes_after: tuple[int, ...],
) -> ActionList:
    """Return one rank's actions for one step of a window: from after the previous update through this one.

    Micro-batches are numbered from the first micro-batch of this step, and its update is `U0`. Forwards run ahead: the
    actions may contain receives and forwards of micro-batches of later steps, and lack forwards that earlier steps
    have run. Of the micro-batches of the steps before and after, as many as there are ranks suffice; fewer after mean
    that the window ends there.
    """
    # More before and after a step do not affect its actions.
    look = placement.pipeline_size
    # Only the number of surrounding micro-batches matters, not their steps; merging them makes the cache hit more
    # often.
    before = (min(sum(sizes_before), look),) if sizes_before else ()
    return _slice(placement, first_active_stage, rank, before, size, min(sum(sizes_after), look))


@lru_cache(maxsize=1024)
def _slice(
    placement: Placement, first_active_stage: int, rank: int, before: tuple[int, ...], size: int, after: int
) -> ActionList:
    actions = window_table(placement, first_active_stage, (*before, size, after))[rank]
    ends = [position for position, action in enumerate(actions) if action.op is Op.UPDATE]
    # All steps before are merged into one, so that its update is the first.
    start = ends[0] + 1 if before else 0
    own = actions[start : ends[len(before)] + 1]
    first = sum(before)
    return tuple(
        action._replace(micro_batch=0 if action.op is Op.UPDATE else action.micro_batch - first) for action in own
    )


def micro_batches_ahead(pipeline_size: int, rank: int) -> int:
    """Return how many micro-batches beyond its own step a `step_actions` of `rank` can contain, including receives
    posted ahead.

    `K - 1 - k` forwards run ahead. Receives are posted two computations ahead: that is one more forward, or two if the
    rank runs forwards only, which the last rank never does. Rank 0 receives no activations.
    """
    posted = 0 if rank == 0 else 1 if rank == pipeline_size - 1 else 2
    return pipeline_size - 1 - rank + posted
