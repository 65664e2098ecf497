"""A freeze policy outside the package, in one file: it watches gradients, and remembers what it saw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_pipetransformer.freeze.policy import FreezePolicy, FreezeSignal


class Settled(FreezePolicy):
    """Freezes the lowest active layer once its gradients are below the head's at two decisions in a row.

    Args:
        share: of the norm of the head.
    """

    name = "settled"
    needs = frozenset({"gradient_norms"})

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self.num_calm = 0
        self.seen: list[float] = []

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        if not signal.gradient_norms:
            return signal.num_frozen
        lowest, head = signal.gradient_norms[signal.num_frozen], signal.gradient_norms[-1]
        self.seen.append(lowest)
        self.num_calm = self.num_calm + 1 if lowest < self.share * head else 0
        if self.num_calm < 2:
            return signal.num_frozen
        self.num_calm = 0
        return signal.num_frozen + 1

    def check(self, num_layers: int, max_steps: int) -> list[str]:
        if self.share <= 0:
            raise ValueError(f"share must be above 0, found {self.share}.")
        return []

    def state(self) -> dict[str, Any]:
        return {"num_calm": self.num_calm, "seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.num_calm, self.seen = state["num_calm"], list(state["seen"])
