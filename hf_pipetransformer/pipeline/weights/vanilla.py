"""Plain asynchronous 1F1B: whatever weights are there."""

from __future__ import annotations

from hf_pipetransformer.pipeline.weights.kind import Plain


class Vanilla(Plain):
    """Both passes see the current weights: the backward other ones than its forward."""

    name = "vanilla"

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return num_updates
