"""What `Pipe` costs on one device: time over the bare Sequential with one chunk, and peak memory by way of checkpointing.

    python scripts/benchmark_pipe.py --output benchmarks/pipe.json

Times are of forward and backward together, contenders by turns in one process with one thread. Peak memory is that of
a process of its own for each contender, less what it had before the first forward. On one CPU nothing can run side by
side: what several devices gain is not measured here.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.pipe.pipe import Pipe


MODES = ("never", "except_last", "always")
BARE = "bare Sequential"
NUM_ROUNDS, NUM_WARM_UP = 150, 5
MEMORY_CHUNKS = 8


def transformer(num_layers: int = 4, width: int = 256) -> nn.Sequential:
    layers = [
        nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, activation="gelu")
        for _ in range(num_layers)
    ]
    return nn.Sequential(*layers)


def perceptron(num_layers: int = 8, width: int = 512) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "4 transformer layers x 256, 8 sequences of 64": (transformer, (8, 64, 256)),
    "8 linear layers x 512, 256 samples": (perceptron, (256, 512)),
}


def seconds(model: nn.Module, x: torch.Tensor) -> float:
    """Of a forward and a backward."""
    start = time.perf_counter()
    model(x).sum().backward()
    taken = time.perf_counter() - start
    for parameter in model.parameters():
        parameter.grad = None
    return taken


def spread(values: list[float]) -> dict[str, float]:
    """Nine tenths of the values lie above the 10 % quantile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    found = {"median": statistics.median(values), "quantile_10": tenths[0], "quantile_90": tenths[-1]}
    return {name: round(value, 4) for name, value in found.items()}


def overheads() -> list[dict[str, Any]]:
    """Time with one chunk over that of the bare Sequential, round by round."""
    rows = []
    for name, (build, shape) in MODELS.items():
        torch.manual_seed(0)
        bare, x = build(), torch.randn(shape)
        contenders: dict[str, nn.Module] = {
            BARE: bare,
            "Pipe, a stage each layer": Pipe(deepcopy(bare)),
            "Pipe, one stage": Pipe(nn.Sequential(deepcopy(bare))),
            "the bare Sequential again": deepcopy(bare),
        }
        for model in contenders.values():
            for _ in range(NUM_WARM_UP):
                seconds(model, x)
        rounds: dict[str, list[float]] = {label: [] for label in contenders}
        for i in range(NUM_ROUNDS):
            order = list(contenders.items())
            for label, model in order[i % len(order) :] + order[: i % len(order)]:
                rounds[label].append(seconds(model, x))
        for label, times in rounds.items():
            ratios = [mine / other for mine, other in zip(times, rounds[BARE], strict=True)]
            row = {"model": name, "contender": label, "milliseconds": round(1e3 * statistics.median(times), 2)}
            rows.append({**row, "ratio_to_bare": spread(ratios)})
            print(row, rows[-1]["ratio_to_bare"], flush=True)
    return rows


def memory_model() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return transformer(num_layers=8), torch.randn(32, 128, 256)


def peak_of(contender: str) -> int:
    """Bytes by which the process grew."""
    module, x = memory_model()
    model = module if contender == BARE else Pipe(module, MEMORY_CHUNKS, contender)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model(x).sum().backward()
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def peaks() -> list[dict[str, Any]]:
    """Of contenders in processes of their own."""
    rows = []
    for contender in (BARE, *MODES):
        found = []
        for _ in range(5):
            command = [sys.executable, __file__, "--peak-of", contender]
            found.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 2**20)
        rows.append({"contender": contender, "peak_mebibytes": spread(found)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=("overhead", "memory"), help="the other stays in the file as it is")
    parser.add_argument("--peak-of", choices=(BARE, *MODES), help="print the bytes of one contender, nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of:
        print(peak_of(options.peak_of))
        return
    before = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    result = {
        "what": (
            "Pipe on one CPU, forward and backward, one thread. overhead: chunks=1, median of "
            f"{NUM_ROUNDS} rounds of a step by turns, as a ratio to the bare Sequential of the same round. "
            f"memory: 8 transformer layers x 256, 32 sequences of 128, {MEMORY_CHUNKS} chunks, a stage each layer; "
            "growth of the process's peak in the first forward and backward, 5 processes each"
        ),
        "date": str(date.today()),
        "machine": f"{platform.processor() or platform.machine()}, one thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "overhead": before.get("overhead") if options.only == "memory" else overheads(),
        "memory": before.get("memory") if options.only == "overhead" else peaks(),
    }
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
