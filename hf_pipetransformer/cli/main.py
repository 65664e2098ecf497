"""`hf-pipetransformer`: configure and test machines, plan runs, report on them, export checkpoints, manage caches."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hf_pipetransformer
from hf_pipetransformer.schedules import SCHEDULE_NAMES


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.planning.course import RunSchedule
    from hf_pipetransformer.startup.planner import RunPlanner
    from hf_pipetransformer.startup.run_plan import Machine


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="hf-pipetransformer", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {hf_pipetransformer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_config, _add_selftest, _add_plan, _add_report, _add_export_checkpoint, _add_cache):
        add(commands)
    words = sys.argv[1:] if argv is None else argv
    options, others = parser.parse_known_args([_with_underscores(word) for word in words])
    if options.command == "plan":
        # With `argv` another program calls this function, and goes on after it.
        options.of_run, options.ends_process = others, argv is None
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        options.run(options)
    except (OSError, ValueError) as error:
        raise SystemExit(_in_a_sentence(error)) from None


def _with_underscores(word: str) -> str:
    """Read `--device-memory` as `--device_memory`, as the parser of Trainer's arguments does."""
    if not word.startswith("--"):
        return word
    name, sign, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{sign}{value}"


def _in_a_sentence(error: OSError | ValueError) -> str:
    """Return what an error of a command says, with the file and the reason of one that the system gave."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return str(error)


# ---- plan ----

_EQUAL_STAGES = ("schedule", "chunks", "backward", "hop", "frozen_stages", "weights", "step_microbatches", "update")
"""Options that draw a schedule of equal stages, besides the two that are required for it."""
_NEEDED = ("stages", "microbatches")
MOST_MEMORY = 1e5
"""Gigabytes of a device: a larger number was meant in other units."""


def _add_plan(commands: Any) -> None:
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
    try:
        if options.model is None:
            _draw_equal_stages(options)
            return
        fits = _plan_model(options)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not fits:
        raise SystemExit(1)


def _draw_equal_stages(options: argparse.Namespace) -> None:
    from hf_pipetransformer.startup.timeline import EqualStages, save_pictures, spans_as_json

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
    from hf_pipetransformer.startup.plan_words import as_json, in_words
    from hf_pipetransformer.startup.run_plan import plan_run
    from hf_pipetransformer.startup.timeline import save_pictures

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
    from hf_pipetransformer.cache.folder import safe_max_bytes
    from hf_pipetransformer.cache.opening import cache_base, stored_dtype
    from hf_pipetransformer.cache.records import RecordFormat
    from hf_pipetransformer.freeze.policies import freezing_of, make_policy
    from hf_pipetransformer.planning.course import RunSchedule, length_of_run
    from hf_pipetransformer.planning.storing import DiskProfile

    activation, limit = planner.probe.activation, args.activation_cache_max_gb
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
    if not length[0]:
        note = "Without --samples or --max_steps the length of the run is unknown, and what freezing saves."
        return RunSchedule(*length, note=note, assumed=rates)
    policy = make_policy(args.freeze_policy, args.freeze_alpha, args.freeze_rule, args.freeze_at)
    num_layers = planner.probe.structure.num_layers
    # It also rounds shares of the run and of the layers, which the forecast needs as numbers.
    policy.check(num_layers, length[0])
    freezing, note, evidence = freezing_of(policy, args, num_layers, planner.num_frozen_by_user, length)
    if freezing is None:
        return RunSchedule(*length, options.samples, note=note, assumed=rates, evidence=evidence)
    record = RecordFormat(activation.hidden_shape[-1], stored_dtype(args, planner.probe.boundary_dtypes[-1]), {}, {})
    size = float(record.record_bytes(activation.hidden_shape[0]))
    seconds = size / (1e9 * options.disk_bandwidth)
    allowed = safe_max_bytes(cache_base(args)) if limit is None else 1e9 * limit
    storage = DiskProfile(
        size, allowed, seconds, seconds, 0.0 if args.dataloader_num_workers else machine.reading, is_shared=True
    )
    rates += (f"{options.disk_bandwidth:g} GB/s of the cache's disk, and samples that are the same in every epoch",)
    rates += () if limit is not None else ("half of the free space of this machine's disk for the cache",)
    return RunSchedule(*length, options.samples, freezing, storage, assumed=rates, evidence=evidence)


# ---- config ----

_CONFIG = """\
# Configuration of accelerate: {processes} on {devices}. Start a script, or a test of the machine, so:
#   accelerate launch --config_file {file} script.py --pipeline_parallel_size 2 ...
#   accelerate launch --config_file {file} -m hf_pipetransformer selftest
{note}
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
{ids}num_machines: 1
num_processes: {number}
machine_rank: 0
main_process_port: 0
mixed_precision: "no"
use_cpu: {use_cpu}

# Several machines: the same file on each, with these lines in place of those above. A pipeline stays inside a machine
# or takes whole ones; every machine starts as many processes as the others.
# num_machines: 2            # all machines
# num_processes: {several}           # of all machines together
# machine_rank: 0            # the number of this machine: 0, 1, ...
# main_process_ip: ADDRESS   # of machine 0, as the others reach it
# main_process_port: 29500   # a port of machine 0 that is free and that the others reach
# rdzv_backend: static
# same_network: true
"""
_NOTES = {
    "cpu": "# On a machine that has GPUs all the same, give scripts --use_cpu true.",
    "gpu": "# The precision is an option of the script (--bf16 true), as with Trainer.",
}


def _add_config(commands: Any) -> None:
    text = "write a configuration of accelerate for this machine"
    configuring = commands.add_parser("config", help=text, description=text.capitalize() + ".")
    configuring.add_argument("--processes", type=int, help="number of processes: by default one per GPU, 2 without")
    configuring.add_argument("--device", choices=("cpu", "gpu"), help="GPUs by default, CPUs where there is none")
    configuring.add_argument("--output", help="file to write; by default it is printed")
    configuring.set_defaults(run=_config)


def _config(options: argparse.Namespace) -> None:
    device, number = options.device, options.processes
    if device is None or number is None:
        import torch  # It takes seconds.

        num_gpus = torch.cuda.device_count()
        device = device or ("gpu" if num_gpus else "cpu")
        number = (num_gpus if device == "gpu" else 2) if number is None else number
    if number < 1:
        found = f"--processes {number}" if options.processes is not None else "No GPU is here"
        raise ValueError(f"{found}: expected a number of processes, 1 or more.")
    text = _CONFIG.format(
        processes=f"{number} process{'es' if number > 1 else ''}",
        devices="the CPUs of one machine (gloo)" if device == "cpu" else "the GPUs of one machine, one each",
        file=options.output or "FILE",
        note=_NOTES[device],
        kind="MULTI_GPU" if number > 1 else '"NO"',  # For CPUs too: with MULTI_CPU accelerate would start one process.
        ids="gpu_ids: all\n" if device == "gpu" else "",
        number=number,
        several=2 * number,
        use_cpu=str(device == "cpu").lower(),
    )
    if options.output is None:
        print(text, end="")
        return
    Path(options.output).write_text(text, encoding="utf-8")
    print(f"{options.output}: start scripts with `accelerate launch --config_file {options.output} script.py`.")


# ---- the other commands ----


def _add_selftest(commands: Any) -> None:
    text = "test the machines of a run: groups, speeds, exactness for every K and schedule, cache folder, a transition"
    testing = commands.add_parser("selftest", help=text, description=f"T{text[1:]}.")
    testing.add_argument("--use_cpu", action="store_true", help="test without GPUs, over gloo")
    testing.add_argument("--activation_cache_dir", help="as in the runs; by default in the temporary folder")
    testing.add_argument("--timeout", type=float, default=60.0, help="most seconds that a step may take, 60")
    testing.add_argument("--output", help="JSON file for all figures")
    testing.epilog = (
        "Start it as the run will be started, on all nodes: accelerate launch --multi_gpu --num_processes N "
        "-m hf_pipetransformer selftest. It takes a minute or two, prints about ten lines, and ends with status 1 and "
        "what to do if something fails."
    )
    testing.set_defaults(run=_selftest)


def _selftest(options: argparse.Namespace) -> None:
    """Test all machines of a launch; exit with an error if a check fails."""
    output = None if options.output is None else Path(options.output)
    from hf_pipetransformer.cli.selftest import Wishes, run_selftest

    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout:g}: expected a positive number of seconds.")
    run_selftest(Wishes(options.use_cpu, options.activation_cache_dir, options.timeout, output))


def _add_report(commands: Any) -> None:
    reporting = commands.add_parser("report", help="draw what runs recorded: one HTML page, and a PNG of each chart")
    reporting.add_argument("output_dir", nargs="+", help="output folders of runs, which are drawn side by side")
    reporting.add_argument("--html", help="page to write; report.html in the first folder by default")
    reporting.add_argument("--png", help="folder for a PNG of each chart; none are written by default")
    reporting.set_defaults(run=_report)


def _add_export_checkpoint(commands: Any) -> None:
    exporting = commands.add_parser("export-checkpoint", help="write a checkpoint that plain Trainer resumes")
    exporting.add_argument("checkpoint", help="a checkpoint-N of a pipeline")
    exporting.add_argument("output", help="folder to write, such as outputs/checkpoint-N")
    exporting.set_defaults(run=_export_checkpoint)


def _add_cache(commands: Any) -> None:
    caching = commands.add_parser("cache", help="list, verify or delete the activation stores of earlier runs")
    caching.add_argument("action", choices=("list", "verify", "prune"))
    caching.add_argument("--activation_cache_dir", help="as in the runs; by default in the temporary folder")
    caching.add_argument("--kept", action="store_true", help="prune: also the stores that are meant to be kept")
    caching.set_defaults(run=_cache)


def _export_checkpoint(options: argparse.Namespace) -> None:
    from hf_pipetransformer.state.plain_checkpoint import export_checkpoint  # Imports torch, which takes seconds.

    for text in export_checkpoint(options.checkpoint, options.output):
        print(text)
    print(f"{options.output} can be resumed by transformers.Trainer.")


def _report(options: argparse.Namespace) -> None:
    from hf_pipetransformer.report.page import write_report

    try:
        written = write_report(options.output_dir, options.html or f"{options.output_dir[0]}/report.html", options.png)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    print("\n".join(written))


def _cache(options: argparse.Namespace) -> None:
    """List, verify or delete activation stores; exit with an error for a damaged store or an untrusted folder."""
    from hf_pipetransformer.cache.folder import default_base, list_stores, prune_stores, verify_stores

    base, is_sound = options.activation_cache_dir or default_base(), True
    try:
        if options.action == "list":
            lines = list_stores(base)
        elif options.action == "verify":
            lines, is_sound = verify_stores(base)
        else:
            lines = prune_stores(base, options.kept)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    none = f"No activation store under {base}" + (" to delete." if options.action == "prune" else ".")
    print("\n".join(lines) or none)
    if not is_sound:
        raise SystemExit(1)
