"""Runs of one trainer: in Trainer's own loop, where frozen parts are computed once, or in a pipeline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from hf_pipetransformer.cache.frozen_parts.stored import StoredParts
from hf_pipetransformer.comm.topology import check_agreement
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.splitters.adapters import has_adapters
from hf_pipetransformer.splitters.masters import cast_masters, master_names
from hf_pipetransformer.state.only_run import only_run
from hf_pipetransformer.state.resumption import find_for_trainer, is_of_pipeline, resumed_by_trainer
from hf_pipetransformer.training.context import PartsOfStage, PartsOfTrainer, make_context
from hf_pipetransformer.training.needs import RunOptions
from hf_pipetransformer.training.part_stores import PartStores


if TYPE_CHECKING:
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.training.pipeline_session import PipelineSession


class Session:
    """Additions of this library to one trainer; lives as long as it, through any number of calls of `train()`.

    Collective: construct on every rank.

    Args:
        wants_pipeline: False if Trainer's own methods train and evaluate, but for a checkpoint of a pipeline.

    Raises:
        ValueError: the ranks were started with different options, or two policies are asked for.
    """

    def __init__(self, trainer: Trainer, options: RunOptions, wants_pipeline: bool) -> None:
        self.context = make_context(trainer)
        self.options = options
        self.policy = options.make_policy(warns=self.context.topology.rank == 0)
        """Freeze policy in use."""
        self.is_in_train = False
        """True in a call of `train()`."""
        self.wants_pipeline = wants_pipeline
        self.trains_alone = self.evaluates_alone = not wants_pipeline or options.args.is_undivided
        """True if Trainer's own methods run in `train()`, and outside of it, instead of the overrides."""
        parts = PartsOfTrainer(trainer, self.context)
        self.stored_parts = StoredParts(parts, PartStores(parts))
        """Frozen parts of the run in progress; on stages, those of this rank's stage."""
        self.results: dict[str, object] = {}
        """What the last training adds to `train_results.json`."""

    @property
    def is_left_to_trainer(self) -> bool:
        """True while Trainer's own methods run instead of the overrides."""
        return self.trains_alone if self.is_in_train else self.evaluates_alone

    @cached_property
    def pipelined(self) -> PipelineSession:
        """Additions of a pipeline. Imported when first needed: most runs that store frozen parts have none."""
        from hf_pipetransformer.training.pipeline_session import PipelineSession

        return PipelineSession(self)

    @property
    def in_force(self) -> Pipeline | None:
        """Pipeline that trains or has trained, if any."""
        return self.pipelined.in_force if "pipelined" in vars(self) else None

    @property
    def layout(self) -> Layout | None:
        """Current layout; None before the first start."""
        return None if self.in_force is None else self.in_force.layout

    @property
    def is_training_in_pipeline(self) -> bool:
        return "pipelined" in vars(self) and self.pipelined.present is not None

    @property
    def is_inside_stage(self) -> bool:
        """True while one of several stages runs, where the other ranks do not log."""
        pipeline = self.in_force
        return pipeline is not None and pipeline.layout.pipeline_size > 1 and pipeline.is_inside_step

    def whole_model(self, device: torch.device) -> AbstractContextManager[None]:
        """See `Pipeline.whole_model`."""
        return nullcontext() if self.in_force is None else self.in_force.whole_model(device)

    # ---- one call of `train()` ----

    @contextmanager
    def train_call(
        self,
        resume_from_checkpoint: str | bool | None,
        trial: object = None,
        ignored_outputs: list[str] | None = None,
    ) -> Iterator[str | bool | None]:
        """Wrap a call of `Trainer.train`; yields the checkpoint folder to resume from, None for a new run.

        Raises:
            ValueError: on every rank, if there is no such checkpoint or this run cannot resume from it.
            PipelineError: an earlier training left the model on several stages.
        """
        self.results = {}
        where = self._choose_who_trains(resume_from_checkpoint or None)
        self.is_in_train = True
        with ExitStack() as stack:
            stack.callback(setattr, self, "is_in_train", False)
            self._check_masters()
            if self.trains_alone:
                self.cast_to_masters()
            else:
                stack.callback(self.pipelined.leave)
                self.context.timeouts.rest()
            # The lock comes first: reported faults are written to the events file, which may belong to another run.
            stack.enter_context(self._only_run(trial))
            stack.enter_context(self._storing(self.stored_parts))
            if self.trains_alone:
                stack.enter_context(self._resumed_by_trainer(where))
            else:
                stack.enter_context(self.context.timeouts.reporting_faults())
                where = stack.enter_context(self.pipelined.train_call(where, ignored_outputs))
            yield where

    def storing_on_stages(self, pipeline: Pipeline, draws: bool) -> AbstractContextManager[None]:
        """Store frozen encoders of media inside, on the ranks of the first stage; `draws` as for `StoredParts`."""
        parts = PartsOfStage(self.context.trainer, self.context, pipeline)
        return self._storing(StoredParts(parts, PartStores(parts), draws))

    @contextmanager
    def _storing(self, parts: StoredParts) -> Iterator[None]:
        """Check what is stored of frozen parts around the epochs inside, and give it back at the end."""
        trainer, outer = self.context.trainer, self.stored_parts
        trainer.callback_handler.callbacks.insert(0, parts.at_epoch_end)
        self.stored_parts = parts
        try:
            yield
        finally:
            self.stored_parts = outer
            trainer.remove_callback(parts.at_epoch_end)
            parts.end()

    def _choose_who_trains(self, where: str | bool | None) -> str | bool | None:
        """Decide whether Trainer trains; return the checkpoint to resume from, or True if it still has to be found."""
        trainer, topology, output_dir = self.context.trainer, self.context.topology, self.context.args.output_dir
        if not self.wants_pipeline:
            # The search below is collective, so all ranks must come to it or none.
            check_agreement(topology, "arguments of train()", {"resume_from_checkpoint=True": where is True})
        if self.wants_pipeline or where is not True or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            self.trains_alone = not self.wants_pipeline and not is_of_pipeline(where, output_dir)
            return where
        needs_weights = not trainer_compat.is_overridden(trainer, "_load_from_checkpoint")
        folder, is_pipelines = topology.decide(lambda: list(find_for_trainer(output_dir, needs_weights)))
        self.trains_alone = not is_pipelines
        # Without a checkpoint, Trainer raises its own error; `find_resumption` later picks the newest sound one.
        if is_pipelines or folder is None:
            return True
        # Each node may have an `output_dir` of its own, under another path.
        return os.path.join(output_dir, os.path.basename(str(folder)))

    def _only_run(self, trial: object) -> AbstractContextManager[None]:
        """Lock `output_dir` against concurrent runs; hyperparameter trials have their own folders and need no lock."""
        args, is_ours = self.context.args, not self.trains_alone
        writes = is_ours or args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint
        return only_run(args.output_dir, self.context.topology) if writes and trial is None else nullcontext()

    def _resumed_by_trainer(self, where: str | bool | None) -> AbstractContextManager[None]:
        trainer = self.context.trainer
        is_trainers = trainer.optimizer is None and not trainer_compat.is_overridden(trainer, "create_optimizer")
        return nullcontext() if where in (None, True) else resumed_by_trainer(str(where), trainer.args, is_trainers)

    # ---- weights of another precision than they are computed in ----

    def _check_masters(self) -> None:
        """Raise ValueError if `pipeline_master_dtype` cannot cast the weights of this training."""
        trainer, args = self.context.trainer, self.context.args
        if not args.pipeline_master_dtype:
            return
        if self.trains_alone and trainer.model_init is not None:
            raise ValueError(
                "pipeline_master_dtype with model_init: Trainer trains this run, and makes the model after train() "
                "begins. Load it in float32 in model_init, and leave pipeline_master_dtype out."
            )
        names = master_names(trainer.model) if has_adapters(trainer.model) else set()
        if names and not trainer.accelerator.native_amp:
            raise ValueError(
                f"pipeline_master_dtype={args.pipeline_master_dtype!r} without bf16: {min(names)} (one of "
                f"{len(names)}) would be float32, the base model that it works on is not. Set bf16=True, or load the "
                "model in float32."
            )

    def cast_to_masters(self) -> None:
        """Cast the weights of a whole model to `pipeline_master_dtype`, if it is set."""
        model = self.context.trainer.model
        if self.context.args.pipeline_master_dtype:
            cast_masters(model, master_names(model))

    # ---- logs ----

    def note_log(self, logs: dict[str, float]) -> None:
        """Write a log entry of a training, or of an evaluation after it, to the events file, with its time."""
        if self.is_training_in_pipeline or self.results:
            values = {name: value for name, value in logs.items() if isinstance(value, (int, float, str))}
            self.context.journal.write("log", values=values)
