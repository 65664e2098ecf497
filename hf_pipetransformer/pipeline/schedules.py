"""Pipeline schedules as tables: what every stage does, in which order. Pure; nothing here touches a device.

Legend, for stage `k` of `K` and micro-batch `i` of `M`:

    F i   forward of micro-batch i               B i   backward of micro-batch i
    RF i  post the receive of i's activation     SF i  send i's activation to stage k + 1
    RB i  post the receive of i's gradient       SB i  send i's gradient to stage k - 1

`RF` and `RB` only *post* a receive; the `F` or `B` that needs the data waits for it. That lets a transfer run while
the stage computes. `SF` and `SB` may wait until the neighbour has posted the receive.

Stages that hold frozen units only run forwards; no gradient is computed in them or sent to them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class Op(Enum):
    """The kinds of action of the legend above."""

    FORWARD = "F"
    BACKWARD = "B"
    RECEIVE_FORWARD = "RF"
    SEND_FORWARD = "SF"
    RECEIVE_BACKWARD = "RB"
    SEND_BACKWARD = "SB"


class Action(NamedTuple):
    """One entry of a stage's row."""

    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.micro_batch}"


Row = tuple[Action, ...]
Table = tuple[Row, ...]

SENDS = {Op.SEND_FORWARD: (1, Op.RECEIVE_FORWARD), Op.SEND_BACKWARD: (-1, Op.RECEIVE_BACKWARD)}
"""Of each send: how far along the pipeline it goes, and the receive there that it answers."""

NEEDS = {Op.FORWARD: Op.RECEIVE_FORWARD, Op.BACKWARD: Op.RECEIVE_BACKWARD}
"""Of each computation: the receive of its input."""


def has_input(stage: int, op: Op, num_stages: int) -> bool:
    """Whether the computation `op` of `stage` waits for a neighbour: all do but those at the ends of the pipeline."""
    return stage > 0 if op is Op.FORWARD else stage < num_stages - 1


def gpipe(num_stages: int, num_microbatches: int) -> Table:
    """All forwards, then all backwards in reverse order (GPipe; PipeTransformer, Figure 6).

    K=2, M=3, computation only, time from left to right:

        stage 0   F0 F1 F2 .  .  B2 B1 B0
        stage 1   .  F0 F1 F2 B2 B1 B0 .
    """
    forwards = [Action(Op.FORWARD, i) for i in range(num_microbatches)]
    backwards = [Action(Op.BACKWARD, i) for i in reversed(range(num_microbatches))]
    return _with_transfers([forwards + backwards for _ in range(num_stages)])


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Table:
    """Synchronous 1F1B: after a warm-up of `K - 1 - k` forwards, stage `k` alternates forward and backward.

    It computes what `gpipe` computes and holds the activations of at most `K - k` micro-batches instead of `M`.
    K=2, M=3, computation only:

        stage 0   F0 F1 .  B0 F2 B1 .  B2
        stage 1   .  F0 B0 F1 B1 F2 B2 .
    """
    rows = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - 1 - stage, num_microbatches)
        row = [Action(Op.FORWARD, i) for i in range(num_warmup)]
        for i in range(num_microbatches - num_warmup):
            row += [Action(Op.FORWARD, num_warmup + i), Action(Op.BACKWARD, i)]
        row += [Action(Op.BACKWARD, i) for i in range(num_microbatches - num_warmup, num_microbatches)]
        rows.append(row)
    return _with_transfers(rows)


def forward_only(num_stages: int, num_microbatches: int) -> Table:
    """Evaluation: every stage runs all forwards in order.

    K=2, M=3:

        stage 0   F0 F1 F2 .
        stage 1   .  F0 F1 F2
    """
    row = [Action(Op.FORWARD, i) for i in range(num_microbatches)]
    return _with_transfers([list(row) for _ in range(num_stages)])


SCHEDULES: dict[str, Callable[[int, int], Table]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""Training schedules by the name that `pipeline_schedule` takes."""


@lru_cache(maxsize=256)
def build_table(schedule: str, num_stages: int, num_microbatches: int, first_active_stage: int = 0) -> Table:
    """The table of a named schedule, or of `"forward_only"`.

    Stages below `first_active_stage` hold frozen units only: they keep the forwards of their row. The stages from
    there on follow the schedule; the first of them sends no gradient. `1f1b` with K=3, M=3 and stage 0 frozen:

        stage 0   F0 F1 F2 .  .  .  .  .
        stage 1   .  F0 F1 .  B0 F2 B1 .  B2
        stage 2   .  .  F0 B0 F1 B1 F2 B2 .

    Args:
        schedule: a key of `SCHEDULES`, or `"forward_only"`, for which all stages are alike.
        num_stages: K.
        num_microbatches: M.
        first_active_stage: the first stage with something to train, 0 to K - 1.

    Raises:
        ValueError: unknown name, fewer than one stage or micro-batch, or an active stage that does not exist.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"A table needs at least one stage and one micro-batch, found {num_stages} and {num_microbatches}."
        )
    if not 0 <= first_active_stage < num_stages:
        raise ValueError(
            f"The first active stage must be one of the {num_stages} stages, 0 to {num_stages - 1}, "
            f"found {first_active_stage}."
        )
    builders = {**SCHEDULES, "forward_only": forward_only}
    if schedule not in builders:
        raise ValueError(f"Unknown schedule {schedule!r}: expected one of {sorted(builders)}.")
    table = builders[schedule](num_stages, num_microbatches)
    return table if first_active_stage == 0 else _with_frozen_stages(table, first_active_stage)


def _with_frozen_stages(table: Table, first_active_stage: int) -> Table:
    """The table without the backwards of the stages below `first_active_stage`.

    The transfers are laid anew: a row of forwards alone posts its receives earlier than one with backwards between.
    """
    rows = []
    for stage, row in enumerate(table):
        kept = (Op.FORWARD,) if stage < first_active_stage else (Op.FORWARD, Op.BACKWARD)
        rows.append([action for action in row if action.op in kept])
    return _with_transfers(rows, first_active_stage)


def _with_transfers(compute_rows: list[list[Action]], first_active_stage: int = 0) -> Table:
    """Add the transfers to rows of computation.

    The receive for a computation is posted one computation ahead, before the send that follows the current one, so
    that two neighbours that send to each other have both posted their receives: no send waits for a send. The order
    of messages of each pair and direction is the order of the computations on both sides.
    """
    return tuple(
        _row_with_transfers(stage, len(compute_rows), first_active_stage, compute)
        for stage, compute in enumerate(compute_rows)
    )


def _row_with_transfers(stage: int, num_stages: int, first_active_stage: int, compute: list[Action]) -> Row:
    row: list[Action] = []
    posted = 0

    def post_receives(until: int) -> None:
        nonlocal posted
        for action in compute[posted:until]:
            if has_input(stage, action.op, num_stages):
                row.append(Action(NEEDS[action.op], action.micro_batch))
        posted = max(posted, until)

    for position, action in enumerate(compute):
        # Two computations ahead: the one about to run, and the one whose data may arrive while it runs.
        post_receives(position + 2)
        row.append(action)
        post_receives(position + 3)
        if action.op is Op.FORWARD and stage < num_stages - 1:
            row.append(Action(Op.SEND_FORWARD, action.micro_batch))
        if action.op is Op.BACKWARD and stage > first_active_stage:
            row.append(Action(Op.SEND_BACKWARD, action.micro_batch))
    return tuple(row)
