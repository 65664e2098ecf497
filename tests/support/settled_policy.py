"""A freeze policy outside the package, in one file: it watches weights, and remembers what it saw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_pipetransformer.freeze.policy import FreezePolicy, FreezeSignal


class Settled(FreezePolicy):
    """Freezes the lowest active layer once it has changed less than the head at two decisions, one after the other.

    Args:
        share: of the head's change.
    """

    name = "settled"
    needs = frozenset({"weight_changes", "activation_similarity"})

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self.num_calm = 0
        self.seen: list[float] = []

    def num_wanted(self, signal: FreezeSignal) -> float:
        if not signal.weight_changes:
            return signal.num_frozen
        lowest, head = signal.weight_changes[signal.num_frozen], signal.weight_changes[-1]
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
