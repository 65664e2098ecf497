"""What a freeze policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any

from hf_pipetransformer.freeze.policies.clock import DecisionClock
from hf_pipetransformer.freeze.policies.signal import GRADIENT_NORMS, FreezeSignal


MOST_ASKED = 100_000
"""Steps of a run for which an `is_due` of a user's own is asked before it, to say what may freeze."""


class FreezePolicy(ABC):
    """Decides how far the frozen prefix reaches. A policy of your own is one subclass, passed as `policy=`.

    Only `num_wanted` is required. A policy that remembers something between its decisions returns it from `state`, so
    that a resumed run decides the same:

        class Settled(FreezePolicy):
            name = "settled"
            needs = frozenset({"weight_changes"})

            def __init__(self):
                self.num_calm = 0

            def num_wanted(self, signal):
                changes = signal.weight_changes
                self.num_calm += bool(changes) and changes[signal.num_frozen] < 0.01
                return self.num_calm

            def state(self):
                return {"num_calm": self.num_calm}

            def load_state(self, state):
                self.num_calm = state["num_calm"]

    It is asked on the first process alone, and its answer holds for all.
    """

    name: str = "custom"
    needs: Collection[str] = frozenset({GRADIENT_NORMS})
    """Which of `MEASUREMENTS` are made for it. Gradient norms cost nothing; for weight changes every process keeps a
    copy of the weights that it trains, for similarities of activations a tiny batch is evaluated at each decision, for
    predicted seconds a layout is planned for each number of layers that may be frozen."""
    keeps_minimum = True
    """Whether `freeze_min_active_layers` limits it."""
    num_watched = 0
    """Decisions, from the beginning of a run, at which it only looks: nothing can freeze before the next one."""
    is_certain = False
    """Whether `most_wanted` is always its answer: what freezes, and when, is then known before a run begins. A
    subclass that overrides `num_wanted` says so anew."""
    freezes = True
    """False: it never will, so that nothing is prepared for it."""
    may_thaw: bool = False
    """Whether fewer layers than are frozen means that the others are trained again; never what the script froze."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Who answers otherwise than the class that is certain is not, unless that is said once more.
        order = cls.__mro__
        says, answers = (
            next(index for index, base in enumerate(order) if name in vars(base))
            for name in ("is_certain", "num_wanted")
        )
        if answers < says:
            cls.is_certain = False

    @abstractmethod
    def num_wanted(self, signal: FreezeSignal) -> float:
        """How many layers shall be frozen now; fractions are rounded up.

        Less than now means no change, or with `may_thaw` that those above are thawed.
        """

    def most_wanted(self, signal: FreezeSignal) -> float:
        """The largest answer that `num_wanted` may give, whatever is measured: to say at the start what may come."""
        return signal.num_layers

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        """Whether to decide before optimizer step number `step`.

        Asked at the start and after each decision, for the steps that come, up to the first that is due; and once
        before a run for up to `MOST_ASKED` of its steps, after which `load_state` gets back what `state` was.
        """
        return clock.is_due(step)

    def due_steps(self, clock: DecisionClock) -> Iterable[int]:
        """All steps of a run that are due, in order. Of an `is_due` of yours: those among the first `MOST_ASKED`."""
        # Of another `is_due` than the clock's nothing is known.
        if type(self).is_due is FreezePolicy.is_due:
            return clock.due_steps()
        before = deepcopy(dict(self.state()))
        found = [step for step in range(min(clock.max_steps, MOST_ASKED)) if self.is_due(step, clock)]
        self.load_state(before)
        return found

    def frozen_until(self, step: int, max_steps: int, num_frozen_by_user: int = 0) -> int:
        """The step before which layers that are frozen at `step` are thawed, as far as that is known.

        What is stored of them is read until then; `max_steps` if they may stay frozen to the end. The first
        `num_frozen_by_user` layers are frozen by the script, and never thawed.
        """
        return max_steps

    def check(self, num_layers: int, max_steps: int) -> list[str]:
        """What the user should hear before a run begins.

        Raises:
            ValueError: it cannot work with such a model or run.
        """
        return []

    def state(self) -> dict[str, Any]:
        """What it remembers, as JSON values: part of every checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Go on from `state`: that of a checkpoint, or at each new training that of the policy as it was given."""

    def describe(self) -> str:
        """The policy in a few words, for the start-up line."""
        return self.name

    def explain(self, signal: FreezeSignal) -> str:
        """Why it answered what it answered, in a few words, for the line of a decision."""
        return self.name
