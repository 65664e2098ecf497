"""The part of the trainer that comes before any batch: checks, the first layout, loaders, faults."""

from __future__ import annotations

import inspect
from collections import deque
from functools import partial
from typing import Any

import datasets
import torch
from transformers import PreTrainedModel, Trainer

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.gathering import ReplicaGather
from hf_pipetransformer.autodp.loader import PipelineLoader, make_pipeline_loader
from hf_pipetransformer.autodp.stream import is_stream, make_stream_loader
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.batches import count_items
from hf_pipetransformer.execution import StageRunner
from hf_pipetransformer.freeze.policies import FreezePolicy
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.losses import LossRule
from hf_pipetransformer.pipeline.shell import PipelineShell
from hf_pipetransformer.pipeline.timing import StepMeter
from hf_pipetransformer.refusals import (
    check_arguments,
    check_dataset,
    check_model,
    warn_about_options,
)
from hf_pipetransformer.report.events import EventLog, logger, read_layouts
from hf_pipetransformer.run.pipeline import Pipeline
from hf_pipetransformer.run.run import Run
from hf_pipetransformer.samples import probe_samples, read_batch
from hf_pipetransformer.splitters import Splitter, find_splitter
from hf_pipetransformer.splitters.check import undisturbed
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.staging import is_apart
from hf_pipetransformer.startup import StartUp, Subject, check_agreement, look_at, main_input_of
from hf_pipetransformer.transition import Settings, Stage, apply_layout


class StartingTrainer(Trainer):
    """Knows its ranks, refuses what cannot work, starts the pipeline and builds its loaders."""

    args: PipeTransformerArguments
    model_accepts_loss_kwargs: bool
    _tr_loss: torch.Tensor

    def __init__(
        self,
        model: PreTrainedModel | torch.nn.Module | None = None,
        args: PipeTransformerArguments | None = None,
        *positional: Any,
        policy: FreezePolicy | None = None,
        splitter: Splitter | None = None,
        **named: Any,
    ) -> None:
        args = PipeTransformerArguments(output_dir="tmp_trainer") if args is None else args
        check_arguments(args)
        kwargs = inspect.signature(Trainer.__init__).bind(self, model, args, *positional, **named).arguments
        if model is not None:
            self._check_model(model, args, kwargs.get("optimizers", (None, None)))
        check_dataset(kwargs.get("train_dataset"), "training")
        for text in warn_about_options(args) if args.process_index == 0 else ():
            logger.warning(text)
        super().__init__(model, args, *positional, **named)
        self.run = Run(self, policy, splitter)
        self._start_up: StartUp | None = None
        self._shell: PipelineShell | None = None
        self._batch_items: deque[int] = deque()
        self._eval_gather: ReplicaGather | None = None
        self._num_starts = 0
        self._model_declares_loss_kwargs = self.model_accepts_loss_kwargs
        self._has_labels = False
        self._logged_layout: Layout | None = None
        self._name_of: dict[int, str] = {}
        self._group_of: dict[str, int] = {}
        self._shared_generator: torch.Generator | None = None
        self._loss_rule = LossRule.MEAN
        self._settings = self._make_settings()
        self._replayed_layouts: dict[int, Layout] | None = None

    # ---- layout and life of the pipeline ----

    @property
    def layout(self) -> Layout | None:
        """The layout in force; None before the first training, evaluation or prediction."""
        return self.run.layout

    @property
    def topology(self) -> Topology:
        """The ranks."""
        return self.run.topology

    @property
    def events(self) -> EventLog:
        """The events file."""
        return self.run.journal.log

    @property
    def _stage(self) -> Stage | None:
        return None if self.run.pipeline is None else self.run.pipeline.stage

    @property
    def _runner(self) -> StageRunner | None:
        return None if self.run.pipeline is None else self.run.pipeline.runner

    @staticmethod
    def _check_model(model: Any, args: PipeTransformerArguments, optimizers: tuple[Any, Any]) -> None:
        is_alone = args.world_size == 1
        check_model(
            model, 1 if is_alone else args.num_stages, is_alone and args.num_microbatches in (None, 1), optimizers
        )

    def _start(self, dataset: Any, is_training: bool) -> Stage:
        """The transition from nothing: probe the model, choose a layout, take this rank's stage."""
        args = self.args
        what = "Training" if is_training else "Evaluation"
        if dataset is None:
            raise ValueError(f"{what} needs a data set: pass {'train' if is_training else 'eval'}_dataset.")
        check_dataset(dataset, what.lower())
        self.model_accepts_loss_kwargs = self._model_declares_loss_kwargs
        check_agreement(self.topology, "data set", {"number of samples": _length(dataset)})
        # Loaders that persist are of the layout before.
        self._eval_dataloaders: dict[str, PipelineLoader] = {}
        self._check_model(self.model, args, (self.optimizer if self.run.has_users_optimizer else None, None))
        splitter = self.run.splitter or find_splitter(self.model)
        self._shell = PipelineShell(self.model, self.accelerator.autocast, self.accelerator.native_amp)
        self._shell.training = is_training
        columns = self._dataset_and_collator(dataset, what)
        read = partial(read_batch, *columns) if is_training else None
        with undisturbed(self.model):
            parts = (*columns, main_input_of(self.model), self._count_items)
            samples = self.topology.decide(lambda: probe_samples(*parts))
        self._has_labels = "labels" in samples
        needs_loss = is_training or all(samples.get(name) is not None for name in self.label_names)
        compute = self._probe_loss if needs_loss else self._probe_output
        subject = Subject(self.model, splitter, samples, compute, self._count_items)
        start_up = look_at(subject, args, self.topology, args.device, is_training, read)
        rule = start_up.loss_rule
        if needs_loss and rule.ignores_num_items:
            # The model swallows num_items_in_batch; dividing by it, as Trainer then expects, would be wrong
            # (transformers#47688).
            self.model_accepts_loss_kwargs = False
        self._settings = self._make_settings()
        self._replayed_layouts = self._read_plan(start_up.probe.structure) if is_training else None
        layout = self._first_layout(start_up)
        self._start_up, self._loss_rule, shell = start_up, rule.rule, self._shell
        stage = apply_layout(self.model, splitter, start_up.probe, self.topology, layout, self._settings, is_training)
        shifts = self._loss_shifts_labels
        self.run.pipeline = Pipeline(start_up, shell, self._settings, rule.rule, shifts, self._has_labels, stage)
        return stage

    def _make_settings(self) -> Settings:
        args, compiled = self.args, None
        if args.torch_compile:
            compiled = partial(torch.compile, backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        return Settings(args.device, args.pipeline_timeout, args.pipeline_checkpoint, StepMeter(args.device), compiled)

    def _started(self, dataset: Any) -> Stage:
        """This rank's stage of the model as it is now; without one, the pipeline starts, to evaluate `dataset`."""
        if self._stage is not None and self._stage.view.model is self.model:
            return self._stage
        return self._start(dataset, is_training=False)

    def _first_layout(self, start_up: StartUp) -> Layout:
        if self._replayed_layouts is not None:
            return self._replayed_layouts[0]
        return start_up.plans.layout(self.args.per_device_train_batch_size)

    def _read_plan(self, structure: Structure) -> dict[int, Layout] | None:
        """The layouts of an earlier run, by step, if the user wants them again.

        Raises:
            ValueError: they are of another model or another number of processes.
        """
        path = self.args.layout_plan
        if path is None:
            return None
        layouts = read_layouts(path)
        check_agreement(self.topology, "layout plans", {f"step {s}": str(layouts[s].as_event()) for s in layouts})
        for step, layout in layouts.items():
            found = (layout.num_layers, layout.num_stages * layout.num_replicas)
            expected = (structure.num_layers, self.topology.world_size)
            on_cuts = set(layout.boundaries) <= set(structure.cut_positions())
            if found != expected or not on_cuts:
                raise ValueError(
                    f"layout_plan={path!r} holds at step {step} a layout for {found[0]} layers on {found[1]} "
                    f"processes with boundaries {layout.boundaries}: expected {expected[0]} layers on {expected[1]} "
                    "processes. Replay a plan with the model and the number of processes that it was made with."
                )
        if min(layouts) != 0:
            raise ValueError(f"layout_plan={path!r} begins at step {min(layouts)}: expected a plan from step 0 on.")
        return layouts

    def _probe_loss(self, inputs: dict[str, Any], num_items: int) -> torch.Tensor:
        device = next(self.model.parameters()).device  # The CPU for a model that is too large for the device.
        items = torch.tensor(num_items, device=device) if self._passes_num_items(inputs) else None
        loss: torch.Tensor = self.compute_loss(self._shell, dict(inputs), num_items_in_batch=items)
        return loss

    def _probe_output(self, inputs: dict[str, Any], num_items: int) -> torch.Tensor:
        assert self._shell is not None
        outputs = self._shell(**inputs)
        logits = outputs[0] if isinstance(outputs, tuple) else next(iter(outputs.values()))
        return logits.float().square().mean()

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> PipelineShell:
        assert self._shell is not None
        return self._shell

    def _count_items(self, inputs: Any) -> int:
        return count_items(inputs, self._loss_shifts_labels) if inputs else 0

    def _passes_num_items(self, inputs: Any) -> bool:
        return "labels" in inputs and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> torch.Tensor | None:
        # Called by Trainer's `prediction_step`; training counts over all replicas in `get_batch_samples`.
        if not any(self._passes_num_items(batch) for batch in batch_samples):
            return None
        return torch.tensor(float(sum(self._count_items(batch) for batch in batch_samples)), device=device)

    # ---- data ----

    def _dataset_and_collator(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """The data set without the columns that the model does not take, and a collator that drops the rest."""
        if isinstance(dataset, datasets.Dataset):
            return self._remove_unused_columns(dataset, description=description), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=description)

    def _serve_evaluation(self, loader: PipelineLoader, dataset: Any) -> None:
        """A loader for evaluation was made; the activation cache may serve it."""

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> PipelineLoader:
        check_dataset(dataset, description.lower())
        stage = self._started(dataset)
        assert self._start_up is not None
        given = dataset
        dataset, collate = self._dataset_and_collator(given, description)
        shows_inputs = "inputs" in self.args.include_for_metrics
        options: dict[str, Any] = {
            "dataset": dataset,
            "collate": collate,
            "global_batch_size": batch_size * self.topology.world_size,
            "args": self.args,
            "groups": stage.groups,
            "placeholders": frozenset() if shows_inputs else self._start_up.probe.placeholders,
            "is_training": is_training,
            "shared": self._shared_generator,
        }
        loader: PipelineLoader
        if is_stream(dataset):
            loader = make_stream_loader(**options)
        else:
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            loader = make_pipeline_loader(**options, sampler=sampler, common_length=self._start_up.common_length)
            if not is_training:
                self._serve_evaluation(loader, given)
        loader.pins_memory = self.args.dataloader_pin_memory and is_apart(self.args.device)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            self._eval_dataloaders = {**getattr(self, "_eval_dataloaders", {}), dataloader_key: loader}
        return loader


def _length(dataset: Any) -> int | None:
    """Samples of a data set; None where it does not know."""
    try:
        return len(dataset)
    except TypeError:
        return None
