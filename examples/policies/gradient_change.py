"""Layers freeze whose gradients change least (AutoFreeze: Liu et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hf_pipetransformer.freeze.policy import GRADIENT_NORMS, FreezePolicy, FreezeSignal, is_usable


class GradientChange(FreezePolicy):
    """Compares the gradient norms of the last two intervals that had any.

    Layer `l` has changed by `eta_l = |before_l - now_l| / before_l`. The longest prefix of the active layers freezes
    in which no change is above a percentile of the changes of all active layers.

    Args:
        percentile: from 0 (only the layer that changes least, if it is the lowest) to 100 (all of them).
    """

    name = "gradient_change"
    needs = frozenset({GRADIENT_NORMS})
    num_watched = 1

    def __init__(self, percentile: float = 50.0) -> None:
        self.percentile = percentile
        self._norms: tuple[float, ...] = ()
        self._why = ""

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        before, now = self._norms, signal.gradient_norms
        if not is_usable(now):
            self._why = "no gradient was finite"
            return signal.num_frozen
        self._norms = tuple(now)
        if not before:
            self._why = "no earlier interval to compare with"
            return signal.num_frozen
        found = changes(before, now)
        active = range(signal.num_frozen, signal.num_layers)
        # What is not trained has no gradient that could change.
        compared = [found[layer] for layer in active if (before[layer] or now[layer]) and math.isfinite(found[layer])]
        if not compared:
            self._why = "no layer had a gradient in both intervals"
            return signal.num_frozen
        bound = percentile_of(compared, self.percentile)
        above = next((layer for layer in active if found[layer] > bound), signal.num_layers)
        self._why = f"gradient norms changed by {min(compared):.3g} to {max(compared):.3g}, the bound is {bound:.3g}"
        if above < signal.num_layers:
            self._why += f"; layer {above + 1} of {signal.num_layers} changed by {found[above]:.3g}"
        return above

    def state(self) -> dict[str, Any]:
        return {"norms": list(self._norms)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._norms = tuple(state["norms"])

    def describe(self) -> str:
        return f"{self.name}, percentile {self.percentile:.3g}"

    def explain(self, signal: FreezeSignal) -> str:
        return f"{self.name}: {self._why}"


def changes(before: Sequence[float], now: Sequence[float]) -> list[float]:
    """How far each norm has moved, relative to what it was; infinite from 0 to anything else."""
    return [abs(old - new) / old if old else (math.inf if new else 0.0) for old, new in zip(before, now, strict=True)]


def percentile_of(values: Sequence[float], percentile: float) -> float:
    """A percentile from 0 to 100, on the straight line between two neighbours."""
    ordered = sorted(values)
    place = percentile / 100 * (len(ordered) - 1)
    lower = math.floor(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (place - lower) * (ordered[upper] - ordered[lower])
