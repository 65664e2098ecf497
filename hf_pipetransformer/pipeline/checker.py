"""A proof by execution that a table cannot deadlock and computes what it should. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

from hf_pipetransformer.pipeline.schedules import NEEDS, SENDS, Action, Op, Table
from hf_pipetransformer.pipeline.schedules.actions import has_input


class ScheduleError(ValueError):
    """A table that would deadlock, mismatch messages, or leave work undone."""


_RECEIVES = {Op.RECEIVE_FORWARD: -1, Op.RECEIVE_BACKWARD: 1}
_GRADIENT = (Op.BACKWARD, Op.RECEIVE_BACKWARD, Op.SEND_BACKWARD)


def check_table(table: Table, num_microbatches: int, has_backward: bool = True, first_active_stage: int = 0) -> None:
    """Prove that `table` ends, by rendezvous and on NCCL, and keeps gradients out of frozen stages, or raise.

    Rendezvous: a send blocks its stage until the matching receive is posted, and each pair of neighbours has one queue
    a direction in which messages match strictly by order, whatever their tags. Gloo is more generous, so what ends
    here ends there. NCCL has rules of its own beside it, see `check_on_nccl`.

    Args:
        table: one row of actions per stage.
        num_microbatches: M; every stage must run each micro-batch once.
        has_backward: False for a table of evaluation.
        first_active_stage: stages below it run forwards only, and no gradient is sent to them or expected by them.

    Raises:
        ScheduleError: with the stages that wait for each other, the messages that do not match, or what is missing.
    """
    for stage, row in enumerate(table):
        _check_row_is_complete(stage, row, num_microbatches, has_backward and stage >= first_active_stage)
        _check_gradients_stay_active(stage, row, first_active_stage)
    _run_to_the_end(table)
    check_on_nccl(table)


def _check_row_is_complete(stage: int, row: tuple[Action, ...], num_microbatches: int, has_backward: bool) -> None:
    order = {action: position for position, action in enumerate(row)}
    if len(order) != len(row):
        raise ScheduleError(f"Stage {stage} has an action twice in {_text(row)}.")
    for i in range(num_microbatches):
        forward, backward = Action(Op.FORWARD, i), Action(Op.BACKWARD, i)
        if forward not in order or has_backward != (backward in order):
            raise ScheduleError(f"Stage {stage} does not run micro-batch {i} as often as it should: {_text(row)}.")
        if has_backward and order[backward] < order[forward]:
            raise ScheduleError(f"Stage {stage} runs {backward} before {forward}.")
    for action, position in order.items():
        if action.op in SENDS:
            source = Action(Op.FORWARD if action.op is Op.SEND_FORWARD else Op.BACKWARD, action.micro_batch)
            if order.get(source, len(row)) > position:
                raise ScheduleError(f"Stage {stage} has {action} before {source}.")
        if not 0 <= action.micro_batch < num_microbatches:
            raise ScheduleError(f"Stage {stage} has {action}, but there are {num_microbatches} micro-batches.")


def _check_gradients_stay_active(stage: int, row: tuple[Action, ...], first_active_stage: int) -> None:
    for action in row:
        receiver = stage - 1 if action.op is Op.SEND_BACKWARD else stage
        if action.op in _GRADIENT and 0 <= receiver < first_active_stage:
            raise ScheduleError(
                f"Stage {stage} has {action}, but the stages below {first_active_stage} are frozen: no gradient "
                "enters them."
            )


def _run_to_the_end(table: Table) -> None:
    num_stages = len(table)
    position = [0] * num_stages
    posted: dict[tuple[int, Op], deque[int]] = defaultdict(deque)
    arrived: set[tuple[int, Op, int]] = set()

    def step(stage: int) -> bool:
        """Run the next action of `stage`; False if it has to wait."""
        op, i, _ = table[stage][position[stage]]
        if op in _RECEIVES:
            _check_neighbour(stage, stage + _RECEIVES[op], num_stages, Action(op, i))
            posted[stage, op].append(i)
        elif op in SENDS:
            offset, receive = SENDS[op]
            _check_neighbour(stage, stage + offset, num_stages, Action(op, i))
            queue = posted[stage + offset, receive]
            if not queue:
                return False
            expected = queue.popleft()
            if expected != i:
                raise ScheduleError(
                    f"Stage {stage} sends {op.value}{i} where stage {stage + offset} expects micro-batch {expected}."
                )
            arrived.add((stage + offset, receive, i))
        elif has_input(stage, op, num_stages) and (stage, NEEDS[op], i) not in arrived:
            return False
        position[stage] += 1
        return True

    while any(position[stage] < len(table[stage]) for stage in range(num_stages)):
        moved = [position[stage] < len(table[stage]) and step(stage) for stage in range(num_stages)]
        if not any(moved):
            waiting = {s: str(table[s][position[s]]) for s in range(num_stages) if position[s] < len(table[s])}
            raise ScheduleError(f"Deadlock: every stage that has work left waits, at {waiting}.")
    left = {f"stage {stage} {op.value}": list(queue) for (stage, op), queue in posted.items() if queue}
    if left:
        raise ScheduleError(f"Receives that nobody sends to: {left}.")


LinkKey = tuple[int, str]
"""The lower of two neighbouring stages, and the direction: `"forward"` or `"backward"`."""

_TRANSFERS = {
    Op.RECEIVE_FORWARD: (-1, "forward"),
    Op.SEND_FORWARD: (0, "forward"),
    Op.RECEIVE_BACKWARD: (0, "backward"),
    Op.SEND_BACKWARD: (-1, "backward"),
}
"""Of each transfer: how far below its stage the link's lower end lies, and the direction."""


def _of_its_own(link: LinkKey) -> Hashable:
    return link


def check_on_nccl(
    table: Table, is_rehearsed: bool = True, communicator: Callable[[LinkKey], Hashable] = _of_its_own
) -> None:
    """Prove that `table` ends under the rules of NCCL, or raise.

    - The first transfer over a link blocks the host of both stages until both are at it, batched or not; rehearsing
      the link when it is made counts as that.
    - What is posted on a communicator runs in the order in which it was posted, on a stream of its own: a receive
      occupies the stream until its data has come. There are no tags.
    - Stricter than NCCL, which only orders streams: a send blocks its stage until it is done, and so does a
      computation until its input is there.

    Args:
        table: one row of actions per stage.
        is_rehearsed: whether every link has had a transfer before.
        communicator: names the communicator that a link uses; by default each has its own.

    Raises:
        ScheduleError: who waits for whom, or which messages do not match.
    """
    _OnStreams(table, is_rehearsed, communicator).run()


def check_first_uses(rows: Sequence[Sequence[LinkKey]]) -> None:
    """Prove that ranks that use their links for the first time, each in the order of its row, get through, or raise.

    Args:
        rows: per rank, the links that it uses; each use blocks the rank until that at the other end is at it, too.

    Raises:
        ScheduleError: who waits for whom.
    """
    position = [0] * len(rows)

    while True:
        at = {rank: row[position[rank]] for rank, row in enumerate(rows) if position[rank] < len(row)}
        if not at:
            return
        keys = list(at.values())
        met = [rank for rank, key in at.items() if keys.count(key) == 2]
        if not met:
            waiting = [f"rank {rank} at {key}" for rank, key in at.items()]
            raise ScheduleError(f"Deadlock in the first use of links: {', '.join(waiting)}.")
        for rank in met:
            position[rank] += 1


class _OnStreams:
    """One execution of a table under the rules of NCCL."""

    def __init__(self, table: Table, is_rehearsed: bool, communicator: Callable[[LinkKey], Hashable]) -> None:
        self.table = table
        self.is_rehearsed = is_rehearsed
        self.communicator = communicator
        self.position = [0] * len(table)
        self.streams: dict[tuple[Hashable, int], deque[Action]] = defaultdict(deque)
        self.at_first_use: dict[LinkKey, set[int]] = defaultdict(set)
        self.posted: set[tuple[int, Action]] = set()
        self.done: set[tuple[int, Action]] = set()

    def run(self) -> None:
        """Raise unless every stage gets to the end of its row and every stream runs empty."""
        stages = range(len(self.table))
        while True:
            moved = [self._advance(stage) for stage in stages]
            if not any(moved):
                break
        unfinished = [stage for stage in stages if self.position[stage] < len(self.table[stage])]
        if unfinished:
            reasons = "; ".join(self._reason(stage) for stage in unfinished)
            raise ScheduleError(f"Deadlock under the rules of NCCL: {reasons}.")
        left = {f"stage {stage}": list(map(str, queue)) for (_, stage), queue in self.streams.items() if queue}
        if left:
            raise ScheduleError(f"Transfers that nobody answers: {left}.")

    def _advance(self, stage: int) -> bool:
        """Run `stage` until it has to wait; whether it ran at all."""
        start = self.position[stage]
        while self.position[stage] < len(self.table[stage]) and self._step(stage):
            self.position[stage] += 1
        return self.position[stage] > start

    def _step(self, stage: int) -> bool:
        action = self.table[stage][self.position[stage]]
        if action.op not in _TRANSFERS:
            waits = has_input(stage, action.op, len(self.table))
            return not waits or (stage, Action(NEEDS[action.op], action.micro_batch)) in self.done
        link, peer = self._link(stage, action)
        _check_neighbour(stage, peer, len(self.table), action)
        if (stage, action) not in self.posted:
            self.at_first_use[link].add(stage)
            if not self.is_rehearsed and len(self.at_first_use[link]) < 2:
                return False
            self.posted.add((stage, action))
            name = self.communicator(link)
            self.streams[name, stage].append(action)
            self._run_streams(name, stage, peer)
        return action.op not in SENDS or (stage, action) in self.done

    def _link(self, stage: int, action: Action) -> tuple[LinkKey, int]:
        below, direction = _TRANSFERS[action.op]
        lower = stage + below
        return (lower, direction), 2 * lower + 1 - stage

    def _run_streams(self, name: Hashable, stage: int, peer: int) -> None:
        """Carry out what is at the head of both ends of a communicator, while one sends and the other receives."""
        here, there = self.streams[name, stage], self.streams[name, peer]
        while here and there:
            (sender, sent), (receiver, received) = (stage, here[0]), (peer, there[0])
            if sent.op not in SENDS:
                (sender, sent), (receiver, received) = (receiver, received), (sender, sent)
            if sent.op not in SENDS or SENDS[sent.op][1] is not received.op:
                return
            if sent.micro_batch != received.micro_batch:
                raise ScheduleError(
                    f"Stage {sender} sends {sent} where stage {receiver} expects micro-batch {received.micro_batch}."
                )
            here.popleft()
            there.popleft()
            self.done |= {(sender, sent), (receiver, received)}

    def _reason(self, stage: int) -> str:
        action = self.table[stage][self.position[stage]]
        if action.op not in _TRANSFERS:
            need = Action(NEEDS[action.op], action.micro_batch)
            return f"stage {stage} is at {action} and waits for {need}{self._queue(stage, need)}"
        link, peer = self._link(stage, action)
        if (stage, action) not in self.posted:
            return f"stage {stage} is at {action}, the first use of its link, until stage {peer} uses it"
        return f"stage {stage} is at {action}{self._queue(stage, action)} and waits for stage {peer}"

    def _queue(self, stage: int, action: Action) -> str:
        """What is in front of a transfer on its stream."""
        if (stage, action) not in self.posted:
            return ", which was never posted"
        queue = self.streams[self.communicator(self._link(stage, action)[0]), stage]
        return f" behind {queue[0]}" if queue and queue[0] != action else ""


def _check_neighbour(stage: int, neighbour: int, num_stages: int, action: Action) -> None:
    if not 0 <= neighbour < num_stages:
        raise ScheduleError(f"Stage {stage} has {action}, but there is no stage {neighbour}.")


def _text(row: tuple[Action, ...]) -> str:
    return " ".join(map(str, row))
