"""Run rows of features with the pipeline or with plain Trainer, and write down what came out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer
from tests.conformance.features import Setup, features_of
from tests.conformance.pieces import AverageWeights
from tests.distributed.cases import GLOBAL_BATCH, GLOBAL_EVAL_BATCH
from tests.distributed.equality_worker import EVAL_SEED, MODEL_SEED, CountEvents, digest
from tests.distributed.launches import Layout, run_listed
from tests.distributed.scenarios import RANK, WORLD_SIZE, scenario
from tests.support.models import build_model, collate, make_rows
from tests.support.trainings import End, our_arguments, plain_arguments


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


def setup_of(features: Mapping[str, str]) -> Setup:
    """What the features make of a run."""
    setup = Setup()
    for feature in features_of(features):
        feature.apply(setup)
    return setup


def arguments_of(setup: Setup, output: Path, layout: Layout | None) -> TrainingArguments:
    options: dict[str, Any] = {
        "batch": GLOBAL_BATCH,
        "per_device_eval_batch_size": GLOBAL_EVAL_BATCH // WORLD_SIZE,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        # At 1e-8 AdamW makes whole steps of float32's rounding where a gradient is nearly zero; in float64 all agree.
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "eval_strategy": "no",
        "seed": 7,
        **setup.options,
    }
    if layout is None:
        return plain_arguments(output, **options)
    return our_arguments(output, layout[0], **options | setup.pipeline_options)


def trainer_of(setup: Setup, args: TrainingArguments, counter: CountEvents, is_plain: bool) -> Trainer:
    base = type("ReadingTrainer", (ReadsCheckpoints, Trainer), {}) if is_plain else PipeTransformerTrainer
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
    if is_plain and setup.loss_ignores_num_items:
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


def train(features: Mapping[str, str], layout: Layout | None, output: Path) -> End:
    """Train, evaluate, predict with a row of features; `output` is the same on all ranks."""
    setup, counter = setup_of(features), CountEvents()
    trainer = trainer_of(setup, arguments_of(setup, output, layout), counter, layout is None)
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


@scenario
def run_rows(folder: Path, listed: str) -> None:
    """Run rows of the covering array."""
    run_listed(folder, listed, train, ValueError)
