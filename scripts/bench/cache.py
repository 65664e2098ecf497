"""The activation cache piece by piece: reading, bytes on the disk, rows in bfloat16, and what `auto` decides.

Steps with stored samples beside the bound are in freezing.py, whole runs in cache_runs.py; all write one file.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.store import ActivationStore

from .measure import Settings, alternate, experiment, interval_95, launch, ratios, report, summary
from .models import RandomModel, correct, sst2, vit
from .training import cache_epochs, train


NUM_TOKENS, HIDDEN_SIZE, NUM_ROWS_READ, BATCHES_A_ROUND = 197, 192, 64, 50
BATCH = 32
CELL_BATCHES, CELL_EPOCHS = 8, 4
"""Of the runs that judge `auto`; the first epoch is not frozen."""
WITHIN = 0.05
"""Step times closer than this are equal when the decisions of `auto` are judged."""


# ---- reading ----


def write_rows(num_rows: int) -> float:
    """The same random rows in a store and in one flat file; MB/s of writing the store."""
    record_format = RecordFormat(HIDDEN_SIZE, torch.float32, {}, {"labels": (torch.int64, ())})
    store = ActivationStore.create(Path("store"), num_rows, record_format, 2**45)
    weights_id, seconds = store.weights_id("benchmark"), 0.0
    with open("rows.bin", "wb") as file:
        for first in range(0, num_rows, NUM_ROWS_READ):
            samples = np.arange(first, min(first + NUM_ROWS_READ, num_rows))
            activation = torch.randn(len(samples), NUM_TOKENS, HIDDEN_SIZE)
            file.write(activation.numpy().tobytes())
            labels, digests = torch.from_numpy(samples), samples.astype(np.uint64)
            lengths, start = np.full(len(samples), NUM_TOKENS), time.perf_counter()
            store.write(samples, weights_id, activation, lengths, {"labels": labels}, digests)
            seconds += time.perf_counter() - start
    store.close()
    os.sync()
    return num_rows * NUM_TOKENS * HIDDEN_SIZE * 4 / 1e6 / seconds


def readers(num_rows: int, rank: int) -> dict[str, Callable[[], float]]:
    """Ways to read random batches; each returns its MB/s. Everything is brought into the page cache first."""
    store, shape = ActivationStore.open(Path("store"), rank), (num_rows, NUM_TOKENS, HIDDEN_SIZE)
    mapped = np.memmap("rows.bin", np.float32, "r", shape=shape)
    source, target = (np.ones((NUM_ROWS_READ, *shape[1:]), np.float32) for _ in range(2))
    generator = np.random.default_rng(rank)
    for first in range(0, num_rows, NUM_ROWS_READ):
        batch = np.arange(first, min(first + NUM_ROWS_READ, num_rows))
        assert bool(np.array_equal(store.read(batch, NUM_TOKENS).activation.numpy(), mapped[batch]))

    def rate(read: Callable[[Any], Any]) -> float:
        batches = generator.integers(0, num_rows, (BATCHES_A_ROUND, NUM_ROWS_READ))
        start = time.perf_counter()
        for batch in batches:
            read(batch)
        return batches.size * source[0].nbytes / 1e6 / (time.perf_counter() - start)

    return {
        "store": partial(rate, lambda batch: store.read(batch, NUM_TOKENS)),
        "memmap": partial(rate, lambda batch: mapped[batch]),
        "memcpy": partial(rate, lambda batch: np.copyto(target, source)),
    }


def read(num_rows: int, rounds: int) -> dict[str, Any]:
    """Rates of one process alone, and of two at once."""
    rank, together = dist.get_rank(), "store, both processes at once"
    written = write_rows(num_rows) if rank == 0 else 0.0
    dist.barrier()
    contenders = readers(num_rows, rank)

    def in_turn(name: str) -> float:
        """Rank 0 alone; then rank 1 alone, if it is the store's turn."""
        dist.barrier()
        found = contenders[name]() if rank == 0 else 0.0
        dist.barrier()
        return contenders[name]() if rank == 1 and name == "store" else found

    def at_once() -> float:
        dist.barrier()
        return contenders["store"]()

    turns: dict[str, Callable[[], float]] = {name: partial(in_turn, name) for name in contenders}
    rates = alternate({**turns, together: at_once}, rounds)
    shares: list[Any] = [None, None]
    dist.all_gather_object(shares, ratios(rates[together], rates["store"]))
    if rank != 0:
        return {}
    return {
        "rows": num_rows,
        "MB/s written, first time": round(written),
        "MB/s": {name: summary(values) for name, values in rates.items()},
        "ratio": {f"store over {name}": summary(ratios(rates["store"], rates[name])) for name in ("memmap", "memcpy")},
        "share of its rate alone that each of two processes keeps": summary([*shares[0], *shares[1]]),
    }


@experiment("cache.json", section="read", minutes=6, quick_minutes=0.5)
def cache_read(settings: Settings) -> dict[str, Any]:
    """MB/s of random reads of records, hashes compared, beside a memmap and a copy; in two processes at once."""
    return launch(read, 2, settings.of(20_000, 640), settings.of(15, 2))


# ---- text ----


def train_text(data: str, sentences: int, **options: Any) -> Any:
    """MiniLM on SST-2 in this process."""
    given = {**sst2(data, sentences), "compute_metrics": correct}
    return train(
        given, BATCH, activation_cache="on", activation_cache_dir="cache", pipeline_parallel_size="1",
        freeze_policy="fixed", learning_rate=1e-4, warmup_steps=12, weight_decay=0.01, **options,
    )  # fmt: skip


def bytes_stored(data: str, sentences: int) -> dict[str, Any]:
    """With three layers frozen from the start."""
    results: dict[str, Any] = {"sentences": sentences}
    for name, item_size in (("float32", 4), ("bfloat16", 2)):
        trainer = train_text(data, sentences, activation_cache_dtype=name, freeze_at="0:3", num_train_epochs=2)
        epochs = cache_epochs(trainer.events)
        num_tokens = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
        needed = num_tokens * trainer.model.config.hidden_size * item_size
        assert epochs[0]["written"] == sentences, epochs
        results[name] = {
            "real tokens": num_tokens, "bytes stored": epochs[0]["bytes_stored"],
            "over real tokens x hidden x item size": round(epochs[0]["bytes_stored"] / needed, 4),
            "hits, second epoch": epochs[1]["hits"],
        }  # fmt: skip
    return results


@experiment("cache.json", section="bytes", minutes=3, quick_minutes=1, processes=1)
def cache_bytes(settings: Settings) -> dict[str, Any]:
    """Bytes on the disk over those of the activations of the real tokens of SST-2."""
    return launch(bytes_stored, 1, settings.data, settings.of(2_000, 200))


def accuracy(data: str, sentences: int, seed: int, dtype: str) -> dict[str, Any]:
    """Three epochs, layers frozen after the first."""
    steps = -(-sentences // BATCH)
    freeze_at = f"{steps}:2,{2 * steps}:3"
    trainer = train_text(
        data, sentences, activation_cache_dtype=dtype, freeze_at=freeze_at, num_train_epochs=3, seed=seed
    )
    hits = sum(epoch["hits"] for epoch in cache_epochs(trainer.events))
    evaluation = trainer.evaluate()
    share = evaluation["eval_correct"] / len(trainer.eval_dataset)
    return {"correct": evaluation["eval_correct"], "loss": evaluation["eval_loss"], "hits": hits, "share": share}


@experiment("cache.json", section="bf16", minutes=15, quick_minutes=2, processes=1)
def cache_bf16(settings: Settings) -> dict[str, Any]:
    """Accuracy on SST-2 with rows in bfloat16 minus that with rows in float32, paired by seed."""
    sentences, runs, points = settings.of(2_000, 200), [], []
    for seed in range(1, settings.of(3, 2) + 1):
        found = {name: launch(accuracy, 1, settings.data, sentences, seed, name) for name in ("float32", "bfloat16")}
        points.append(100 * (found["bfloat16"].pop("share") - found["float32"].pop("share")))
        runs.append({"seed": seed, **found})
        report("bf16", runs[-1])
    return {
        "sentences": sentences, "epochs": 3, "layers frozen by epoch": [0, 2, 3], "runs": runs, "points": points,
        "mean": statistics.mean(points), "interval_95_points": list(interval_95(points)),
    }  # fmt: skip


# ---- the decisions of `auto` ----


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


def steps_after_freeze(model: RandomModel, frozen: int, mode: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of the steps after the first epoch, and what `auto` decided."""
    trainer = train(
        model.task(CELL_BATCHES), model.batch, max_steps=CELL_EPOCHS * CELL_BATCHES, pipeline_parallel_size="1",
        freeze_policy="fixed", freeze_at=f"{CELL_BATCHES}:{frozen}", activation_cache=mode,
        activation_cache_dir="cache",
    )  # fmt: skip
    decisions = [event for event in trainer.events if event["event"] == "cache" and event["what"] == "decision"]
    return sum(trainer.seconds[CELL_BATCHES:]), decisions


def decide(num_layers: int, frozen: int, hidden: int, image: int, throttle: int, rounds: int) -> dict[str, Any]:
    """One cell: the cache on, off and `auto`, in turns; `auto` is right if what it takes is no slower by 5 %."""
    make = partial(vit, num_layers=num_layers, hidden_size=hidden, image_size=image)
    model = RandomModel(make, 16, num_layers)
    with throttled(throttle * 1e-6):
        modes = {mode: partial(steps_after_freeze, model, frozen, mode) for mode in ("on", "off", "auto")}
        found = alternate(modes, rounds)
    seconds = {mode: [each for each, _ in runs] for mode, runs in found.items()}
    decisions = [decision for _, run in found["auto"] for decision in run]
    assert len(decisions) == rounds, decisions
    median = {mode: statistics.median(values) for mode, values in seconds.items()}
    times_on = sum(decision["level"] > 0 for decision in decisions)
    chosen, other = ("on", "off") if 2 * times_on > rounds else ("off", "on")
    predicted = decisions[-1]["seconds_per_sample"]
    saved = (median["off"] - median["on"]) / (model.batch * CELL_BATCHES)
    return {
        "layers": num_layers, "F": frozen, "hidden": hidden, "tokens": (image // 4) ** 2 + 1,
        "microseconds a row added": throttle, "on over off": round(median["on"] / median["off"], 4),
        # Over all epochs after the freeze; what is predicted is the difference in the frozen prefix alone.
        "microseconds a sample saved, predicted": round(1e6 * (predicted["compute"] - predicted["write"]), 1),
        "microseconds a sample saved": round(1e6 * saved, 1),
        "auto": chosen, "auto, times on": times_on, "right": median[chosen] <= (1 + WITHIN) * median[other],
        "seconds": {mode: summary(values) for mode, values in seconds.items()},
    }  # fmt: skip


@experiment("cache.json", section="profiler", minutes=12, quick_minutes=2, processes=1)
def cache_profiler(settings: Settings) -> dict[str, Any]:
    """Whether `auto` takes what is faster: small ViTs by depth, F, row size and speed of the store."""
    grid = product(settings.of((4, 12), (4,)), ((64, 16), (192, 32)), (0, 1000))
    cells = []
    for num_layers, (hidden, image), throttle in grid:
        for frozen in (1, num_layers - 1):
            cells.append(launch(decide, 1, num_layers, frozen, hidden, image, throttle, settings.of(3, 1)))
            report("cell", cells[-1])
    num_right = sum(cell["right"] for cell in cells)
    return {"cells right": num_right, "cells": len(cells), "share": round(num_right / len(cells), 4), "table": cells}
