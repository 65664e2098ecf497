"""Nothing freezes for good, but in each step some weights rest (after TimelyFreeze: arXiv 2602.05754)."""

from __future__ import annotations

import importlib.util

from hf_pipetransformer.freeze.policies.clock import DecisionClock
from hf_pipetransformer.freeze.policies.protocol import FreezePolicy
from hf_pipetransformer.freeze.policies.signal import FreezeSignal


class Timely(FreezePolicy):
    """Skips, in each step, the weight gradients of some layers, drawn at random, where the end of the step waits.

    After the warm-up the times of steps are measured, with and without skipping. A linear programme over the graph of
    the schedule then chooses the share of each stage. The paper draws shares for each stage and micro-batch; here a
    step skips the same layers in all its micro-batches: a gradient that misses some of its micro-batches would be that
    of a part of the batch, while a layer without any is one that its optimizer leaves alone in this step.

    Args:
        max_ratio: in (0, 1), the largest share of a stage's weight gradients that is skipped on average.

    Raises:
        ValueError: scipy, which solves the programme, is missing.
    """

    name = "timely"
    needs = frozenset()
    freezes = False

    def __init__(self, max_ratio: float = 0.5) -> None:
        if importlib.util.find_spec("scipy") is None:
            raise ValueError(
                "freeze_policy='timely' solves a linear programme with scipy, which is not installed: "
                'pip install "hf-pipetransformer[timely]", or choose another policy.'
            )
        self.most_skipped = max_ratio

    def num_wanted(self, signal: FreezeSignal) -> float:
        return signal.num_frozen

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return False

    def describe(self) -> str:
        return f"{self.name}, at most {self.most_skipped:.0%} of a stage's weight gradients skipped"
