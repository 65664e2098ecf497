"""`hf-pipetransformer plan`: the plan of a run from a model's config, or the timeline of a schedule on its own."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hf_pipetransformer
from hf_pipetransformer.planning.simulator import Timeline, draw, equal_durations, simulate, steady_seconds
from hf_pipetransformer.schedules import SCHEDULE_NAMES, find_schedule, schedules_that
from hf_pipetransformer.schedules.asynchronous import window_table
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.weight_kinds import find_weights


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.planning.course import RunSchedule
    from hf_pipetransformer.planning.storing import DiskProfile
    from hf_pipetransformer.startup.planner import RunPlanner
    from hf_pipetransformer.startup.run_plan import Machine


_EQUAL_STAGES = ("schedule", "chunks", "backward", "hop", "frozen_stages", "weights", "step_microbatches", "update")
"""Options that draw a schedule of equal stages, besides the two that are required for it."""
_NEEDED = ("stages", "microbatches")
MOST_MEMORY = 1e5
"""Gigabytes of a device: a larger number was meant in other units."""


def add_plan(commands: Any) -> None:
    text = "memory, waiting and time of a run from the model's config alone; without a model, a schedule's timeline"
    # Options of a run follow, and none may be taken for the abbreviation of one of these.
    planning = commands.add_parser("plan", help=text, description=text.capitalize() + ".", allow_abbrev=False)
    planning.add_argument("model", nargs="?", help="folder or name with the config.json of a model; no weights")
    planning.add_argument("--json", action="store_true", help="print JSON instead of text")
    planning.add_argument("--png", metavar="FILE", help="draw the timeline of a batch; needs the extra 'report'")
    planning.add_argument("--svg", metavar="FILE", help="the same as SVG")
    planning.set_defaults(run=_plan)
    of_model = planning.add_argument_group("of a model")
    of_model.add_argument("--processes", type=int, help="devices of the run, one process each (required)")
    of_model.add_argument("--device_memory", type=float, help="memory of a device, in GB of 1e9 bytes (required)")
    of_model.add_argument("--processes_per_node", type=int, help="devices of a node; all by default")
    of_model.add_argument("--sequence_length", type=int, default=512, help="tokens of a sequence, 512 by default")
    of_model.add_argument("--samples", type=int, help="training samples: for epochs, freezing and the cache")
    of_model.add_argument("--dtype", help="dtype of the weights; the config's by default")
    of_model.add_argument("--lora_rank", type=int, help="train LoRA adapters of this rank on all linear layers")
    of_model.add_argument("--load_in_4bit", action="store_true", help="hold the layers below the adapters in 4 bits")
    of_model.add_argument("--device_tflops", type=float, default=100.0, help="TFLOP/s that a device reaches, 100")
    of_model.add_argument("--bandwidth", type=float, default=25.0, help="GB/s between two devices of a node, 25")
    of_model.add_argument("--node_bandwidth", type=float, help="GB/s between two devices of different nodes; the same")
    of_model.add_argument("--memory_bandwidth", type=float, default=1000.0, help="GB/s of a device's memory, 1000")
    of_model.add_argument("--disk_bandwidth", type=float, default=1.0, help="GB/s of the cache's disk, 1")
    of_model.add_argument("--reading_ms", type=float, default=0.0, help="ms to read and collate a sample, 0")
    of_model.add_argument("--launch_us", type=float, default=25.0, help="us in which an operation is launched, 25")
    of_model.add_argument("--communicator_gb", type=float, default=0.3, help="GB that each communicator takes, 0.3")
    drawing = planning.add_argument_group("without a model: equal stages, a forward through all of a rank takes 1")
    drawing.add_argument("--stages", type=int, help="ranks of the pipeline K (required)")
    drawing.add_argument("--microbatches", type=int, help="micro-batches M (required)")
    drawing.add_argument("--schedule", type=str.lower, choices=SCHEDULE_NAMES, help="1f1b by default")
    drawing.add_argument("--chunks", type=int, help="stages on each rank V; the schedule's own number by default")
    drawing.add_argument("--backward", type=float, help="time of a backward, 2 by default")
    drawing.add_argument("--hop", type=float, help="time of a message between neighboring ranks, 0 by default")
    drawing.add_argument("--frozen_stages", type=int, help="stages at the bottom that run forward only")
    drawing.add_argument("--weights", help="async_1f1b: weights that passes use, as in pipeline_weights")
    drawing.add_argument("--step_microbatches", type=int, help="async_1f1b: micro-batches of a step, 1 by default")
    drawing.add_argument("--update", type=float, help="async_1f1b: time of a stage's update, 0.5 by default")
    planning.epilog = (
        "Options of a run follow, such as --per_device_train_batch_size 4 --optim adafactor --freeze_policy fixed "
        "--freeze_at 0:6. --plan_only in a script prints the same plan with what is measured at the start."
    )


def _plan(options: argparse.Namespace) -> None:
    """Print a plan, or a schedule's timeline; exit with an error if the run fits on no number of stages."""
    if options.model is None:
        _draw_equal_stages(options)
    elif not _plan_model(options):
        raise SystemExit(1)


def _pictures(options: argparse.Namespace) -> list[str]:
    for ending in ("png", "svg"):
        path = getattr(options, ending)
        if path is not None and not path.endswith(f".{ending}"):
            raise ValueError(f"--{ending} {path}: expected a file that ends in .{ending}.")
    return [path for path in (options.png, options.svg) if path is not None]


def _plan_model(options: argparse.Namespace) -> bool:
    """Print the plan of a model; return False if it fits nowhere."""
    _check_names(options)
    if options.ends_process and options.lora_rank is None and not options.load_in_4bit:
        _leave_out_peft()
    import torch  # Imports of seconds.
    from transformers import HfArgumentParser

    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.startup.estimate import batch_on_meta, build_on_meta, estimate
    from hf_pipetransformer.startup.plan_words import as_json, in_words, save_pictures
    from hf_pipetransformer.startup.run_plan import plan_run

    alone = [f"--{name}" for name in (*_NEEDED, *_EQUAL_STAGES) if getattr(options, name) is not None]
    if alone:
        raise ValueError(
            f"{' '.join(alone)}: these draw equal stages without a model. With a model, give the options of the run, "
            "such as --pipeline_schedule, --pipeline_parallel_size and --pipeline_parallel_num_microbatches."
        )
    # Trainer's arguments look for devices and trackers, which a plan on meta tensors does without.
    given = ["--output_dir", "planned", "--use_cpu", "--report_to", "none", *options.of_run]
    (args,) = HfArgumentParser([PipeTransformerArguments]).parse_args_into_dataclasses(given)
    # After the options of the run, which an option of the plan with a wrong name is taken for.
    missing = [f"--{name}" for name in ("processes", "device_memory") if getattr(options, name) is None]
    if missing:
        raise ValueError(f"The plan of a model needs {' and '.join(missing)}.")
    if args.activation_checkpointing:
        args.pipeline_checkpoint = "layers"  # As in a run of several processes; these options know of one.
    machine, paths = _machine(options), _pictures(options)
    dtype = getattr(torch, options.dtype or "", None)
    if options.dtype and not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype {options.dtype}: expected a dtype of torch, such as bfloat16.")
    model = build_on_meta(options.model, dtype, options.lora_rank, options.load_in_4bit)
    planner = estimate(model, batch_on_meta(model, options.sequence_length), args, machine)
    plan = plan_run(model, planner, machine, _course(options, args, planner, machine))
    print(json.dumps(as_json(plan)) if options.json else in_words(plan))
    if paths:
        save_pictures(
            plan.timeline, f"{plan.model}, {plan.chosen.layout}, {plan.chosen.layout.schedule}", "seconds", paths
        )
    return plan.chosen.fits


def _check_names(options: argparse.Namespace) -> None:
    """Raise ValueError for an option that no run has, without the imports of seconds that it takes to read them."""
    known = {*_fields_in(Path(hf_pipetransformer.__file__).with_name("options") / "arguments.py")}
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    known |= {*_fields_in(Path(package.origin).with_name("training_args.py"))}
    # HfArgumentParser adds --no_NAME for what is true by default.
    known |= {f"no_{name}" for name in known}
    for word in options.of_run:
        name = word.removeprefix("--").partition("=")[0]
        # argparse takes abbreviations.
        if word.startswith("--") and not any(each.startswith(name) for each in known):
            # Its attributes that are no options come from no command line.
            own = {*vars(options)} - {"run", "command", "model", "of_run", "ends_process"}
            near = difflib.get_close_matches(name, {*known, *own}, n=1)
            hint = f"; the nearest is --{near[0]}." if near else "."
            raise ValueError(f"--{name} is no option of plan, nor of a run{hint}")


def _fields_in(path: Path) -> Iterator[str]:
    """Yield the names of the fields of the classes in a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield line.target.id


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
    names = ("device_memory", "device_tflops", "bandwidth", "node_bandwidth", "memory_bandwidth", "disk_bandwidth")
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name} {value:g}: expected a positive number.")
    for name in ("launch_us", "reading_ms", "communicator_gb"):
        if (value := getattr(options, name)) < 0:
            raise ValueError(f"--{name} {value:g}: expected 0 or more.")
    return Machine(
        options.processes,
        1e9 * options.device_memory,
        local,
        1e12 * options.device_tflops,
        1e9 * options.bandwidth,
        1e9 * options.memory_bandwidth,
        1e9 * options.communicator_gb,
        options.reading_ms / 1e3,
        node_bandwidth=1e9 * (options.node_bandwidth or 0.0),
        launch=options.launch_us / 1e6,
    )


def _course(
    options: argparse.Namespace, args: PipeTransformerArguments, planner: RunPlanner, machine: Machine
) -> RunSchedule:
    """Return the length of the run by its options, what it freezes, and what a store would hold."""
    from hf_pipetransformer.freeze.policies import freezing_of, make_policy
    from hf_pipetransformer.planning.course import RunSchedule, length_of_run

    if options.samples is not None and options.samples < 1:
        raise ValueError(f"--samples {options.samples}: expected a number of samples, 1 or more.")
    length = length_of_run(args, machine.num_devices, options.samples)
    far = "" if options.node_bandwidth is None else f" of a node and {options.node_bandwidth:g} GB/s between nodes"
    rates: tuple[str, ...] = (
        f"{options.device_tflops:g} TFLOP/s of a device and {options.memory_bandwidth:g} GB/s of its memory",
        f"{options.bandwidth:g} GB/s between two{far}, reductions beside the backward of the last micro-batch",
        f"{options.communicator_gb:g} GB for each communicator",
        f"{options.reading_ms:g} ms to read a sample, {options.launch_us:g} us to launch an operation",
    )
    if args.use_liger_kernel:
        rates += ("logits of whole sequences, as without Liger's kernels: only --plan_only runs these",)
    if not length[0]:
        note = "Without --samples or --max_steps the length of the run is unknown, and what freezing saves."
        return RunSchedule(*length, note=note, assumed=rates)
    policy = make_policy(args)
    num_layers = planner.probe.structure.num_layers
    # It also rounds shares of the run and of the layers, which the forecast needs as numbers.
    policy.check(num_layers, length[0])
    freezing, note, evidence = freezing_of(policy, args, num_layers, planner.num_frozen_by_user, length)
    if freezing is None:
        return RunSchedule(*length, options.samples, note=note, assumed=rates, evidence=evidence)
    storage, more = _storage(options, args, planner, machine)
    return RunSchedule(*length, options.samples, freezing, storage, assumed=rates + more, evidence=evidence)


def _storage(
    options: argparse.Namespace, args: PipeTransformerArguments, planner: RunPlanner, machine: Machine
) -> tuple[DiskProfile, tuple[str, ...]]:
    """Return what a store of the run's samples takes, and what was assumed for it."""
    # Here, as the cache imports datasets, which takes a second that a plan without a store can do without.
    from hf_pipetransformer.cache.folder import safe_max_bytes
    from hf_pipetransformer.cache.records import RecordFormat
    from hf_pipetransformer.cache.storage import cache_base, stored_dtype
    from hf_pipetransformer.planning.storing import DiskProfile

    activation, limit = planner.probe.activation, args.activation_cache_max_gb
    record = RecordFormat(activation.hidden_shape[-1], stored_dtype(args, planner.probe.boundary_dtypes[-1]), {}, {})
    size = float(record.record_bytes(activation.hidden_shape[0]))
    seconds = size / (1e9 * options.disk_bandwidth)
    # The same limit as in a run: half of what is free.
    allowed = safe_max_bytes(cache_base(args)) if limit is None else 1e9 * limit
    # --disk_bandwidth is that of a disk alone: the pipelines of a node share it.
    storage = DiskProfile(
        size, allowed, seconds, seconds, 0.0 if args.dataloader_num_workers else machine.reading, is_shared=True
    )
    assumed = [f"{options.disk_bandwidth:g} GB/s of the cache's disk, and samples that are the same in every epoch"]
    assumed += [] if limit is not None else ["half of the free space of this machine's disk for the cache"]
    return storage, tuple(assumed)


# ---- equal stages ----


def _draw_equal_stages(options: argparse.Namespace) -> None:
    from hf_pipetransformer.startup.plan_words import save_pictures, spans_as_json

    if options.of_run:
        raise ValueError(f"Without a model, plan draws equal stages and knows no {' '.join(options.of_run)}.")
    missing = [f"--{name}" for name in _NEEDED if getattr(options, name) is None]
    if missing:
        raise ValueError(
            "plan takes a model, with --processes and --device_memory, or draws a schedule of equal stages, with "
            f"--stages and --microbatches. Missing: {missing[0] if len(missing) == 1 else 'both'}."
        )
    given = {name: value for name in _EQUAL_STAGES if (value := getattr(options, name)) is not None}
    stages = EqualStages(stages=options.stages, microbatches=options.microbatches, **{"schedule": "1f1b", **given})
    timeline, text = stages.simulate()
    print(json.dumps(spans_as_json(timeline)) if options.json else text)
    title = f"{stages.schedule}, K={stages.stages}, M={stages.microbatches}"
    if paths := _pictures(options):
        save_pictures(timeline, title, "units of time", paths)


@dataclass(frozen=True)
class EqualStages:
    """Pipeline of equal stages, where a forward through all stages of a rank takes 1.

    Args:
        chunks: stages on each rank V; None for the schedule's own number.
        backward: time of a backward, `hop` of a message between neighboring ranks.
        frozen_stages: stages at the bottom that run forward only.
        weights: asynchronous schedules: a value of `pipeline_weights`; `step_microbatches` of an optimizer step;
            `update` is the time of a stage's update. None for their defaults.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int | None = None
    backward: float = 2.0
    hop: float = 0.0
    frozen_stages: int = 0
    weights: str | None = None
    step_microbatches: int | None = None
    update: float | None = None

    def simulate(self) -> tuple[Timeline, str]:
        """Return the timeline, and it as text with its length and what it means for memory.

        Raises:
            ValueError: the schedule cannot run these stages, or does not know an option.
        """
        schedule, size = find_schedule(self.schedule), self.stages
        num_chunks = schedule.abilities.on(size).default_chunks if self.chunks is None else self.chunks
        placement = Placement(size, num_chunks, schedule.placement)
        table = schedule.table(size, self.microbatches, num_chunks, self.frozen_stages)
        timeline = simulate(table, equal_durations(placement, self.backward, self.hop), placement)
        if schedule.abilities.overlaps_steps:
            return self._window()
        for name in ("weights", "step_microbatches", "update"):
            if getattr(self, name) is not None:
                needed = schedules_that(lambda abilities: abilities.overlaps_steps)
                raise ValueError(f"--{name} is for {' or '.join(needed)}, found {schedule.name}.")
        return timeline, f"{draw(timeline)}\n{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble"

    def _window(self) -> tuple[Timeline, str]:
        """Simulate an asynchronous schedule from one drain to the next, and say what each rank stores."""
        kind = find_weights(self.weights or "pipeoptim")
        placement, frozen = Placement(self.stages), self.frozen_stages
        step_size = 1 if self.step_microbatches is None else self.step_microbatches
        if step_size < 1:
            raise ValueError(f"--step_microbatches must be 1 or more, found {step_size}.")
        kind.check(self.stages, step_size)
        # The last step of an epoch may have fewer micro-batches.
        whole, rest = divmod(self.microbatches, step_size)
        update = 0.5 if self.update is None else self.update
        updates = tuple(0.0 if stage < frozen else update for stage in range(self.stages))
        durations = replace(equal_durations(placement, self.backward, self.hop), update=updates)
        timeline = simulate(
            window_table(placement, frozen, (step_size,) * whole + ((rest,) if rest else ())), durations, placement
        )
        steady = steady_seconds(placement, frozen, step_size, durations)
        lines = [
            draw(timeline),
            f"{timeline.end:g} units of time, {timeline.bubble:.0%} of it bubble: the window fills and drains once",
            f"{steady:g} units of time a step in a long window",
        ]
        held = find_schedule(self.schedule).in_flight(self.stages, 1, first_active_stage=frozen)
        for stage, in_flight in enumerate(held):
            copies = kind.copies(stage, self.stages, step_size) if stage >= frozen else 1
            lines.append(
                f"rank {stage}: micro-batches in flight {in_flight}, copies of its weights {copies} ({kind.name})"
            )
        if kind.direction == "adam":
            lines.append(f"{kind.name} keeps two moments a weight beside an optimizer that has none of Adam's")
        return timeline, "\n".join(lines)
