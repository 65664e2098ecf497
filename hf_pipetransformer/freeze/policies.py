"""How many layers to freeze: pure functions of a signal (PipeTransformer section 3.1 and appendix B)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hf_pipetransformer.option_values import parse_freeze_at


_ROUNDING = 1e-9
"""An answer that is a whole number but for floating-point noise is that number, not the next one."""


GRADIENT_NORMS = "gradient_norms"
WEIGHT_CHANGES = "weight_changes"
ACTIVATION_SIMILARITY = "activation_similarity"
MEASUREMENTS = (GRADIENT_NORMS, WEIGHT_CHANGES, ACTIVATION_SIMILARITY)
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
    """

    step: int
    max_steps: int
    num_layers: int
    num_frozen: int
    num_wanted: float
    gradient_norms: tuple[float, ...] = ()
    weight_changes: tuple[float, ...] = ()
    activation_similarity: tuple[float, ...] = ()


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
    copy of the weights that it trains, for similarities of activations a tiny batch is evaluated at each decision."""
    keeps_minimum = True
    """Whether `freeze_min_active_layers` limits it."""
    freezes = True
    """False: it never will, so that nothing is prepared for it."""

    @abstractmethod
    def num_wanted(self, signal: FreezeSignal) -> float:
        """How many layers shall be frozen now; fractions are rounded up, less than now means no change."""

    def most_wanted(self, signal: FreezeSignal) -> float:
        """The largest answer that `num_wanted` may give, whatever is measured: to say at the start what may come."""
        return signal.num_layers

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        """Whether to decide before optimizer step number `step`. Asked at the start and after each decision."""
        return clock.is_due(step)

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
    return DecisionClock(every, math.ceil(warmup * max_steps - _ROUNDING), max_steps)


class NoFreezing(FreezePolicy):
    """Everything that the user left trainable is trained to the end."""

    name = "none"
    needs = frozenset()
    freezes = False

    def num_wanted(self, signal: FreezeSignal) -> float:
        return signal.num_frozen

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return False


class Schedule(FreezePolicy):
    """The upper bound of Eq. 1 alone: each decision freezes the share alpha of what is left.

    Args:
        alpha: in (0, 1).
    """

    name = "schedule"
    needs = frozenset()

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def num_wanted(self, signal: FreezeSignal) -> float:
        return self.most_wanted(signal)

    def most_wanted(self, signal: FreezeSignal) -> float:
        return signal.num_wanted + self.alpha * (signal.num_layers - signal.num_wanted)

    def describe(self) -> str:
        return f"{self.name}, alpha {self.alpha:.3g}"

    def explain(self, signal: FreezeSignal) -> str:
        bound = self.most_wanted(signal)
        return f"{self.name}: at most {bound:.2f} layers, rounded up {math.ceil(bound - _ROUNDING)}"


class GradientNorm(Schedule):
    """Eq. 1: the bound of `Schedule`, or the layer of the smallest gradient norm if that comes first.

    Args:
        alpha: in (0, 1).
        rule: "exclusive" freezes the layers before the one with the smallest norm (Appendix B, Figure 18),
            "inclusive" that one too.
    """

    name = "gradient_norm"
    needs = frozenset({GRADIENT_NORMS})

    def __init__(self, alpha: float, rule: str) -> None:
        super().__init__(alpha)
        self.rule = rule

    def num_wanted(self, signal: FreezeSignal) -> float:
        if not signal.gradient_norms:
            return signal.num_wanted
        smallest = self.smallest(signal)
        limit = smallest if self.rule == "exclusive" else min(smallest + 1, signal.num_layers)
        return min(self.most_wanted(signal), float(limit))

    @staticmethod
    def smallest(signal: FreezeSignal) -> int:
        """The active layer with the smallest gradient norm; L is the head. What is not trained has none."""
        norms = signal.gradient_norms
        candidates = [index for index in range(signal.num_frozen, signal.num_layers + 1) if norms[index]]
        return min(candidates or [signal.num_layers], key=lambda index: norms[index])

    def describe(self) -> str:
        return f"{super().describe()}, {self.rule}"

    def explain(self, signal: FreezeSignal) -> str:
        if not signal.gradient_norms:
            return f"{self.name}: no gradient was finite"
        smallest = self.smallest(signal)
        where = "the head" if smallest == signal.num_layers else f"layer {smallest + 1} of {signal.num_layers}"
        return f"{super().explain(signal)}; smallest gradient norm in {where}"


class Fixed(FreezePolicy):
    """Freezes what the user wrote down.

    Args:
        table: optimizer step to number of layers frozen before that step.
    """

    name = "fixed"
    needs = frozenset()
    keeps_minimum = False

    def __init__(self, table: Mapping[int, int]) -> None:
        self.table = dict(table)

    def num_wanted(self, signal: FreezeSignal) -> float:
        return self.most_wanted(signal)

    def most_wanted(self, signal: FreezeSignal) -> float:
        return self.table.get(signal.step, signal.num_frozen)

    def check(self, num_layers: int, max_steps: int) -> list[str]:
        most = max(self.table.values())
        if most > num_layers:
            raise ValueError(f"freeze_at freezes {most} layers: the model has {num_layers}.")
        late = [step for step in self.table if step >= max_steps]
        if not late:
            return []
        return [f"freeze_at: the run ends after {max_steps} steps, before step {late[0]} freezes anything."]

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return step in self.table

    def describe(self) -> str:
        return "fixed, " + ", ".join(f"{layers} layers at step {step}" for step, layers in self.table.items())


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
    def is_held_back(self) -> bool:
        """Whether the policy wanted more layers than may freeze."""
        return math.ceil(self.num_wanted - _ROUNDING) > self.num_frozen

    def as_event(self) -> dict[str, Any]:
        """The decision with its inputs as JSON values."""
        return {
            "num_frozen_before": self.signal.num_frozen,
            "num_frozen": self.num_frozen,
            "num_wanted_before": self.signal.num_wanted,
            "num_wanted": self.num_wanted,
            **{name: list(getattr(self.signal, name)) for name in MEASUREMENTS},
        }


def decide(policy: FreezePolicy, signal: FreezeSignal, min_active_layers: int) -> Decision:
    """Ask the policy and hold its answer between what is frozen now and what must stay active.

    Raises:
        ValueError: the policy answered no finite number.
    """
    answer = float(policy.num_wanted(signal))
    if not math.isfinite(answer):
        raise ValueError(f"{type(policy).__name__}.num_wanted returned {answer}: expected a number of layers.")
    num_frozen = held(policy, answer, signal, min_active_layers)
    return Decision(signal, max(answer, signal.num_wanted), num_frozen)


def held(policy: FreezePolicy, answer: float, signal: FreezeSignal, min_active_layers: int) -> int:
    """A policy's answer as layers, between what is frozen and what must stay active."""
    kept = min_active_layers if policy.keeps_minimum else 0
    most = max(signal.num_layers - kept, signal.num_frozen)
    return min(max(math.ceil(answer - _ROUNDING), signal.num_frozen), most)


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


def make_policy(name: str, alpha: float, rule: str, freeze_at: str | None) -> FreezePolicy:
    """The policy that the options name.

    Raises:
        ValueError: unknown name, or `freeze_at` missing or of the wrong form.
    """
    if name == "gradient_norm":
        return GradientNorm(alpha, rule)
    if name == "schedule":
        return Schedule(alpha)
    if name == "fixed":
        return Fixed(parse_freeze_at(freeze_at or ""))
    if name == "none":
        return NoFreezing()
    raise ValueError(f"Unknown freeze policy {name!r}.")
