"""A model on its stages, as the run and as Trainer see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from accelerate.utils import convert_to_fp32
from torch import nn

from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.rng import SharedDraws
from hf_pipetransformer.runtime.execution import StageRunner
from hf_pipetransformer.runtime.gathering import whole_on_every_rank
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.runtime.wiring import StageSettings
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.startup.planner import StartUp


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


class Settling(Protocol):
    """What may be in flight between two steps."""

    def settle(self) -> None:
        """Nothing is any more. A collective call of all ranks."""


class Pipeline:
    """The model on its stages, from one start to the next. A transition changes the stage and its runner.

    Args:
        start_up: what was found out about the model.
        shell: the model as Trainer sees it.
        settings: of the stages.
        shifts_labels: the loss predicts the next token.
        has_labels: the data set that it was started with has labels.
        stage: this rank's.
    """

    stage: Stage
    runner: StageRunner

    def __init__(
        self,
        start_up: StartUp,
        shell: PipelineShell,
        settings: StageSettings,
        shifts_labels: bool,
        has_labels: bool,
        stage: Stage,
    ) -> None:
        self.start_up = start_up
        self.shell = shell
        self.settings = settings
        self.shifts_labels = shifts_labels
        self.has_labels = has_labels
        self.shared_draws: SharedDraws | None = None
        """In a training of several ranks they stand for the generators of one process."""
        self.steps: Settling | None = None
        """Of the training under way."""
        self.persistent_loaders: dict[str, PipelineLoader] = {}
        """Those of evaluations that outlive one."""
        self.warned_events: set[str] = set()
        """Those of which the user was told that a callback reads the model there."""
        self.take(stage)

    def settle(self) -> None:
        """All stages of a training come to the same weights, with nothing in flight. A collective call."""
        if self.steps is not None:
            self.steps.settle()

    @property
    def layout(self) -> Layout:
        """The layout in force."""
        return self.stage.layout

    def take(self, stage: Stage) -> None:
        """From now on this rank is `stage`."""
        self.stage = stage
        start_up = self.start_up
        self.runner = StageRunner(stage, start_up.probe.activation, start_up.loss_rule.rule, self.shifts_labels)
        self.shell.runner = self.runner if stage.layout.pipeline_size > 1 else None

    @property
    def is_in_parts(self) -> bool:
        """Whether the model is that of one of several stages now; it stays so after a training that failed."""
        stage = self.stage
        return self.layout.pipeline_size > 1 and (stage.view.is_installed or not stage.store.is_whole)

    @property
    def is_inside_step(self) -> bool:
        """Whether the engine runs this stage right now."""
        return self.runner.is_inside_step

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        """Inside, the model is whole and has its own forward, on every rank; what is changed in it stays.

        A collective call: every rank enters and leaves it, between two steps of a training or outside.

        Raises:
            ValueError: it is called amid a step, where other stages do not come by.
        """
        if not self.is_in_parts:
            yield
            return
        if self.is_inside_step:
            raise ValueError(
                "whole_model() was called amid a step, where other stages do not come by. Call it between two steps "
                "on every rank, in a callback for example."
            )
        self.settle()
        with whole_on_every_rank(self.stage):
            yield
