"""The transfers between the computations of a table."""

from __future__ import annotations

from collections.abc import Sequence

from hf_pipetransformer.pipeline.schedules.actions import GIVES, NEEDS, Action, Op, Row, Table
from hf_pipetransformer.placement import Placement


def add_transfers(rows: Sequence[Sequence[Action]], placement: Placement, first_active_stage: int = 0) -> Table:
    """Add to each rank's computations what it receives and sends.

    The receive for a computation is posted one computation ahead, before the send that follows the current one, so
    that two neighbours that send to each other have both posted their receives: no send waits for a send. The order
    of messages of each pair and direction is the order of the computations on both sides. Between stages on one rank,
    and into frozen stages, nothing is sent.
    """
    return tuple(
        _add_to_row(compute, placement.stages_of(rank), placement, first_active_stage)
        for rank, compute in enumerate(rows)
    )


def _add_to_row(
    compute: Sequence[Action], stages: tuple[int, ...], placement: Placement, first_active_stage: int
) -> Row:
    row: list[Action] = []
    posted = 0

    def post_receives(until: int) -> None:
        nonlocal posted
        for action in compute[posted:until]:
            stage = stages[action.chunk]
            if action.op in NEEDS and placement.is_crossed(stage - 1 if action.op is Op.FORWARD else stage):
                row.append(action._replace(op=NEEDS[action.op]))
        posted = max(posted, until)

    for position, action in enumerate(compute):
        # Two computations ahead: the one about to run, and the one whose data may arrive while it runs.
        post_receives(position + 2)
        row.append(action)
        post_receives(position + 3)
        stage = stages[action.chunk]
        is_wanted = action.op is Op.FORWARD or stage > first_active_stage
        if action.op in GIVES and is_wanted and placement.is_crossed(stage if action.op is Op.FORWARD else stage - 1):
            row.append(action._replace(op=GIVES[action.op]))
    return tuple(row)
