"""What some of Trainer's options cost and gain in a pipeline of two processes."""

from __future__ import annotations

import statistics
from functools import partial
from itertools import product
from typing import Any

import torch

from hf_pipetransformer.selftest.runs import SavedBytes

from .measure import Settings, alternate, experiment, largest_difference, launch, ratios, report, summary
from .models import MODELS, cifar10_images
from .training import make_trainer, train


NUM_STEPS, NUM_WARM = 12, 4
NUM_LOADER_EPOCHS, LOADER_BATCH = 4, 32
FROZEN = {"freeze_policy": "fixed", "freeze_at": "0:11"}
LOADER_SETTINGS: dict[str, dict[str, Any]] = {
    "all layers trained": {},
    "11 of 12 layers frozen": FROZEN,
    "11 of 12 layers frozen, activations stored": {**FROZEN, "activation_cache": "on"},
}


def options_of(**options: Any) -> dict[str, Any]:
    """Nothing frozen or stored, all losses kept, unless the options say otherwise."""
    common = {"freeze_policy": "none", "activation_cache": "off", "logging_strategy": "steps", "logging_steps": 1}
    return {**common, "activation_cache_dir": "cache", **options}


# ---- recomputation ----


def kept(name: str, schedule: str, mode: str) -> dict[str, Any]:
    """MB that autograd keeps at most on each stage, and the losses."""
    model = MODELS[name]
    trainer = make_trainer(
        model.task(2), model.batch, **options_of(
            max_steps=3, pipeline_parallel_size="2", pipeline_parallel_num_microbatches="8",
            pipeline_schedule=schedule, pipeline_checkpoint=mode,
        )
    )  # fmt: skip
    count = SavedBytes(trainer)
    with count.hooks():
        trainer.train()
    peaks = trainer.topology.gather(count.most)
    return {"MB by stage": [round(peak / 1e6, 1) for peak in peaks], "losses": trainer.losses}


@experiment("features.json", section="memory", minutes=5, quick_minutes=5)
def features_recomputation(settings: Settings) -> dict[str, Any]:
    """Most bytes that autograd keeps for the backward by `pipeline_checkpoint`, K=2, M=8, and that no loss changes."""
    table: dict[str, Any] = {name: {} for name in MODELS}
    for name, schedule in product(MODELS, ("gpipe", "1f1b")):
        never: list[float] = []
        for mode in ("never", "except_last", "always"):
            found = launch(kept, 2, name, schedule, mode)
            losses = found.pop("losses")
            never = never or losses
            found["largest relative difference of the losses"] = largest_difference(losses, never)
            table[name][f"{schedule}, {mode}"] = found
            report(f"{name}, {schedule}, {mode}", found)
    return {"K": 2, "M": 8, **table}


# ---- compilation ----


def steps_of(name: str, num_stages: int, compiles: bool) -> tuple[list[float], list[float]]:
    """Seconds of the steps, and the losses."""
    torch._dynamo.reset()
    model = MODELS[name]
    trainer = train(
        model.task(2), model.batch, **options_of(
            max_steps=NUM_STEPS, torch_compile=compiles, pipeline_parallel_size=str(num_stages),
            pipeline_parallel_num_microbatches="4" if num_stages > 1 else "1",
        )
    )  # fmt: skip
    return trainer.seconds, trainer.losses


def compare_compiled(name: str, num_stages: int, rounds: int) -> dict[str, Any]:
    """Throughput over uncompiled; the steps that compile are left out."""
    contenders = {key: partial(steps_of, name, num_stages, key == "compiled") for key in ("compiled", "plain")}
    runs = alternate(contenders, rounds)
    medians = {key: [statistics.median(seconds[NUM_WARM:]) for seconds, _ in found] for key, found in runs.items()}
    first = [sum(seconds[:NUM_WARM]) for seconds, _ in runs["compiled"]]
    pairs = zip(runs["compiled"], runs["plain"], strict=True)
    return {
        "throughput over uncompiled": summary(ratios(medians["plain"], medians["compiled"])),
        "largest relative difference of the losses": max(largest_difference(a[1], b[1]) for a, b in pairs),
        "seconds of compiling": summary(
            [taken - NUM_WARM * median for taken, median in zip(first, medians["compiled"], strict=True)]
        ),
    }


@experiment("features.json", section="compile", minutes=12, quick_minutes=8)
def features_compile(settings: Settings) -> dict[str, Any]:
    """Layers compiled with inductor beside uncompiled ones, K=1 and K=2."""
    rounds, table = settings.of(3, 1), {}
    for name, num_stages in product(MODELS, (1, 2)):
        table[f"{name}, K={num_stages}"] = launch(compare_compiled, 2, name, num_stages, rounds)
        report(f"{name}, K={num_stages}", table[f"{name}, K={num_stages}"])
    return {"backend": "inductor", "steps": NUM_STEPS, "rounds": rounds, **table}


# ---- the loader ----


def waiting(data: str, models: str, num_images: int, num_workers: int, setting: str) -> dict[str, float]:
    """Mean seconds of a step and of its waiting, by the process that waits longest, after two epochs."""
    model, training, _ = cifar10_images(data, models, num_images, 0)
    steps = num_images // LOADER_BATCH
    trainer = train(
        {"model": model, "train_dataset": training}, LOADER_BATCH, **options_of(
            pipeline_parallel_size="1", max_steps=NUM_LOADER_EPOCHS * steps, dataloader_num_workers=num_workers,
            dataloader_persistent_workers=num_workers > 0, remove_unused_columns=False, **LOADER_SETTINGS[setting],
        )
    )  # fmt: skip
    # The first batch of an epoch waits for workers that could not know that it would be asked for.
    counted = [i for i in range(2 * steps, len(trainer.seconds)) if i % steps]
    waited = trainer.topology.gather(statistics.mean(trainer.waited[i] for i in counted))
    step = trainer.topology.gather(statistics.mean(trainer.seconds[i] for i in counted))
    return {"waited": max(waited), "step": max(step)}


@experiment("features.json", section="loader", minutes=15, quick_minutes=5)
def features_loader(settings: Settings) -> dict[str, Any]:
    """Share of a step in which a process waits for images that are decoded at every access."""
    images, table = settings.of(512, 128), {}
    for setting, workers in product(LOADER_SETTINGS, (0, 1)):
        runs = [
            launch(waiting, 2, settings.data, settings.models, images, workers, setting)
            for _ in range(settings.of(3, 1))
        ]
        table.setdefault(setting, {})[f"{workers} workers a process"] = {
            "share of a step": summary([run["waited"] / run["step"] for run in runs]),
            "seconds a step": summary([run["step"] for run in runs]),
        }
        report(f"{setting}, {workers} workers", table[setting])
    return {"images": images, "global batch": LOADER_BATCH, **table}
