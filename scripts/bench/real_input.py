"""Real training on real data: the numbers of plain `Trainer`, and the time, for several layouts."""

from __future__ import annotations

import time
from typing import Any

from transformers import PrinterCallback, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

from .measure import Settings, experiment, largest_difference, launch, report
from .models import cifar10_images, correct, sst2
from .training import run_options


BATCH, NUM_COMPARED_STEPS = 32, 20
PLAIN = "plain Trainer, 1 process"
RUNS = {PLAIN: (1, None), "K=2": (2, "2"), "K=1 x R=2": (2, "1"), "plain Trainer with DDP, 2 processes": (2, None)}
"""Number of processes, and of stages if it is a run of ours."""


def make_task(task: str, data: str, models: str, sentences: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a trainer is given, and its arguments."""
    if task == "sst2":
        return sst2(data, sentences), {"num_train_epochs": 1, "learning_rate": 1e-4, "warmup_steps": 12}
    model, training, test = cifar10_images(data, models, NUM_COMPARED_STEPS * BATCH, 500)
    options = {"max_steps": NUM_COMPARED_STEPS, "learning_rate": 3e-4, "warmup_steps": 5}
    given = {"model": model, "train_dataset": training, "eval_dataset": test}
    return given, {**options, "remove_unused_columns": False}


def train(task: str, num_stages: str | None, data: str, models: str, sentences: int) -> dict[str, Any]:
    """One run of one contender."""
    given, own = make_task(task, data, models, sentences)
    given["compute_metrics"] = correct
    options = run_options(BATCH, weight_decay=0.01, logging_strategy="steps", logging_steps=1, seed=1, **own)
    if num_stages is None:
        trainer = Trainer(args=TrainingArguments(ddp_find_unused_parameters=False, **options), **given)
        # BERT's classification loss ignores num_items_in_batch, ViT's does not.
        trainer.model_accepts_loss_kwargs = task == "cifar10"
    else:
        args = PipeTransformerArguments(pipeline_parallel_size=num_stages, freeze_policy="none", **options)
        trainer = PipeTransformerTrainer(args=args, **given)
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    middle = time.perf_counter()
    evaluation = trainer.evaluate()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "correct": evaluation["eval_correct"], "samples": len(given["eval_dataset"]),
        "seconds": middle - start, "evaluation seconds": time.perf_counter() - middle,
    }  # fmt: skip


def beside(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """A run beside the reference."""
    losses = [each["losses"][:NUM_COMPARED_STEPS] for each in (found, plain)]
    return {
        "largest relative difference of the first losses": largest_difference(*losses),
        "correct": f"{found['correct']} of {found['samples']}",
        "difference in correct": found["correct"] - plain["correct"],
        "train seconds": round(found["seconds"], 1),
        "evaluation seconds": round(found["evaluation seconds"], 1),
    }


@experiment("real_input.json", minutes=12, quick_minutes=4)
def real_input(settings: Settings) -> dict[str, Any]:
    """Losses and right answers on SST-2 and CIFAR-10 beside plain `Trainer` in one process."""
    sentences = settings.of(4_000, 320)
    results: dict[str, Any] = {"sentences": sentences, "global batch": BATCH}
    for task in ("cifar10", "sst2"):
        results[task], plain = {}, None
        for name, (processes, num_stages) in RUNS.items():
            found = launch(train, processes, task, num_stages, settings.data, settings.models, sentences)
            plain = plain or found
            results[task][name] = beside(found, plain)
            report(f"{task}, {name}", results[task][name])
    return results
