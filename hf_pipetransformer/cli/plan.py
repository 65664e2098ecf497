"""`hf-pipetransformer plan`: the plan of a run from a model's config, or the timeline of a schedule on its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_pipetransformer.options.reading import closest
from hf_pipetransformer.planning.simulator import Timeline, draw, equal_durations, simulate, steady_seconds
from hf_pipetransformer.report.drawing import Spec, save_chart
from hf_pipetransformer.schedules.abilities import OPTIONS_OF_SCHEDULES, SCHEDULE_NAMES
from hf_pipetransformer.schedules.asynchronous import window_table
from hf_pipetransformer.schedules.layout import counted
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import find_schedule
from hf_pipetransformer.schedules.weight_kinds import find_weights


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.planning.course import RunSchedule
    from hf_pipetransformer.planning.storing import DiskProfile
    from hf_pipetransformer.startup.planner import RunPlanner
    from hf_pipetransformer.startup.run_plan import Machine


_OF_MODEL: dict[str, tuple[type, float | None, str]] = {
    "processes": (int, None, "devices of the run, one process each (required)"),
    "device_memory": (float, None, "memory of a device, in GB of 1e9 bytes (required)"),
    "processes_per_node": (int, None, "devices of a node; all by default"),
    "sequence_length": (int, 512, "tokens of a sequence, those of its images with it; 512 by default"),
    "images": (int, 0, "images or tiles of a sample beside its text; none by default"),
    "image_size": (int, None, "their height and width in pixels; the config's by default"),
    "frozen_tower": (bool, None, "train no weight of what encodes images; adapters leave it frozen too"),
    "samples": (int, None, "training samples: for epochs, freezing and the cache"),
    "dtype": (str, None, "dtype of the weights; the config's by default"),
    "lora_rank": (int, None, "train LoRA adapters of this rank on all linear layers"),
    "load_in_4bit": (bool, None, "hold the layers below the adapters in 4 bits"),
}
_FIGURES: dict[str, tuple[float | None, int, str, str]] = {
    "device_tflops": (100.0, 12, "flops", "TFLOP/s that a device reaches"),
    "memory_bandwidth": (1000.0, 9, "memory_bandwidth", "GB/s of a device's memory"),
    "bandwidth": (25.0, 9, "bandwidth", "GB/s between two devices of a node"),
    "node_bandwidth": (None, 9, "node_bandwidth", "GB/s between two devices of different nodes"),
    "communicator_gb": (0.3, 9, "communicator_bytes", "GB for each communicator"),
    "reading_ms": (0.0, -3, "reading", "ms to read and collate a sample"),
    "launch_us": (25.0, -6, "launch", "us to launch an operation"),
    "disk_bandwidth": (1.0, 9, "", "GB/s of the cache's disk"),
}
"""What a plan assumes of the machines: options with defaults, powers of ten and fields of `Machine`, words."""
_MAY_BE_ZERO = ("communicator_gb", "reading_ms", "launch_us")
_DRAWN: dict[str, tuple[Any, Any, str]] = {
    "stages": (int, None, "ranks of the pipeline K (required)"),
    "microbatches": (int, None, "micro-batches M (required)"),
    "schedule": (str.lower, "1f1b", "order of the passes"),
    "chunks": (int, None, "stages on each rank V; the schedule's own number by default"),
    "backward": (float, 2.0, "time of a backward"),
    "hop": (float, 0.0, "time of a message between neighboring ranks"),
    "frozen_stages": (int, 0, "stages at the bottom that run forward only"),
    "weights": (str, "pipeoptim", "async_1f1b: weights that passes use, as in pipeline_weights"),
    "step_microbatches": (int, 1, "async_1f1b: micro-batches of a step"),
    "update": (float, 0.5, "async_1f1b: time of a stage's update"),
}
"""Options that draw a schedule of equal stages: types, defaults and words."""
_NEEDED = ("stages", "microbatches")
MOST_MEMORY = 1e5
"""Gigabytes of a device: a larger number was meant in other units."""

_Told = tuple[str, dict[str, Any], Spec, bool]
"""What a plan says, as text, as JSON values and as a chart, and True if it fits."""


HELP = "memory, waiting and time of a run from the model's config alone; without a model, a schedule's timeline"


def add_options(planning: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    planning.add_argument("model", nargs="?", help="folder or name with the config.json of a model; no weights")
    planning.add_argument("--json", action="store_true", help="print JSON instead of text")
    planning.add_argument("--png", metavar="FILE", help="draw the timeline of a batch; needs the extra 'report'")
    planning.add_argument("--svg", metavar="FILE", help="the same as SVG")
    of_model = planning.add_argument_group("of a model")
    for name, (kind, default, words) in _OF_MODEL.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "default": default}
        of_model.add_argument(f"--{name}", help=words, **how)
    for name, (default, *_, words) in _FIGURES.items():
        usual = "the same by default" if default is None else f"{default:g} by default"
        of_model.add_argument(f"--{name}", type=float, default=default, help=f"{words}, {usual}")
    drawing = planning.add_argument_group("without a model: equal stages, a forward through all of a rank takes 1")
    for name, (kind, default, words) in _DRAWN.items():
        usual = words if default is None else f"{words}, {default} by default"
        choices = SCHEDULE_NAMES if name == "schedule" else None
        # None where it is not given, so that it is refused beside a model.
        drawing.add_argument(f"--{name}", type=kind, choices=choices, help=usual)
    planning.epilog = (
        "Options of a run follow, such as --per_device_train_batch_size 4 --optim adafactor --freeze_policy fixed "
        "--freeze_at 0:6. --plan_only in a script prints the same plan with what is measured at the start."
    )


def print_plan(options: argparse.Namespace) -> None:
    """Print a plan, or a schedule's timeline; exit with an error if the run fits on no number of stages."""
    paths = {f".{ending}": getattr(options, ending) for ending in ("png", "svg") if getattr(options, ending)}
    for ending, path in paths.items():
        if not path.endswith(ending):
            raise ValueError(f"--{ending[1:]} {path}: expected a file that ends in {ending}.")
    text, values, chart, fits = _draw_equal_stages(options) if options.model is None else _plan_model(options)
    print(json.dumps(values) if options.json else text)
    for path in paths.values():
        save_chart(chart, Path(path))
    if not fits:
        raise SystemExit(1)


def _plan_model(options: argparse.Namespace) -> _Told:
    if options.ends_process and options.lora_rank is None and not options.load_in_4bit:
        _leave_out_peft()
    import torch  # Imports of seconds.
    from transformers import HfArgumentParser

    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.planning.course import num_passes
    from hf_pipetransformer.startup.estimate import (
        batch_on_meta,
        build_on_meta,
        estimate,
        freeze_tower,
        images_on_meta,
    )
    from hf_pipetransformer.startup.plan_words import as_json, chart_of, in_words
    from hf_pipetransformer.startup.run_plan import plan_run

    alone = [f"--{name}" for name in _DRAWN if getattr(options, name) is not None]
    if alone:
        raise ValueError(
            f"{' '.join(alone)}: these draw equal stages without a model. With a model, give the options of the run, "
            "such as --pipeline_schedule, --pipeline_parallel_size and --pipeline_parallel_num_microbatches."
        )
    # Trainer's arguments look for devices and trackers, which a plan on meta tensors does without.
    given = ["--output_dir", "planned", "--use_cpu", "--report_to", "none", *options.of_run]
    parser = HfArgumentParser([PipeTransformerArguments])
    args, unknown = parser.parse_args_into_dataclasses(given, return_remaining_strings=True)
    _refuse_unknown(unknown, options, [each.name for each in fields(args)])
    # After the options of the run, which an option of the plan with a wrong name is taken for.
    missing = [f"--{name}" for name in ("processes", "device_memory") if getattr(options, name) is None]
    if missing:
        raise ValueError(f"The plan of a model needs {' and '.join(missing)}.")
    if args.activation_checkpointing:
        args.pipeline_checkpoint = "layers"  # As in a run of several processes; these options know of one.
    machine, dtype = _machine(options), getattr(torch, options.dtype or "", None)
    if options.dtype and not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype {options.dtype}: expected a dtype of torch, such as bfloat16.")
    model = build_on_meta(options.model, dtype, options.lora_rank, options.load_in_4bit)
    images = images_on_meta(model, options.images, options.image_size) if options.images else {}
    if options.frozen_tower:
        freeze_tower(model)
    passes = num_passes(args, machine.num_devices, options.samples)
    planner = estimate(model, batch_on_meta(model, options.sequence_length), args, machine, images, passes)
    plan = plan_run(model, planner, machine, _course(options, args, planner, machine))
    chart = chart_of(plan.timeline, f"{plan.model}, {plan.chosen.name}", "seconds")
    return in_words(plan), as_json(plan), chart, plan.chosen.fits


def _refuse_unknown(words: Sequence[str], options: argparse.Namespace, of_run: Iterable[str]) -> None:
    """Raise ValueError if there are `words` that neither a run nor the plan has an option for."""
    # Attributes that are no options come from no command line.
    of_plan = {*vars(options)} - {"run", "command", "model", "of_run", "ends_process"}
    if words:
        name = words[0].partition("=")[0]
        near = closest(name, [f"--{known}" for known in {*of_run, *of_plan}])
        raise ValueError(f"{name} is no option of plan, nor of a run.{near}")


def _leave_out_peft() -> None:
    """Keep transformers from importing peft, and bitsandbytes with it: seconds for what this plan does not need.

    Only for a process that ends with its plan: transformers would miss them later on.
    """
    import transformers.utils

    transformers.utils.is_peft_available = lambda: False


def _machine(options: argparse.Namespace) -> Machine:
    from hf_pipetransformer.startup.run_plan import Machine

    local = options.processes_per_node or options.processes
    if options.processes < 1 or local < 1 or options.processes % local:
        raise ValueError(f"--processes {options.processes} is no multiple of --processes_per_node {local}.")
    if options.node_bandwidth is not None and local == options.processes:
        raise ValueError("--node_bandwidth with all processes on one node: give --processes_per_node too.")
    if options.device_memory > MOST_MEMORY:
        raise ValueError(f"--device_memory {options.device_memory:g}: expected gigabytes of one device, such as 80.")
    given = {name: getattr(options, name) for name in ("device_memory", *_FIGURES)}
    for name, value in given.items():
        if value is not None and (value < 0 or (value == 0 and name not in _MAY_BE_ZERO)):
            expected = "0 or more" if name in _MAY_BE_ZERO else "a positive number"
            raise ValueError(f"--{name} {value:g}: expected {expected}.")
    # Divided by powers of ten, which are whole numbers, while 1e-6 is rounded.
    figures = {
        field: given[name] * 10**power if power > 0 else given[name] / 10**-power
        for name, (_, power, field, _) in _FIGURES.items()
        if field and given[name] is not None
    }
    return Machine(options.processes, 1e9 * options.device_memory, local, **figures)


def _course(
    options: argparse.Namespace, args: PipeTransformerArguments, planner: RunPlanner, machine: Machine
) -> RunSchedule:
    """Return the length of the run by its options, what it freezes, and what a store would hold."""
    from hf_pipetransformer.freeze.policies import freezing_of, make_policy
    from hf_pipetransformer.planning.course import RunSchedule, length_of_run

    if options.samples is not None and options.samples < 1:
        raise ValueError(f"--samples {options.samples}: expected a number of samples, 1 or more.")
    length = length_of_run(args, machine.num_devices, options.samples)
    # What the disk does counts only where something is stored.
    figures = [(getattr(options, name), words) for name, (*_, field, words) in _FIGURES.items() if field]
    assumed = [f"{value:g} {words}" for value, words in figures if value is not None]
    assumed.append("reductions beside the backward of the last micro-batch")
    if planner.probe.structure.media is not None:
        images = f"{counted(options.images, 'image')} in each sample, with tokens among those of its sequence"
        assumed.append(images if options.images else "samples of text alone: --images says how many images they have")
    if planner.read_share:
        assumed.append("images that are the same in every epoch, of which all but the first reads what is stored")
    if args.use_liger_kernel:
        assumed.append("logits of whole sequences, as without Liger's kernels: only --plan_only runs these")
    if not length[0]:
        note = "Without --samples or --max_steps the length of the run is unknown, and what freezing saves."
        return RunSchedule(*length, note=note, assumed=tuple(assumed))
    policy = make_policy(args)
    num_layers = planner.probe.structure.num_layers
    # It also rounds shares of the run and of the layers, which the forecast needs as numbers.
    policy.check(num_layers, length[0])
    freezing, note, evidence = freezing_of(policy, args, num_layers, planner.num_frozen_by_user, length)
    storage = None
    if freezing is not None:
        storage, more = _storage(options, args, planner, machine)
        assumed += more
    return RunSchedule(*length, options.samples, freezing, storage, note, assumed=tuple(assumed), evidence=evidence)


def _storage(
    options: argparse.Namespace, args: PipeTransformerArguments, planner: RunPlanner, machine: Machine
) -> tuple[DiskProfile, list[str]]:
    """Return what a store of the run's samples takes, and what was assumed for it."""
    # Here, as the cache imports datasets, which takes a second that a plan without a store can do without.
    from hf_pipetransformer.cache.records import RecordFormat
    from hf_pipetransformer.cache.storage import most_bytes, stored_dtype
    from hf_pipetransformer.planning.storing import DiskProfile

    activation, limit = planner.probe.activation, args.activation_cache_max_gb
    record = RecordFormat(activation.hidden_shape[-1], stored_dtype(args, planner.probe.boundary_dtypes[-1]))
    size = float(record.record_bytes(activation.hidden_shape[0]))
    seconds = size / (1e9 * options.disk_bandwidth)
    # The same limit as in a run: half of what is free.
    allowed = most_bytes(args)
    # --disk_bandwidth is that of a disk alone: the pipelines of a node share it.
    storage = DiskProfile(size, allowed, seconds, seconds, is_shared=True)
    assumed = [f"{options.disk_bandwidth:g} GB/s of the cache's disk, and samples that are the same in every epoch"]
    assumed += [] if limit is not None else ["half of the free space of this machine's disk for the cache"]
    return storage, assumed


# ---- equal stages ----


def _draw_equal_stages(options: argparse.Namespace) -> _Told:
    """Draw a pipeline of equal stages, where a forward through all stages of a rank takes 1.

    Raises:
        ValueError: the schedule cannot run these stages, or does not know an option.
    """
    from hf_pipetransformer.startup.plan_words import chart_of, spans_as_json

    if options.of_run:
        raise ValueError(f"Without a model, plan draws equal stages and knows no {' '.join(options.of_run)}.")
    missing = [f"--{name}" for name in _NEEDED if getattr(options, name) is None]
    if missing:
        raise ValueError(
            "plan takes a model, with --processes and --device_memory, or draws a schedule of equal stages, with "
            f"--stages and --microbatches. Missing: {missing[0] if len(missing) == 1 else 'both'}."
        )
    given = {name: getattr(options, name) for name in _DRAWN}
    drawn = argparse.Namespace(**{name: _DRAWN[name][1] if value is None else value for name, value in given.items()})
    schedule, size = find_schedule(drawn.schedule), drawn.stages
    num_chunks = schedule.abilities.on(size).default_chunks if drawn.chunks is None else drawn.chunks
    placement = Placement(size, num_chunks, schedule.abilities.placement)
    table = schedule.table(size, drawn.microbatches, num_chunks, drawn.frozen_stages)
    durations = equal_durations(placement, drawn.backward, drawn.hop)
    timeline = simulate(table, durations, placement)
    text = f"{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble"
    if "pipeline_weights" in schedule.abilities.reads:
        timeline, text = _window(drawn)
    elif unknown := [name for name in ("weights", "step_microbatches", "update") if given[name] is not None]:
        needed = OPTIONS_OF_SCHEDULES["pipeline_weights"]
        raise ValueError(f"--{unknown[0]} is for {' or '.join(needed)}, found {schedule.name}.")
    chart = chart_of(timeline, f"{schedule.name}, K={size}, M={drawn.microbatches}", "units of time")
    return f"{draw(timeline)}\n{text}", spans_as_json(timeline), chart, True


def _window(drawn: argparse.Namespace) -> tuple[Timeline, str]:
    """Simulate an asynchronous schedule from one drain to the next, and say what each rank stores."""
    kind, size, frozen = find_weights(drawn.weights), drawn.stages, drawn.frozen_stages
    placement, step_size = Placement(size), drawn.step_microbatches
    if step_size < 1:
        raise ValueError(f"--step_microbatches must be 1 or more, found {step_size}.")
    kind.check(size, step_size)
    # The last step of an epoch may have fewer micro-batches.
    whole, rest = divmod(drawn.microbatches, step_size)
    updates = tuple(0.0 if stage < frozen else drawn.update for stage in range(size))
    durations = replace(equal_durations(placement, drawn.backward, drawn.hop), update=updates)
    table = window_table(placement, frozen, (step_size,) * whole + ((rest,) if rest else ()))
    timeline = simulate(table, durations, placement)
    steady = steady_seconds(placement, frozen, step_size, durations)
    lines = [
        f"{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble: the window fills and drains once",
        f"{steady:g} units of time a step in a long window",
    ]
    for stage, in_flight in enumerate(find_schedule(drawn.schedule).in_flight(size, 1, first_active_stage=frozen)):
        copies = kind.copies(stage, size, step_size) if stage >= frozen else 1
        lines.append(
            f"rank {stage}: micro-batches in flight {in_flight}, copies of its weights {copies} ({drawn.weights})"
        )
    if kind.direction == "adam":
        lines.append(f"{drawn.weights} keeps two moments a weight beside an optimizer that has none of Adam's")
    return timeline, "\n".join(lines)
