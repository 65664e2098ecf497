"""What some of Trainer's options cost and gain in a pipeline of two processes."""

from __future__ import annotations

import statistics
from functools import partial
from itertools import product
from typing import Any

import torch

from hf_pipetransformer.training import loss_check

from .measure import Settings, alternate, experiment, largest_difference, launch, ratios, report, summary
from .models import MODELS, cifar10_images
from .training import losses_of, train


NUM_STEPS, NUM_WARM = 12, 4
LOADER_BATCH = 32
FROZEN = {"freeze_policy": "fixed", "freeze_at": "0:11"}
LOADER_SETTINGS: dict[str, dict[str, Any]] = {
    "all layers trained": {},
    "11 of 12 layers frozen": FROZEN,
    "11 of 12 layers frozen, activations stored": {**FROZEN, "activation_cache": "on"},
}
PLAIN = {"freeze_policy": "none", "activation_cache": "off", "logging_strategy": "steps", "logging_steps": 1}
"""Nothing frozen or stored, all losses kept."""


def steps_of(name: str, num_stages: int, compiles: bool) -> tuple[float, list[float]]:
    """Median seconds of the steps after those that compile, and the losses."""
    torch._dynamo.reset()
    model = MODELS[name]
    trainer = train(
        model.task(2), model.batch, max_steps=NUM_STEPS, torch_compile=compiles, pipeline_parallel_size=num_stages,
        pipeline_parallel_num_microbatches="4" if num_stages > 1 else "1", **PLAIN,
    )  # fmt: skip
    return statistics.median(trainer.clock.seconds[NUM_WARM:]), losses_of(trainer)


def compare_compiled(name: str, num_stages: int, rounds: int) -> dict[str, Any]:
    """Throughput over uncompiled."""
    contenders = {key: partial(steps_of, name, num_stages, key == "compiled") for key in ("compiled", "plain")}
    runs = alternate(contenders, rounds)
    seconds = {key: [each for each, _ in found] for key, found in runs.items()}
    pairs = zip(runs["compiled"], runs["plain"], strict=True)
    return {
        "throughput over uncompiled": summary(ratios(seconds["plain"], seconds["compiled"])),
        "largest relative difference of the losses": max(largest_difference(a[1], b[1]) for a, b in pairs),
    }


@experiment("features.json", section="compile", minutes=12, quick_minutes=3)
def features_compile(settings: Settings) -> dict[str, Any]:
    """Layers compiled with inductor beside uncompiled ones, K=1 and K=2."""
    table = {}
    for name, num_stages in settings.of(list(product(MODELS, (1, 2))), [(min(MODELS), 2)]):
        table[f"{name}, K={num_stages}"] = launch(compare_compiled, 2, name, num_stages, settings.of(3, 1))
        report(f"{name}, K={num_stages}", table[f"{name}, K={num_stages}"])
    return table


def share_of_check(name: str, micro_batches: int, num_steps: int) -> float:
    """Extra share of a step whose loss is checked, from medians of one run that checks every other step."""
    model, first, interval = MODELS[name], loss_check.NUM_FIRST, loss_check.INTERVAL
    loss_check.NUM_FIRST, loss_check.INTERVAL = 0, 2
    try:
        trainer = train(
            model.task(2), model.batch, max_steps=num_steps, pipeline_parallel_size="1",
            pipeline_parallel_num_microbatches=str(micro_batches), **PLAIN,
        )  # fmt: skip
    finally:
        loss_check.NUM_FIRST, loss_check.INTERVAL = first, interval
    seconds = trainer.clock.seconds
    # `seconds[i]` are those of the step that begins when i + 1 steps are done.
    checked, others = seconds[NUM_WARM + 1 :: 2], seconds[NUM_WARM::2]
    return statistics.median(checked) / statistics.median(others) - 1


@experiment("features.json", section="loss_check", minutes=15, quick_minutes=2)
def features_loss_check(settings: Settings) -> dict[str, Any]:
    """Share of a step that the check of a known loss takes: of a step with it, and over all steps of a run."""
    table: dict[str, Any] = {"every steps": loss_check.INTERVAL}
    micro_batches = 4
    for name in settings.of(list(MODELS), [min(MODELS)]):
        shares = [
            launch(share_of_check, 1, name, micro_batches, settings.of(24, 12)) for _ in range(settings.of(5, 1))
        ]
        table[f"{name}, M={micro_batches}"] = {
            "of a step with it": summary(shares),
            "over all steps": summary([share / loss_check.INTERVAL for share in shares]),
        }
        report(f"{name}, M={micro_batches}", table[f"{name}, M={micro_batches}"])
    return table


def waiting(settings: Settings, setting: str, num_workers: int) -> tuple[float, float]:
    """Mean seconds of a step and of its waiting, by the process that waits longest, after two epochs of four."""
    model, training, _ = cifar10_images(settings.data, settings.models, settings.of(512, 128), 0)
    trainer = train(
        {"model": model, "train_dataset": training}, LOADER_BATCH, pipeline_parallel_size="1", num_train_epochs=4,
        dataloader_num_workers=num_workers, dataloader_persistent_workers=num_workers > 0,
        remove_unused_columns=False, activation_cache_dir="cache", **{**PLAIN, **LOADER_SETTINGS[setting]},
    )  # fmt: skip
    steps = len(training) // LOADER_BATCH
    # The first batch of an epoch waits for workers that could not know that it would be asked for.
    counted = [i for i in range(2 * steps, 4 * steps) if i % steps]
    step, waited = (
        max(trainer.topology.gather(statistics.mean(values[i] for i in counted)))
        for values in ([0.0, *trainer.clock.seconds], trainer.waited)
    )
    return step, waited


@experiment("features.json", section="loader", minutes=15, quick_minutes=2)
def features_loader(settings: Settings) -> dict[str, Any]:
    """Share of a step in which a process waits for images that are decoded at every access."""
    table: dict[str, Any] = {}
    for setting, workers in product(settings.of(list(LOADER_SETTINGS), list(LOADER_SETTINGS)[-1:]), (0, 1)):
        runs = [launch(waiting, 2, settings, setting, workers) for _ in range(settings.of(3, 1))]
        table.setdefault(setting, {})[f"{workers} workers a process"] = {
            "share of a step": summary([waited / step for step, waited in runs]),
            "seconds a step": summary([step for step, _ in runs]),
        }
        report(f"{setting}, {workers} workers", table[setting])
    return table
