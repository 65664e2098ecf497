"""A policy's answer, and the layers that freeze or thaw by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hf_pipetransformer.freeze.policies.protocol import FreezePolicy
from hf_pipetransformer.freeze.policies.rounding import rounded_up
from hf_pipetransformer.freeze.policies.signal import MEASUREMENTS, FreezeSignal


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
