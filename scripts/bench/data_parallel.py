"""K=1, R=2 beside `Trainer` with DistributedDataParallel."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch.distributed as dist
from transformers import PrinterCallback, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

from .measure import Settings, alternate, experiment, launch, ratios, report, summary
from .models import MODELS, VIT
from .training import StepClock, run_options


NUM_STEPS, NUM_WARM = 15, 3


def train(contender: str, name: str) -> float:
    """Median step time of one training run of one contender."""
    clock = StepClock()
    given = {**MODELS[name].task(4), "callbacks": [clock]}
    options = run_options(MODELS[name].batch, max_steps=NUM_STEPS)
    if contender == "ours":
        args = PipeTransformerArguments(pipeline_parallel_size="1", freeze_policy="none", **options)
        trainer: Trainer = PipeTransformerTrainer(args=args, **given)
    else:
        trainer = Trainer(args=TrainingArguments(ddp_find_unused_parameters=False, **options), **given)
        # BERT's classification loss ignores num_items_in_batch, ViT's does not.
        trainer.model_accepts_loss_kwargs = name == VIT
    trainer.remove_callback(PrinterCallback)
    dist.barrier()
    trainer.train()
    return statistics.median(clock.seconds[NUM_WARM:])


def compare(rounds: int) -> dict[str, Any]:
    """Both contenders on both models, in the processes of a launch."""
    results = {}
    for name in MODELS:
        seconds = alternate({each: partial(train, each, name) for each in ("ours", "ddp")}, rounds)
        results[name] = {
            "throughput_over_ddp": summary(ratios(seconds["ddp"], seconds["ours"])),
            "ours_ms": summary([1000 * each for each in seconds["ours"]]),
            "ddp_ms": summary([1000 * each for each in seconds["ddp"]]),
        }
        report(f"data parallel, {name}", results[name])
    return results


@experiment("data_parallel.json", minutes=12, quick_minutes=1)
def data_parallel(settings: Settings) -> dict[str, Any]:
    """Throughput of K=1, R=2 beside that of `Trainer` with DDP (found-unused off, same batch)."""
    return {"data_parallel": launch(compare, 2, settings.of(7, 1))}
