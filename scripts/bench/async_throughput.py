"""Optimizer steps without a flush beside the best synchronous schedule, through the trainer, at equal mini-batches."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

from . import models
from .measure import Settings, alternate, experiment, launch, ratios, report, summary
from .training import StepClock as Watch


SYNCHRONOUS = {"1f1b": (2, 4, 8, 16), "zb_h1": (4, 8, 16), "zb_v": (4, 8)}
KINDS = ("pipeoptim", "vanilla", "stashing")
SKIPPED = 2
"""Steps at the beginning that do not count; the end of the last one is a drain."""
SLEEP_PER_SAMPLE = 0.002
"""Seconds of an emulated layer's forward; its backward takes twice as long."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_PER_SAMPLE * len(hidden))
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * SLEEP_PER_SAMPLE * len(gradients[0]))
        return gradients[0]


def emulated(num_samples: int) -> tuple[nn.Module, models.Tensors]:
    """A tiny BERT of eight layers that sleep: four ranks need no four devices."""
    _, inputs = models.bert(num_samples, vocab_size=1000, num_tokens=64)
    sizes = {"hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=1000, **sizes, **models.NO_DROPOUT))
    for layer in model.bert.encoder.layer:
        layer.output.register_forward_hook(lambda module, given, hidden: _Sleep.apply(hidden))
    return model, inputs


MAKE = {"vit": models.vit, "bert": partial(models.bert, vocab_size=30522, num_tokens=64), "emulated": emulated}


def step_seconds(name: str, batch: int, steps: int, schedule: str, m: int, weights: str | None = None) -> float:
    """Mean time of an optimizer step, on the slowest rank."""
    world, watch = dist.get_world_size(), Watch()
    model, inputs = MAKE[name](batch * steps)
    options = models.training_options(
        max_steps=steps, per_device_train_batch_size=batch // world, learning_rate=1e-4, pipeline_parallel_size=world,
        pipeline_parallel_num_microbatches=m, pipeline_schedule=schedule, freeze_policy="none",
        **({} if weights is None else {"pipeline_weights": weights}),
    )  # fmt: skip
    rows = models.rows_of(inputs)
    trainer = PipeTransformerTrainer(model, PipeTransformerArguments(**options), train_dataset=rows, callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    mean = torch.tensor((watch.ends[-1] - watch.ends[SKIPPED - 1]) / (steps - SKIPPED), dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return float(mean)


def compare(name: str, batch: int, steps: int, rounds: int) -> dict[str, Any]:
    """Every synchronous schedule once; then the best of them and the asynchronous ones by turns."""
    world, tried = dist.get_world_size(), {}
    for schedule, counts in SYNCHRONOUS.items() if name != "emulated" else (("1f1b", (4, 8, 16)),):
        for m in counts:
            if world <= m <= batch:
                tried[f"{schedule}, M={m}"] = step_seconds(name, batch, max(8, steps // 2), schedule, m)
    best = min(tried, key=tried.__getitem__)
    schedule, m = best.split(", M=")
    runs = {best: partial(step_seconds, name, batch, steps, schedule, int(m))}
    runs |= {kind: partial(step_seconds, name, batch, steps, "async_1f1b", 1, kind) for kind in KINDS}
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
