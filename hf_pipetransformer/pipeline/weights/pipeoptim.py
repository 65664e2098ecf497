"""PipeOptim: the forward predicts the weights of its backward."""

from __future__ import annotations

from collections.abc import Collection

from hf_pipetransformer.pipeline.weights.kind import DirectionName, ForwardPass, steady_lag


class PipeOptim:
    """A forward sees the weights as they will be at its backward, which sees those that are there (Algorithm 1)."""

    name = "pipeoptim"
    direction: DirectionName = "optimizer"

    def copies(self, stage: int, num_stages: int, units_per_step: int) -> int:
        return 2 if self.predicts(stage, num_stages) else 1

    def check(self, num_stages: int, units_per_step: int) -> None:
        return None

    def predicts(self, stage: int, num_stages: int) -> bool:
        return steady_lag(stage, num_stages) > 0

    def forward_version(self, forward: ForwardPass) -> int:
        return forward.step

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return num_updates

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        return set()
