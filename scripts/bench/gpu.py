"""On one GPU, most valuable first: speed and memory beside plain `Trainer`, beside bounds, and beside plans.

    python -m scripts.bench.gpu                # 12 minutes, into benchmarks/gpu_bench.json
    python -m scripts.bench.gpu --device cpu   # tiny sizes: it shows that everything runs, no figures
    python -m scripts.bench.gpu --only llama --force

A measurement that has finished is in the file, with the card's name, versions and date; a second start goes on behind
it. Each has its own minutes, after which its processes end, and is left out where fewer are left. All models have
random weights. Contenders take turns in one process. A step is an epoch over its steps, from one synchronization with
the GPU to the next; the first epoch, which loads kernels and fills the store, is not in the medians. Memory is the
peak of the allocator after the first step. Two ranks share the GPU over NCCL's sockets: their memory is that of two
GPUs, their time is not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .gpu_contenders import (
    HEADS,
    NUM_EPOCHS,
    compare,
    head_memories,
    head_memory,
    heads_beside,
    stage_memory,
    subjects,
)
from .measure import (
    KEEPS_FREED,
    REPOSITORY,
    RETURNS_FREED,
    Settings,
    experiment,
    launch_all,
    machine,
    versions,
    write_json,
)


RESULTS = {"cuda": REPOSITORY / "benchmarks" / "gpu_bench.json", "cpu": REPOSITORY / "runs" / "bench" / "gpu_cpu.json"}
PUBLISHED = {
    "tokens a second": 12473,
    "source": "https://docs.nvidia.com/nemo/automodel/performance/performance-summary.md",
    "differs": "H100, packed sequences, their kernels",
}
"""What NeMo AutoModel publishes for LoRA on Llama-3-8B, 4,096 tokens a sequence, on one GPU."""


@dataclass(frozen=True)
class Launcher:
    """Starts processes on the device until a measurement's time is over; a quick look has the time of all."""

    device: str
    deadline: float

    def __call__(self, function: Callable[..., Any], processes: int, *args: Any) -> list[Any]:
        """Return what the function returned on every rank.

        Raises:
            TimeoutError: the time is over; the processes have ended.
        """
        # Memory of a CPU is that of the process, which must give back what is freed.
        on_cpu = RETURNS_FREED | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        environment = on_cpu if self.device == "cpu" else KEEPS_FREED | {"ACCELERATE_USE_CPU": "false"}
        minutes = (self.deadline - time.monotonic()) / 60
        return launch_all(function, processes, *args, minutes=minutes, environment=environment)

    @property
    def is_tiny(self) -> bool:
        """Whether a look at everything is enough."""
        return self.device == "cpu"


def beside_trainer(group: str, subject: str, rounds: int, launcher: Launcher) -> dict[str, Any]:
    """Compare a group of contenders on one subject."""
    size = (1, 2) if launcher.is_tiny else (rounds, NUM_EPOCHS)
    [found] = launcher(compare, 1, subjects(launcher.is_tiny)[subject], group, *size)
    return found  # type: ignore[no-any-return]


def adapters(launcher: Launcher) -> dict[str, Any]:
    """LoRA on the shape of Llama-3-8B beside what another trainer publishes."""
    found = beside_trainer("adapters", "llama", 1, launcher)
    found["contenders"]["NeMo AutoModel, as published"] = PUBLISHED
    return found


def heads(launcher: Launcher) -> dict[str, Any]:
    """Memory of the last of two stages by the way its head is computed."""
    size = (64, 64, 16_000) if launcher.is_tiny else (2048, 2048, 128_000)
    return heads_beside(launcher(head_memories, 2, *size, False))


def stages(launcher: Launcher) -> dict[str, Any]:
    """Memory of two stages of the Llama with adapters beside the plan; a step has four sequences."""
    subject = replace(subjects(launcher.is_tiny)["llama"], batch=4, num_steps=2)
    ranks = launcher(stage_memory, 2, subject)
    planned = ranks[0]["planned"]
    return {
        "GiB at most of each rank": [round(rank["bytes"] / 2**30, 3) for rank in ranks],
        "GiB as planned": [round(each / 2**30, 3) for each in planned],
        "predicted over measured": [
            round(each / rank["bytes"], 3) for each, rank in zip(planned, ranks, strict=True)
        ],
    }  # fmt: skip


@experiment("head_slices.json", minutes=12, quick_minutes=2)
def head_slices(settings: Settings) -> dict[str, Any]:
    """Memory of the last of two stages by the way its head is computed, on CPUs."""
    size = settings.of((128, 256, 128_000), (32, 32, 4_000))

    def beside(is_adapted: bool) -> dict[str, Any]:
        # Each in processes of its own: what one has left in memory must not hide what the next one takes.
        found = {
            name: launch_all(head_memory, 2, name, *size, is_adapted, environment=RETURNS_FREED) for name in HEADS
        }
        return heads_beside([{name: ranks[rank] for name, ranks in found.items()} for rank in range(2)])

    return {"all weights": beside(False), "adapters": beside(True)}


@dataclass(frozen=True)
class Measurement:
    """A name in the results file, the minutes that it may take on a GPU, and what measures."""

    name: str
    minutes: float
    measure: Callable[[Launcher], dict[str, Any]]


MEASUREMENTS = (
    Measurement("half stored, BERT-base, 64 x 384 tokens", 1.5, partial(beside_trainer, "prefix", "bert 64 x 384", 2)),
    Measurement("half stored, ViT-B/16, 128 images", 2, partial(beside_trainer, "prefix", "vit 128", 2)),
    Measurement(
        "launch-bound, BERT-base, 32 x 128 tokens", 2.5, partial(beside_trainer, "launches", "bert 32 x 128", 1)
    ),
    Measurement("LoRA on Llama-3-8B's shape, 4,096 tokens", 2, adapters),
    Measurement("last stage with 128,000 words", 1, heads),
    Measurement("host's time, 8 micro-batches", 0.5, partial(beside_trainer, "accumulation", "host", 2)),
    Measurement(
        "8 micro-batches, BERT-base, 64 x 128 tokens", 1, partial(beside_trainer, "accumulation", "bert 64 x 128", 2)
    ),
    Measurement("two stages of Llama-3-8B's shape", 1.5, stages),
)
"""Most valuable first, 12 minutes together."""


def measure_all(
    measurements: Sequence[Measurement], path: Path, of_device: str, card: str, minutes: float, forces: bool = False
) -> list[str]:
    """Measure what is not in the file for this card and these versions, and return the names of what failed.

    Args:
        minutes: of all together. A measurement that may take more than what is left is left out.
    """
    end, failed = time.monotonic() + 60 * minutes, []
    for each in measurements:
        records = json.loads(path.read_text())["measurements"] if path.exists() else []
        key = {"name": each.name, "card": card, "versions": versions()}
        others = [record for record in records if not key.items() <= record.items()]
        if len(others) < len(records) and not forces:
            print(f"=== {each.name}: in {path.name} already; --force measures it again", flush=True)
            continue
        left = (end - time.monotonic()) / 60
        if left < each.minutes:
            print(f"=== {each.name}: left out, {left:.1f} minutes are left of {each.minutes:g}", flush=True)
            continue
        print(f"=== {each.name}, {each.minutes:g} minutes at most", flush=True)
        start = time.monotonic()
        try:
            found = each.measure(Launcher(of_device, end if of_device == "cpu" else start + 60 * each.minutes))
        except Exception:
            traceback.print_exc()
            failed.append(each.name)
            continue
        header = {
            "date": machine(1)["date"],
            "cuda": torch.version.cuda,
            "seconds": round(time.monotonic() - start, 1),
        }
        write_json(path, {"measurements": [*others, {**key, **header, "found": found}]})
        print(json.dumps(found), flush=True)
    return failed


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(RESULTS), default="cuda")
    parser.add_argument("--minutes", type=float, default=12, help="of all measurements together, 12")
    parser.add_argument("--only", default="", help="measurements whose names have this text")
    parser.add_argument("--output", type=Path, help="results file")
    parser.add_argument("--force", action="store_true", help="also measure what is in the file already")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("No GPU: nothing was measured. --device cpu runs everything with tiny sizes.")
    chosen = [each for each in MEASUREMENTS if options.only.lower() in each.name.lower()]
    if not chosen:
        sys.exit(f"No measurement has {options.only!r} in its name; there are {[each.name for each in MEASUREMENTS]}.")
    card = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    path = options.output or RESULTS[options.device]
    failed = measure_all(chosen, path, options.device, card, options.minutes, options.force)
    if failed:
        sys.exit(f"{len(failed)} of {len(chosen)} measurements failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
