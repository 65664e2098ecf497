"""What GPUs can show of this library (`make gpu-check`): all checks that one machine allows, with a results file.

    python -m tests.gpu --output benchmarks/gpu_check.json [--device cpu]

One GPU is enough for most: in one process exactness beside Trainer in fp32 and bf16, freezing, the cache with its
pinned read-ahead, the start-up checks and what they refuse, FlashAttention-2 where it is installed, peak memory; in
two and four processes on that GPU, with gloo through host memory, stages under every kind of schedule and under one
hardware queue, tied weights, memory of groups and of micro-batches in flight, save and resume, logits, an 8-bit
optimizer and 4 bits where bitsandbytes is installed, LoRA, generation, metrics, transitions, freezing by gradient
norms, two hosts by name, an out-of-memory on one rank and a killed one. Then the same runs over NCCL, in fp16 too;
with fewer GPUs than processes these share them, and NCCL runs over sockets: its order and its numbers, but neither its
speed nor P2P or NVLink. `VERIFIED_ON_NCCL` of the package is what `nccl.verified` of the committed results says.

On the CPU every check of the first part runs too, to see that the checks themselves work. `--parts` and `--groups`
choose some of them. With `--process` this is one process of a group:

    python -m tests.gpu --process GROUP FOLDER --device cuda|cpu [--precisions fp32 bf16]

The groups `alone` and `notes` run in one process; the others run in several, and read what these wrote. Rank 0 adds a
line to `FOLDER/GROUP-BACKEND.jsonl` after each check.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import accelerate
import psutil
import torch
import transformers

from hf_pipetransformer.comm import transfers
from hf_pipetransformer.comm.groups import SAID_OF_SOCKETS, share_gpus
from hf_pipetransformer.schedules.layout import counted
from tests.gpu import one_process, stages, wider
from tests.gpu.runs import Figures


LIMIT_SECONDS = 10 * 60
STACKS_AFTER = 20
"""Seconds after which a check writes where each of its threads is."""
CHECKS = "tests.gpu"
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Group:
    """Checks of one launch, the number of its processes, and additions to its environment."""

    checks: Callable[[Path, str, Sequence[str], str], dict[str, Callable[[], Figures]]]
    num_processes: int
    environment: Mapping[str, str] = field(default_factory=dict)


GROUPS = {
    "alone": Group(one_process.alone, 1),
    "stages": Group(stages.stages, 2),
    "one_queue": Group(stages.one_queue, 2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    "four": Group(stages.four, 4),
    "shortage": Group(stages.shortage, 2),
    "notes": Group(wider.notes, 1),
    "pairs": Group(wider.pairs, 2),
    "wide": Group(wider.wide, 4),
    "overlapping": Group(wider.overlapping, 4),
    "nodes": Group(wider.nodes, 4),
    "killed": Group(wider.killed, 1),
}
"""In the order in which they run. Those of one process run without a launcher."""


def run_checks(
    checks: Mapping[str, Callable[[], Figures]], output: Path | None, agree: Callable[[], None] = lambda: None
) -> None:
    """Run every check and write a line for each; in one process a failed one does not keep the others from running.

    Of several processes one that fails ends the launch, and so the others, which may be waiting for it; `run_group`
    starts them again behind the check that failed.

    Args:
        agree: waits until the check has passed on every rank, before rank 0 writes that it has.
    """
    for name, check in checks.items():
        faulthandler.dump_traceback_later(STACKS_AFTER)
        start = time.perf_counter()
        try:
            line = {"check": name, "passed": True, **check()}
            agree()
        except Exception as error:
            traceback.print_exc()
            line = {"check": name, "passed": False, "error": f"{type(error).__name__}: {error}"}
        faulthandler.cancel_dump_traceback_later()
        line["took_s"] = round(time.perf_counter() - start, 2)
        if output is not None:
            add_line(output, line)
        if not line["passed"] and "RANK" in os.environ:
            sys.exit(1)


def machine(device: str) -> dict[str, Any]:
    """Describe the machine and the versions."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": date.today().isoformat(), "device": device, "gpus": names if device == "cuda" else [],
        "cuda": torch.version.cuda if device == "cuda" else None, "cores": os.cpu_count(),
        "processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "accelerate": accelerate.__version__,
    }  # fmt: skip


def environment(device: str, **changes: str) -> dict[str, str]:
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **common, "ACCELERATE_USE_CPU": str(device == "cpu").lower(), **changes}


def run_group(
    group: str, folder: Path, device: str, seconds: float, backend: str = "gloo", precisions: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run a group of checks in processes of their own; return a result for each, also those that were not reached.

    Every launch leaves out what has a line already: checks begin in the order of their names.
    """
    precisions = precisions or ("fp32", "bf16")
    options = ["--process", group, str(folder), "--device", device, "--backend", backend, "--precisions", *precisions]
    size, changes = GROUPS[group].num_processes, dict(GROUPS[group].environment)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)] if size > 1 else []
    if size == 1 and device == "cuda":
        changes["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    log, lines = folder / f"{group}-{backend}.log", folder / f"{group}-{backend}.jsonl"
    names = list(GROUPS[group].checks(folder, device, precisions, backend))
    deadline = time.monotonic() + seconds
    reason, found = "ended without a result", read_lines(lines)
    while len(found) < len(names) and reason != "not reached in time":
        with log.open("a") as file:
            process = subprocess.Popen(
                [sys.executable, *launcher, "-m", CHECKS, *options],
                env=environment(device, **changes), stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                reason = "not reached in time"
                end(process)
        ended, found = found, read_lines(lines)
        if len(found) < len(names) and (found == ended or found[-1]["passed"]):
            # Its process could not write why. The next launch goes on behind it.
            add_line(lines, {"check": names[len(found)], "passed": False, "error": reason})
            found = read_lines(lines)
    found += [{"check": name, "passed": False, "error": reason} for name in names[len(found) :]]
    if not all(line["passed"] for line in found):
        print(log.read_text()[-100_000:])
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_line(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def end(process: subprocess.Popen[Any]) -> None:
    """End a launch with its workers: those of torchrun are in sessions of their own."""
    launch = psutil.Process(process.pid)
    # The launch first, or it may end by itself once its workers are gone.
    for each in [launch, *launch.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def check_one_device(device: str, folder: Path, groups: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run the part for one GPU, or for the CPU in its place."""
    start = time.monotonic()
    results = []
    for group in groups:
        results += run_group(group, folder, device, seconds - (time.monotonic() - start))
    return {"machine": machine(device), "seconds": round(time.monotonic() - start, 1), "checks": results}


def check_nccl(folder: Path, groups: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run the checks of several processes over NCCL, by precision, and note the transport of each."""
    start, precisions, num_gpus = time.monotonic(), ("fp32", "bf16", "fp16"), torch.cuda.device_count()
    results = []
    for name in groups:
        size, left = GROUPS[name].num_processes, seconds - (time.monotonic() - start)
        if size > num_gpus:
            print(f"{name}: {SAID_OF_SOCKETS.format(counted(num_gpus, 'GPU'), size)}", flush=True)
        found = run_group(name, folder, "cuda", left, "nccl" if size > 1 or name == "killed" else "gloo", precisions)
        transport = {"transport": "sockets" if size > num_gpus else "direct"} if size > 1 else {}
        results += [result | transport for result in found]
    sound = set()
    for precision in precisions:
        # A transition is checked in fp32; it counts for all.
        own = [r for r in results if precision in r["check"] or r["check"].startswith("transition")]
        if all(result["passed"] for result in own):
            sound.add(precision)
    runs = sorted({(*r["run"], r["transport"]) for r in results if "run" in r and r["run"][-1] in sound})
    took = round(time.monotonic() - start, 1)
    return {"machine": machine("cuda"), "seconds": took, "checks": results, "verified": runs}


PARTS = ("one device", "nccl")


def run_parts(
    output: Path | None,
    device: str,
    parts: Sequence[str] = PARTS,
    groups: Sequence[str] = tuple(GROUPS),
    seconds: float = LIMIT_SECONDS,
) -> bool:
    """Run checks on `cuda` or `cpu`; return True if all passed.

    Args:
        output: takes the results after each part; those of other parts stay in the file.
        seconds: that a part may take.

    Raises:
        ValueError: no GPU is there, or a launcher has started this process.
    """
    if "RANK" in os.environ:
        raise ValueError("The checks start their own processes on this machine: run them without a launcher.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("No GPU: nothing was checked. --device cpu runs the same checks on the CPU.")
    results = json.loads(output.read_text()) if output is not None and output.exists() else {}
    found: dict[str, Any] = {}
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            if part == "one device":
                found[part] = check_one_device(device, Path(folder), groups, seconds)
            elif device == "cuda":
                found[part] = check_nccl(Path(folder), groups, seconds)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(results | found, indent=2) + "\n")
    checks = [check for section in found.values() for check in section["checks"]]
    for check in checks:
        print(f"{'passed' if check['passed'] else 'FAILED':8}{check['check']}  {check.get('error', '')}")
    return all(check["passed"] for check in checks)


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Check what GPUs can show.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="that a part may take")
    parser.add_argument("--process", nargs=2, metavar=("GROUP", "FOLDER"), help="be one process of a group")
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--only", default="", help="a part of the names of the checks to run")
    return parser


def run_process(name: str, folder: Path, options: argparse.Namespace) -> None:
    """Be one process of a group."""
    torch.set_num_threads(1)
    if options.backend == "nccl":
        share_gpus(torch.cuda.device_count())
    transfers._Staged = stages.Staged  # type: ignore[misc]
    if options.device == "cpu":
        # What goes through host memory on a GPU does so here: the same code.
        transfers._goes_through_host = lambda transfer: True
    output, group = folder / f"{name}-{options.backend}.jsonl", GROUPS[name]
    checks = group.checks(folder, options.device, options.precisions, options.backend)
    # No rank can be behind its first check before all have read this.
    done = {line["check"] for line in read_lines(output)}
    checks = {name: check for name, check in checks.items() if options.only in name and name not in done}
    # A rank that has failed is gone, and the launcher ends those that wait for it.
    agrees = group.num_processes > 1 and name != "shortage"
    own = output if os.environ.get("RANK", "0") == "0" else None
    run_checks(checks, own, torch.distributed.barrier if agrees else lambda: None)
    if group.num_processes > 1:
        sys.stdout.flush()
        os._exit(0)  # The groups of a run that failed cannot be destroyed, and those of others may wait for a thread.


def main(command: Sequence[str] | None = None) -> None:
    """Run parts of the checks, or one process of a group; exit with status 1 if a check fails."""
    options = parser_of().parse_args(command)
    if options.process is not None:
        run_process(options.process[0], Path(options.process[1]), options)
    elif not run_parts(options.output, options.device, options.parts, options.groups, options.seconds):
        sys.exit(1)


if __name__ == "__main__":
    main()
