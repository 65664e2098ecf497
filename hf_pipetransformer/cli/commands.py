"""`hf-pipetransformer`: configure and test machines, plan runs, report on them, export checkpoints, manage caches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hf_pipetransformer
from hf_pipetransformer.cli.plan import HELP, add_options, print_plan


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="hf-pipetransformer", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {hf_pipetransformer.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run, about, arguments) in _COMMANDS.items():
        command = commands.add_parser(name, **about)
        command.set_defaults(run=run)
        for argument, how in arguments.items():
            command.add_argument(argument, **how)
    add_options(commands.choices["plan"])
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


def _selftest(options: argparse.Namespace) -> None:
    """Test all machines of a launch; exit with an error if a check fails."""
    output = None if options.output is None else Path(options.output)
    from hf_pipetransformer.cli.selftest import run_selftest

    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout:g}: expected a positive number of seconds.")
    run_selftest(options.use_cpu, options.activation_cache_dir, options.timeout, output)


def _export_checkpoint(options: argparse.Namespace) -> None:
    from hf_pipetransformer.state.plain_checkpoint import export_checkpoint  # Imports torch, which takes seconds.

    for text in export_checkpoint(options.checkpoint, options.output):
        print(text)
    print(f"{options.output} can be resumed by transformers.Trainer.")


def _report(options: argparse.Namespace) -> None:
    from hf_pipetransformer.report.page import write_report

    page = options.html or f"{options.output_dir[0]}/report.html"
    print("\n".join(write_report(options.output_dir, page, options.png)))


def _cache(options: argparse.Namespace) -> None:
    """List, verify or delete activation stores; exit with an error for a damaged store or an untrusted folder."""
    from hf_pipetransformer.cache.folder import default_base
    from hf_pipetransformer.cli.stores import list_stores, prune_stores, verify_stores

    base, is_sound = options.activation_cache_dir or default_base(), True
    if options.action == "list":
        lines = list_stores(base)
    elif options.action == "verify":
        lines, is_sound = verify_stores(base)
    else:
        lines = prune_stores(base, options.kept)
    none = f"No activation store under {base}" + (" to delete." if options.action == "prune" else ".")
    print("\n".join(lines) or none)
    if not is_sound:
        raise SystemExit(1)


_STORES = {"help": "as in the runs; by default in the temporary folder"}
_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], None], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "config": (
        _config,
        {
            "help": "write a configuration of accelerate for this machine",
            "description": "Write a configuration of accelerate for this machine.",
        },
        {
            "--processes": {"type": int, "help": "number of processes: by default one per GPU, 2 without"},
            "--device": {"choices": ("cpu", "gpu"), "help": "GPUs by default, CPUs where there is none"},
            "--output": {"help": "file to write; by default it is printed"},
        },
    ),
    "selftest": (
        _selftest,
        {
            "help": "test the machines of a run: groups, speeds, exactness for every K and schedule, cache folder, a "
            "transition",
            "description": "Test the machines of a run: groups, speeds, exactness for every K and schedule, cache "
            "folder, a transition.",
            "epilog": "Start it as the run will be started, on all nodes: accelerate launch --multi_gpu "
            "--num_processes N -m hf_pipetransformer selftest. It takes a minute or two, prints about ten lines, and "
            "ends with status 1 and what to do if something fails.",
        },
        {
            "--use_cpu": {"action": "store_true", "help": "test without GPUs, over gloo"},
            "--activation_cache_dir": _STORES,
            "--timeout": {"type": float, "default": 60.0, "help": "most seconds that a step may take, 60"},
            "--output": {"help": "JSON file for all figures"},
        },
    ),
    # Options of a run follow, and none may be taken for the abbreviation of one of its own, which `add_options` adds.
    "plan": (print_plan, {"help": HELP, "description": f"{HELP.capitalize()}.", "allow_abbrev": False}, {}),
    "report": (
        _report,
        {"help": "draw what runs recorded: one HTML page, and a PNG of each chart"},
        {
            "output_dir": {"nargs": "+", "help": "output folders of runs, which are drawn side by side"},
            "--html": {"help": "page to write; report.html in the first folder by default"},
            "--png": {"help": "folder for a PNG of each chart; none are written by default"},
        },
    ),
    "export-checkpoint": (
        _export_checkpoint,
        {"help": "write a checkpoint that plain Trainer resumes"},
        {
            "checkpoint": {"help": "a checkpoint-N of a pipeline"},
            "output": {"help": "folder to write, such as outputs/checkpoint-N"},
        },
    ),
    "cache": (
        _cache,
        {"help": "list, verify or delete the activation stores of earlier runs"},
        {
            "action": {"choices": ("list", "verify", "prune")},
            "--activation_cache_dir": _STORES,
            "--kept": {"action": "store_true", "help": "prune: also the stores that are meant to be kept"},
        },
    ),
}
"""What each command runs, what its parser is made with, and its arguments."""
