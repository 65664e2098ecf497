"""When a freeze policy is asked."""

from __future__ import annotations

from dataclasses import dataclass

from hf_pipetransformer.freeze.policies.rounding import rounded_up


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
