"""A run that ends with its plan before the first step: printed, with what was measured at the start."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.storage import StorageSpeed, cache_base, measure_storage, most_bytes, stored_dtype
from hf_pipetransformer.data.loader import Request
from hf_pipetransformer.freeze.policies import freezing_of
from hf_pipetransformer.freeze.policy import check_policy
from hf_pipetransformer.planning.course import RunSchedule
from hf_pipetransformer.planning.storing import DiskProfile
from hf_pipetransformer.report import logger
from hf_pipetransformer.report.files import create
from hf_pipetransformer.startup.plan_words import as_json
from hf_pipetransformer.startup.plan_words import in_words as plan_in_words
from hf_pipetransformer.startup.run_plan import COMMUNICATOR_BYTES, Machine, RunPlan, plan_run
from hf_pipetransformer.training.expectation import optimizer_seconds


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.startup.planner import StartUp
    from hf_pipetransformer.training.builder import PipelineBuilder


PLAN_FILE = "plan.json"
"""File in `output_dir` with the printed plan as JSON."""


def print_plan(builder: PipelineBuilder, given: Any, num_steps: int, steps_per_epoch: int) -> None:
    """Inspect and measure as for a training, print the plan on rank 0, and raise `PlanPrinted` on every rank.

    Of a model that Trainer trains, frozen parts are planned with its first batch, see `frozen_parts`: returns then.
    Collective: call on every rank. `given` is what `PipelineBuilder.inspect` takes.
    """
    context = builder.context
    start_up = builder.inspect_or_leave(given, is_training=True)
    if start_up is None:
        return

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
    num_samples: int | None = None
    why: str | None = "the loader is the script's own, whose samples have no index"
    if isinstance(given, Request):
        num_samples = len(given.dataset) if hasattr(given.dataset, "__len__") else None
        why = "data set or collator draw random numbers" if builder.reads_at_random else None
    # Workers read while the ranks compute.
    reading = 0.0 if args.dataloader_num_workers else builder.reading_seconds
    machine = Machine(
        topology.world_size,
        plans.device_bytes,
        topology.local_world_size,
        communicator_bytes=COMMUNICATOR_BYTES if args.device.type == "cuda" else 0.0,
        is_host=args.device.type == "cpu",
    )
    measured = [f"blocks (with {plans.costs.num_samples} samples)", "memory of the devices", "the optimizer step"]
    measured += ["transfers"] if topology.world_size > 1 else []
    measured += ["reading samples"] if reading else []
    num_layers = start_up.probe.structure.num_layers
    for text in check_policy(builder.policy, num_layers, length[0], args.freeze_min_active_layers):
        logger.warning(text)
    freezing, note, evidence = freezing_of(builder.policy, args, num_layers, plans.num_frozen_by_user, length)
    storage = None if freezing is None else _storage(args, start_up, why, num_samples or 0)
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


def _storage(args: PipeTransformerArguments, start_up: StartUp, why_off: str | None, num_samples: int) -> DiskProfile:
    """Measure the disk of the activation cache, as far as samples can be stored."""
    activation = start_up.probe.activation
    if len(activation.hidden_shape) != 2 or activation.changes_length:
        why_off = "the layers' activations are not one for each token"
    length, speed = start_up.record_length, StorageSpeed(0.0, 0.0)
    try:
        dtype = stored_dtype(args, start_up.probe.boundary_dtypes[-1])
        record = RecordFormat(activation.hidden_shape[-1], dtype)
        if why_off is None:
            speed = measure_storage(cache_base(args), record, length, args.train_samples_per_device, num_samples)
    except (OSError, ValueError) as error:
        return DiskProfile(why_off=why_off or str(error))
    return DiskProfile(record.record_bytes(length), most_bytes(args), speed.read, speed.write, why_off)
