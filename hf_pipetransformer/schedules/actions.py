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
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, NamedTuple


if TYPE_CHECKING:
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

    # Enum's own hash is Python code, which the engine would run dozens of times for each micro-batch.
    __hash__ = object.__hash__


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
    # Counted in computations: transfers lie between them in numbers that depend on the rank.
    computed = [position for position, action in enumerate(actions) if action.op in COMPUTATIONS]
    last_op = GRADIENTS_ARE_WHOLE if any(action.op in GRADIENTS_ARE_WHOLE for action in actions) else (Op.FORWARD,)
    # For each micro-batch, the index of its last computation in the actions.
    last_of = [number for number, position in enumerate(computed) if actions[position].op in last_op]
    before: dict[int, list[Action]] = {}
    for step, end in enumerate(ends):
        last = end - 1 + runs_ahead
        # A window that ends early has no such forward any more: then the update closes the list.
        number = 0 if end == 0 else last_of[last] + 1 if last < len(last_of) else len(computed)
        position = computed[number] if number < len(computed) else len(actions)
        # Updates of empty steps are at the same place as that of the step before.
        before.setdefault(position, []).append(Action(Op.UPDATE, step))
    laid: list[Action] = []
    # One position more than there are actions: an update may follow the last of them.
    for position in range(len(actions) + 1):
        laid += before.get(position, [])
        laid += actions[position : position + 1]
    return tuple(laid)


def add_transfers(
    action_lists: Sequence[Sequence[Action]], placement: Placement, first_active_stage: int = 0
) -> Table:
    """Add sends and receives to the computations of each rank.

    A receive is posted one computation ahead, so that the transfer can run while the rank computes, but after the
    sends of earlier results. No table deadlocks, even if each action of a rank waits for the one before it, as on a
    GPU with a single hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`): there a posted receive delays all that follows
    until its data has arrived. Where ranks would wait for each other, a receive is posted later, or before a send.
    Messages of two stages have the order of the computations on both sides. Nothing is sent within a rank or into
    frozen stages.

    Raises:
        ValueError: the computations themselves form a dependency cycle.
    """
    return _Laying(action_lists, placement, first_active_stage).table()


class _Laying:
    """Execution of the computations and transfers one after another on each rank, which reorders what deadlocks.

    `left` holds the actions of each rank that have not run, in reverse order. A transfer runs when its send is the
    next action of one rank and its receive that of the other.
    """

    def __init__(
        self, action_lists: Sequence[Sequence[Action]], placement: Placement, first_active_stage: int
    ) -> None:
        self.placement = placement
        self.first_active_stage = first_active_stage
        self.left = [self._with_transfers(rank, actions) for rank, actions in enumerate(action_lists)]
        self.laid: list[list[Action]] = [[] for _ in action_lists]
        # Only what stages of one rank hand to each other: between ranks the transfers themselves keep the order.
        self.computed: set[tuple[int, Op, int]] = set()
        """Stage, operation and micro-batch of each computation that has run."""

    def table(self) -> Table:
        ranks = range(len(self.left))
        while any(self.left):
            moved = [self._advance(rank) for rank in ranks]
            # Only a standstill changes the order, and the smaller change comes first.
            if any(moved) or any(self._put_off_receives(rank) for rank in ranks) or self._receive_for_send():
                continue
            # No order of transfers helps here, so a table would hang on the ranks instead of failing now.
            waiting = [str(left[-1]) for left in self.left if left]
            raise ValueError(f"Computations that wait for each other: {waiting}.")
        return tuple(map(tuple, self.laid))

    def _with_transfers(self, rank: int, actions: Sequence[Action]) -> list[Action]:
        """Return the actions in reverse order, with each receive one computation ahead."""
        receives = [self._receive_of(rank, action) for action in actions]
        found: list[Action] = []
        for position, action in enumerate(actions):
            # The first computation has none before it: its own receive comes right before it, with that of the second.
            upcoming = receives[position + 1 : position + 2] if position else receives[:2]
            found += [*filter(None, upcoming), action]
            if action.op in GIVES and self._is_sent(rank, action):
                found.append(action._replace(op=GIVES[action.op]))
        # Reversed, because the next action is taken from the end of a list, which is cheap.
        return found[::-1]

    def _receive_of(self, rank: int, computation: Action) -> Action | None:
        """Return the receive of a computation's input, None if the input is on this rank."""
        source = source_of(computation.op, self._stage(rank, computation), self.placement.num_stages)
        if source is None or self.placement.rank_of(source) == rank:
            return None
        return computation._replace(op=NEEDS[computation.op])

    def _is_sent(self, rank: int, computation: Action) -> bool:
        stage = self._stage(rank, computation)
        if computation.op is Op.FORWARD:
            return self.placement.is_crossed(stage)
        # Frozen stages have no backward that would take the gradient.
        return stage > self.first_active_stage and self.placement.is_crossed(stage - 1)

    def _stage(self, rank: int, action: Action) -> int:
        return self.placement.stages_of(rank)[action.chunk]

    def _receive_at_peer(self, rank: int, send: Action) -> tuple[int, Action]:
        """Return the rank that receives a message, and its receive."""
        is_forward = send.op is Op.SEND_FORWARD
        target = self._stage(rank, send) + (1 if is_forward else -1)
        op = Op.RECEIVE_FORWARD if is_forward else Op.RECEIVE_BACKWARD
        # With the chunk that it is on the receiving rank, which may be another one than on the sending rank.
        return self.placement.rank_of(target), Action(op, send.micro_batch, self.placement.chunk_of(target))

    def _advance(self, rank: int) -> bool:
        """Run the rank's next actions until one has to wait; return False if none ran."""
        count = len(self.laid[rank])
        while self.left[rank] and self._can_run(rank, self.left[rank][-1]):
            action = self.left[rank].pop()
            if action.op in SENDS:
                # A transfer runs on both ranks at once: `_can_run` has seen that the peer's next action is this
                # receive.
                peer, receive = self._receive_at_peer(rank, action)
                self.left[peer].pop()
                self.laid[peer].append(receive)
            # A weight gradient gives nothing that another stage could wait for.
            elif action.op in GIVES:
                self.computed.add((self._stage(rank, action), GIVES[action.op], action.micro_batch))
            self.laid[rank].append(action)
        return len(self.laid[rank]) > count

    def _can_run(self, rank: int, action: Action) -> bool:
        if action.op in SENDS:
            peer, receive = self._receive_at_peer(rank, action)
            return self.left[peer][-1:] == [receive]
        # A receive does not run by itself: the send of its peer runs both, see `_advance`.
        return action.op in COMPUTATIONS and self._has_local_input(rank, action)

    def _has_local_input(self, rank: int, computation: Action) -> bool:
        """Return False if another stage of this rank has yet to compute the input."""
        source = source_of(computation.op, self._stage(rank, computation), self.placement.num_stages)
        if source is None or self.placement.rank_of(source) != rank:
            return True
        return (source, GIVES[computation.op], computation.micro_batch) in self.computed

    def _receive_for_send(self) -> bool:
        """Move the receive of a waiting send to the front of its rank: the receive that is closest to the front."""
        held = [(rank, left[-1]) for rank, left in enumerate(self.left) if left and left[-1].op in SENDS]
        ends = [self._receive_at_peer(rank, send) for rank, send in held]
        if not ends:
            return False
        # The closest one changes the least; the first rank wins a tie, so that all ranks lay the same table.
        peer, receive = min(ends, key=lambda end: self.left[end[0]][::-1].index(end[1]))
        self.left[peer].remove(receive)
        self.left[peer].append(receive)
        return True

    def _put_off_receives(self, rank: int) -> bool:
        """Move the next action that is no receive before the receives it does not need, if nothing else holds it."""
        left = self.left[rank]
        receives = list(takewhile(lambda action: action.op in NEEDS.values(), reversed(left)))
        if not receives:
            return False
        action = left[-1 - len(receives)]
        # A computation stays behind the receives if one of them is its own, or if another stage's result is missing.
        needs_one = self._receive_of(rank, action) in receives
        if action.op in COMPUTATIONS and (needs_one or not self._has_local_input(rank, action)):
            return False
        # The receives stay in their order: messages of two stages match by it.
        left.remove(action)
        left.append(action)
        return True
