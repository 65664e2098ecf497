"""A model on its stages: what a start gives, and what a transition changes of it."""

from __future__ import annotations

from hf_pipetransformer.execution import StageRunner
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.losses import LossRule
from hf_pipetransformer.pipeline.shell import PipelineShell
from hf_pipetransformer.startup import StartUp
from hf_pipetransformer.transition import Settings, Stage


class Pipeline:
    """The model on its stages, from one start to the next. A transition changes the stage and its runner.

    Args:
        start_up: what was found out about the model.
        shell: the model as Trainer sees it.
        settings: of the stages.
        loss_rule: how losses of parts add up.
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
        settings: Settings,
        loss_rule: LossRule,
        shifts_labels: bool,
        has_labels: bool,
        stage: Stage,
    ) -> None:
        self.start_up = start_up
        self.shell = shell
        self.settings = settings
        self.loss_rule = loss_rule
        self.shifts_labels = shifts_labels
        self.has_labels = has_labels
        self.take(stage)

    @property
    def layout(self) -> Layout:
        """The layout in force."""
        return self.stage.layout

    def take(self, stage: Stage) -> None:
        """From now on this rank is `stage`."""
        self.stage = stage
        self.runner = StageRunner(stage, self.start_up.probe.activation, self.loss_rule, self.shifts_labels)
        self.shell.runner = self.runner if stage.layout.num_stages > 1 else None
