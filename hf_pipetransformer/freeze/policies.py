"""How many layers to freeze: pure functions of a signal (PipeTransformer section 3.1 and appendix B)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_pipetransformer.option_values import parse_freeze_at


_ROUNDING = 1e-9
"""A level that is a whole number but for floating-point noise is that number, not the next one."""


@dataclass(frozen=True)
class FreezeSignal:
    """What a policy may look at.

    Args:
        step: optimizer steps done.
        max_steps: optimizer steps of the whole run.
        num_layers: L.
        num_frozen: layers frozen now.
        level: what the policy answered last, L_frozen of Eq. 1 before rounding; `num_frozen` at the start.
        gradient_norms: `num_layers + 1` means, over the optimizer steps since the last decision, of the L2 norm of
            the reduced, unscaled, unclipped gradient: of layer `l` at index `l`, of the head at index L. 0 for layers
            that are frozen. Empty if no step counted.
    """

    step: int
    max_steps: int
    num_layers: int
    num_frozen: int
    level: float
    gradient_norms: tuple[float, ...]


class FreezePolicy(ABC):
    """Decides how far the frozen prefix reaches. A policy of your own is one subclass, passed as `policy=`."""

    name: str = "custom"
    needs_gradient_norms = True
    """False spares the monitor."""
    keeps_minimum = True
    """Whether `freeze_min_active_layers` limits it."""

    @abstractmethod
    def level(self, signal: FreezeSignal) -> float:
        """How many layers shall be frozen now; fractions are rounded up, less than now means no change."""

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        """Whether to decide before optimizer step number `step`."""
        return clock.is_due(step)

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
    needs_gradient_norms = False

    def level(self, signal: FreezeSignal) -> float:
        return signal.num_frozen

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return False


class Schedule(FreezePolicy):
    """The upper bound of Eq. 1 alone: each decision freezes the share alpha of what is left.

    Args:
        alpha: in (0, 1).
    """

    name = "schedule"
    needs_gradient_norms = False

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def level(self, signal: FreezeSignal) -> float:
        return signal.level + self.alpha * (signal.num_layers - signal.level)

    def describe(self) -> str:
        return f"{self.name}, alpha {self.alpha:.3g}"

    def explain(self, signal: FreezeSignal) -> str:
        return f"{self.name}: bound {Schedule.level(self, signal):.2f} layers"


class GradientNorm(Schedule):
    """Eq. 1: the bound of `Schedule`, or the layer of the smallest gradient norm if that comes first.

    Args:
        alpha: in (0, 1).
        rule: "exclusive" freezes the layers before the one with the smallest norm (Appendix B, Figure 18),
            "inclusive" that one too.
    """

    name = "gradient_norm"
    needs_gradient_norms = True

    def __init__(self, alpha: float, rule: str) -> None:
        super().__init__(alpha)
        self.rule = rule

    def level(self, signal: FreezeSignal) -> float:
        if not signal.gradient_norms:
            return signal.level
        smallest = self.smallest(signal)
        limit = smallest if self.rule == "exclusive" else min(smallest + 1, signal.num_layers)
        return min(super().level(signal), float(limit))

    @staticmethod
    def smallest(signal: FreezeSignal) -> int:
        """The active layer with the smallest gradient norm; L is the head."""
        candidates = range(signal.num_frozen, signal.num_layers + 1)
        return min(candidates, key=lambda index: signal.gradient_norms[index])

    def describe(self) -> str:
        return f"{super().describe()}, {self.rule}"

    def explain(self, signal: FreezeSignal) -> str:
        if not signal.gradient_norms:
            return f"{self.name}: no gradient was finite"
        smallest = self.smallest(signal)
        where = "the head" if smallest == signal.num_layers else f"layer {smallest}"
        return f"{super().explain(signal)}, smallest gradient norm in {where}"


class Fixed(FreezePolicy):
    """Freezes what the user wrote down.

    Args:
        table: optimizer step to number of layers frozen before that step.
    """

    name = "fixed"
    needs_gradient_norms = False
    keeps_minimum = False

    def __init__(self, table: Mapping[int, int]) -> None:
        self.table = dict(table)

    def level(self, signal: FreezeSignal) -> float:
        return self.table.get(signal.step, signal.num_frozen)

    def check(self, num_layers: int) -> None:
        """Refuse a table for a deeper model.

        Raises:
            ValueError: it freezes more layers than there are.
        """
        most = max(self.table.values())
        if most > num_layers:
            raise ValueError(f"freeze_at freezes {most} layers: the model has {num_layers}.")

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return step in self.table

    def describe(self) -> str:
        return "fixed, " + ", ".join(f"{layers} layers at step {step}" for step, layers in self.table.items())


@dataclass(frozen=True)
class Decision:
    """A policy's answer, and what became of it.

    Args:
        signal: the inputs.
        level: the answer before rounding.
        num_frozen: layers frozen from now on.
    """

    signal: FreezeSignal
    level: float
    num_frozen: int

    @property
    def freezes(self) -> bool:
        """Whether anything is newly frozen."""
        return self.num_frozen > self.signal.num_frozen

    def as_event(self) -> dict[str, Any]:
        """The decision with its inputs as JSON values."""
        return {
            "num_frozen_before": self.signal.num_frozen,
            "num_frozen": self.num_frozen,
            "level_before": self.signal.level,
            "level": self.level,
            "gradient_norms": list(self.signal.gradient_norms),
        }


def decide(policy: FreezePolicy, signal: FreezeSignal, min_active_layers: int) -> Decision:
    """Ask the policy and hold its answer between what is frozen now and what must stay active.

    Raises:
        ValueError: the policy answered no finite number.
    """
    level = float(policy.level(signal))
    if not math.isfinite(level):
        raise ValueError(f"{type(policy).__name__}.level returned {level}: expected a number of layers.")
    kept = min_active_layers if policy.keeps_minimum else 0
    most = max(signal.num_layers - kept, signal.num_frozen)
    wanted = math.ceil(level - _ROUNDING)
    num_frozen = min(max(wanted, signal.num_frozen), most)
    return Decision(signal, max(level, signal.level), num_frozen)


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
