"""The parts that a pipeline adds to one trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.topology import get_topology
from hf_pipetransformer.freeze.policies import FreezePolicy, make_policy
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.refusals import comparable
from hf_pipetransformer.report.events import EventLog
from hf_pipetransformer.run.callbacks import WholeModelCallbacks
from hf_pipetransformer.run.evaluation import Evaluation, evaluating
from hf_pipetransformer.run.journal import Journal
from hf_pipetransformer.run.patience import Patience
from hf_pipetransformer.run.pipeline import Pipeline
from hf_pipetransformer.run.seeds import Seeds
from hf_pipetransformer.run.starting import Found, Starter
from hf_pipetransformer.splitters import Splitter
from hf_pipetransformer.startup import check_agreement


class Run:
    """What a pipeline adds to one trainer; it lives as long as the trainer. Made by all ranks together.

    A pipeline lives from one start to the next (a start comes with each `train`, and with an evaluation before any).
    A part gets what it needs when it is made: the `Trainer`, where it follows the trainer's living state (`state`,
    `args`, `accelerator`, `model`, `optimizer`, `lr_scheduler`, `callback_handler`), else nothing of it.

    Args:
        trainer: the user's trainer, whose own constructor has run.
        policy: decides what freezes; None makes the one that the options name.
        splitter: how the model falls into layers; None looks for it.

    Raises:
        ValueError: the ranks were started with different options.
    """

    def __init__(self, trainer: Trainer, policy: FreezePolicy | None, splitter: Splitter | None) -> None:
        args: PipeTransformerArguments = trainer.args
        rest_seconds = max(args.pipeline_timeout, args.ddp_timeout)
        local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
        self.trainer = trainer
        self.topology = get_topology(rest_seconds, int(local_world_size) if local_world_size else None)
        self.topology.limit_waits(rest_seconds)  # An earlier trainer may have failed within a step.
        if args.pipeline_size is not None:
            self.topology.check_pipeline_size(args.pipeline_size)
        check_agreement(self.topology, "training arguments", _shared(args))
        self.journal = Journal(trainer, EventLog(args.output_dir if trainer.is_world_process_zero() else None))
        # Any step may compile: a batch of another shape is enough.
        step_seconds = rest_seconds if args.torch_compile else args.pipeline_timeout
        self.patience = Patience(self.topology, self.journal, step_seconds, rest_seconds)
        self.has_users_optimizer = trainer.optimizer is not None
        self.starter = Starter(trainer, self.topology, splitter, trainer.optimizer, self.journal.log.path)
        self.seeds = Seeds(self.topology, args.seed)
        self.policy = policy or make_policy(args.freeze_policy, args.freeze_alpha, args.freeze_rule, args.freeze_at)
        self.in_force: Pipeline | None = None
        self._evaluation: Evaluation | None = None

    def start(self, found: Found, layout: Layout) -> Pipeline:
        """The pipeline starts; from now on, callbacks that take the model find it whole."""
        self.journal.tried = found.start_up.plans.trying(layout) if found.is_training else {}
        self.in_force = pipeline = self.starter.start(found, layout)
        if layout.pipeline_size > 1:
            self.trainer.callback_handler = WholeModelCallbacks(self.trainer.callback_handler, pipeline)
            self.trainer.callback_handler.check(self.topology)
        return pipeline

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline in force."""
        if self.in_force is None:
            raise RuntimeError("The pipeline has not started: train(), evaluate() or predict() come first.")
        return self.in_force

    def started(self, dataset: Any) -> Pipeline:
        """The pipeline of the model as it is now; without one, it starts, to evaluate `dataset`."""
        pipeline, trainer = self.in_force, self.trainer
        if pipeline is not None and pipeline.stage.view.model is trainer.model:
            return pipeline
        found = self.starter.look(dataset, is_training=False)
        return self.start(found, found.start_up.plans.layout(trainer.args.per_device_train_batch_size))

    @property
    def evaluation(self) -> Evaluation:
        """The pass over a data set that is under way."""
        if self._evaluation is None:
            raise RuntimeError("prediction_step is called by evaluate() and predict() alone.")
        return self._evaluation

    @contextmanager
    def evaluating(self, dataset: Any) -> Iterator[None]:
        """The pipeline is up inside, for an evaluation of `dataset`: one, its name or several by name."""
        trainer = self.trainer
        dataset = trainer.eval_dataset if dataset is None else dataset
        dataset = trainer.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        first = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
        with self.patience.reporting_faults(), evaluating(self.started(first)):
            yield

    @contextmanager
    def passing_over(self, loader: Any) -> Iterator[Evaluation]:
        """Trainer's evaluation loop runs inside."""
        outer, trainer = self._evaluation, self.trainer
        evaluation = Evaluation(trainer, self.pipeline, loader)
        self._evaluation, trainer.gather_function = evaluation, evaluation.gather
        try:
            # Entered here too: an `evaluate` of a user's own calls the loop itself.
            with self.evaluating(evaluation.loader.dataset):
                yield evaluation
        finally:
            self._evaluation = outer

    @property
    def layout(self) -> Layout | None:
        """The layout in force; None before the first training, evaluation or prediction."""
        return None if self.in_force is None else self.in_force.layout


def _shared(args: PipeTransformerArguments) -> dict[str, Any]:
    """The arguments that must be equal on all ranks."""
    local = ("output_dir", "run_name", "disable_tqdm", "log_level", "log_level_replica", "hub_token", "local_rank")
    return comparable({key: value for key, value in args.to_dict().items() if key not in local})
