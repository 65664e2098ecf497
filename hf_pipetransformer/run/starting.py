"""From a model in one piece to a pipeline: checks, a look at the model, this rank's stage under the first layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Trainer

from hf_pipetransformer.adapters import why_unsplittable
from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.freeze.policies import FreezePolicy
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.shell import PipelineShell
from hf_pipetransformer.pipeline.timing import StepMeter
from hf_pipetransformer.refusals import (
    check_arguments,
    check_dataset,
    check_launch,
    check_model,
    warn_about_options,
)
from hf_pipetransformer.report.events import logger
from hf_pipetransformer.run import host
from hf_pipetransformer.run.first_batches import first_batches, most_samples
from hf_pipetransformer.run.loaders import Request
from hf_pipetransformer.run.need import Need, does_without, need_of
from hf_pipetransformer.run.noted import noting_nothing
from hf_pipetransformer.run.pipeline import Pipeline
from hf_pipetransformer.samples import probe_samples
from hf_pipetransformer.splitters import Splitter, UnsupportedModelError, find_splitter
from hf_pipetransformer.splitters.check import undisturbed
from hf_pipetransformer.startup import StartUp, Subject, check_agreement, look_at, main_input_of
from hf_pipetransformer.transition import apply_layout
from hf_pipetransformer.wiring import StageSettings


@dataclass(frozen=True)
class Found:
    """What was found out about a model that is still in one piece.

    Args:
        start_up: about the model and its loss.
        shell: the model as Trainer sees it.
        splitter: how the model falls into layers.
        has_labels: the data set has labels.
        is_training: what the pipeline is for.
    """

    start_up: StartUp
    shell: PipelineShell
    splitter: Splitter
    has_labels: bool
    is_training: bool


@dataclass
class Starter:
    """Brings the trainer's model onto stages: the transition from nothing. Its calls are collective.

    Args:
        trainer: of the model, whose loss is computed.
        topology: the ranks.
        splitter: how the model falls into layers; None looks for it.
        events: the file with what happened to earlier runs in this folder, on rank 0.
    """

    trainer: Trainer
    topology: Topology
    splitter: Splitter | None
    events: str | None

    def __post_init__(self) -> None:
        self._took_loss_kwargs = False

    def look(self, given: Request | Any, is_training: bool) -> Found:
        """Check data set, model and loss, and measure the model.

        Args:
            given: what Trainer's loader was asked for, or a loader of the user's own.
            is_training: what the pipeline is for.

        Raises:
            ValueError: something cannot work with a pipeline.
        """
        trainer, what = self.trainer, "Training" if is_training else "Evaluation"
        if isinstance(given, Request):
            if given.dataset is None:
                raise ValueError(f"{what} needs a data set: pass {'train' if is_training else 'eval'}_dataset.")
            check_dataset(given.dataset, what.lower())
            check_agreement(self.topology, "data set", {"number of samples": _length(given.dataset)})
        if self._took_loss_kwargs:
            trainer.model_accepts_loss_kwargs = True  # As the model declares, which may be another one now.
            self._took_loss_kwargs = False
        check_trained_model(trainer.model, trainer.args, trainer.optimizer if is_training else None)
        splitter = self.splitter or find_splitter(trainer.model)
        shell = PipelineShell(trainer.model, trainer.accelerator.autocast, trainer.accelerator.native_amp)
        shell.training = is_training
        count = partial(host.items_of, trainer)
        with undisturbed(trainer.model):
            batches = first_batches(trainer, given)
            parts = (batches, main_input_of(trainer.model), count, most_samples(trainer.args))
            samples = self.topology.decide(lambda: probe_samples(*parts))
        needs_loss = is_training or all(samples.get(name) is not None for name in trainer.label_names)
        compute = partial(_loss if needs_loss else _size_of_output, trainer, shell)
        start_up = look_at(
            Subject(trainer.model, splitter, samples, compute, count),
            trainer.args,
            self.topology,
            trainer.args.device,
            is_training,
            batches.read if is_training else None,
            self.events if is_training else None,
        )
        if needs_loss and start_up.loss_rule.ignores_num_items:
            # The model swallows num_items_in_batch; dividing by it, as Trainer then expects, would be wrong
            # (transformers#47688).
            self._took_loss_kwargs = bool(trainer.model_accepts_loss_kwargs)
            trainer.model_accepts_loss_kwargs = False
        return Found(start_up, shell, splitter, "labels" in samples, is_training)

    def start(self, found: Found, layout: Layout) -> Pipeline:
        """This rank's stage of the model under `layout`."""
        args: PipeTransformerArguments = self.trainer.args
        compiled = None
        if args.torch_compile:
            compiled = partial(torch.compile, backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        meter = StepMeter(args.device)
        settings = StageSettings(args.device, args.pipeline_timeout, args.pipeline_checkpoint, meter, compiled)
        probe = found.start_up.probe
        stage = apply_layout(
            self.trainer.model, found.splitter, probe, self.topology, layout, settings, found.is_training
        )
        shifts_labels = host.shifts_labels(self.trainer)
        return Pipeline(found.start_up, found.shell, settings, shifts_labels, found.has_labels, stage)


def check_given(
    below: Any,
    model: Any,
    args: PipeTransformerArguments,
    policy: FreezePolicy | None = None,
    splitter: Splitter | None = None,
    train_dataset: Any = None,
    optimizers: Any = (None, None),
) -> bool:
    """Refuse what a trainer is given and cannot work, before Trainer takes it, and say what is taken differently.

    Args:
        below: the trainer as the classes after the mixin know it.
        model: and what else it is given.

    Returns:
        Whether the run needs a pipeline; one that does not is Trainer's, and nothing of it is refused.
    """
    check_launch(args)
    need = need_of(args, policy, splitter, model)
    if need is Need.NONE:
        args.leave_recomputing_to_trainer()
        return False
    try:
        host.check_taken_over(below, args)
        check_arguments(args)
        if model is not None:
            check_trained_model(model, args, optimizers[0])
        check_dataset(train_dataset, "training")
    except ValueError as error:
        if need is Need.MUST and not does_without(error, args, policy, splitter):
            raise
        say_left_to_trainer(error)
        args.leave_recomputing_to_trainer()
        return False
    for text in warn_about_options(args) if args.process_index == 0 else ():
        logger.warning(text)
    return True


def say_left_to_trainer(error: ValueError) -> None:
    """Why a run goes on without a pipeline."""
    if int(os.environ.get("RANK", "0")) == 0:
        logger.warning(f"This run is that of Trainer, which freezes and stores nothing: {error}")


def check_trained_model(model: Any, args: PipeTransformerArguments, users_optimizer: Any) -> None:
    """Refuse a model or an optimizer that cannot be put on the stages that the options name."""
    reason = why_unsplittable(model)
    if reason is not None:
        raise UnsupportedModelError(
            f"{reason}. Use plain LoRA on an unquantized model, or ask for no stages, micro-batches or layout_plan: "
            "the model is then trained as by Trainer."
        )
    num_stages = 1 if args.world_size == 1 else args.pipeline_size
    check_model(model, num_stages, is_undivided(args), (users_optimizer, None))


def is_undivided(args: PipeTransformerArguments) -> bool:
    """Whether one process computes each batch as a whole."""
    return args.world_size == 1 and args.num_microbatches in (None, 1)


def _loss(trainer: Trainer, shell: PipelineShell, inputs: dict[str, Any], num_items: int) -> torch.Tensor:
    device = next(trainer.model.parameters()).device  # The CPU for a model that is too large for the device.
    passes = "labels" in inputs and host.takes_num_items(trainer)
    items = torch.tensor(num_items, device=device) if passes else None
    with noting_nothing(trainer):
        loss: torch.Tensor = trainer.compute_loss(shell, _copied(inputs), num_items_in_batch=items)
    return loss


def _size_of_output(trainer: Trainer, shell: PipelineShell, inputs: dict[str, Any], num_items: int) -> torch.Tensor:
    outputs = shell(**_copied(inputs))
    logits = outputs[0] if isinstance(outputs, tuple) else next(iter(outputs.values()))
    return logits.float().square().mean()


def _copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same batch runs many times: a model may change it where it lies."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def _length(dataset: Any) -> int | None:
    """Samples of a data set; None where it does not know."""
    try:
        return len(dataset)
    except TypeError:
        return None
