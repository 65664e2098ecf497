"""Predicted training time: measures what a step costs besides its samples, before the first step.

With `plan_only` a run ends there: the plan is printed, with what was measured at the start.
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer

from hf_pipetransformer.cache.folder import safe_max_bytes
from hf_pipetransformer.cache.inputs import InputReport, examine_inputs
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.storage import StorageSpeed, cache_base, measure_storage, stored_dtype
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.data.loader import Request
from hf_pipetransformer.engine.timing import settled_seconds
from hf_pipetransformer.freeze.policies import freezing_of
from hf_pipetransformer.freeze.policy import check_policy
from hf_pipetransformer.planning.course import RunSchedule
from hf_pipetransformer.planning.forecast import Forecast
from hf_pipetransformer.planning.storing import DiskProfile
from hf_pipetransformer.report import duration, logger
from hf_pipetransformer.report.files import create
from hf_pipetransformer.startup.plan_words import as_json
from hf_pipetransformer.startup.plan_words import in_words as plan_in_words
from hf_pipetransformer.startup.run_plan import COMMUNICATOR_BYTES, Machine, RunPlan, plan_run


if TYPE_CHECKING:
    from hf_pipetransformer.cache.training import TrainingCache
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.startup.planner import StartUp
    from hf_pipetransformer.training.builder import PipelineBuilder


PLAN_FILE = "plan.json"
"""File in `output_dir` with the printed plan as JSON."""
MOST_ELEMENTS = 2**22
"""Upper limit of parameters that are stepped: a rough figure is enough, and each takes 16 bytes."""
NUM_REPEATS = 5
KNOWN_PACKAGES = ("torch.optim.", "transformers.")
"""Packages whose optimizers one rank can build and step alone; others may contain collectives."""


def optimizer_seconds(trainer: Trainer, parameters: Iterable[nn.Parameter]) -> float:
    """Measure the seconds per parameter of clipping and an optimizer step, on copies of some parameters.

    AdamW stands in for an optimizer that cannot be built or stepped alone. If AdamW fails too, returns 0.
    """
    given = list(parameters)
    for make in (_alike, _adamw):
        # A user's optimizer may raise anything, and the device may be out of memory; neither should end the run.
        with suppress(Exception):
            copies = _copies(given, trainer.args.device)
            return _seconds(make(trainer, copies), copies, trainer.args.max_grad_norm) if copies else 0.0
    logger.warning("The optimizer step could not be timed; the predicted training time leaves it out.")
    return 0.0


def _copies(parameters: Iterable[nn.Parameter], device: torch.device) -> list[nn.Parameter]:
    copies, left = [], MOST_ELEMENTS
    for parameter in parameters:
        if left and parameter.numel():
            rows = parameter.detach()
            per_row = max(1, parameter.numel() // len(rows)) if rows.dim() else 1
            rows = rows[: max(1, left // per_row)] if rows.dim() else rows
            # A copy on the same device too, because the steps that are timed change it.
            copies.append(nn.Parameter(rows.to(device, copy=True)))
            left = max(0, left - rows.numel())
    return copies


def _seconds(optimizer: torch.optim.Optimizer, copies: list[nn.Parameter], max_norm: float | None) -> float:
    times = []
    for _ in range(NUM_REPEATS + 1):
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        start = settled_seconds(copies[0].device)
        if max_norm:
            clip_grad_norm_(copies, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        times.append(settled_seconds(copies[0].device) - start)
    # The first step allocates the optimizer's state.
    return statistics.median(times[1:]) / sum(copy.numel() for copy in copies)


def _alike(trainer: Trainer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Build an optimizer of the run's class and options."""
    if trainer.optimizer is None:
        kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    else:
        own = trainer_compat.torch_optimizer(trainer)
        # Defaults are not always constructor arguments: AdamW adds one itself.
        kind, known = type(own), inspect.signature(type(own)).parameters
        options = {name: value for name, value in own.defaults.items() if name in known}
    if not f"{kind.__module__}.".startswith(KNOWN_PACKAGES):
        return _adamw(trainer, parameters)
    made: torch.optim.Optimizer = kind(parameters, **options)
    return made


def _adamw(_trainer: Trainer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def make_forecast(trainer: Trainer, pipeline: Pipeline, cache: TrainingCache | None) -> Forecast:
    """Build a forecast for runs that start on the pipeline's current layout, from what rank 0 measures.

    Its stage stands for the others.
    """
    args, layout, costs = trainer.args, pipeline.layout, pipeline.start_up.plans.costs
    samples = args.train_samples_per_device * layout.pipeline_size * args.gradient_accumulation_steps
    read = 0.0 if cache is None else cache.planner.input_seconds
    # Workers read while the ranks compute.
    reading = 0.0 if args.dataloader_num_workers else samples * read
    update = optimizer_seconds(trainer, pipeline.stage.trained_here().values())
    overheads = replace(costs.overheads, optimizer_per_parameter=update, per_step=reading)
    storing = None if cache is None else cache.planner.storing()
    inputs = replace(pipeline.start_up.plans.inputs(layout), overheads=overheads)
    return Forecast(layout, inputs, storing)


def in_words(seconds: float, full_seconds: float, is_certain: bool, num_frozen: int = 0) -> str:
    """Compare a predicted time with that of a run that freezes no more than `num_frozen` layers, in sentences."""
    at_least, more = "" if is_certain else "at least ", " more" if num_frozen else ""
    # Compared as it is shown below, so that no sentence contradicts its number.
    share = f"{seconds / full_seconds:.2f}"
    time = f"{at_least}{duration(seconds)}, {share} of what it takes with nothing{more} frozen"
    if float(share) >= 1:
        return f"Predicted training time: {time}. Freezing saves no time in this run."
    epochs = f"{share} of the epochs, which takes as long." if is_certain else "fewer epochs."
    return (
        f"Predicted training time: {time}. Freezing may cost accuracy: compare it with training everything for "
        f"{epochs}"
    )


# ---- a run that ends with its plan ----


def print_plan(builder: PipelineBuilder, given: Any, num_steps: int, steps_per_epoch: int) -> None:
    """Inspect and measure as for a training, print the plan on rank 0, and raise `PlanPrinted` on every rank.

    Of a model that Trainer trains, frozen parts are planned with its first batch, see `frozen_parts`: returns then.
    Collective: call on every rank. `given` is what `PipelineBuilder.inspect` takes.
    """
    context = builder.context
    report = builder.inspect_or_leave(given, is_training=True)
    if report is None:
        return
    start_up = report.start_up

    def tell() -> None:
        plan = _plan(builder, start_up, given, (num_steps, steps_per_epoch))
        print(plan_in_words(plan), flush=True)
        folder = context.args.output_dir
        os.makedirs(folder, exist_ok=True)
        with create(os.path.join(folder, PLAN_FILE)) as file:
            json.dump(as_json(plan), file)

    # By `decide`, so that an error on rank 0 does not leave the others waiting.
    context.topology.decide(tell)
    context.end_plan()


def _plan(builder: PipelineBuilder, start_up: StartUp, given: Any, length: tuple[int, int]) -> RunPlan:
    context, plans = builder.context, start_up.plans
    trainer, topology, args = context.trainer, context.topology, context.args
    num_samples = None
    report = InputReport("the loader is the script's own, whose samples have no index")
    if isinstance(given, Request):
        activation = start_up.probe.activation
        dataset, collate = trainer_compat.dataset_and_collator(trainer, given.dataset, given.description)
        report = examine_inputs(dataset, collate, activation.main_input, start_up.probe.placeholders)
        num_samples = len(dataset) if hasattr(dataset, "__len__") else None
    # Workers read while the ranks compute.
    reading = 0.0 if args.dataloader_num_workers else report.seconds_per_sample
    machine = Machine(
        topology.world_size,
        plans.device_bytes,
        topology.local_world_size,
        communicator_bytes=COMMUNICATOR_BYTES if args.device.type == "cuda" else 0.0,
        is_host=args.device.type == "cpu",
    )
    measured = [f"blocks (with {plans.costs.num_samples} samples)", "memory of the devices", "the optimizer step"]
    measured += ["transfers"] if topology.world_size > 1 else []
    measured += ["reading samples"] if report.seconds_per_sample else []
    num_layers = start_up.probe.structure.num_layers
    for text in check_policy(builder.policy, num_layers, length[0], args.freeze_min_active_layers):
        logger.warning(text)
    freezing, note, evidence = freezing_of(builder.policy, args, num_layers, plans.num_frozen_by_user, length)
    storage = None if freezing is None else _storage(args, start_up, report, num_samples or 0)
    measured += ["the cache's disk"] if storage is not None and storage.why_off is None else []
    assumed = (f"{COMMUNICATOR_BYTES / 1e9:g} GB for each communicator",) if machine.communicator_bytes else ()
    course = RunSchedule(*length, num_samples, freezing, storage, note, tuple(measured), assumed, evidence)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    overheads = replace(
        plans.costs.overheads,
        optimizer_per_parameter=optimizer_seconds(trainer, trained),
        per_step=args.train_samples_per_device * args.gradient_accumulation_steps * reading,
    )
    planner = replace(plans, costs=replace(plans.costs, overheads=overheads))
    return plan_run(trainer.model, planner, machine, course)


def _storage(args: PipeTransformerArguments, start_up: StartUp, report: InputReport, num_samples: int) -> DiskProfile:
    """Measure the disk of the activation cache, as far as samples can be stored."""
    activation, why = start_up.probe.activation, report.reason
    if len(activation.hidden_shape) != 2 or activation.changes_length:
        why = "the layers' activations are not one for each token"
    length, size = start_up.record_length, activation.hidden_shape[-1]
    base, speed, limit = cache_base(args), StorageSpeed(0.0, 0.0), args.activation_cache_max_gb
    dtype = stored_dtype(args, start_up.probe.boundary_dtypes[-1])
    try:
        record = RecordFormat(size, dtype, report.token_fields, report.sample_fields)
        if why is None:
            speed = measure_storage(base, record, length, args.train_samples_per_device, num_samples)
    except (OSError, ValueError) as error:
        return DiskProfile(why_off=why or str(error))
    allowed = safe_max_bytes(base) if limit is None else limit * 1e9
    seconds = 0.0 if args.dataloader_num_workers else report.seconds_per_sample
    return DiskProfile(record.record_bytes(length), allowed, speed.read, speed.write, seconds, why)
