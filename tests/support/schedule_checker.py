"""A proof by execution that a table cannot deadlock and computes what it should. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise

from hf_pipetransformer.schedules.actions import (
    BEGINS_BACKWARD,
    COMPUTATIONS,
    GIVES,
    GRADIENTS_ARE_WHOLE,
    NEEDS,
    SENDS,
    Action,
    ActionList,
    Op,
    ScheduleError,
    Table,
    source_of,
)
from hf_pipetransformer.schedules.placement import Placement


_WHOLE = [Op.FORWARD, Op.BACKWARD]
_SPLIT = [Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]
_GRADIENT = {*_WHOLE[1:], *_SPLIT[1:], Op.RECEIVE_BACKWARD, Op.SEND_BACKWARD}


def check_table(
    table: Table,
    num_microbatches: int,
    has_backward: bool = True,
    first_active_stage: int = 0,
    placement: Placement | None = None,
    num_token_slices: int = 1,
    step_sizes: Sequence[int] = (),
) -> None:
    """Prove that `table` computes all that it should, keeps gradients out of frozen stages and ends, or raise.

    It ends under the rules of NCCL, see `check_on_nccl`, where every link is rehearsed and all links from one rank to
    another share a communicator: a send blocks its rank until the matching receive is posted, and the messages from
    one rank to another match strictly by order. Gloo is more generous, so what ends here ends there.

    Args:
        table: one list of actions per rank.
        num_microbatches: M; every stage must run each micro-batch once: a forward, and a backward, whole or in two.
        has_backward: False for a table of evaluation.
        first_active_stage: stages below it run forwards only, and no gradient is sent to them or expected by them.
        placement: where the stages lie; by default one on each rank.
        num_token_slices: so many micro-batches in a list of actions, from a multiple of it on, are slices of the same
            sequences: their forwards must follow each other, and their backwards in the reverse order.
        step_sizes: of a table with updates, micro-batches of each step: every stage must update itself once a step,
            between the last backward of the step and its next computation.

    Raises:
        ScheduleError: with the ranks that wait for each other, the messages that do not match, or what is missing.
    """
    placement = placement or Placement(len(table))
    for rank, actions in enumerate(table):
        _check_actions(rank, actions, num_microbatches, placement.num_chunks, len(step_sizes))
        for chunk, stage in enumerate(placement.stages_of(rank)):
            own = tuple(action for action in actions if action.chunk == chunk)
            _check_stage(stage, own, num_microbatches, has_backward and stage >= first_active_stage)
            _check_gradients_stay_active(stage, own, first_active_stage)
            _check_token_slices(stage, own, num_token_slices)
            if step_sizes:
                runs_ahead = 0 if stage >= first_active_stage else placement.num_stages - 1 - stage
                _check_updates(stage, own, step_sizes, runs_ahead)
    check_on_nccl(table, placement=placement)
    check_on_one_queue(table, placement)


def _check_actions(rank: int, actions: ActionList, num_microbatches: int, num_chunks: int, num_steps: int) -> None:
    if len(set(actions)) != len(actions):
        raise ScheduleError(f"Rank {rank} has an action twice in {_text(actions)}.")
    for action in actions:
        count, what = (num_steps, "steps") if action.op is Op.UPDATE else (num_microbatches, "micro-batches")
        if not 0 <= action.micro_batch < count:
            raise ScheduleError(f"Rank {rank} has {action}, but there are {count} {what}.")
        if not 0 <= action.chunk < num_chunks:
            raise ScheduleError(f"Rank {rank} has {action}, but it holds {num_chunks} stages.")


def _check_stage(stage: int, actions: ActionList, num_microbatches: int, has_backward: bool) -> None:
    """`actions`: what its rank does for `stage`."""
    order = {(action.op, action.micro_batch): position for position, action in enumerate(actions)}
    for i in range(num_microbatches):
        found = [op for op in COMPUTATIONS if (op, i) in order]
        if found not in ((_WHOLE, _SPLIT) if has_backward else ([Op.FORWARD],)):
            raise ScheduleError(f"Stage {stage} does not run micro-batch {i} as often as it should: {_text(actions)}.")
        for earlier, later in [*pairwise(found), *((source, GIVES[source]) for source in found if source in GIVES)]:
            if order.get((later, i), len(actions)) < order[earlier, i]:
                raise ScheduleError(f"Stage {stage} runs {later.value}{i} before {earlier.value}{i}.")


def _check_gradients_stay_active(stage: int, actions: ActionList, first_active_stage: int) -> None:
    for action in actions:
        receiver = stage - 1 if action.op is Op.SEND_BACKWARD else stage
        if action.op in _GRADIENT and 0 <= receiver < first_active_stage:
            raise ScheduleError(
                f"Stage {stage} has {action}, but the stages below {first_active_stage} are frozen: no gradient "
                "enters them."
            )


def _check_token_slices(stage: int, actions: ActionList, num_token_slices: int) -> None:
    for ops, step in (((Op.FORWARD,), 1), (BEGINS_BACKWARD, -1)):
        order = [action.micro_batch for action in actions if action.op in ops]
        for earlier, later in pairwise(sorted(order, key=lambda i: i // num_token_slices)):
            if earlier // num_token_slices == later // num_token_slices and later - earlier != step:
                what = "forward" if step > 0 else "backward"
                raise ScheduleError(
                    f"Stage {stage} runs the {what} of slice {later} next after that of slice {earlier}: slices of "
                    "the same sequences run forward in their order and backward in the reverse order."
                )


def _check_updates(stage: int, actions: ActionList, step_sizes: Sequence[int], runs_ahead: int) -> None:
    """`runs_ahead`: forwards of a frozen stage beyond those of its step; a stage without backwards counts those."""
    last_op = GRADIENTS_ARE_WHOLE if any(action.op in GRADIENTS_ARE_WHOLE for action in actions) else (Op.FORWARD,)
    total, updates = sum(step_sizes), []
    ends = [min(end + runs_ahead, total) if end else 0 for end in accumulate(step_sizes)]
    done: set[int] = set()
    is_last = True
    for action in actions:
        if action.op is Op.UPDATE:
            updates.append(action.micro_batch)
            expected = ends[len(updates) - 1]
            if done != set(range(expected)) or not is_last:
                raise ScheduleError(
                    f"Stage {stage} has {action} where {len(done)} micro-batches are done; expected it directly after "
                    f"the first {expected}: {_text(actions)}."
                )
        elif action.op in COMPUTATIONS:
            is_last = action.op in last_op
            if is_last:
                done.add(action.micro_batch)
    if updates != [*range(len(step_sizes))]:
        raise ScheduleError(f"Stage {stage} has updates {updates}, expected one for each of {len(step_sizes)} steps.")


LinkKey = tuple[int, str]
"""The lower of two stages in a table that lie on two ranks, and the direction: `"forward"` or `"backward"`."""

_TRANSFERS = {
    Op.RECEIVE_FORWARD: (-1, "forward"),
    Op.SEND_FORWARD: (0, "forward"),
    Op.RECEIVE_BACKWARD: (0, "backward"),
    Op.SEND_BACKWARD: (-1, "backward"),
}
"""Of each transfer: how far below its stage the link's lower end lies, and the direction."""


_PASS = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward"}
"""Of each computation whose result another stage can need: which pass it belongs to."""


def _link_of(placement: Placement, rank: int, action: Action) -> tuple[LinkKey, int]:
    """The link of a transfer, and the rank at its other end."""
    stage, (below, direction) = placement.stages_of(rank)[action.chunk], _TRANSFERS[action.op]
    lower = stage + below
    other = 2 * lower + 1 - stage
    if not placement.is_crossed(lower):
        raise ScheduleError(f"Rank {rank} has {action}, but there is no stage {other} on another rank.")
    return (lower, direction), placement.rank_of(other)


def _of_the_way(placement: Placement, link: LinkKey) -> tuple[int, int]:
    """Ranks that a link leads from and to."""
    lower, direction = link
    below, above = placement.rank_of(lower), placement.rank_of(lower + 1)
    return (below, above) if direction == "forward" else (above, below)


def check_on_nccl(
    table: Table,
    is_rehearsed: bool = True,
    communicator: Callable[[LinkKey], Hashable] | None = None,
    placement: Placement | None = None,
) -> None:
    """Prove that `table` ends under the rules of NCCL, or raise.

    - The first transfer over a link blocks the host of both ranks until both are at it, batched or not; rehearsing
      the link when it is made counts as that.
    - What is posted on a communicator runs in the order in which it was posted, on a stream of its own: a receive
      occupies the stream until its data has come. There are no tags.
    - Stricter than NCCL, which only orders streams: a send blocks its rank until it is done, and so does a
      computation until its input is there.

    Args:
        table: one list of actions per rank.
        is_rehearsed: whether every link has had a transfer before.
        communicator: names the communicator that a link uses; by default all links from one rank to another share one.
        placement: where the stages lie; by default one on each rank.

    Raises:
        ScheduleError: who waits for whom, or which messages do not match.
    """
    placement = placement or Placement(len(table))
    _OnStreams(table, is_rehearsed, communicator or cache(partial(_of_the_way, placement)), placement).run()


def check_on_one_queue(table: Table, placement: Placement | None = None) -> None:
    """Prove that `table` ends where all kernels of a rank share one hardware queue, or raise.

    `CUDA_DEVICE_MAX_CONNECTIONS=1` makes a GPU such, and so do more streams than queues: kernels start in the order in
    which they were launched, whatever their stream. A receive holds all that follows until its data has come, and a
    send until the matching receive is at the head of the other queue.

    Raises:
        ScheduleError: with what is at the head of each queue that waits.
    """
    placement = placement or Placement(len(table))
    position, given = [0] * len(table), set[tuple[int, str, int]]()
    link_of = partial(_link_of, placement)

    def is_done(rank: int, action: Action) -> bool:
        stage = placement.stages_of(rank)[action.chunk]
        if action.op in COMPUTATIONS:
            source = source_of(action.op, stage, placement.num_stages)
            if source is not None and (source, _PASS[action.op], action.micro_batch) not in given:
                return False
            if action.op in _PASS:
                given.add((stage, _PASS[action.op], action.micro_batch))
        elif action.op in _TRANSFERS:
            link, peer = link_of(rank, action)
            if position[peer] == len(table[peer]):
                return False
            other = table[peer][position[peer]]
            if other.op not in _TRANSFERS or (other.op in SENDS) == (action.op in SENDS):
                return False
            if link_of(peer, other) != (link, rank) or other.micro_batch != action.micro_batch:
                return False
            position[peer] += 1
        return True

    while any(position[rank] < len(actions) for rank, actions in enumerate(table)):
        has_moved = False
        for rank, actions in enumerate(table):
            while position[rank] < len(actions) and is_done(rank, actions[position[rank]]):
                position[rank] += 1
                has_moved = True
        if not has_moved:
            heads = [f"rank {rank} at {actions[at]}" for rank, (actions, at) in _unfinished(table, position)]
            raise ScheduleError(f"Deadlock with one hardware queue: {', '.join(heads)}.")


def _unfinished(table: Table, position: Sequence[int]) -> list[tuple[int, tuple[ActionList, int]]]:
    pairs = enumerate(zip(table, position, strict=True))
    return [(rank, (actions, at)) for rank, (actions, at) in pairs if at < len(actions)]


def check_first_uses(action_lists: Sequence[Sequence[LinkKey]]) -> None:
    """Prove that ranks that use their links for the first time, each in the order of its actions, get through, or
    raise.

    Args:
        action_lists: per rank, the links that it uses; each use blocks the rank until that at the other end is at it,
            too.

    Raises:
        ScheduleError: who waits for whom.
    """
    position = [0] * len(action_lists)

    while True:
        at = {
            rank: actions[position[rank]] for rank, actions in enumerate(action_lists) if position[rank] < len(actions)
        }
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

    def __init__(
        self, table: Table, is_rehearsed: bool, communicator: Callable[[LinkKey], Hashable], placement: Placement
    ) -> None:
        self.table = table
        self.is_rehearsed = is_rehearsed
        self.communicator = communicator
        self.placement = placement
        self.stages = [placement.stages_of(rank) for rank in range(len(table))]
        self.position = [0] * len(table)
        self.streams: dict[tuple[Hashable, int], deque[Action]] = defaultdict(deque)
        self.at_first_use: dict[LinkKey, set[int]] = defaultdict(set)
        self.posted: set[tuple[int, Action]] = set()
        self.done: set[tuple[int, Action]] = set()
        self.given: set[tuple[int, Op, int]] = set()

    def run(self) -> None:
        """Raise unless every rank gets to the end of its actions and every stream runs empty."""
        ranks = range(len(self.table))
        while True:
            moved = [self._advance(rank) for rank in ranks]
            if not any(moved):
                break
        unfinished = [rank for rank in ranks if self.position[rank] < len(self.table[rank])]
        if unfinished:
            reasons = "; ".join(self._reason(rank) for rank in unfinished)
            raise ScheduleError(f"Deadlock under the rules of NCCL: {reasons}.")
        left = {f"rank {rank}": list(map(str, queue)) for (_, rank), queue in self.streams.items() if queue}
        if left:
            raise ScheduleError(f"Transfers that nobody answers: {left}.")

    def _advance(self, rank: int) -> bool:
        """Run `rank` until it has to wait; whether it ran at all."""
        start = self.position[rank]
        while self.position[rank] < len(self.table[rank]) and self._step(rank):
            self.position[rank] += 1
        return self.position[rank] > start

    def _step(self, rank: int) -> bool:
        action = self.table[rank][self.position[rank]]
        if action.op not in _TRANSFERS:
            return self._compute(rank, action)
        link, peer = self._link(rank, action)
        if (rank, action) not in self.posted:
            self.at_first_use[link].add(rank)
            if not self.is_rehearsed and len(self.at_first_use[link]) < 2:
                return False
            self.posted.add((rank, action))
            name = self.communicator(link)
            self.streams[name, rank].append(action)
            self._run_streams(name, rank, peer)
        return action.op not in SENDS or (rank, action) in self.done

    def _compute(self, rank: int, action: Action) -> bool:
        """Whether the input of a computation is there, from another rank or from this one; then it is done."""
        stage, i = self.stages[rank][action.chunk], action.micro_batch
        source = source_of(action.op, stage, self.placement.num_stages)
        if source is not None and self.placement.rank_of(source) != rank:
            is_there = (rank, action._replace(op=NEEDS[action.op])) in self.done
        else:
            is_there = source is None or (source, GIVES[action.op], i) in self.given
        if is_there and action.op in GIVES:
            self.given.add((stage, GIVES[action.op], i))
        return is_there

    def _link(self, rank: int, action: Action) -> tuple[LinkKey, int]:
        return _link_of(self.placement, rank, action)

    def _run_streams(self, name: Hashable, rank: int, peer: int) -> None:
        """Carry out what is at the head of both ends of a communicator, while one sends and the other receives."""
        here, there = self.streams[name, rank], self.streams[name, peer]
        while here and there:
            (sender, sent), (receiver, received) = (rank, here[0]), (peer, there[0])
            if sent.op not in SENDS:
                (sender, sent), (receiver, received) = (receiver, received), (sender, sent)
            if sent.op not in SENDS or self._link(sender, sent)[0] != self._link(receiver, received)[0]:
                return
            if sent.micro_batch != received.micro_batch:
                raise ScheduleError(
                    f"Rank {sender} sends {sent} where rank {receiver} expects micro-batch {received.micro_batch}."
                )
            here.popleft()
            there.popleft()
            self.done |= {(sender, sent), (receiver, received)}

    def _reason(self, rank: int) -> str:
        action = self.table[rank][self.position[rank]]
        if action.op not in _TRANSFERS:
            need = action._replace(op=NEEDS[action.op])
            return f"rank {rank} is at {action} and waits for {need}{self._queue(rank, need)}"
        _, peer = self._link(rank, action)
        if (rank, action) not in self.posted:
            return f"rank {rank} is at {action}, the first use of its link, until rank {peer} uses it"
        return f"rank {rank} is at {action}{self._queue(rank, action)} and waits for rank {peer}"

    def _queue(self, rank: int, action: Action) -> str:
        """What is in front of a transfer on its stream."""
        if (rank, action) not in self.posted:
            return ", which was never posted"
        queue = self.streams[self.communicator(self._link(rank, action)[0]), rank]
        return f" behind {queue[0]}" if queue and queue[0] != action else ""


def _text(actions: ActionList) -> str:
    return " ".join(map(str, actions))
