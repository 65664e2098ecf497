"""Layers freeze and thaw by a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hf_pipetransformer.freeze.policies.clock import DecisionClock
from hf_pipetransformer.freeze.policies.protocol import FreezePolicy
from hf_pipetransformer.freeze.policies.signal import FreezeSignal


class Fixed(FreezePolicy):
    """Freezes and thaws what the user wrote down.

    Args:
        table: optimizer step to number of layers frozen before that step.
    """

    name = "fixed"
    needs = frozenset()
    is_certain = True
    keeps_minimum = False

    def __init__(self, table: Mapping[int, int]) -> None:
        self.table = dict(sorted(table.items()))
        counts = list(self.table.values())
        self.may_thaw = counts != sorted(counts)

    def num_wanted(self, signal: FreezeSignal) -> float:
        return self.most_wanted(signal)

    def most_wanted(self, signal: FreezeSignal) -> float:
        return self.table.get(signal.step, signal.num_frozen)

    def frozen_until(self, step: int, max_steps: int, num_frozen_by_user: int = 0) -> int:
        counts = {at: max(layers, num_frozen_by_user) for at, layers in self.table.items()}
        now = [layers for at, layers in counts.items() if at <= step]
        num_frozen = now[-1] if now else num_frozen_by_user
        ends = (at for at, layers in counts.items() if at > step and layers < num_frozen)
        return min(next(ends, max_steps), max_steps)

    def check(self, num_layers: int, max_steps: int) -> list[str]:
        most = max(self.table.values())
        if most > num_layers:
            raise ValueError(f"freeze_at freezes {most} layers: the model has {num_layers}.")
        late = [step for step in self.table if step >= max_steps]
        if not late:
            return []
        return [
            f"freeze_at: the run ends after {max_steps} steps, before step {late[0]} freezes or unfreezes anything."
        ]

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return step in self.table

    def due_steps(self, clock: DecisionClock) -> Iterable[int]:
        if type(self).is_due is not Fixed.is_due:
            return super().due_steps(clock)
        return (step for step in self.table if step < clock.max_steps)

    def describe(self) -> str:
        return "fixed, " + ", ".join(f"{layers} layers at step {step}" for step, layers in self.table.items())
