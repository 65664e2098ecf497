"""Plain asynchronous 1F1B: whatever weights are there."""

from __future__ import annotations

from collections.abc import Collection

from hf_pipetransformer.pipeline.weights.kind import DirectionName, ForwardPass


class Vanilla:
    """Both passes see the current weights: the backward other ones than its forward."""

    name = "vanilla"
    direction: DirectionName = "optimizer"

    def copies(self, stage: int, num_stages: int, units_per_step: int) -> int:
        return 1

    def check(self, num_stages: int, units_per_step: int) -> None:
        return None

    def predicts(self, stage: int, num_stages: int) -> bool:
        return False

    def forward_version(self, forward: ForwardPass) -> int:
        return forward.num_updates

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return num_updates

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        return set()
