"""PipeDream-2BW: every stage computes a step with the weights of the step before."""

from __future__ import annotations

from collections.abc import Collection

from hf_pipetransformer.pipeline.weights.kind import ForwardPass, Plain


class DoubleBuffer(Plain):
    """Both passes of all units of step t see version t - 1, on every stage: a uniform delay of one update.

    Where a short step (the last of an epoch) has a forward come before that version is there, the unit sees the
    current one in both passes, and that one is kept as long.
    """

    name = "double_buffer"

    def copies(self, stage: int, num_stages: int, units_per_step: int) -> int:
        return 2

    def check(self, num_stages: int, units_per_step: int) -> None:
        if units_per_step < num_stages - 1:
            raise ValueError(
                f"pipeline_weights='double_buffer' keeps two versions of the weights, but with {units_per_step} "
                f"micro-batches an optimizer step on {num_stages} stages a forward and its backward are more than one "
                f"update apart: expected at least {num_stages - 1}. Raise pipeline_parallel_num_microbatches or "
                "gradient_accumulation_steps, or use another pipeline_weights."
            )

    def forward_version(self, forward: ForwardPass) -> int:
        return min(max(0, forward.step - 1), forward.num_updates)

    def backward_version(self, forward_version: int, num_updates: int) -> int:
        return forward_version

    def kept_versions(self, num_updates: int, in_flight: Collection[int]) -> set[int]:
        return {num_updates - 1} | {version for version in in_flight if version < num_updates}
