"""The activation cache: reading, bytes on the disk, rows in bfloat16, what `auto` decides, and whole runs.

Steps with stored samples beside the bound are in freezing.py.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from transformers import Trainer

from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.store import ActivationStore

from .measure import Settings, alternate, experiment, interval_95, launch, launch_all, ratios, report, summary
from .models import RandomModel, cifar10_images, correct, sst2, vit
from .training import Timed, cache_epochs, make_trainer, train


ROW, NUM_ROWS_READ = (197, 192), 64
BATCH, NUM_BATCHES, NUM_EPOCHS = 16, 8, 4
"""Of the runs that judge `auto`; the first epoch is not frozen."""


# ---- reading ----


def write_rows(num_rows: int) -> None:
    """Write the same random rows to a store and to one flat file."""
    record_format = RecordFormat(ROW[1], torch.float32, {}, {"labels": (torch.int64, ())})
    store = ActivationStore.create(Path("store"), num_rows, record_format, 2**45)
    weights_id = store.weights_id("benchmark")
    with open("rows.bin", "wb") as file:
        for first in range(0, num_rows, NUM_ROWS_READ):
            samples = np.arange(first, min(first + NUM_ROWS_READ, num_rows))
            activation, lengths = torch.randn(len(samples), *ROW), np.full(len(samples), ROW[0])
            file.write(activation.numpy().tobytes())
            labels = {"labels": torch.from_numpy(samples)}
            store.write(samples, weights_id, activation, lengths, labels, samples.astype(np.uint64))
    store.close()
    os.sync()


def readers(num_rows: int, rank: int) -> dict[str, Callable[[], float]]:
    """Ways to read random batches; each returns its MB/s. Everything is brought into the page cache first."""
    store = ActivationStore.open(Path("store"), rank)
    mapped = np.memmap("rows.bin", np.float32, "r", shape=(num_rows, *ROW))
    source, target = (np.ones((NUM_ROWS_READ, *ROW), np.float32) for _ in range(2))
    generator = np.random.default_rng(rank)
    for first in range(0, num_rows, NUM_ROWS_READ):
        batch = np.arange(first, min(first + NUM_ROWS_READ, num_rows))
        assert bool(np.array_equal(store.read(batch, ROW[0]).activation.numpy(), mapped[batch]))

    def rate(read: Callable[[Any], Any]) -> float:
        batches = generator.integers(0, num_rows, (50, NUM_ROWS_READ))
        start = time.perf_counter()
        for batch in batches:
            read(batch)
        return batches.size * source[0].nbytes / 1e6 / (time.perf_counter() - start)

    return {
        "store": partial(rate, lambda batch: store.read(batch, ROW[0])),
        "memmap": partial(rate, lambda batch: mapped[batch]),
        "memcpy": partial(rate, lambda batch: np.copyto(target, source)),
    }


def rates(num_rows: int, rounds: int) -> dict[str, list[float]]:
    """Rates of this process while the other one waits, and of the store in both at once."""
    rank = dist.get_rank()
    if rank == 0:
        write_rows(num_rows)
    dist.barrier()
    contenders = readers(num_rows, rank)

    def in_turn(name: str) -> float:
        found = 0.0
        for turn in range(2):
            dist.barrier()
            found = contenders[name]() if turn == rank else found
        return found

    def at_once() -> float:
        dist.barrier()
        return contenders["store"]()

    turns: dict[str, Callable[[], float]] = {name: partial(in_turn, name) for name in contenders}
    return alternate({**turns, "both": at_once}, rounds)


@experiment("cache.json", section="read", minutes=6, quick_minutes=0.5)
def cache_read(settings: Settings) -> dict[str, Any]:
    """MB/s of random reads of records, hashes compared, beside a memmap and a copy; in two processes at once."""
    ranks = launch_all(rates, 2, settings.of(20_000, 640), settings.of(15, 2))
    shares = [share for found in ranks for share in ratios(found["both"], found["store"])]
    return {
        "MB/s": {name: summary(values) for name, values in ranks[0].items()},
        "ratio": {"store over memmap": summary(ratios(ranks[0]["store"], ranks[0]["memmap"]))},
        "share of its rate alone that each of two processes keeps": summary(shares),
    }


# ---- text ----


def train_text(settings: Settings, **options: Any) -> Any:
    """MiniLM on SST-2 in this process."""
    given = {**sst2(settings.data, settings.of(2_000, 200)), "compute_metrics": correct}
    return train(
        given, 32, activation_cache="on", activation_cache_dir="cache", pipeline_parallel_size="1",
        freeze_policy="fixed", learning_rate=1e-4, warmup_steps=12, weight_decay=0.01, **options,
    )  # fmt: skip


def bytes_stored(settings: Settings) -> dict[str, Any]:
    """With three layers frozen from the start."""
    results = {}
    for name, item_size in (("float32", 4), ("bfloat16", 2)):
        trainer = train_text(settings, activation_cache_dtype=name, freeze_at="0:3", num_train_epochs=2)
        [first, _] = cache_epochs(trainer.events)
        assert first["written"] == len(trainer.train_dataset), first
        num_tokens = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
        needed = num_tokens * trainer.model.config.hidden_size * item_size
        results[name] = {"over real tokens x hidden x item size": round(first["bytes_stored"] / needed, 4)}
    return results


@experiment("cache.json", section="bytes", minutes=3, quick_minutes=1, processes=1)
def cache_bytes(settings: Settings) -> dict[str, Any]:
    """Bytes on the disk over those of the activations of the real tokens of SST-2."""
    return launch(bytes_stored, 1, settings)


def accuracy(settings: Settings, seed: int, dtype: str) -> float:
    """Per cent, of three epochs with layers frozen after the first."""
    steps = -(-settings.of(2_000, 200) // 32)
    freeze_at = f"{steps}:2,{2 * steps}:3"
    trainer = train_text(settings, activation_cache_dtype=dtype, freeze_at=freeze_at, num_train_epochs=3, seed=seed)
    return 100 * trainer.evaluate()["eval_correct"] / len(trainer.eval_dataset)  # type: ignore[no-any-return]


@experiment("cache.json", section="bf16", minutes=15, quick_minutes=2, processes=1)
def cache_bf16(settings: Settings) -> dict[str, Any]:
    """Accuracy on SST-2 with rows in bfloat16 minus that with rows in float32, paired by seed."""
    points = []
    for seed in range(1, settings.of(3, 2) + 1):
        whole, half = (launch(accuracy, 1, settings, seed, dtype) for dtype in ("float32", "bfloat16"))
        points.append(half - whole)
        report("bf16", points)
    return {"points": points, "mean": statistics.mean(points), "interval_95_points": list(interval_95(points))}


# ---- the decisions of `auto` ----


def throttled(call: Callable[..., Any], seconds_per_row: float) -> Callable[..., Any]:
    """Make reads or writes of a store take so much longer."""

    def slowed(store: ActivationStore, samples: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds_per_row * len(samples))
        return call(store, samples, *args, **kwargs)

    return slowed if seconds_per_row else call


def steps_after_freeze(model: RandomModel, frozen: int, mode: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of the steps after the first epoch, and what `auto` decided."""
    trainer = train(
        model.task(NUM_BATCHES), BATCH, max_steps=NUM_EPOCHS * NUM_BATCHES, pipeline_parallel_size="1",
        freeze_policy="fixed", freeze_at=f"{NUM_BATCHES}:{frozen}", activation_cache=mode,
        activation_cache_dir="cache",
    )  # fmt: skip
    decisions = [event for event in trainer.events if event["event"] == "cache" and event["what"] == "decision"]
    return sum(trainer.clock.seconds[NUM_BATCHES:]), decisions


def decide(num_layers: int, frozen: int, hidden: int, image: int, throttle: int, rounds: int) -> dict[str, Any]:
    """One cell: the cache on, off and `auto`, in turns; `auto` is right if what it takes is no slower by 5 %."""
    make = partial(vit, num_layers=num_layers, hidden_size=hidden, image_size=image)
    slow = {name: throttled(getattr(ActivationStore, name), throttle * 1e-6) for name in ("read", "write")}
    with patch.multiple(ActivationStore, **slow):
        modes = ("on", "off", "auto")
        model = RandomModel(make, BATCH, num_layers)
        found = alternate({mode: partial(steps_after_freeze, model, frozen, mode) for mode in modes}, rounds)
    seconds = {mode: summary([each for each, _ in runs]) for mode, runs in found.items()}
    [*_, last] = decisions = [decision for _, run in found["auto"] for decision in run]
    assert len(decisions) == rounds, decisions
    median = {mode: values["median"] for mode, values in seconds.items()}
    is_on = 2 * sum(decision["level"] > 0 for decision in decisions) > rounds
    chosen, other = ("on", "off") if is_on else ("off", "on")
    saved = last["seconds_per_sample"]["compute"] - last["seconds_per_sample"]["write"]
    return {
        "layers": num_layers, "F": frozen, "hidden": hidden, "tokens": (image // 4) ** 2 + 1,
        "microseconds a row added": throttle, "on over off": round(median["on"] / median["off"], 4),
        # What is predicted is the difference in the frozen prefix alone.
        "microseconds a sample saved, predicted": round(1e6 * saved, 1),
        "auto": chosen, "right": median[chosen] <= 1.05 * median[other], "seconds": seconds,
    }  # fmt: skip


@experiment("cache.json", section="profiler", minutes=12, quick_minutes=2, processes=1)
def cache_profiler(settings: Settings) -> dict[str, Any]:
    """Whether `auto` takes what is faster: small ViTs by depth, F, row size and speed of the store."""
    cells = []
    for depth, (hidden, image), throttle in product(settings.of((4, 12), (4,)), ((64, 16), (192, 32)), (0, 1000)):
        for frozen in settings.of((1, depth - 1), (1,)):
            cells.append(launch(decide, 1, depth, frozen, hidden, image, throttle, settings.of(3, 1)))
            report("cell", cells[-1])
    return {"cells right": sum(cell["right"] for cell in cells), "cells": len(cells), "table": cells}


# ---- whole runs ----

DDP, STATIC = "Trainer with DDP", "ours, K=2, nothing frozen"
SHORT = "Trainer with DDP for 3 epochs"
"""As many epochs as fit into the time of the runs that freeze: what anybody would do first."""
CACHED, ELASTIC = "ours, K=1, freezing, cache auto", "ours, from K=2 on, freezing, elastic, cache on"
FREEZING: dict[str, Any] = {
    "freeze_policy": "schedule", "freeze_alpha": 1 / 3, "freeze_warmup": 0.0, "freeze_min_active_layers": 0,
    "activation_cache_dir": "cache",
}  # fmt: skip
CONTENDERS: dict[str, dict[str, Any]] = {
    DDP: {},
    SHORT: {"num_train_epochs": 3},
    STATIC: {"pipeline_parallel_size": "2", "freeze_policy": "none", "activation_cache": "off"},
    CACHED: {"pipeline_parallel_size": "1", "activation_cache": "auto", **FREEZING},
    ELASTIC: {"pipeline_parallel_size": "2", "activation_cache": "on", "elastic": True, **FREEZING},
}


def train_images(settings: Settings, contender: str, seed: int, evaluates: bool) -> tuple[float, float]:
    """Seconds and accuracy of a run on images that are decoded at each access; the test images are not in its time."""
    model, training, test = cifar10_images(settings.data, settings.models, *settings.of((2_000, 4_000), (256, 200)))
    given = {
        "model": model, "train_dataset": training, "compute_metrics": correct,
        "eval_dataset": test.select(range(min(500, len(test)))),
    }  # fmt: skip
    trainer = make_trainer(
        given, 64, Trainer if "Trainer" in contender else Timed,
        **{"num_train_epochs": settings.of(10, 3), **CONTENDERS[contender]}, learning_rate=3e-4, warmup_steps=16,
        weight_decay=0.01, remove_unused_columns=False, seed=seed, eval_strategy="epoch" if evaluates else "no",
    )  # fmt: skip
    seconds = trainer.train().metrics["train_runtime"]
    return seconds, trainer.evaluate(test, metric_key_prefix="test")["test_correct"] / len(test)


def compare(settings: Settings, rounds: int, evaluates: bool) -> dict[str, list[tuple[float, float]]]:
    """Runs by contender, round by round, each a launch of its own with a seed of its round."""

    def next_run(contender: str, seeds: Any) -> tuple[float, float]:
        found = launch(train_images, 2, settings, contender, next(seeds), evaluates)
        report(contender, found)
        return found  # type: ignore[no-any-return]

    return alternate({name: partial(next_run, name, count(1)) for name in CONTENDERS}, rounds)


@experiment("cache.json", section="runs", minutes=70, quick_minutes=5)
def cache_runs(settings: Settings) -> dict[str, Any]:
    """A small ViT on CIFAR-10, F = 0 to 12 over 10 epochs: time and accuracy beside `Trainer` with DDP."""
    runs = compare(settings, settings.of(3, 1), evaluates=False)
    seconds, accuracy = ({name: [run[i] for run in found] for name, found in runs.items()} for i in range(2))
    return {
        "time ratios": {f"{ELASTIC} over {DDP}": summary(ratios(seconds[ELASTIC], seconds[DDP]))},
        "contenders": {
            name: {"seconds": summary(seconds[name]), "accuracy by round": accuracy[name]} for name in CONTENDERS
        },
    }


@experiment("cache.json", section="runs_evaluated", minutes=30, quick_minutes=5)
def cache_runs_evaluated(settings: Settings) -> dict[str, Any]:
    """The same runs with 500 test images evaluated after each epoch, in the time."""
    return {"contenders": {name: {"seconds": run[0]} for name, [run] in compare(settings, 1, evaluates=True).items()}}
