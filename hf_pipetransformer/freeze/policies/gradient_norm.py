"""Eq. 1 (PipeTransformer, section 3.1 and appendix B)."""

from __future__ import annotations

from hf_pipetransformer.freeze.policies.schedule import Schedule
from hf_pipetransformer.freeze.policies.signal import GRADIENT_NORMS, FreezeSignal


class GradientNorm(Schedule):
    """Eq. 1: the bound of `Schedule`, or the layer of the smallest gradient norm if that comes first.

    Args:
        alpha: in (0, 1).
        rule: "exclusive" freezes the layers before the one with the smallest norm (Appendix B, Figure 18),
            "inclusive" that one too.
    """

    name = "gradient_norm"
    needs = frozenset({GRADIENT_NORMS})
    is_certain = False

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
