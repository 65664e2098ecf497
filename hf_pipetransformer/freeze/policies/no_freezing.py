"""Nothing freezes."""

from __future__ import annotations

from hf_pipetransformer.freeze.policies.clock import DecisionClock
from hf_pipetransformer.freeze.policies.protocol import FreezePolicy
from hf_pipetransformer.freeze.policies.signal import FreezeSignal


class NoFreezing(FreezePolicy):
    """Everything that the user left trainable is trained to the end."""

    name = "none"
    needs = frozenset()
    freezes = False

    def num_wanted(self, signal: FreezeSignal) -> float:
        return signal.num_frozen

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return False
