"""The entries of a schedule's table.

For micro-batch `i` of `M` on a stage; `F3.1` is that of the second stage (chunk 1) on the rank:

    F i   forward                                B i   backward: gradients of input and weights
    I i   backward, gradient of the input only   W i   backward, gradients of the weights only
    RF i  post the receive of i's activation     SF i  send i's activation to the next stage
    RB i  post the receive of i's gradient       SB i  send i's gradient to the stage before
    U t   update of the stage's weights: optimizer step t; only where steps follow each other without a flush

`RF` and `RB` only *post* a receive; the `F`, `B` or `I` that needs the data waits for it. That lets a transfer run
while the rank computes. `SF` and `SB` may wait until the neighbour has posted the receive.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class ScheduleError(ValueError):
    """A table that would deadlock, mismatch messages, or leave work undone."""


class Op(Enum):
    """The kinds of action of the legend above."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECEIVE_FORWARD = "RF"
    SEND_FORWARD = "SF"
    RECEIVE_BACKWARD = "RB"
    SEND_BACKWARD = "SB"
    UPDATE = "U"


class Action(NamedTuple):
    """One entry of a rank's row; `micro_batch` of an update is the number of its step."""

    op: Op
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


Row = tuple[Action, ...]
"""What one rank does, in this order."""

Table = tuple[Row, ...]
"""One row a rank of the pipeline."""

COMPUTATIONS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)

BEGINS_BACKWARD = (Op.BACKWARD, Op.BACKWARD_INPUT)
"""The computations that others wait for on the way back."""

GRADIENTS_ARE_WHOLE = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
"""The computations after which a stage has all that a micro-batch gives to its gradients."""

SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)

NEEDS = {
    Op.FORWARD: Op.RECEIVE_FORWARD,
    Op.BACKWARD: Op.RECEIVE_BACKWARD,
    Op.BACKWARD_INPUT: Op.RECEIVE_BACKWARD,
}
"""Of each computation that follows one of another stage: the receive of its input."""

GIVES = {
    Op.FORWARD: Op.SEND_FORWARD,
    Op.BACKWARD: Op.SEND_BACKWARD,
    Op.BACKWARD_INPUT: Op.SEND_BACKWARD,
}
"""Of each computation whose result another stage takes: its send."""


def source_of(op: Op, stage: int, num_stages: int) -> int | None:
    """The stage that gives `stage` the input of the computation `op`: the one before, or the next for a gradient.

    None at the ends of the pipeline, and for the gradients of weights: they follow from what the stage holds.
    """
    if op not in NEEDS:
        return None
    source = stage - 1 if op is Op.FORWARD else stage + 1
    return source if 0 <= source < num_stages else None
