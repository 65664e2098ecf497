"""Whole runs with the activation cache on real data, beside plain `Trainer` and a static pipeline."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

from transformers import Trainer

from .measure import Settings, alternate, experiment, launch, ratios, report, summary
from .models import cifar10_images, correct
from .training import Timed, make_trainer


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


def train(settings: Settings, contender: str, seed: int, evaluates: bool) -> tuple[float, float]:
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
        found = launch(train, 2, settings, contender, next(seeds), evaluates)
        report(contender, found)
        return found  # type: ignore[no-any-return]

    return alternate({name: partial(next_run, name, count(1)) for name in CONTENDERS}, rounds)


@experiment("cache.json", section="runs", minutes=70, quick_minutes=5)
def cache_runs(settings: Settings) -> dict[str, Any]:
    """A small ViT on CIFAR-10, F = 0 to 12 over 10 epochs: time and accuracy beside `Trainer` with DDP."""
    runs = compare(settings, settings.of(3, 1), evaluates=False)
    seconds, accuracy = ({name: [run[i] for run in found] for name, found in runs.items()} for i in range(2))
    pairs = ((CACHED, DDP), (ELASTIC, STATIC), (ELASTIC, DDP), (STATIC, DDP), (SHORT, CACHED))
    return {
        "time ratios": {f"{one} over {other}": summary(ratios(seconds[one], seconds[other])) for one, other in pairs},
        "contenders": {
            name: {"seconds": summary(seconds[name]), "accuracy by round": accuracy[name]} for name in CONTENDERS
        },
    }


@experiment("cache.json", section="runs_evaluated", minutes=30, quick_minutes=5)
def cache_runs_evaluated(settings: Settings) -> dict[str, Any]:
    """The same runs with 500 test images evaluated after each epoch, in the time."""
    return {"contenders": {name: {"seconds": run[0]} for name, [run] in compare(settings, 1, evaluates=True).items()}}
