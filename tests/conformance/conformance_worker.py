"""Run rows of features in one launch, with the pipeline or with plain Trainer, and write down what came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.conformance.features import Setup, features_of
from tests.conformance.pieces import AverageWeights
from tests.distributed.cases import GLOBAL_BATCH, GLOBAL_EVAL_BATCH
from tests.distributed.equality_worker import (
    EVAL_SEED,
    MODEL_SEED,
    CountEvents,
    digest,
)
from tests.distributed.scenarios import RANK, WORLD_SIZE, run_case, scenario
from tests.support.models import build_model, collate, make_rows


# Neither is a multiple of its batch: the last ones have 5 samples and 1.
NUM_SAMPLES = 29
NUM_EVAL_SAMPLES = 13
# Of a second evaluation set.
NUM_OTHER_SAMPLES = 9


class ReadsCheckpoints:
    """Plain Trainer puts the best checkpoint into the model without the conversion of `from_pretrained`.

    Of a ViT it loads nothing so: a checkpoint holds the names of older releases.
    """

    def _load_best_model(self):
        best = type(self.model).from_pretrained(self.state.best_model_checkpoint)
        self.model.load_state_dict(best.state_dict())


def base_classes(num_stages: int | None) -> tuple[type[Trainer], type[TrainingArguments]]:
    """The trainer and its arguments; `num_stages` is None for plain Trainer, which runs without the library."""
    if num_stages is None:
        return Trainer, TrainingArguments
    from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

    return PipeTransformerTrainer, PipeTransformerArguments


def setup_of(features: Mapping[str, str]) -> Setup:
    """What the features make of a run."""
    setup = Setup()
    for feature in features_of(features):
        feature.apply(setup)
    return setup


def arguments_of(setup: Setup, output: Path, num_stages: int | None) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": GLOBAL_BATCH // WORLD_SIZE,
        "per_device_eval_batch_size": GLOBAL_EVAL_BATCH // WORLD_SIZE,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        # At 1e-8 AdamW makes whole steps of float32's rounding where a gradient is nearly zero; in float64 all agree.
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "seed": 7,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    options |= setup.options
    if num_stages is not None:
        options |= {"pipeline_timeout": 60, "freeze_policy": "none", **setup.pipeline_options}
        options["pipeline_parallel_size"] = num_stages
    return base_classes(num_stages)[1](**options)


def trainer_of(setup: Setup, args: TrainingArguments, counter: CountEvents, num_stages: int | None) -> Trainer:
    base = base_classes(num_stages)[0]
    if num_stages is None:
        base = type("ReadingTrainer", (ReadsCheckpoints, base), {})
    mixed = type(f"My{base.__name__}", (*setup.mixins, base), {})
    arguments: dict[str, Any] = {
        "args": args,
        "train_dataset": dataset_of(setup, NUM_SAMPLES, is_for_training=True),
        "eval_dataset": dataset_of(setup, NUM_EVAL_SAMPLES, EVAL_SEED),
        "callbacks": [counter, *setup.callbacks],
        **setup.trainer_arguments,
    }
    if setup.has_evaluation_sets:
        other = dataset_of(setup, NUM_OTHER_SAMPLES, EVAL_SEED + 1)
        arguments["eval_dataset"] = {"first": arguments["eval_dataset"], "other": other}
    if setup.through_model_init:
        arguments["model_init"] = partial(model_of, setup)
    else:
        arguments["model"] = model_of(setup)
    if "optimizers" in arguments:
        arguments["optimizers"] = arguments["optimizers"](arguments["model"])
    trainer = mixed(**arguments)
    if num_stages is None and setup.loss_ignores_num_items:
        # Else Trainer takes the loss for one that honours `num_items_in_batch` and counts accumulation twice.
        trainer.model_accepts_loss_kwargs = False
    return trainer


def model_of(setup: Setup) -> nn.Module:
    model = build_model(setup.model, MODEL_SEED)
    for change in setup.change_model:
        change(model)
    return model


def dataset_of(setup: Setup, num_samples: int, seed: int = 0, is_for_training: bool = False) -> Any:
    rows = list(make_rows(setup.model, num_samples, seed))
    for change in setup.change_row:
        rows = [change(index, row) for index, row in enumerate(rows)]
    return setup.as_dataset(rows, is_for_training)


def run(setup: Setup, num_stages: int | None, output: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train, evaluate, predict; what is a plain value, and what is a tensor. `output` is the same on all ranks."""
    counter = CountEvents()
    trainer = trainer_of(setup, arguments_of(setup, output, num_stages), counter, num_stages)
    trained = trainer.train()
    weights = named("weights", dict(trainer.model.named_parameters()))
    for callback in setup.callbacks:
        if isinstance(callback, AverageWeights):
            weights |= named("averaged", callback.mean)
    metrics = trainer.evaluate()
    evaluated = trainer.eval_dataset["first"] if setup.has_evaluation_sets else trainer.eval_dataset
    predicted = trainer.predict(evaluated)
    tensors = named("predictions", predicted.predictions) | named("label_ids", predicted.label_ids)
    tensors |= named("whole", plain_outputs(trainer.model, setup.model))
    state = trainer.state
    values = {
        "log_history": state.log_history,
        "training_loss": trained.training_loss,
        "metrics": metrics,
        "test_metrics": predicted.metrics,
        "events": dict(counter.counts),
        "state": {
            key: getattr(state, key)
            for key in ("global_step", "max_steps", "num_train_epochs", "epoch", "best_metric", "best_global_step")
        },
        "num_input_tokens_seen": state.num_input_tokens_seen,
        "total_flos": state.total_flos,
        "digests": {"weights": digest(weights), "predictions": digest(tensors)},
    }
    if RANK == 0:
        values["checkpoints"] = sorted(path.name for path in output.glob("checkpoint-*"))
        for name in values["checkpoints"]:
            loaded = type(trainer.model).from_pretrained(output / name)
            weights |= named(f"saved in {name}", dict(loaded.named_parameters()))
        values["scalars"] = tensorboard_scalars(output)
    return values, tensors | weights


def named(prefix: str, value: Any) -> dict[str, torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, copied, each under the way that leads to it."""
    if value is None:
        return {}
    if isinstance(value, (list, tuple)):
        value = {str(index): part for index, part in enumerate(value)}
    if isinstance(value, dict):
        return {path: found for key, part in value.items() for path, found in named(f"{prefix}.{key}", part).items()}
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return {prefix: tensor.detach().clone().contiguous()}


@torch.no_grad()
def plain_outputs(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """The outputs of the trained model called directly, on this rank: after `train()` it is whole."""
    model.eval()
    outputs = model(**collate(make_rows(name, NUM_EVAL_SAMPLES, EVAL_SEED)))
    return {key: value for key, value in outputs.items() if isinstance(value, torch.Tensor)}


def tensorboard_scalars(output: Path) -> dict[str, list[tuple[int, float]]]:
    """What the event files in a folder hold: tag to steps and values; nothing if there are none."""
    files = sorted(output.rglob("events.out.tfevents.*"))
    if not files:
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(files[0].parent))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


RunOne = Callable[[Mapping[str, str], int | None, Path], tuple[dict[str, Any], dict[str, torch.Tensor]]]


@scenario
def run_rows(folder: Path, listed: str, num_stages: int | None = None) -> None:
    """Run rows of the covering array with the pipeline, or without `num_stages` with plain Trainer."""
    run_listed(folder, listed, num_stages, lambda features, stages, output: run(setup_of(features), stages, output))


def run_listed(folder: Path, listed: str, num_stages: int | None, run_one: RunOne) -> None:
    for row in json.loads(Path(listed).read_text()):
        name = row["name"]
        run_case(folder, name, partial(run_one, row["features"], num_stages, folder / f"{name}-output"), ValueError)
