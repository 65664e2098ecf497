"""A model on its stages: what a start gives, and what a transition changes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from hf_pipetransformer.autodp.draws import SharedDraws
from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.execution import StageRunner
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.shell import PipelineShell
from hf_pipetransformer.startup import StartUp
from hf_pipetransformer.transition import Stage, whole_on_every_rank
from hf_pipetransformer.wiring import StageSettings


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
