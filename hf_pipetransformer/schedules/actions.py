"""Actions of a schedule, and functions that add transfers and updates to the computations. Pure.

Notation for micro-batch `i` of `M` on a stage; `F3.1` belongs to the second stage (chunk 1) of the rank:

    F i   forward                                B i   backward: gradients of input and weights
    I i   backward, gradient of the input only   W i   backward, gradients of the weights only
    RF i  post the receive of i's activation     SF i  send i's activation to the next stage
    RB i  post the receive of i's gradient       SB i  send i's gradient to the stage before
    U t   update of the stage's weights: optimizer step t; only where steps follow each other without a flush

`RF` and `RB` only post a receive; the `F`, `B` or `I` that needs the data waits for it. A transfer can therefore run
while the rank computes. `SF` and `SB` may block until the neighbor has posted the receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from hf_pipetransformer.schedules.placement import Placement


class ScheduleError(ValueError):
    """Error for a table that would deadlock, mismatch messages, or leave work undone."""


class Op(Enum):
    """Kinds of action; see the notation above."""

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
    """One entry of an action list. For an update, `micro_batch` is the index of its optimizer step."""

    op: Op
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.op.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


ActionList = tuple[Action, ...]
"""Action list of one rank."""

Table = tuple[ActionList, ...]
"""Action lists of a pipeline, one per rank."""

COMPUTATIONS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)

BEGINS_BACKWARD = (Op.BACKWARD, Op.BACKWARD_INPUT)
"""Computations whose result the previous stage's backward waits for."""

GRADIENTS_ARE_WHOLE = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
"""Computations after which a stage has the complete gradient of a micro-batch."""

SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)

NEEDS = {
    Op.FORWARD: Op.RECEIVE_FORWARD,
    Op.BACKWARD: Op.RECEIVE_BACKWARD,
    Op.BACKWARD_INPUT: Op.RECEIVE_BACKWARD,
}
"""Receive that provides the input of each computation that can depend on another stage."""

GIVES = {
    Op.FORWARD: Op.SEND_FORWARD,
    Op.BACKWARD: Op.SEND_BACKWARD,
    Op.BACKWARD_INPUT: Op.SEND_BACKWARD,
}
"""Send of each computation whose result another stage can need."""


def source_of(op: Op, stage: int, num_stages: int) -> int | None:
    """Return the stage that computes the input of `op` on `stage`: the previous one, or the next for a gradient.

    None at the ends of the pipeline, and for weight gradients, which need only local data.
    """
    if op not in NEEDS:
        return None
    source = stage - 1 if op is Op.FORWARD else stage + 1
    return source if 0 <= source < num_stages else None


def add_updates(table: Table, step_sizes: Sequence[int], first_active_stage: int = 0) -> Table:
    """Add the update of each optimizer step to the action lists, after the step's last backward.

    The transfers up to the next computation come first: the gradient is sent, and receives posted ahead can complete
    while the rank updates its weights. A rank without backwards has its update where a trained rank in that position
    would have it, or at the end of its list. The table must have one stage per rank, and backwards in the order of the
    micro-batches. The update of an empty step follows the previous step's.
    """
    ends = list(accumulate(step_sizes))
    return tuple(
        _updated(actions, ends, 0 if rank >= first_active_stage else len(table) - 1 - rank)
        for rank, actions in enumerate(table)
    )


def _updated(actions: ActionList, ends: Sequence[int], runs_ahead: int) -> ActionList:
    """Insert the updates; `runs_ahead` is how many forwards a rank without backwards runs past those of a step."""
    computed = [position for position, action in enumerate(actions) if action.op in COMPUTATIONS]
    last_op = GRADIENTS_ARE_WHOLE if any(action.op in GRADIENTS_ARE_WHOLE for action in actions) else (Op.FORWARD,)
    # For each micro-batch, the index of its last computation in the actions.
    last_of = [number for number, position in enumerate(computed) if actions[position].op in last_op]
    before: dict[int, list[Action]] = {}
    for step, end in enumerate(ends):
        last = end - 1 + runs_ahead
        number = 0 if end == 0 else last_of[last] + 1 if last < len(last_of) else len(computed)
        position = computed[number] if number < len(computed) else len(actions)
        before.setdefault(position, []).append(Action(Op.UPDATE, step))
    laid: list[Action] = []
    for position in range(len(actions) + 1):
        laid += before.get(position, [])
        laid += actions[position : position + 1]
    return tuple(laid)


def add_transfers(
    action_lists: Sequence[Sequence[Action]], placement: Placement, first_active_stage: int = 0
) -> Table:
    """Add sends and receives to the computations of each rank.

    The receive for a computation is posted one computation ahead and before the send that follows the current one, so
    two neighbors that send to each other have both posted their receives. Where all ranks would otherwise block, a
    receive is posted as early as necessary: no table deadlocks, even if a send blocks until its receive is posted.
    Messages of two stages have the order of the computations on both sides. Nothing is sent within a rank or into
    frozen stages.

    Raises:
        ValueError: the computations themselves form a dependency cycle.
    """
    return _Laying(action_lists, placement, first_active_stage).table()


class _Laying:
    """Simulation of the computations with blocking sends, which records the transfers that take place.

    A result is identified by the stage that produces it, the send that would carry it, and the micro-batch.
    """

    def __init__(
        self, action_lists: Sequence[Sequence[Action]], placement: Placement, first_active_stage: int
    ) -> None:
        self.action_lists = action_lists
        self.placement = placement
        self.first_active_stage = first_active_stage
        self.stages = [placement.stages_of(rank) for rank in range(len(action_lists))]
        self.laid: list[list[Action]] = [[] for _ in action_lists]
        self.position = [0] * len(action_lists)
        self.num_posted = [0] * len(action_lists)
        self.leaving: list[Action | None] = [None] * len(action_lists)
        self.awaited: set[tuple[int, Op, int]] = set()
        self.given: set[tuple[int, Op, int]] = set()

    def table(self) -> Table:
        ranks = range(len(self.action_lists))
        while any(self.position[rank] < len(self.action_lists[rank]) or self.leaving[rank] for rank in ranks):
            moved = [self._advance(rank) for rank in ranks]
            if not any(moved):
                self._post_for(next((rank for rank in ranks if self.leaving[rank]), None))
        return tuple(map(tuple, self.laid))

    def _advance(self, rank: int) -> bool:
        """Add the pending send, or else the next computation; return False if the rank has to wait."""
        if leaving := self.leaving[rank]:
            if self._result(rank, leaving) not in self.awaited:
                return False
            self.laid[rank].append(leaving)
            self.leaving[rank] = None
            return True
        position = self.position[rank]
        if position == len(self.action_lists[rank]):
            return False
        action = self.action_lists[rank][position]
        # Two computations ahead: the one about to run, and the one whose data may arrive while it runs.
        self._post(rank, position + 2)
        source = self._source(rank, action)
        if source is not None and (source, GIVES[action.op], action.micro_batch) not in self.given:
            return False
        self.laid[rank].append(action)
        self.position[rank] += 1
        # Before the send: two neighbors that send to each other must both have posted their receives.
        self._post(rank, position + 3)
        if action.op in GIVES:
            given = action._replace(op=GIVES[action.op])
            self.given.add(self._result(rank, given))
            self.leaving[rank] = given if self._is_sent(rank, given) else None
        return True

    def _result(self, rank: int, send: Action) -> tuple[int, Op, int]:
        return self.stages[rank][send.chunk], send.op, send.micro_batch

    def _source(self, rank: int, action: Action) -> int | None:
        return source_of(action.op, self.stages[rank][action.chunk], self.placement.num_stages)

    def _is_sent(self, rank: int, send: Action) -> bool:
        stage = self.stages[rank][send.chunk]
        if send.op is Op.SEND_FORWARD:
            return self.placement.is_crossed(stage)
        return stage > self.first_active_stage and self.placement.is_crossed(stage - 1)

    def _post(self, rank: int, until: int) -> None:
        """Post the receives of this rank's first `until` computations."""
        for action in self.action_lists[rank][self.num_posted[rank] : until]:
            source = self._source(rank, action)
            if source is not None and self.placement.rank_of(source) != rank:
                self.awaited.add((source, GIVES[action.op], action.micro_batch))
                self.laid[rank].append(action._replace(op=NEEDS[action.op]))
        self.num_posted[rank] = max(self.num_posted[rank], until)

    def _post_for(self, rank: int | None) -> None:
        """Post the receive for the blocked send of `rank`, to resolve a deadlock; fail if `rank` is None."""
        if rank is None or (leaving := self.leaving[rank]) is None:
            waiting = [
                str(actions[at])
                for actions, at in zip(self.action_lists, self.position, strict=True)
                if at < len(actions)
            ]
            raise ValueError(f"Computations that wait for each other: {waiting}.")
        stage, send, i = self._result(rank, leaving)
        target = stage + (1 if send is Op.SEND_FORWARD else -1)
        receiver, chunk = self.placement.rank_of(target), self.placement.chunk_of(target)
        taking = [GIVES.get(each.op) is send and each[1:] == (i, chunk) for each in self.action_lists[receiver]]
        self._post(receiver, taking.index(True) + 1)
