"""Optimizer steps without a flush beside the best synchronous schedule, through the trainer, at equal mini-batches.

    torchrun --standalone --nproc_per_node 2 scripts/benchmark_async.py --output benchmarks/async.json
    torchrun --standalone --nproc_per_node 4 scripts/benchmark_async.py --emulated --output benchmarks/async.json

With two processes real models compute: a ViT of 12 layers of 192 and a BERT of 6 of 384. Every schedule and number of
micro-batches runs once; then the fastest of the synchronous ones and the asynchronous ones take turns. With four
processes the computation is emulated, a layer sleeps as long as its samples would take, so that four ranks need no
four devices: what is measured is the order of the schedule, the transfers, and what the trainer does in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from benchmark_cache_runs import StepEnds
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


ASYNC = "async_1f1b"
SYNCHRONOUS = {"1f1b": (2, 4, 8, 16), "zb_h1": (4, 8, 16), "zb_v": (4, 8)}
LENGTH = 64
SKIPPED = 2
"""Steps at the beginning that do not count; the end of the last one is a drain."""

SLEEP_PER_SAMPLE = 0.002
"""Seconds of an emulated layer's forward; its backward takes twice as long."""


class Samples(Dataset[dict[str, torch.Tensor]]):
    """As many as it takes, made on the spot."""

    def __init__(self, model: str, number: int) -> None:
        self.model, self.number = model, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        labels = torch.tensor(index % 2)
        if self.model == "vit":
            return {"pixel_values": torch.rand(3, 32, 32, generator=generator), "labels": labels}
        return {"input_ids": torch.randint(5, 1000, (LENGTH,), generator=generator), "labels": labels}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_PER_SAMPLE * len(hidden))
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * SLEEP_PER_SAMPLE * len(gradients[0]))
        return gradients[0]


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "vit":
        sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
        return ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=2, **sizes, **none))
    if name == "bert":
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        return BertForSequenceClassification(BertConfig(num_labels=2, **sizes, **none))
    sizes = {"hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(num_labels=2, vocab_size=1000, **sizes, **none))
    for layer in model.bert.encoder.layer:
        layer.output.register_forward_hook(lambda module, given, hidden: _Sleep.apply(hidden))
    return model


def step_seconds(model: str, batch: int, schedule: str, m: int, steps: int, weights: str | None = None) -> float:
    """Of an optimizer step, the slowest rank's mean."""
    world = dist.get_world_size()
    clock = StepEnds()
    with tempfile.TemporaryDirectory() as folder:
        args = PipeTransformerArguments(
            output_dir=folder,
            per_device_train_batch_size=batch // world,
            max_steps=steps,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            learning_rate=1e-4,
            pipeline_parallel_size=world,
            pipeline_parallel_num_microbatches=m,
            pipeline_schedule=schedule,
            freeze_policy="none",
            **({} if weights is None else {"pipeline_weights": weights}),
        )
        trainer = PipeTransformerTrainer(
            model=make_model(model), args=args, train_dataset=Samples(model, batch * steps), callbacks=[clock]
        )
        trainer.train()
    mean = torch.tensor((clock.times[-1] - clock.times[SKIPPED - 1]) / (steps - SKIPPED), dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return float(mean)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(
    model: str, batch: int, steps: int, rounds: int, synchronous: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Medians over rounds in which the contenders take turns, and the ratio of each round."""
    world = dist.get_world_size()
    tried: dict[str, float] = {}
    for schedule, counts in synchronous.items():
        for m in counts:
            if world <= m <= batch:
                tried[f"{schedule}, M={m}"] = step_seconds(model, batch, schedule, m, max(8, steps // 2))
    best = min(tried, key=tried.__getitem__)
    schedule, m = best.split(", M=")
    found: dict[str, list[float]] = {best: [], "pipeoptim": [], "vanilla": [], "stashing": []}
    for _ in range(rounds):
        found[best].append(step_seconds(model, batch, schedule, int(m), steps))
        for weights in ("pipeoptim", "vanilla", "stashing"):
            found[weights].append(step_seconds(model, batch, ASYNC, 1, steps, weights))
    ratios = {
        weights: spread([slow / fast for slow, fast in zip(found[best], found[weights], strict=True)])
        for weights in ("pipeoptim", "vanilla", "stashing")
    }
    result = {
        "steps": steps,
        "rounds": rounds,
        "synchronous, tried once (s a step)": tried,
        "best synchronous": best,
        "seconds a step": {name: spread(values) for name, values in found.items()},
        "faster than the best synchronous": ratios,
    }
    if dist.get_rank() == 0:
        print(model, batch, json.dumps(result, indent=1), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--emulated", action="store_true", help="layers sleep")
    parser.add_argument("--models", nargs="+", default=["vit", "bert"])
    parser.add_argument("--batches", nargs="+", type=int, help="samples of a mini-batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    world, found = dist.get_world_size(), {}
    models = ["emulated"] if options.emulated else options.models
    synchronous = {"1f1b": (4, 8, 16)} if options.emulated else SYNCHRONOUS
    for model in models:
        for batch in options.batches or ([16] if options.emulated else [8, 32]):
            name = f"{model}, K={world}, mini-batch {batch}"
            found[name] = compare(model, batch, options.steps, options.rounds, synchronous)
    if dist.get_rank() == 0:
        whole = json.loads(options.output.read_text()) if options.output.exists() else {}
        whole |= found | {
            "machine": {
                "date": str(date.today()),
                "cores": os.cpu_count(),
                "processor": platform.machine(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            }
        }
        options.output.write_text(json.dumps(whole, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
