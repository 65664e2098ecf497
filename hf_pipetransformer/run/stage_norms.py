"""Gradient norms of a model whose stages are at different optimizer steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hf_pipetransformer.errors import guarded
from hf_pipetransformer.execution import StageRunner


WHAT = "summing the gradient norms over the stages"


class StageNorms:
    """Collects the squares of a stage, and sums them over the stages when these are at one step.

    Args:
        runner: of this rank's stage.
        clips_by_last: gradients are clipped by the norm of the whole model `K - 1` steps ago: the last step that all
            stages have done, so nobody waits. The first `K - 1` steps after a drain are clipped by the stage's own.
        record: takes the squares of the whole model of each step, in their order.
    """

    def __init__(self, runner: StageRunner, clips_by_last: bool, record: Callable[[torch.Tensor], None]) -> None:
        self.runner = runner
        self.clips_by_last = clips_by_last
        self.record = record
        self.norm: torch.Tensor | None = None
        """Of the whole model in the last step that `settle` has seen."""
        self._own: list[torch.Tensor] = []
        self._summed: deque[tuple[torch.Tensor, Any]] = deque()

    def add(self) -> torch.Tensor:
        """The squares of this step are there: the norm to clip by, scalar."""
        squares, groups = self.runner.own_gradient_squares(), self.runner.stage.groups
        own = squares.sum().sqrt().float()
        self._own.append(squares)
        if not self.clips_by_last:
            return own
        total = squares.clone()
        work = guarded(lambda: dist.all_reduce(total, group=groups.pipeline_group, async_op=True), WHAT)
        self._summed.append((total, work))
        if len(self._summed) < groups.pipeline_size:
            return own
        complete, work = self._summed.popleft()
        guarded(work.wait, WHAT)
        return complete.sum().sqrt().float()

    def settle(self, is_drained: bool) -> None:
        """All stages have done the same steps: hand their squares over. A collective call of the pipeline.

        Args:
            is_drained: the next step is the first of a window.
        """
        if self._own:
            squares = self.runner.summed_over_stages(torch.stack(self._own))
            self._own.clear()
            for each in squares.unbind():
                # The embeddings' norm is no layer's, but what they overflow in counts nowhere.
                self.record(each[:-1] + 0 * each[-1])
            self.norm = squares[-1].sum().sqrt().float()
        if is_drained:
            for _, work in self._summed:
                guarded(work.wait, WHAT)
            self._summed.clear()
