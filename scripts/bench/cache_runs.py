"""Whole runs with the activation cache on real data, beside plain `Trainer` and a static pipeline."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE, read_events

from .measure import Settings, alternate, experiment, launch, ratios, report, summary
from .models import cifar10_images, correct
from .training import Events, StepClock, cache_epochs, run_options


BATCH, EPOCHS, SHORT_EPOCHS = 64, 10, 3
FROZEN_BY_EPOCH = [0, 4, 7, 9, 10, 11, 11, 12, 12, 12]
DDP, STATIC = "Trainer with DDP", "ours, K=2, nothing frozen"
SHORT = f"Trainer with DDP for {SHORT_EPOCHS} epochs"
"""As many epochs as fit into the time of the runs that freeze: what anybody would do first."""
CACHED, ELASTIC = "ours, K=1, freezing, cache auto", "ours, from K=2 on, freezing, elastic, cache on"
FREEZING: dict[str, Any] = {
    "freeze_policy": "schedule", "freeze_alpha": 1 / 3, "freeze_warmup": 0.0, "freeze_min_active_layers": 0,
}  # fmt: skip
CONTENDERS: dict[str, dict[str, Any] | None] = {
    DDP: None,
    SHORT: None,
    STATIC: {"pipeline_parallel_size": "2", "freeze_policy": "none", "activation_cache": "off"},
    CACHED: {"pipeline_parallel_size": "1", "activation_cache": "auto", **FREEZING},
    ELASTIC: {"pipeline_parallel_size": "2", "activation_cache": "on", "elastic": True, **FREEZING},
}


def course(events: Events, steps_per_epoch: int) -> dict[str, Any]:
    """The layouts at the beginning of each epoch and what the cache did."""
    changes = {e["step"]: e["layout"] if e["event"] == "run" else e["to"]
               for e in events if e["event"] in ("run", "transition")}  # fmt: skip
    starts = range(0, events[-1]["step"], steps_per_epoch)
    layouts = [changes[max(step for step in changes if step <= start)] for start in starts]
    of_cache = [event for event in events if event["event"] == "cache"]
    return {
        "F by epoch": [layout["num_frozen_layers"] for layout in layouts],
        "K by epoch": [layout["num_stages"] for layout in layouts],
        "cached layers by epoch": [layout.get("cache_level", 0) for layout in layouts],
        "cache": [{key: e[key] for key in e if key not in ("event", "what")} for e in cache_epochs(events)],
        "decisions": [{key: e[key] for key in ("step", "level", "num_frozen_layers", "reason")}
                      for e in of_cache if e["what"] == "decision"],
        "cache off": [e["reason"] for e in of_cache if e["what"] == "off"],
    }  # fmt: skip


def train(contender: str, data: str, models: str, own: dict[str, Any], sizes: tuple[int, int]) -> dict[str, Any]:
    """One run of one contender on images that are decoded at each access; the test images are not in its time."""
    model, training, test = cifar10_images(data, models, *sizes)
    clock = StepClock()
    given: dict[str, Any] = {
        "model": model, "train_dataset": training, "compute_metrics": correct, "callbacks": [clock],
        "eval_dataset": test.select(range(min(500, len(test)))),
    }  # fmt: skip
    options = run_options(
        BATCH, learning_rate=3e-4, warmup_steps=16, weight_decay=0.01, remove_unused_columns=False, **own
    )
    settings = CONTENDERS[contender]
    if settings is None:
        trainer = Trainer(args=TrainingArguments(ddp_find_unused_parameters=False, **options), **given)
        trainer.model_accepts_loss_kwargs = True
    else:
        args = PipeTransformerArguments(activation_cache_dir="cache", **settings, **options)
        trainer = PipeTransformerTrainer(args=args, **given)
    trainer.remove_callback(PrinterCallback)
    output = trainer.train()
    steps = len(trainer.get_train_dataloader())
    # The first step of an epoch contains whatever lies between two epochs.
    epochs = [clock.seconds[start : start + steps - 1] for start in range(0, len(clock.ends), steps)]
    result = {
        "seconds": output.metrics["train_runtime"], "loss": output.training_loss,
        "seconds a step by epoch": [round(statistics.median(epoch), 4) for epoch in epochs],
        "accuracy": trainer.evaluate(test, metric_key_prefix="test")["test_correct"] / len(test),
    }  # fmt: skip
    if settings is not None and trainer.is_world_process_zero():
        result |= course(read_events(str(Path(trainer.args.output_dir) / EVENTS_FILE)), steps)
    return result


def table_row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a contender; what is not its time is that of the last run."""
    accuracies = [run["accuracy"] for run in runs]
    return {
        "seconds": summary([run["seconds"] for run in runs]), "accuracy": summary(accuracies),
        "accuracy by round": accuracies,
        **{key: value for key, value in runs[-1].items() if key not in ("seconds", "accuracy")},
    }  # fmt: skip


def compare(settings: Settings, rounds: int, evaluates: bool) -> dict[str, Any]:
    """Seconds and accuracy of whole runs, round by round, each a launch of its own."""
    sizes, epochs = settings.of((2_000, 4_000), (256, 200)), settings.of(EPOCHS, 3)
    seeds = dict.fromkeys(CONTENDERS, 0)

    def one_run(contender: str, **own: Any) -> dict[str, Any]:
        return launch(train, 2, contender, settings.data, settings.models, own, sizes)

    trials = {m: one_run(STATIC, max_steps=12, pipeline_parallel_num_microbatches=str(m)) for m in (2, 4, 8)}
    by_m = {m: run["seconds a step by epoch"][0] for m, run in trials.items()}
    best = min(by_m, key=by_m.__getitem__)

    def next_run(contender: str) -> dict[str, Any]:
        seeds[contender] += 1
        own: dict[str, Any] = {"num_train_epochs": SHORT_EPOCHS if contender == SHORT else epochs}
        own |= {"pipeline_parallel_num_microbatches": str(best)} if contender == STATIC else {}
        own |= {"seed": seeds[contender], "eval_strategy": "epoch" if evaluates else "no"}
        found = one_run(contender, **own)
        report(f"{contender}, seed {seeds[contender]}", [found["seconds"], found["accuracy"]])
        return found

    results = alternate({contender: partial(next_run, contender) for contender in CONTENDERS}, rounds)
    seconds = {name: [run["seconds"] for run in runs] for name, runs in results.items()}
    pairs = ((CACHED, DDP), (ELASTIC, STATIC), (ELASTIC, DDP), (STATIC, DDP), (SHORT, CACHED))
    as_planned = [run["F by epoch"] == FROZEN_BY_EPOCH[:epochs] for name in (CACHED, ELASTIC) for run in results[name]]
    return {
        "images": sizes[0], "test images": sizes[1], "epochs": epochs, "global batch": BATCH,
        "evaluation each epoch": evaluates, "seconds a step by M, nothing frozen": by_m, "best M": best,
        "F by epoch is as planned": all(as_planned),
        "time ratios": {f"{one} over {other}": summary(ratios(seconds[one], seconds[other])) for one, other in pairs},
        "contenders": {name: table_row(runs) for name, runs in results.items()},
    }  # fmt: skip


@experiment("cache.json", section="runs", minutes=70, quick_minutes=5)
def cache_runs(settings: Settings) -> dict[str, Any]:
    """A small ViT on CIFAR-10, F = 0 to 12 over 10 epochs: time and accuracy beside `Trainer` with DDP."""
    return compare(settings, settings.of(3, 1), evaluates=False)


@experiment("cache.json", section="runs_evaluated", minutes=30, quick_minutes=5)
def cache_runs_evaluated(settings: Settings) -> dict[str, Any]:
    """The same runs with 500 test images evaluated after each epoch, in the time."""
    return compare(settings, 1, evaluates=True)
