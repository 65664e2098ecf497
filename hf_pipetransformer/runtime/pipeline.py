"""Pipeline-parallel model as the run sees it (`Pipeline`) and as Trainer sees it (`PipelineShell`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate.utils import convert_to_fp32
from torch import nn

from hf_pipetransformer.engine.losses import LossScope
from hf_pipetransformer.runtime.execution import Prediction, StageRunner
from hf_pipetransformer.runtime.gathering import HOST, whole_on_every_rank
from hf_pipetransformer.runtime.ownership import ParameterSlots
from hf_pipetransformer.splitters.adapters import bare_model


if TYPE_CHECKING:
    from hf_pipetransformer.data.loader import PipelineLoader
    from hf_pipetransformer.data.rng import SharedRngState
    from hf_pipetransformer.runtime.stage import Stage, StageSettings
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.startup.planner import StartUp


class PipelineShell(nn.Module):
    """Wrapper that takes the place of Trainer's wrapped model; the same object for the whole run.

    Called by the engine, it runs this stage's part of the model. Called from elsewhere (evaluation, a user's
    `prediction_step`), it runs the batch through the pipeline and returns the output on every stage, or runs the model
    directly if that has its original forward. With `is_mixed`, outputs are cast back to float32, as accelerate does.
    """

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]], is_mixed: bool) -> None:
        super().__init__()
        self.module = model
        self._autocast = autocast
        self._is_mixed = is_mixed
        self.runner: StageRunner | None = None
        """Runner of the stages; None if there is only one stage."""
        self.prediction = Prediction()
        """How calls from elsewhere are run."""
        self._slots: ParameterSlots | None = None

    def __getattr__(self, name: str) -> Any:
        """Return what the model has under a name that is not the wrapper's, as in Trainer on one process."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @contextmanager
    def predicting(self, runner: StageRunner | None, prediction: Prediction) -> Iterator[None]:
        """Run calls from elsewhere inside by `runner`, None for the model's own forward, and as `prediction` says."""
        outer = self.runner, self.prediction
        self.runner, self.prediction = runner, prediction
        try:
            yield
        finally:
            self.runner, self.prediction = outer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, without the walk through the modules that a GPU would wait for after each step."""
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        self._slots = self._slots or ParameterSlots(self.module)
        for _, parameter in self._slots.named():
            parameter.grad = None

    def forget_parameters(self) -> None:
        """Look for the parameters anew: the model may have other ones."""
        self._slots = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runner = self.runner
        # Within a step the engine asks for this stage's part, and the loss of a whole batch for the pipeline's
        # forward; any other caller means the whole model.
        is_alone = runner is None or runner.stage.view.is_running or not runner.stage.view.is_installed
        if runner is None or is_alone or runner.present is not None:
            # As `called` does, without a call more between Trainer and each forward.
            with self._autocast():
                return self._converted(self.module(*args, **kwargs))
        if args or torch.is_grad_enabled():
            raise RuntimeError(
                "A model that is split into pipeline stages can be called with keyword arguments under "
                "torch.no_grad() only; gradients are computed by trainer.train(). Set pipeline_parallel_size=1 to "
                "call it freely."
            )
        return runner.predict(kwargs, self._run_own_part, self.prediction)

    def called(self, forward: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        """Return what a forward of the model returns, under the autocast of the run."""
        with self._autocast():
            return self._converted(forward(**inputs))

    def _converted(self, outputs: Any) -> Any:
        return convert_to_fp32(outputs) if self._is_mixed else outputs

    def _run_own_part(self, inputs: dict[str, Any]) -> Any:
        return self(**inputs)

    def _get_name(self) -> str:
        # Trainer chooses the shift of label smoothing by the model's class name.
        return type(bare_model(self.module)).__name__


class Settling(Protocol):
    """Work that may be in flight between two steps."""

    def settle(self) -> None:
        """Finish it. Collective: call on every rank."""


class Pipeline:
    """Model on its stages, for the lifetime of one start-up. Transitions replace `stage` and `runner`.

    `shifts_labels` is True for next-token losses.
    """

    stage: Stage
    runner: StageRunner

    def __init__(
        self,
        start_up: StartUp,
        shell: PipelineShell,
        settings: StageSettings,
        shifts_labels: bool,
        stage: Stage,
    ) -> None:
        self.start_up = start_up
        self.shell = shell
        self.settings = settings
        self.shifts_labels = shifts_labels
        self.has_labels = "labels" in start_up.samples
        """True if the data set used at start-up has labels."""
        self.shared_rng: SharedRngState | None = None
        """RNG state that one process would have, in a training with several ranks."""
        self.steps: Settling | None = None
        """Training in progress, which may have work in flight between two steps."""
        self.persistent_loaders: dict[str, PipelineLoader] = {}
        """Evaluation loaders that are reused from one evaluation to the next."""
        self.warned_events: set[str] = set()
        """Callback events for which the user was already warned that a callback reads the model."""
        self.take(stage)

    def settle(self) -> None:
        """Drain a running training, so that all stages are at the same step. Collective: call on every rank."""
        if self.steps is not None:
            self.steps.settle()

    @property
    def layout(self) -> Layout:
        """Layout in force."""
        return self.stage.layout

    def take(self, stage: Stage) -> None:
        """Replace this rank's stage, and create a runner for it."""
        self.stage = stage
        found, activation = self.start_up, self.start_up.probe.activation
        scope, shifts, called = found.plans.scope, self.shifts_labels, self.shell.called
        self.runner = StageRunner(stage, activation, found.loss_rule, scope, shifts, called, found.untried_media)
        # One stage runs the model's own forward, for which nothing has to be cut.
        self.shell.runner = self.runner if stage.layout.pipeline_size > 1 else None

    def evaluating(self, is_cut: bool, prediction: Prediction) -> AbstractContextManager[None]:
        """Run the model as `prediction` says inside; the loss sees all replicas' samples if it sees whole batches.

        `is_cut`: each replica has some samples of the batch.
        """
        joins = is_cut and self.runner.scope is LossScope.BATCH and self.layout.num_replicas > 1
        runner = self.runner if joins else self.shell.runner
        return self.shell.predicting(runner, replace(prediction, joins_replicas=joins))

    @property
    def is_in_parts(self) -> bool:
        """True if the model is restricted to this rank's stages, or left incomplete by a training that failed."""
        stage = self.stage
        return self.layout.pipeline_size > 1 and (stage.view.is_installed or stage.is_spread)

    @property
    def is_inside_step(self) -> bool:
        """True while this rank runs what other stages do not: its part of the model, or a loss behind the model."""
        loss = self.runner.present
        return self.stage.view.is_running or (loss is not None and loss.is_entered)

    def check_between_steps(self, name: str) -> None:
        """Raise ValueError if `name` is called where other stages do not call it."""
        if self.layout.pipeline_size > 1 and self.is_inside_step:
            raise ValueError(
                f"{name} was called amid a step, where other stages do not come by. Call it between two steps on "
                "every rank, in a callback for example."
            )

    @contextmanager
    def whole_model(self, device: torch.device = HOST) -> Iterator[None]:
        """Make the model whole inside, on `device` on every rank, with its original forward.

        Collective: enter and leave it on every rank, between two steps or outside training. A change to a parameter
        persists only if the ranks that use the parameter make it, so make the same changes on every rank.

        Raises:
            ValueError: a step is running, in which other ranks do not call it; or the whole model does not fit.
        """
        if not self.is_in_parts:
            yield
            return
        self.check_between_steps("whole_model()")
        # In an asynchronous training stages may be at different steps, and the model would be a mix of them.
        self.settle()
        with whole_on_every_rank(self.stage, device):
            yield
