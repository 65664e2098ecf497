"""A pipeline for `Trainer` and its subclasses: what a trainer takes and shows beside Trainer's own."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from hf_pipetransformer.autodp.topology import Topology, let_group_threads_finish
from hf_pipetransformer.freeze.policies import FreezePolicy
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.report.events import EventLog
from hf_pipetransformer.run import host
from hf_pipetransformer.run.run import Run
from hf_pipetransformer.run.starting import check_given
from hf_pipetransformer.splitters import Splitter
from hf_pipetransformer.trainer.given import check_handed_on, find_given
from hf_pipetransformer.trainer.overrides import Overrides


class PipeTransformerMixin(Overrides):
    """Splits the model of a `Trainer` into K pipeline stages and R replicas, with the same numbers.

    It stands before the trainer that gets a pipeline: `class MyTrainer(PipeTransformerMixin, SomeTrainer)`. What that
    trainer does in `compute_loss`, `prediction_step`, `log` and so on stays.

    Args:
        positional: what the constructor of the trainer after the mixin takes by place, in its order, among it `args`
            ([`PipeTransformerArguments`]): `TrainingArguments` with the pipeline's options; plain ones get their
            defaults.
        named: what it takes by name.
        policy ([`FreezePolicy`], *optional*): decides what freezes; it wins over `freeze_policy`.
        splitter ([`Splitter`], *optional*): how the model falls into layers, for models that the library does not
            know; by default it is found by `config.model_type`.

    Raises:
        ValueError: an option, model or data set that cannot work with a pipeline; the text says what to change.
    """

    def __init__(
        self,
        *positional: Any,
        policy: FreezePolicy | None = None,
        splitter: Splitter | None = None,
        **named: Any,
    ) -> None:
        given = find_given(type(self), PipeTransformerMixin, positional, named)
        args, model = given.args, given.model
        known = {name: given.values[name] for name in ("train_dataset", "optimizers") if name in given.values}
        needs_pipeline = check_given(super(Overrides, self), model, args, policy, splitter, **known)
        args.places_model = needs_pipeline and args.world_size > 1
        num_stages = args.pipeline_size or 1
        if args.world_size > 1 and num_stages > 1:
            host.check_loaders(type(self), num_stages)
        super().__init__(*given.positional, **given.named)
        check_handed_on(self)
        self.pipeline_run = Run(self, policy, splitter, needs_pipeline)

    @property
    def layout(self) -> Layout | None:
        """The layout in force; None before the first training, evaluation or prediction."""
        return self.pipeline_run.layout

    @property
    def topology(self) -> Topology:
        """The ranks."""
        return self.pipeline_run.topology

    @property
    def events(self) -> EventLog:
        """The events file."""
        return self.pipeline_run.journal.log

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `Trainer.train` does; afterwards `trainer.model` is whole on every rank.

        A run goes on from one of its checkpoints, to the bit under the same settings and on as many processes;
        elsewhere, or from a checkpoint of plain Trainer, it goes on too and says what differs.

        Raises:
            ValueError: something that cannot work with a pipeline, or a checkpoint that this run cannot go on from.
            PipelineError: another rank failed; the text names the first cause.
        """
        with self.pipeline_run.train_call(resume_from_checkpoint, trial) as folder:
            return super().train(folder, trial, ignore_keys_for_eval)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Not an override that gives way: what Trainer saves alone is made safe too.
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self.pipeline_run.saving_checkpoint(os.path.join(self._get_output_dir(trial), name)):
            super()._save_checkpoint(model, trial)

    def whole_model(self) -> AbstractContextManager[None]:
        """Inside, `trainer.model` is whole and has its own forward, on every rank; what is changed in it stays.

        A collective call: every rank enters and leaves it, between two steps of a training or outside.

        Raises:
            ValueError: it is called amid a step, where other stages do not come by.
        """
        return self.pipeline_run.whole_model()

    def end(self) -> None:
        """Leave the process group: the last line of a script."""
        let_group_threads_finish()
        super().end()
