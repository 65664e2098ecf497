"""The updates of stages in a table without flushes: each stage takes its optimizer steps on its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hf_pipetransformer.pipeline.schedules.actions import COMPUTATIONS, GRADIENTS_ARE_WHOLE, Action, Op, Row, Table


def add_updates(table: Table, step_sizes: Sequence[int], first_active_stage: int = 0) -> Table:
    """Add to each rank's row the update of every step: once its last gradient is there, before the next computation.

    What lies between that backward and the next computation comes first: the gradient goes out, and the receives that
    are posted ahead can be filled while the rank updates its weights. A rank without backwards has its update where a
    trained rank in its place would have it, or at the end of its row.

    Args:
        table: one stage a rank, backwards in the order of the micro-batches.
        step_sizes: micro-batches of each step, 0 or more; a step without any updates right after the one before.
        first_active_stage: stages below it run forwards only.
    """
    ends = list(accumulate(step_sizes))
    return tuple(
        _updated(row, ends, 0 if rank >= first_active_stage else len(table) - 1 - rank)
        for rank, row in enumerate(table)
    )


def _updated(row: Row, ends: Sequence[int], runs_ahead: int) -> Row:
    """`row` with its updates; `runs_ahead`: forwards of a rank without backwards beyond those of its step."""
    computed = [position for position, action in enumerate(row) if action.op in COMPUTATIONS]
    last_op = GRADIENTS_ARE_WHOLE if any(action.op in GRADIENTS_ARE_WHOLE for action in row) else (Op.FORWARD,)
    # Of each micro-batch, which computation of the row is its last one.
    last_of = [number for number, position in enumerate(computed) if row[position].op in last_op]
    before: dict[int, list[Action]] = {}
    for step, end in enumerate(ends):
        last = end - 1 + runs_ahead
        number = 0 if end == 0 else last_of[last] + 1 if last < len(last_of) else len(computed)
        position = computed[number] if number < len(computed) else len(row)
        before.setdefault(position, []).append(Action(Op.UPDATE, step))
    laid: list[Action] = []
    for position in range(len(row) + 1):
        laid += before.get(position, [])
        laid += row[position : position + 1]
    return tuple(laid)
