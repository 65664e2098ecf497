"""When asynchronous training drains next: where Trainer or a decision needs all stages at one step."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import Trainer
from transformers.trainer_utils import IntervalStrategy, SaveStrategy


def next_drain(trainer: Trainer, decisions: Iterable[int], interval: int | None) -> int:
    """The number of optimizer steps at the next drain, which the step that comes begins before; alike on all ranks.

    What nobody knows of before, such as a callback that asks for a checkpoint, ends a window where it comes.

    Args:
        trainer: whose loop evaluates, saves and ends.
        decisions: steps before which the layout may change.
        interval: steps between two drains; None for no more than are needed.
    """
    args, state = trainer.args, trainer.state
    step = state.global_step
    ends = [state.max_steps, *(decision for decision in decisions if decision > step)]
    if interval is not None:
        ends.append(step + interval)
    if args.eval_strategy == IntervalStrategy.STEPS and state.eval_steps:
        ends.append(_multiple(step, state.eval_steps))
    if args.save_strategy == SaveStrategy.STEPS and state.save_steps:
        ends.append(_multiple(step, state.save_steps))
    return max(min(ends), step + 1)


def _multiple(step: int, every: float) -> int:
    """The first multiple of `every` behind `step`."""
    return int(every) * (step // int(every) + 1)
