"""PipeDream's weight stashing: the backward sees what the forward saw."""

from __future__ import annotations

from collections.abc import Collection

from hf_pipetransformer.pipeline.weights.kind import Plain, steady_lag


class Stashing(Plain):
    """A forward sees the current weights, its backward the same: each version in flight is kept."""

    name = "stashing"

    def copies(self, stage: int, num_stages: int, units_per_step: int) -> int:
        """A version for each step that the units in flight belong to: K - stage with one unit a step."""
        return 1 + -(-steady_lag(stage, num_stages) // units_per_step)

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return forward_version

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        return {version for version in in_flight if version < num_updates}
