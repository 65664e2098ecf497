"""Plans beside what is measured: a step's time and the memory of each rank.

Three models with random weights are trained on two processes, as two replicas (K=1) and as two stages (K=2). Each is
planned twice: by `--plan_only`, which measures the blocks at its start, and by `hf-pipetransformer plan` from its
config, with the rates of this machine: products and copies that are timed here, and the all-reduce that `--plan_only`
measured. Plans and runs take turns. Memory is the peak of a process's anonymous memory while it trains, beyond what it
had before the model was made and after it was trained once; plans and runs of it have `full_determinism`, under which
operations are counted to place stages: measured times may place those of a run elsewhere than those of its plan.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_pipetransformer.cli import main as command

from .measure import (
    RETURNS_FREED,
    PeakMemory,
    Settings,
    alternate,
    experiment,
    launch,
    launch_all,
    report,
    seconds_of,
)
from .models import RandomModel, bert, llama, vit
from .training import StepClock, train


NUM_STEPS, SKIPPED = 12, 3
SAME_STAGES = {"full_determinism": True}
MODELS = {
    "MiniLM": RandomModel(partial(bert, vocab_size=30522), 32, 6), "ViT": RandomModel(vit, 64, 12),
    "Llama": RandomModel(llama, 16, 8),
}  # fmt: skip


# ---- in the processes of a launch


def run(name: str, num_stages: int, memory: PeakMemory | None = None, **options: Any) -> list[float]:
    """Train once, or print the plan of it; return the seconds of the steps, the loader's part included."""
    model, clock = MODELS[name], StepClock(memory)
    with contextlib.suppress(SystemExit):  # A plan ends the script.
        train(
            {**model.task(NUM_STEPS + 1), "callbacks": [clock]}, model.batch, pipeline_parallel_size=num_stages,
            pipeline_gather_at_end="never", activation_cache="off",
            pipeline_parallel_num_microbatches="auto" if num_stages == 1 else 4,
            **{"output_dir": "output", "max_steps": NUM_STEPS, **options},
        )  # fmt: skip
    return clock.seconds


def planned(name: str, num_stages: int, **options: Any) -> dict[str, Any]:
    """The plan of `--plan_only` on rank 0, which writes it."""
    with contextlib.redirect_stdout(io.StringIO()):
        run(name, num_stages, plan_only=True, **options)
    return json.loads(Path("output", "plan.json").read_text()) if os.environ["RANK"] == "0" else {}


def step_seconds(name: str, num_stages: int) -> float:
    """Median of the steps after the first ones."""
    return statistics.median(run(name, num_stages)[SKIPPED:])


def bytes_used(name: str, num_stages: int) -> int:
    """Measure memory, of a process that has trained before: libraries allocate some things once."""
    run(name, num_stages, max_steps=2, **SAME_STAGES)
    gc.collect()
    memory = PeakMemory("made")
    run(name, num_stages, memory, max_steps=4, **SAME_STAGES)
    memory.end()
    return memory.peaks["training"]


def rates() -> dict[str, float]:
    """TFLOP/s of products as large as a layer's, and GB/s of copies, on one thread: medians of eleven."""
    left, right, large = torch.randn(2048, 384), torch.randn(384, 1536), torch.randn(2**25)
    product, copy = (
        statistics.median(seconds_of(call) for _ in range(11)) for call in (lambda: left @ right, large.clone)
    )
    return {"TFLOP/s": 2 * 2048 * 384 * 1536 / product / 1e12, "GB/s of memory": 2 * large.nbytes / copy / 1e9}


# ---- in the driver


def plan_of(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The plan of a model's config by the command line."""
    model.config.architectures = [type(model).__name__]
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        model.config.save_pretrained(folder)
        with contextlib.suppress(SystemExit):  # It fits nowhere.
            command(["plan", folder, *words, "--json"])
    return json.loads(printed.getvalue())["chosen"]  # type: ignore[no-any-return]


def beside(predicted: list[float], measured: list[float]) -> dict[str, Any]:
    """Medians of both, their ratio, and the range of the measured ones."""
    both = statistics.median(predicted), statistics.median(measured)
    return {
        "predicted": both[0], "measured": both[1], "ratio": round(both[0] / both[1], 3),
        "measured, range": [min(measured), max(measured)],
    }  # fmt: skip


def measured(name: str, num_stages: int, rounds: int, found_rates: dict[str, float]) -> dict[str, Any]:
    """Plans and runs of a model by turns, then a run whose memory is watched."""
    calls = {call: partial(launch_all, call, 2, name, num_stages) for call in (planned, step_seconds)}
    turns = alternate({call.__name__: run for call, run in calls.items()}, rounds)
    plans, steps = [ranks[0] for ranks in turns["planned"]], [max(ranks) for ranks in turns["step_seconds"]]
    used = launch_all(bytes_used, 2, name, num_stages, environment=RETURNS_FREED)
    again = launch_all(partial(planned, **SAME_STAGES), 2, name, num_stages)[0]["chosen"]
    per_byte = statistics.median(each["overheads"]["reduction_per_byte"] for each in plans)
    model, _ = MODELS[name].make(1)
    options = {
        "processes": 2, "device_memory": 8, "sequence_length": 128, "communicator_gb": 0,
        "device_tflops": found_rates["TFLOP/s"], "memory_bandwidth": found_rates["GB/s of memory"],
        "bandwidth": 1e-9 / per_byte, "per_device_train_batch_size": MODELS[name].batch // 2,
        "pipeline_parallel_size": num_stages,
        **({"pipeline_parallel_num_microbatches": 4} if num_stages > 1 else {}),
    }  # fmt: skip
    of_config, of_config_again = plan_of(model, options), plan_of(model, options | SAME_STAGES)
    found: dict[str, Any] = {"rates": found_rates}
    for way, chosen, same in (
        ("--plan_only", [each["chosen"] for each in plans], again),
        ("from the config", [of_config], of_config_again),
    ):
        found[f"seconds of a step, {way}"] = beside([each["step_seconds"] for each in chosen], steps)
        # Every replica has the memory of the one rank of its pipeline.
        totals = [rank["total"] for rank in same["memory"]] * (3 - num_stages)
        found[f"bytes of each rank, {way}"] = [beside([a], [b]) for a, b in zip(totals, used, strict=True)]
    return found


@experiment("plan.json", minutes=25, quick_minutes=4)
def plan(settings: Settings) -> dict[str, Any]:
    """Plans beside measured steps and memory of three models at K=1 and 2."""
    results: dict[str, Any] = {}
    found_rates = launch(rates, 1)
    for name in settings.of(list(MODELS), ["ViT"]):
        for num_stages in settings.of((1, 2), (2,)):
            key = f"{name}, K={num_stages}"
            results[key] = measured(name, num_stages, settings.of(3, 1), found_rates)
            report(key, results[key])
    return results
