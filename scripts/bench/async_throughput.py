"""Optimizer steps without a flush beside the best synchronous schedule, through the trainer, at equal mini-batches."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from . import models
from .measure import Settings, alternate, experiment, launch, ratios, report, summary
from .training import train


SYNCHRONOUS = {"1f1b": (2, 4, 8, 16), "zb_h1": (4, 8, 16), "zb_v": (4, 8)}
KINDS = ("pipeoptim", "vanilla", "stashing")
SKIPPED = 2
"""Steps at the beginning that do not count; the end of the last one is a drain."""
SLEEP_PER_SAMPLE = 0.002
"""Seconds of an emulated layer's forward; its backward takes twice as long."""


def sleep(module: nn.Module, given: Any, hidden: torch.Tensor) -> None:
    """Take time in the forward and in the backward."""
    time.sleep(SLEEP_PER_SAMPLE * len(hidden))
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: time.sleep(2 * SLEEP_PER_SAMPLE * len(gradient)))


def emulated(num_samples: int) -> tuple[nn.Module, models.Tensors]:
    """A tiny BERT of eight layers that sleep: four ranks need no four devices."""
    _, inputs = models.bert(num_samples, vocab_size=1000, num_tokens=64)
    sizes = {"hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=1000, **sizes, **models.NO_DROPOUT))
    for layer in model.bert.encoder.layer:
        layer.output.register_forward_hook(sleep)
    return model, inputs


MAKE = {"vit": models.vit, "bert": partial(models.bert, vocab_size=30522, num_tokens=64), "emulated": emulated}


def step_seconds(name: str, batch: int, steps: int, schedule: str, m: int, **options: Any) -> float:
    """Mean time of an optimizer step, on the slowest rank."""
    model, inputs = MAKE[name](batch * steps)
    trainer = train(
        {"model": model, "train_dataset": models.rows_of(inputs)}, batch, max_steps=steps, learning_rate=1e-4,
        pipeline_parallel_size=dist.get_world_size(), pipeline_parallel_num_microbatches=m,
        pipeline_schedule=schedule, freeze_policy="none", **options,
    )  # fmt: skip
    return max(trainer.topology.gather(statistics.mean(trainer.clock.seconds[SKIPPED - 1 :])))


def compare(name: str, batch: int, steps: int, rounds: int) -> dict[str, Any]:
    """Every synchronous schedule once; then the best of them and the asynchronous ones by turns."""
    world = dist.get_world_size()
    tried = {
        f"{schedule}, M={m}": step_seconds(name, batch, max(8, steps // 2), schedule, m)
        for schedule, counts in SYNCHRONOUS.items()
        for m in counts
        if world <= m <= batch and (schedule == "1f1b" or name != "emulated")
    }
    best = min(tried, key=tried.__getitem__)
    schedule, m = best.split(", M=")
    runs = {best: partial(step_seconds, name, batch, steps, schedule, int(m))}
    runs |= {each: partial(step_seconds, name, batch, steps, "async_1f1b", 1, pipeline_weights=each) for each in KINDS}
    found = alternate(runs, rounds)
    result = {
        "steps": steps, "rounds": rounds, "synchronous, tried once (s a step)": tried, "best synchronous": best,
        "seconds a step": {each: summary(values) for each, values in found.items()},
        "faster than the best synchronous": {kind: summary(ratios(found[best], found[kind])) for kind in KINDS},
    }  # fmt: skip
    report(f"{name}, mini-batch {batch}", result)
    return result


@experiment("async.json", minutes=25, quick_minutes=3, processes=4)
def async_throughput(settings: Settings) -> dict[str, Any]:
    """Asynchronous kinds beside the best synchronous schedule: ViT and BERT at K=2, sleeping layers at K=4."""
    cells = [("bert", 2, 8, 16), ("vit", 2, 8, 16), ("emulated", 4, 16, 16), ("vit", 2, 32, 10)]
    return {
        f"{name}, K={world}, mini-batch {batch}": launch(
            compare, world, name, batch, settings.of(steps, 6), settings.of(5, 1)
        )
        for name, world, batch, steps in settings.of(cells, cells[1:3])
    }
