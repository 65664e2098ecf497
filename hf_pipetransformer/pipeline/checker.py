"""A proof by execution that a table cannot deadlock and computes what it should. Pure."""

from __future__ import annotations

from collections import defaultdict, deque

from hf_pipetransformer.pipeline.schedules import NEEDS, SENDS, Action, Op, Table, has_input


class ScheduleError(ValueError):
    """A table that would deadlock, mismatch messages, or leave work undone."""


_RECEIVES = {Op.RECEIVE_FORWARD: -1, Op.RECEIVE_BACKWARD: 1}
_GRADIENT = (Op.BACKWARD, Op.RECEIVE_BACKWARD, Op.SEND_BACKWARD)


def check_table(table: Table, num_microbatches: int, has_backward: bool = True, first_active_stage: int = 0) -> None:
    """Prove that `table` ends under rendezvous semantics and keeps gradients out of frozen stages, or raise.

    Rendezvous is the strictest reading that a backend may give: a send blocks its stage until the matching receive is
    posted, and each pair of neighbours has one queue a direction in which messages match strictly by order, whatever
    their tags. Gloo and NCCL are both more generous, so what ends here ends there.

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
        op, i = table[stage][position[stage]]
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


def _check_neighbour(stage: int, neighbour: int, num_stages: int, action: Action) -> None:
    if not 0 <= neighbour < num_stages:
        raise ScheduleError(f"Stage {stage} has {action}, but there is no stage {neighbour}.")


def _text(row: tuple[Action, ...]) -> str:
    return " ".join(map(str, row))
