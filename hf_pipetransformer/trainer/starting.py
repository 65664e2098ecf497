"""The part of the trainer that comes before any batch: checks, the first layout, loaders, faults."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.stream import StreamLoader
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.freeze.policies import FreezePolicy
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.shell import PipelineShell
from hf_pipetransformer.refusals import (
    check_arguments,
    check_dataset,
    warn_about_options,
)
from hf_pipetransformer.report.events import EventLog, logger
from hf_pipetransformer.run import host
from hf_pipetransformer.run.loaders import make_loader
from hf_pipetransformer.run.replay import read_plan
from hf_pipetransformer.run.run import Run
from hf_pipetransformer.run.starting import check_trained_model
from hf_pipetransformer.splitters import Splitter
from hf_pipetransformer.startup import StartUp
from hf_pipetransformer.transition import Stage


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
            check_trained_model(model, args, kwargs.get("optimizers", (None, None))[0])
        check_dataset(kwargs.get("train_dataset"), "training")
        for text in warn_about_options(args) if args.process_index == 0 else ():
            logger.warning(text)
        super().__init__(model, args, *positional, **named)
        self.run = Run(self, policy, splitter)
        self._logged_layout: Layout | None = None
        self._name_of: dict[int, str] = {}
        self._group_of: dict[str, int] = {}
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
        return None if self.run.in_force is None else self.run.in_force.stage

    @property
    def _eval_dataloaders(self) -> dict[str, PipelineLoader]:
        """Trainer takes one that persists from here."""
        return {} if self.run.in_force is None else self.run.in_force.persistent_loaders

    def _start(self, dataset: Any, is_training: bool) -> Stage:
        """The transition from nothing: probe the model, choose a layout, take this rank's stage."""
        found = self.run.starter.look(dataset, is_training)
        structure = found.start_up.probe.structure
        self._replayed_layouts = read_plan(self.args.layout_plan, structure, self.topology)
        return self.run.start(found, self._first_layout(found.start_up)).stage

    def _first_layout(self, start_up: StartUp) -> Layout:
        if self._replayed_layouts is not None:
            return self._replayed_layouts[0]
        return start_up.plans.layout(self.args.per_device_train_batch_size)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> PipelineShell:
        return self.run.pipeline.shell

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> torch.Tensor | None:
        # Called by Trainer's `prediction_step`; training counts over all replicas in `get_batch_samples`.
        if not any("labels" in batch for batch in batch_samples) or not host.takes_num_items(self):
            return None
        return torch.tensor(float(sum(host.items_of(self, batch) for batch in batch_samples)), device=device)

    # ---- data ----

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
        pipeline = self.run.started(dataset)
        loader = make_loader(self, self.topology, pipeline, dataset, description, batch_size, sampler_fn, is_training)
        if not is_training and not isinstance(loader, StreamLoader):
            self._serve_evaluation(loader, dataset)
        if dataloader_key is not None and self.args.dataloader_persistent_workers:
            pipeline.persistent_loaders[dataloader_key] = loader
        return loader
