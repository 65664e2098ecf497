"""What can be checked on the GPUs of this machine (`make gpu-check`), written to a results file.

    python scripts/gpu_check.py --output benchmarks/gpu_check.json [--device cpu]

One GPU is enough for most: in one process exactness beside Trainer in fp32 and bf16, freezing, the cache with its
pinned read-ahead, the start-up checks and what they refuse, FlashAttention-2 where it is installed, peak memory; in
two and four processes on that GPU, with gloo through host memory, stages under every kind of schedule and under one
hardware queue, tied weights, memory of groups and of micro-batches in flight, save and resume, logits, an 8-bit
optimizer where bitsandbytes is installed, a transition to two replicas, an out-of-memory on one rank. That part ends
within 8 minutes. With two GPUs or more (four for the checks of four processes) the same runs over NCCL, in fp16 too,
and then the tests that need it. `VERIFIED_ON_NCCL` of the package is what `nccl.verified` of the committed results
says.

`--device cpu` runs every check of the first part without a GPU, to see that the checks themselves work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import accelerate
import psutil
import torch
import transformers
from gpu_checks import GROUPS


LIMIT_SECONDS = 8 * 60
NCCL_SECONDS = 30 * 60
REPOSITORY = Path(__file__).resolve().parents[1]
CHECKS = Path(__file__).with_name("gpu_checks.py")


def machine(device: str) -> dict[str, Any]:
    """What the checks ran on."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": date.today().isoformat(), "device": device, "gpus": names if device == "cuda" else [],
        "cuda": torch.version.cuda if device == "cuda" else None, "cores": os.cpu_count(),
        "processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "accelerate": accelerate.__version__,
    }  # fmt: skip


def environment(device: str, **changes: str) -> dict[str, str]:
    paths = [str(REPOSITORY), str(CHECKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **common, "ACCELERATE_USE_CPU": str(device == "cpu").lower(), **changes}


def run_group(
    group: str, folder: Path, device: str, seconds: float, backend: str = "gloo", precisions: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """One group of checks in processes of their own: a result for each, also for those that were not reached."""
    precisions = precisions or ("fp32", "bf16")
    options = [group, str(folder), "--device", device, "--backend", backend, "--precisions", *precisions]
    size, changes = GROUPS[group].num_processes, dict(GROUPS[group].environment)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)] if size > 1 else []
    if size == 1 and device == "cuda":
        changes["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    log = folder / f"{group}-{backend}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(CHECKS), *options],
            env=environment(device, **changes), stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        reason = "ended without a result"
        try:
            process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            reason = "not reached in time"
            end(process)
    lines = folder / f"{group}-{backend}.jsonl"
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    names = GROUPS[group].checks(folder, device, precisions, backend)
    missing = [name for name in names if name not in {line["check"] for line in found}]
    found += [{"check": name, "passed": False, "error": reason} for name in missing]
    if not all(line["passed"] for line in found):
        print(log.read_text()[-20_000:])
    return found


def end(process: subprocess.Popen[Any]) -> None:
    """End a launch with its workers: those of torchrun are in sessions of their own."""
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def check_one_device(device: str, folder: Path) -> dict[str, Any]:
    """The part for one GPU, or for the CPU in its place."""
    start = time.monotonic()
    results = []
    for group in GROUPS:
        results += run_group(group, folder, device, LIMIT_SECONDS - (time.monotonic() - start))
    return {"machine": machine(device), "seconds": round(time.monotonic() - start, 1), "checks": results}


def check_nccl(folder: Path) -> dict[str, Any]:
    """Two GPUs or more: the checks of two processes over NCCL, and the tests that need them, by precision."""
    start, precisions = time.monotonic(), ("fp32", "bf16", "fp16")
    results = []
    for name, group in GROUPS.items():
        if group.num_processes <= torch.cuda.device_count():
            backend = "nccl" if group.num_processes > 1 else "gloo"
            results += run_group(name, folder, "cuda", LIMIT_SECONDS, backend, precisions)
    sound = set()
    for precision in precisions:
        tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", precision, "tests/distributed/test_gpu.py"]
        ended = subprocess.run(tests, cwd=REPOSITORY, env=environment("cuda"), timeout=NCCL_SECONDS, check=False)
        results.append({"check": f"tests, {precision}", "passed": ended.returncode == 0})
        # A transition is checked in fp32; it counts for all.
        own = [r for r in results if precision in r["check"] or r["check"].startswith("transition")]
        if all(result["passed"] for result in own):
            sound.add(precision)
    runs = sorted({tuple(result["run"]) for result in results if "run" in result and result["run"][-1] in sound})
    seconds = round(time.monotonic() - start, 1)
    return {"machine": machine("cuda"), "seconds": seconds, "checks": results, "verified": runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; sections of other runs are kept")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No GPU: nothing was checked. `--device cpu` runs the same checks on the CPU.")
        return 0
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        results["one device"] = check_one_device(options.device, Path(folder))
    if options.device == "cuda" and torch.cuda.device_count() > 1:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            results["nccl"] = check_nccl(Path(folder))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    checks = [check for section in results.values() for check in section["checks"]]
    for check in checks:
        print(f"{'passed' if check['passed'] else 'FAILED':8}{check['check']}  {check.get('error', '')}")
    return 0 if all(check["passed"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
