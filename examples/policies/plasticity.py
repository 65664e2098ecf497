"""Layers freeze whose output has nearly stopped changing (after Egeria: Wang et al., EuroSys 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_pipetransformer.freeze.policy import ACTIVATION_SIMILARITY, FreezePolicy, FreezeSignal, is_usable


WINDOW = 3
"""Decisions that a moving average runs over."""

UNFREEZING_RATE = 0.1
"""Share of the learning rate of the first freeze, at which layers are unfrozen."""


class Plasticity(FreezePolicy):
    """Watches how much of what each layer gives is new since the last decision.

    The plasticity of a layer is 1 minus the linear CKA of its output now and at the last decision, for a few samples,
    divided by the optimizer steps in between: the first interval, with the warm-up, may be longer than the others. A
    layer is *calm* at a decision if the average of its last `WINDOW` plasticities, and that average plus its rise
    since the last decision, are at most `tolerance` times the largest plasticity that it ever had. The lowest active
    layer freezes once it was calm at `patience` decisions in a row, and with it those above it of which that is true.

    Egeria compares with a reference that is an older copy of the model, quantised, by a loss that preserves the
    similarities of samples to each other, and freezes where the slope of the smoothed curve is small. Here the
    reference is the model itself at the last decision, in the precision of training; the measure is CKA; the bound is
    on the smoothed value, and its slope may only hold a layer back.

    With `unfreezes` all that it froze is unfrozen, as in Egeria, at the first decision at which the learning rate is a
    tenth or less of what it was when the first layer froze. Then it begins anew: layers may freeze again.

    Args:
        tolerance: in (0, 1), of a layer's largest plasticity.
        patience: decisions in a row, 1 or more.
        unfreezes: whether a low learning rate unfreezes layers.
    """

    name = "plasticity"
    needs = frozenset({ACTIVATION_SIMILARITY})

    def __init__(self, tolerance: float = 0.2, patience: int = 2, unfreezes: bool = False) -> None:
        self.tolerance = tolerance
        self.patience = patience
        self.may_unfreeze = unfreezes
        # The first decision is the first to compare with.
        self.num_watched = patience
        self._step = 0
        self._recent: list[list[float]] = []
        self._largest: list[float] = []
        self._num_calm: list[int] = []
        self._rate_of_freeze: float | None = None
        self._why = ""

    def num_wanted(self, signal: FreezeSignal) -> float:
        steps, self._step = signal.step - self._step, signal.step
        if self._is_to_unfreeze(signal):
            self._begin_anew()
            return signal.num_frozen_by_user
        if not is_usable(signal.activation_similarity) or steps <= 0:
            self._why = "nothing to compare with"
            return signal.num_frozen
        self._take([
            max(0.0, 1.0 - similarity) / steps if layer >= signal.num_frozen else 0.0
            for layer, similarity in enumerate(signal.activation_similarity)
        ])  # fmt: skip
        wanted = signal.num_frozen
        while wanted < signal.num_layers and self._num_calm[wanted] >= self.patience:
            wanted += 1
        if wanted == signal.num_layers:
            self._why = "all active layers are calm"
        else:
            share = self._averages()[wanted] / self._largest[wanted] if self._largest[wanted] else 0.0
            calm = f"calm at {self._num_calm[wanted]} of {self.patience} decisions"
            self._why = f"layer {wanted + 1} of {signal.num_layers} changes at {share:.0%} of its largest rate, {calm}"
        if wanted > signal.num_frozen and self._rate_of_freeze is None:
            self._rate_of_freeze = signal.learning_rate
        return wanted

    def _is_to_unfreeze(self, signal: FreezeSignal) -> bool:
        if signal.num_frozen <= signal.num_frozen_by_user:
            self._rate_of_freeze = None  # What it wanted to freeze had to stay active.
        rate = self._rate_of_freeze
        if not self.may_unfreeze or not rate or signal.learning_rate > UNFREEZING_RATE * rate:
            return False
        self._why = f"the learning rate, {signal.learning_rate:.3g}, was {rate:.3g} at the first freeze"
        return True

    def _begin_anew(self) -> None:
        self._recent, self._largest, self._num_calm, self._rate_of_freeze = [], [], [], None

    def _take(self, values: list[float]) -> None:
        """The plasticities of one more decision."""
        before = self._averages()
        self._recent = [*self._recent, values][-WINDOW:]
        averages = self._averages()
        if not before:
            self._largest, self._num_calm = list(values), [0] * len(values)
            return
        self._largest = [max(pair) for pair in zip(self._largest, values, strict=True)]
        for layer, (old, new) in enumerate(zip(before, averages, strict=True)):
            is_calm = new + max(new - old, 0.0) <= self.tolerance * self._largest[layer]
            self._num_calm[layer] = self._num_calm[layer] + 1 if is_calm else 0

    def _averages(self) -> list[float]:
        """Of each layer over the last decisions; empty before the first."""
        return [sum(values) / len(values) for values in zip(*self._recent, strict=True)]

    def state(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "recent": [list(values) for values in self._recent],
            "largest": list(self._largest),
            "num_calm": list(self._num_calm),
            "rate_of_freeze": self._rate_of_freeze,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])
        self._recent = [list(values) for values in state["recent"]]
        self._largest, self._num_calm = list(state["largest"]), list(state["num_calm"])
        self._rate_of_freeze = state.get("rate_of_freeze")

    def describe(self) -> str:
        unfreezing = ", unfreezes" if self.may_unfreeze else ""
        return f"{self.name}, tolerance {self.tolerance:.3g}, patience {self.patience}{unfreezing}"

    def explain(self, signal: FreezeSignal) -> str:
        return f"{self.name}: {self._why}"
