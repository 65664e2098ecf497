"""The interface of freeze policies: what they see, when they are asked, and how their answers are held."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


_NOISE = 1e-9
"""An answer that is a whole number but for floating-point noise is that number, not the next one."""


def rounded_up(value: float) -> int:
    """The whole number that `value` is, or the next one."""
    return math.ceil(value - _NOISE)


GRADIENT_NORMS = "gradient_norms"
WEIGHT_CHANGES = "weight_changes"
ACTIVATION_SIMILARITY = "activation_similarity"
PREDICTED_SECONDS = "predicted_seconds"
MEASUREMENTS = (GRADIENT_NORMS, WEIGHT_CHANGES, ACTIVATION_SIMILARITY, PREDICTED_SECONDS)
"""What a policy may ask for: fields of `FreezeSignal` that cost something."""


@dataclass(frozen=True)
class FreezeSignal:
    """What a policy may look at. What it does not name in `needs` is empty.

    Args:
        step: optimizer steps done.
        max_steps: optimizer steps of the whole run.
        num_layers: L.
        num_frozen: layers frozen now.
        num_wanted: what the policy answered last, L_frozen of Eq. 1 before rounding; `num_frozen` at the start.
        gradient_norms: `num_layers + 1` means, over the optimizer steps since the last decision, of the L2 norm of
            the reduced, unscaled, unclipped gradient: of layer `l` at index `l`, of the head at index L. 0 for layers
            that are frozen. Empty if no step counted.
        weight_changes: `num_layers + 1` L2 norms of what the weights of a layer, or of the head, have changed by since
            the last decision (the first step of the run), over the L2 norm of the weights then. 0 for what is frozen.
        activation_similarity: `num_layers` linear CKA (Kornblith et al., 2019) of what a layer gives, averaged over
            positions, for a few samples of the training set, and what it gave for them at the last decision (the
            first step of the run): 1 where nothing has changed.
        predicted_seconds: `num_layers + 1` predicted seconds of the rest of the run, by the layers that would be
            frozen from now on, with the layout and the activation cache that would follow: the first pass over the
            data computes what later ones read. 0 for fewer layers than are frozen, and for more than may be.
        learning_rate: of the first group of the optimizer, for the step that comes; 0 where the optimizer has none.
        num_frozen_by_user: layers that the script froze, which nothing thaws.
    """

    step: int
    max_steps: int
    num_layers: int
    num_frozen: int
    num_wanted: float
    gradient_norms: tuple[float, ...] = ()
    weight_changes: tuple[float, ...] = ()
    activation_similarity: tuple[float, ...] = ()
    predicted_seconds: tuple[float, ...] = ()
    learning_rate: float = 0.0
    num_frozen_by_user: int = 0


def is_usable(values: Sequence[float]) -> bool:
    """Whether something was measured, and all of it is finite."""
    return bool(values) and all(map(math.isfinite, values))


@dataclass(frozen=True)
class DecisionClock:
    """When a policy is asked: every interval, after the warm-up, never before the first or after the last step.

    Args:
        every: optimizer steps between two decisions.
        warmup_steps: no decision before this many steps.
        max_steps: optimizer steps of the run.
    """

    every: int
    warmup_steps: int
    max_steps: int

    def is_due(self, step: int) -> bool:
        """Whether a decision is taken before optimizer step number `step` (0 is the first)."""
        return 0 < step < self.max_steps and step % self.every == 0 and step >= self.warmup_steps

    def due_steps(self) -> range:
        """All steps that are due."""
        first = max(1, -(-self.warmup_steps // self.every))
        return range(first * self.every, self.max_steps, self.every)


def make_clock(interval: str, warmup: float, steps_per_epoch: int, max_steps: int) -> DecisionClock:
    """The clock for the option `freeze_interval`: "epoch", a number of steps, or a share of the run.

    Args:
        interval: "epoch", "200" or "0.1".
        warmup: share of the run before the first decision.
        steps_per_epoch: optimizer steps of an epoch.
        max_steps: optimizer steps of the run.
    """
    if interval == "epoch":
        every = steps_per_epoch
    elif interval.isdigit():
        every = int(interval)
    else:
        every = max(1, round(float(interval) * max_steps))
    return DecisionClock(every, rounded_up(warmup * max_steps), max_steps)


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


@dataclass(frozen=True)
class Decision:
    """A policy's answer, and what became of it.

    Args:
        signal: the inputs.
        num_wanted: the answer before rounding.
        num_frozen: layers frozen from now on.
    """

    signal: FreezeSignal
    num_wanted: float
    num_frozen: int

    @property
    def freezes(self) -> bool:
        """Whether anything is newly frozen."""
        return self.num_frozen > self.signal.num_frozen

    @property
    def thaws(self) -> bool:
        """Whether anything that was frozen is trained from now on."""
        return self.num_frozen < self.signal.num_frozen

    @property
    def is_held_back(self) -> bool:
        """Whether the policy wanted more layers than may freeze."""
        return rounded_up(self.num_wanted) > self.num_frozen

    def as_event(self) -> dict[str, Any]:
        """The decision with its inputs as JSON values."""
        return {
            "num_frozen_before": self.signal.num_frozen,
            "num_frozen": self.num_frozen,
            "thaws": self.thaws,
            "num_wanted_before": self.signal.num_wanted,
            "num_wanted": self.num_wanted,
            "learning_rate": self.signal.learning_rate,
            **{name: list(getattr(self.signal, name)) for name in MEASUREMENTS},
        }


def decide(policy: FreezePolicy, signal: FreezeSignal, min_active_layers: int) -> Decision:
    """Ask the policy and hold its answer between what must stay frozen and what must stay active.

    Raises:
        ValueError: the policy answered no finite number.
    """
    answer = float(policy.num_wanted(signal))
    if not math.isfinite(answer):
        raise ValueError(f"{type(policy).__name__}.num_wanted returned {answer}: expected a number of layers.")
    num_frozen = held(policy, answer, signal, min_active_layers)
    wanted = answer if policy.may_thaw else max(answer, signal.num_wanted)
    return Decision(signal, wanted, num_frozen)


def held(policy: FreezePolicy, answer: float, signal: FreezeSignal, min_active_layers: int) -> int:
    """A policy's answer as layers, between what must stay frozen and what must stay active."""
    kept = min_active_layers if policy.keeps_minimum else 0
    most = max(signal.num_layers - kept, signal.num_frozen)
    least = signal.num_frozen_by_user if policy.may_thaw else signal.num_frozen
    return min(max(rounded_up(answer), least), most)


def check_policy(policy: FreezePolicy, num_layers: int, max_steps: int, min_active_layers: int) -> list[str]:
    """What the user should hear of a policy before the run begins.

    Raises:
        ValueError: it cannot work with such a model or run, or needs what nobody measures.
    """
    if isinstance(policy.needs, str):
        raise ValueError(f"{type(policy).__name__}.needs is {policy.needs!r}: expected a collection of names.")
    unknown = sorted(set(policy.needs) - set(MEASUREMENTS))
    if unknown:
        raise ValueError(f"{type(policy).__name__}.needs has {', '.join(unknown)}: expected some of {MEASUREMENTS}.")
    texts = policy.check(num_layers, max_steps)
    if policy.freezes and policy.keeps_minimum and min_active_layers >= num_layers:
        texts.append(f"freeze_min_active_layers={min_active_layers} of {num_layers} layers: nothing will be frozen.")
    return texts
