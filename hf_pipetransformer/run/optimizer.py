"""A stage's part of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from hf_pipetransformer.autodp.migration import keep_parameters
from hf_pipetransformer.pipeline.shared import share_values
from hf_pipetransformer.run.pipeline import Pipeline
from hf_pipetransformer.run.windows import Windows


def divide(optimizer: torch.optim.Optimizer, pipeline: Pipeline, names: Mapping[int, str]) -> dict[str, int]:
    """Leave this stage its parameters of an optimizer, whoever made it, in the groups that they are in.

    A parameter that stages share is stepped by its first user, the others get the value.

    Args:
        names: identity of each parameter, as it was before the model was divided, to its name.

    Returns:
        The group of each parameter of the model by name; empty for one rank, which keeps all.
    """
    if pipeline.layout.pipeline_size == 1:
        return {}
    stage = pipeline.stage
    now = {id(parameter): name for name, parameter in stage.view.model.named_parameters()}
    return keep_parameters(optimizer, {**names, **now}, stage.trained_here())


class StepHooks:
    """Measures the steps of an optimizer, and gives its new values to the stages that share them.

    Args:
        optimizer: of this stage's parameters.
        pipeline: of the stage.
        windows: forwards may be in flight that have seen the values before.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pipeline: Pipeline, windows: Windows) -> None:
        self.pipeline = pipeline
        self.windows = windows
        self._part = ExitStack()
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def remove(self) -> None:
        """The optimizer is again as its user gave it."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: Any) -> None:
        self._part.enter_context(self.pipeline.settings.meter.part("optimizer"))
        self.windows.before_update()

    def _end(self, *_: Any) -> None:
        self.windows.after_update()
        share_values(self.pipeline.stage.shared)
        self._part.close()
