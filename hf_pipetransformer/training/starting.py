"""Starting a pipeline, and deciding whether a run needs one: otherwise it is left to plain Trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from transformers import Trainer

from hf_pipetransformer import trainer_compat
from hf_pipetransformer.comm.errors import ModelSettingError
from hf_pipetransformer.comm.topology import Topology, check_agreement
from hf_pipetransformer.data.loader import Request
from hf_pipetransformer.elastic.transition import apply_layout
from hf_pipetransformer.engine.losses import LossDoesNotDecomposeError
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.freeze.policy import FreezePolicy
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.options.refusals import (
    check_arguments,
    check_dataset,
    check_launch,
    check_model,
    warn_about_options,
)
from hf_pipetransformer.report import logger
from hf_pipetransformer.runtime.pipeline import Pipeline, PipelineShell
from hf_pipetransformer.runtime.wiring import StageSettings
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.splitters.adapters import bare_model, has_adapters, why_unsplittable
from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError, layers_of, main_input_of
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.startup.first_samples import first_batches, most_samples, probe_samples
from hf_pipetransformer.startup.model import ProbeTarget, undisturbed
from hf_pipetransformer.startup.planner import StartUp
from hf_pipetransformer.startup.start import inspect_model
from hf_pipetransformer.training.metrics import noting_nothing


class Need(Enum):
    """Need of a run for features that Trainer does not have."""

    NONE = "none"
    WISH = "wish"
    """Trainer is an acceptable fallback. It lacks stored activations, the numbers of one process on several replicas
    and, for adapters that cannot be split, freezing.
    """
    MUST = "must"


def need_of(
    args: PipeTransformerArguments, policy: FreezePolicy | None, splitter: Splitter | None, model: Any
) -> Need:
    """Return what the options and the model require.

    `policy` and `splitter` are the user's own, if any; `model` is None if it is not built yet.
    """
    freezes = _freezes(args, policy)
    asks_for_parts = _asks_for_parts(args, splitter)
    if _leaves_adapters_to_trainer(model) and not asks_for_parts:
        return Need.WISH if freezes or args.activation_cache == "on" else Need.NONE
    is_divided = args.world_size > 1 and args.pipeline_size != 1
    if is_divided or freezes or asks_for_parts or args.activation_cache == "on":
        return Need.MUST
    if args.world_size > 1 and not has_adapters(model):
        return Need.WISH
    return Need.WISH if args.activation_cache == "auto" and _may_store(model) else Need.NONE


def does_without(
    error: ValueError, args: PipeTransformerArguments, policy: FreezePolicy | None, splitter: Splitter | None
) -> bool:
    """Return True if `error` may leave the run to Trainer, because the user asked for nothing that needs a pipeline.

    A model that cannot be split is trained without freezing. If another setting or loss would make it splittable, the
    run is refused when freezing was requested.
    """
    if _asks_for_parts(args, splitter) or args.activation_cache == "on":
        return False
    if isinstance(error, (ModelSettingError, LossDoesNotDecomposeError)):
        return not _freezes(args, policy)
    return isinstance(error, UnsupportedModelError)


def _freezes(args: PipeTransformerArguments, policy: FreezePolicy | None) -> bool:
    return args.freeze_policy != "none" if policy is None else policy.freezes


def _asks_for_parts(args: PipeTransformerArguments, splitter: Splitter | None) -> bool:
    return (
        args.pipeline_size not in (None, 1)
        or args.num_microbatches not in (None, 1)
        or (args.pipeline_checkpoint != "never" and not args.recomputes_for_trainer)
        or args.pipeline_token_slices != "auto"
        or args.layout_plan is not None
        or splitter is not None
    )


def _leaves_adapters_to_trainer(model: Any) -> bool:
    return has_adapters(model) and (why_unsplittable(model) is not None or bool(getattr(model, "hf_device_map", None)))


def _may_store(model: Any) -> bool:
    """Return True if parameters below the trained ones look frozen, so their activations could be stored."""
    if model is None:
        return False
    if not has_adapters(model):
        return any(not parameter.requires_grad for parameter in model.parameters())
    try:
        first = layers_of(find_splitter(model), bare_model(model))[0]
    except Exception:  # Any error in finding layers means there are none to store.
        return False
    return not any(parameter.requires_grad for parameter in first.parameters())


@dataclass(frozen=True)
class ModelReport:
    """Findings on a model that is still in one piece; `shell` is the model as Trainer sees it."""

    start_up: StartUp
    shell: PipelineShell
    splitter: Splitter
    has_labels: bool
    is_training: bool


@dataclass
class Starter:
    """Moves the trainer's model onto stages. Collective: call its methods on every rank.

    `events` is, on rank 0, the events file of earlier runs in this folder.
    """

    trainer: Trainer
    topology: Topology
    splitter: Splitter | None
    events: str | None

    def __post_init__(self) -> None:
        self._overrode_loss_kwargs = False

    def inspect(self, given: Request | Any, is_training: bool) -> ModelReport:
        """Check data set, model and loss, and measure the model.

        `given` is the request made to Trainer's loader, or a loader of the user's own.

        Raises:
            ValueError: something does not work with a pipeline.
        """
        trainer, what = self.trainer, "Training" if is_training else "Evaluation"
        if isinstance(given, Request):
            if given.dataset is None:
                raise ValueError(f"{what} needs a data set: pass {'train' if is_training else 'eval'}_dataset.")
            check_dataset(given.dataset, what.lower())
            check_agreement(self.topology, "data set", {"number of samples": _length(given.dataset)})
        if self._overrode_loss_kwargs:
            trainer.model_accepts_loss_kwargs = True  # Undo the override below; the model may be another one now.
            self._overrode_loss_kwargs = False
        check_trained_model(trainer.model, trainer.args, trainer.optimizer if is_training else None)
        splitter = self.splitter or find_splitter(trainer.model)
        shell = PipelineShell(trainer.model, trainer.accelerator.autocast, trainer.accelerator.native_amp)
        shell.training = is_training
        count = partial(trainer_compat.items_of, trainer)
        with undisturbed(trainer.model):
            batches = first_batches(trainer, given)
            parts = (batches, main_input_of(trainer.model), count, most_samples(trainer.args))
            samples = self.topology.decide(lambda: probe_samples(*parts))
        needs_loss = is_training or all(samples.get(name) is not None for name in trainer.label_names)
        compute = partial(_loss if needs_loss else _size_of_output, trainer, shell)
        start_up = inspect_model(
            ProbeTarget(trainer.model, splitter, samples, compute, count),
            trainer.args,
            self.topology,
            is_training,
            batches.read if is_training else None,
            self.events if is_training else None,
        )
        if needs_loss and start_up.loss_rule.ignores_num_items:
            # The model accepts num_items_in_batch but ignores it; Trainer would then skip its own division of the loss
            # (transformers#47688).
            self._overrode_loss_kwargs = bool(trainer.model_accepts_loss_kwargs)
            trainer.model_accepts_loss_kwargs = False
        return ModelReport(start_up, shell, splitter, "labels" in samples, is_training)

    def start(self, found: ModelReport, layout: Layout) -> Pipeline:
        """Build this rank's stage of the model under `layout`."""
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
        shifts_labels = trainer_compat.shifts_labels(self.trainer)
        return Pipeline(found.start_up, found.shell, settings, shifts_labels, found.has_labels, stage)


def check_constructor_arguments(
    below: Any,
    model: Any,
    args: PipeTransformerArguments,
    policy: FreezePolicy | None = None,
    splitter: Splitter | None = None,
    train_dataset: Any = None,
    optimizers: Any = (None, None),
) -> bool:
    """Check a trainer's arguments before its constructor runs; return False if the run is left to Trainer.

    Refuses what cannot work, and warns about options that mean something else. `below` is the trainer's `super()`.
    """
    check_launch(args)
    need = need_of(args, policy, splitter, model)
    if need is Need.NONE:
        args.leave_recomputing_to_trainer()
        return False
    try:
        trainer_compat.check_taken_over(below, args)
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
    """Warn why a run goes on without a pipeline."""
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
    """Return True if one process computes each batch as a whole."""
    return args.world_size == 1 and args.num_microbatches in (None, 1)


def _loss(trainer: Trainer, shell: PipelineShell, inputs: dict[str, Any], num_items: int) -> torch.Tensor:
    device = next(trainer.model.parameters()).device  # A model too large for the device is still on the CPU here.
    passes = "labels" in inputs and trainer_compat.takes_num_items(trainer)
    items = torch.tensor(num_items, device=device) if passes else None
    with noting_nothing(trainer):
        loss: torch.Tensor = trainer.compute_loss(shell, _copied(inputs), num_items_in_batch=items)
    return loss


def _size_of_output(trainer: Trainer, shell: PipelineShell, inputs: dict[str, Any], num_items: int) -> torch.Tensor:
    outputs = shell(**_copied(inputs))
    logits = outputs[0] if isinstance(outputs, tuple) else next(iter(outputs.values()))
    return logits.float().square().mean()


def _copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copy the tensors: the same batch runs many times, and a model may modify it in place."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None
