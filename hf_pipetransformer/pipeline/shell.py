"""The module that Trainer trains: the model behind autocast, or the whole pipeline when somebody predicts with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from accelerate.utils import convert_to_fp32
from torch import nn

from hf_pipetransformer.adapters import bare_model


class Runner(Protocol):
    """Runs batches through all stages."""

    @property
    def is_inside_step(self) -> bool:
        """Whether the engine runs this stage right now."""

    @property
    def is_installed(self) -> bool:
        """Whether the model is that of the stages now; else it is whole and has its own forward."""

    def predict(self, inputs: dict[str, Any], forward: Callable[[dict[str, Any]], Any]) -> Any:
        """The model's output for one batch, on every stage; `forward` runs this stage's part of a micro-batch."""


class PipelineShell(nn.Module):
    """Stands where Trainer expects the wrapped model; one object for the whole run.

    Inside a pipeline step it runs this stage's part of the model. Called by anybody else (evaluation, a user's
    `prediction_step`) it runs the batch through the pipeline and returns the whole output on every stage; once the
    model has its own forward again, the model.

    Args:
        model: the user's model.
        autocast: makes the mixed precision context of the run.
        is_mixed: whether outputs are cast back to float32, as accelerate does under mixed precision.
    """

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]], is_mixed: bool) -> None:
        super().__init__()
        self.module = model
        self._autocast = autocast
        self._is_mixed = is_mixed
        self.runner: Runner | None = None
        """Of the stages; None, where there is one only, runs the model directly."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.runner is None or self.runner.is_inside_step or not self.runner.is_installed:
            with self._autocast():
                outputs = self.module(*args, **kwargs)
            return convert_to_fp32(outputs) if self._is_mixed else outputs
        if args or torch.is_grad_enabled():
            raise RuntimeError(
                "A model that is split into pipeline stages can be called with keyword arguments under "
                "torch.no_grad() only; gradients are computed by trainer.train(). Set pipeline_parallel_size=1 to "
                "call it freely."
            )
        return self.runner.predict(kwargs, self._run_own_part)

    def _run_own_part(self, inputs: dict[str, Any]) -> Any:
        return self(**inputs)

    def _get_name(self) -> str:
        # Trainer asks for the class name of the model to choose how labels are smoothed.
        return type(bare_model(self.module)).__name__
