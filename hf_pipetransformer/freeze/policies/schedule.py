"""The upper bound of Eq. 1 (PipeTransformer, section 3.1)."""

from __future__ import annotations

from hf_pipetransformer.freeze.policies.protocol import FreezePolicy
from hf_pipetransformer.freeze.policies.rounding import rounded_up
from hf_pipetransformer.freeze.policies.signal import FreezeSignal


class Schedule(FreezePolicy):
    """The upper bound of Eq. 1 alone: each decision freezes the share alpha of what is left.

    Args:
        alpha: in (0, 1).
    """

    name = "schedule"
    needs = frozenset()
    is_certain = True

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def num_wanted(self, signal: FreezeSignal) -> float:
        return self.most_wanted(signal)

    def most_wanted(self, signal: FreezeSignal) -> float:
        return signal.num_wanted + self.alpha * (signal.num_layers - signal.num_wanted)

    def describe(self) -> str:
        return f"{self.name}, alpha {self.alpha:.3g}"

    def explain(self, signal: FreezeSignal) -> str:
        share = {1 / 3: "a third", 1 / 2: "half", 1 / 4: "a quarter"}.get(self.alpha, f"{self.alpha:.3g}")
        wanted, left = signal.num_wanted, signal.num_layers - signal.num_wanted
        part = f"{share} of {left:.3g}" if not wanted else f"{wanted:.3g} and {share} of the other {left:.3g}"
        return f"{self.name}: limit {rounded_up(self.most_wanted(signal))} layers ({part})"
