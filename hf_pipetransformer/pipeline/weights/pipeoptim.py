"""PipeOptim: the forward predicts the weights of its backward."""

from __future__ import annotations

from hf_pipetransformer.pipeline.weights.kind import ForwardPass, Plain, steady_lag


class PipeOptim(Plain):
    """A forward sees the weights as they will be at its backward, which sees those that are there (Algorithm 1)."""

    name = "pipeoptim"

    def predicts(self, stage: int, num_stages: int) -> bool:
        return steady_lag(stage, num_stages) > 0

    def forward_version(self, forward: ForwardPass) -> int:
        return forward.step

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return num_updates
