"""Step times of two checkouts of this library, taking turns step by step on one machine.

    python scripts/compare_revisions.py --old ../before --new . --output benchmarks/revisions.json

Both train the same model on the same batches, in processes of their own that wait while the other side runs. A pair is
one step of each, one right after the other, and the order changes from pair to pair, so what disturbs the machine for
longer than a step meets both. Printed and written: the median of the pairs' quotients new/old with its 95 % interval
(bootstrap), and both sides' median milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "data parallel": (2, {"pipeline_parallel_size": "1", "freeze_policy": "none"}),
    "pipeline": (
        2,
        {"pipeline_parallel_size": "2", "pipeline_parallel_num_microbatches": "4", "freeze_policy": "none"},
    ),
    "half frozen": (2, {"pipeline_parallel_size": "2", "pipeline_parallel_num_microbatches": "4", "elastic": False}),
    "cache": (1, {"pipeline_parallel_size": "1", "activation_cache": "on"}),
}
"""Name to number of processes and options; the last two freeze layers before the first step."""
FROZEN_SHARE = {"half frozen": 0.5, "cache": 0.99}
WARMUP_STEPS = 10


def worker(case: str, model_name: str, batch: int, num_steps: int, folder: str) -> None:
    """One rank of one side: before each step it waits for a line, after it it writes one."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    import torch
    from benchmark_pipeline import MODELS
    from transformers import PrinterCallback, TrainerCallback

    from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

    torch.set_num_threads(1)
    world, options = CASES[case]
    make, _ = MODELS[model_name]
    model, inputs = make(4 * batch)
    samples = [{key: value[i] for key, value in inputs.items()} for i in range(4 * batch)]
    if case in FROZEN_SHARE:
        num_layers = model.config.num_hidden_layers
        options |= {"freeze_policy": "fixed", "freeze_at": f"0:{int(FROZEN_SHARE[case] * num_layers)}"}

    class Turns(TrainerCallback):
        start = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print(f"step {time.perf_counter() - self.start}", flush=True)
            sys.stdin.readline()
            self.start = time.perf_counter()

    args = PipeTransformerArguments(
        output_dir=folder, max_steps=num_steps, per_device_train_batch_size=batch // world, save_strategy="no",
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, logging_strategy="no", report_to="none",
        **options,
    )  # fmt: skip
    trainer = PipeTransformerTrainer(model, args, train_dataset=samples, callbacks=[Turns()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


class Side:
    """The processes of one checkout."""

    def __init__(self, checkout: Path, arguments: list[str], world: int, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {
            "PYTHONPATH": f"{checkout.resolve()}{os.pathsep}{checkout.resolve() / 'scripts'}", "PYTHONSAFEPATH": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "HF_HUB_OFFLINE": "1",
            "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if world == 1:
            common = {key: value for key, value in common.items() if "WORLD_SIZE" not in key and "MASTER" not in key}
        self.log = log.open("w")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--worker", *arguments],
                env={**os.environ, **common, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=checkout,
            )
            for rank in range(world)
        ]  # fmt: skip

    def wait(self) -> float:
        """Seconds of the step that is running now, until the last rank is through it."""
        return max(self._seconds(rank) for rank in self.ranks)

    def _seconds(self, rank: Any) -> float:
        for line in rank.stdout:
            if line.startswith("step "):
                return float(line.split()[1])
        raise RuntimeError(f"a worker ended; see {self.log.name}")

    def step(self) -> float:
        """One step."""
        for rank in self.ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
        return self.wait()

    def stop(self) -> None:
        """Trainings that wait for their turn have nothing to lose."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self.log.close()


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of samples drawn with replacement."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def compare(old: Path, new: Path, case: str, model_name: str, batch: int, pairs: int, folder: Path) -> dict[str, Any]:
    """Step times of one case."""
    folder.mkdir(parents=True, exist_ok=True)
    sides = {}
    for name, checkout in (("old", old), ("new", new)):
        arguments = ["--case", case, "--model", model_name, "--batch", str(batch), "--pairs", str(pairs)]
        own = folder / f"{name}-{case}-{model_name}".replace(" ", "_").replace(",", "")
        arguments += ["--folder", str(own.resolve())]
        sides[name] = Side(checkout, arguments, CASES[case][0], own.with_suffix(".log"))
    seconds: dict[str, list[float]] = {"old": [], "new": []}
    try:
        for side in sides.values():
            side.wait()
        for index in range(WARMUP_STEPS + pairs):
            for name in ("old", "new") if index % 2 else ("new", "old"):
                took = sides[name].step()
                if index >= WARMUP_STEPS:
                    seconds[name].append(took)
    finally:
        for side in sides.values():
            side.stop()
    ratios = [after / before for before, after in zip(seconds["old"], seconds["new"], strict=True)]
    low, high = interval(ratios)
    return {
        "new over old": round(statistics.median(ratios), 4), "95 % interval": [round(low, 4), round(high, 4)],
        "pairs": pairs, "batch": batch,
        **{f"{name}_ms": round(1000 * statistics.median(values), 2) for name, values in seconds.items()},
    }  # fmt: skip


def revision(checkout: Path) -> str:
    """The commit that is checked out."""
    return subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="a checkout of the revision before")
    parser.add_argument("--new", type=Path, default=Path())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="samples of a step over all processes")
    parser.add_argument("--model", action="append", help="names in benchmark_pipeline.MODELS; default: all")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="runs/revisions", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        steps = WARMUP_STEPS + options.pairs + 2
        worker(options.case[0], options.model[0], options.batch, steps, options.folder)
        return
    models = options.model or ["bert-6x384, 128 tokens", "vit-12x192, 65 tokens"]
    results: dict[str, Any] = {
        "date": date.today().isoformat(), "cores": os.cpu_count(), "old": revision(options.old),
        "new": revision(options.new),
    }  # fmt: skip
    for case in options.case or CASES:
        for model_name in models:
            found = compare(
                options.old, options.new, case, model_name, options.batch, options.pairs, Path(options.folder)
            )
            results.setdefault(case, {})[model_name] = found
            print(f"{case}, {model_name}: {json.dumps(found)}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
