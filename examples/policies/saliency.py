"""Layers freeze that give less for a second of what remains of the run than those above them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_pipetransformer.freeze.policy import GRADIENT_NORMS, PREDICTED_SECONDS, FreezePolicy, FreezeSignal, is_usable


SMOOTHING = 0.5
"""Share that the intervals before the last one keep in what a layer gains."""


class Saliency(FreezePolicy):
    """Weighs what the loss still gains from a layer against what keeping it active costs over the rest of the run.

    The gain of layer `l` in an interval is `s_l = learning rate * norm_l ** 2`, with its mean gradient norm: the
    first-order decrease of the loss in a step of gradient descent on that layer. `s_l` of the head counts too, that of
    the embeddings is not known. Of F frozen layers there remain `gain(F)`, the sum of `s_l` over `l >= F`, and
    `seconds(F)`, predicted for the layout and the activation cache that F would bring. The F with the largest
    `gain(F) / seconds(F)` freezes: with fewer frozen layers a second is spent for less than it brings in the layers
    above them. That is right for a run that spends the seconds that it saves on more such steps.

    Adam divides by the size of the gradient, so that its first-order decrease is near the learning rate times the sum
    of the absolute values of the gradient, which is not measured. The square prefers layers with large gradients
    beyond that, and says nothing of how long their gradients stay so. What is compared are shares of one sum, so no
    factor common to all layers matters, the learning rate included, but for the smoothing over intervals.

    Seconds are measured ones: two runs with the same seed may decide differently.
    """

    name = "saliency"
    needs = frozenset({GRADIENT_NORMS, PREDICTED_SECONDS})

    def __init__(self) -> None:
        self._gains: list[float] = []
        self._why = ""

    def num_wanted(self, signal: FreezeSignal) -> float:
        now = signal.num_frozen
        new = [signal.learning_rate * norm * norm for norm in signal.gradient_norms]
        if not is_usable(new):
            self._why = "no gradient was finite"
            return now
        if self._gains:
            pairs = zip(self._gains, new, strict=True)
            new = [SMOOTHING * before + (1 - SMOOTHING) * last for before, last in pairs]
        self._gains = [0.0] * now + new[now:]
        seconds = signal.predicted_seconds
        possible = [frozen for frozen in range(now, len(seconds)) if 0 < seconds[frozen] < math.inf]
        gains = [math.fsum(self._gains[frozen:]) for frozen in range(len(self._gains))]
        if now not in possible or not 0 < gains[now] < math.inf:
            self._why = "no gradient, no learning rate or no predicted time to weigh"
            return now
        # max takes the first of equals, which freezes least.
        best = max(possible, key=lambda frozen: gains[frozen] / seconds[frozen])
        kept, spent = gains[best] / gains[now], seconds[best] / seconds[now]
        self._why = "no layer gives less for its seconds than those above it"
        if best > now:
            self._why = f"the other layers have {kept:.0%} of the expected gain, in {spent:.0%} of the seconds"
        return best

    def state(self) -> dict[str, Any]:
        return {"gains": list(self._gains)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._gains = list(state["gains"])

    def explain(self, signal: FreezeSignal) -> str:
        return f"{self.name}: {self._why}"
