"""Train, evaluate and predict the cases of Law 1, with the pipeline or with plain Trainer."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.cases import GLOBAL_BATCH, GLOBAL_EVAL_BATCH, NUM_EVAL_SAMPLES, Case
from tests.distributed.launches import Layout, run_listed
from tests.distributed.scenarios import WORLD_SIZE, scenario
from tests.support.models import IGNORED, MODELS, QA_LENGTH, build_model, collate, make_dataset, make_rows
from tests.support.trainings import End, our_arguments, plain_arguments, weights_of


MODEL_SEED = 11
EVAL_SEED = 1
# Drawn in the first epoch, but not in the first steps.
NAN_SAMPLE = 20


class CountEvents(TrainerCallback):
    """Counts the events a callback of the user sees. Logs are left out: the pipeline writes some of its own."""

    EVENTS = (
        *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end"),
        *("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_evaluate", "on_predict", "on_save"),
        "on_prediction_step",
    )

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()


def _counter_of(event: str) -> Callable[..., None]:
    def count(self: CountEvents, *args: Any, **kwargs: Any) -> None:
        self.counts[event] += 1

    return count


for _event in CountEvents.EVENTS:
    setattr(CountEvents, _event, _counter_of(_event))


class FocalLoss:
    """A user's `compute_loss`: a mean over samples that the model does not know."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        log_probability = outputs.logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        loss = -((1 - log_probability.exp()) ** 2 * log_probability).mean()
        return (loss, outputs) if return_outputs else loss


def summed_loss(outputs, labels, num_items_in_batch=None):
    """A user's `compute_loss_func` as the documentation of Trainer asks for it."""
    logits = outputs.logits.flatten(0, -2)
    loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.05)
    return loss / num_items_in_batch


def mean_loss(outputs, labels, num_items_in_batch=None):
    """A user's `compute_loss_func` that does not care for `num_items_in_batch`."""
    return nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.05)


def accuracy(evaluation):
    """Share of right labels, and the mean margin, which a wrong order of samples changes too."""
    predictions, labels = evaluation.predictions, evaluation.label_ids
    classes = predictions.argmax(-1) if predictions.ndim > labels.ndim else predictions
    counted = labels != IGNORED
    order = np.arange(1, len(labels) + 1).reshape(-1, *[1] * (labels.ndim - 1))
    right = (classes == labels) & counted
    return {
        "accuracy": right.sum() / counted.sum(),
        "weighted_accuracy": (order * right).sum() / (order * counted).sum(),
        "num_items": int(counted.sum()),
    }


def to_classes(logits, labels):
    return logits.argmax(-1)


def datasets_of(case: Case) -> tuple[Dataset, Dataset]:
    rows = make_rows(case.model, case.num_samples)
    for index, row in enumerate(rows):
        if case.change == "nan" and index == NAN_SAMPLE:
            row["pixel_values"] = np.full_like(row["pixel_values"], np.nan).tolist()
        elif case.change == "ignored_labels" and index % 4 == 1:
            row["labels"] = IGNORED
        elif case.change == "ignored_answers" and index % 4 == 1:
            row["start_positions"] = row["end_positions"] = QA_LENGTH
    return Dataset.from_list(rows), make_dataset(case.model, NUM_EVAL_SAMPLES, EVAL_SEED)


def arguments_of(case: Case, output: Path, layout: Layout | None) -> TrainingArguments:
    options: dict[str, Any] = {
        "batch": GLOBAL_BATCH,
        "per_device_eval_batch_size": GLOBAL_EVAL_BATCH // WORLD_SIZE,
        "gradient_accumulation_steps": case.accumulation,
        "num_train_epochs": case.epochs,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 5,
        "lr_scheduler_type": "linear",
        "seed": 7,
        **case.options,
    }
    if layout is None:
        return plain_arguments(output, **options)
    return our_arguments(
        output,
        layout[0],
        **options,
        pipeline_parallel_num_microbatches=case.num_microbatches,
        pipeline_schedule=case.schedule,
        freeze_policy="fixed" if case.num_frozen_layers else "none",
        freeze_at=f"0:{case.num_frozen_layers}" if case.num_frozen_layers else None,
        **case.pipeline_options,
    )


_LAYER = re.compile(r"\.layers?\.(\d+)\.")
# What the first layers take in: embeddings, and position biases that other layers use too.
_BELOW_THE_LAYERS = re.compile(r"embed|encoder\.LayerNorm|relative_attention_bias|shared_position_bias")


def freeze_by_hand(model: PreTrainedModel, num_layers: int) -> None:
    """What a user of Trainer would write to freeze the first layers and all that is below them."""
    for name, parameter in model.named_parameters():
        layer = _LAYER.search(name)
        is_below = int(layer[1]) < num_layers if layer else bool(_BELOW_THE_LAYERS.search(name))
        if num_layers and is_below:
            parameter.requires_grad_(False)


def trainer_of(case: Case, args: TrainingArguments, counter: CountEvents, is_plain: bool) -> Trainer:
    base: type[Trainer] = Trainer if is_plain else PipeTransformerTrainer
    if case.loss == "override":
        base = type(f"Focal{base.__name__}", (FocalLoss, base), {})
    model = build_model(case.model, MODEL_SEED, case.attention)
    if is_plain:
        freeze_by_hand(model, case.num_frozen_layers)
    train, evaluation = datasets_of(case)
    trainer = base(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=collate,
        compute_loss_func={"function": summed_loss, "mean_function": mean_loss}.get(case.loss),
        compute_metrics=accuracy if case.metrics else None,
        preprocess_logits_for_metrics=to_classes if case.metrics == "classes" else None,
        callbacks=[counter, *([EarlyStoppingCallback(early_stopping_patience=2)] if case.stop_early else [])],
    )
    smooths_labels = bool(case.options.get("label_smoothing_factor"))
    if is_plain and not MODELS[case.model].loss_uses_num_items and not smooths_labels:
        # Else Trainer takes the loss for one that honours `num_items_in_batch` and counts accumulation twice. Its
        # own label smoothing, which takes the place of the model's loss, does honour it.
        trainer.model_accepts_loss_kwargs = False
    return trainer


def train(fields: Mapping[str, Any], layout: Layout | None, output: Path) -> End:
    """Train, evaluate, predict; `output` is the same on all ranks."""
    case, counter = Case(**fields), CountEvents()
    tensors: dict[str, torch.Tensor] = {}
    trainer = trainer_of(case, arguments_of(case, output, layout), counter, layout is None)
    if case.evaluate_first:
        tensors |= prediction_tensors("predictions.before", trainer.predict(trainer.eval_dataset))
    if case.change == "seeded":
        set_seed(8)
    trained = trainer.train()
    weights = weights_of(trainer)
    metrics = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    tensors |= prediction_tensors("predictions.after", predicted)
    tensors |= {f"whole.{key}": value for key, value in plain_forward(trainer).items()}
    state = trainer.state
    values = {
        "log_history": state.log_history,
        "global_step": state.global_step,
        "max_steps": state.max_steps,
        "epoch": state.epoch,
        "best_metric": state.best_metric,
        "best_global_step": state.best_global_step,
        "training_loss": trained.training_loss,
        "metrics": metrics,
        "test_metrics": predicted.metrics,
        "events": dict(counter.counts),
        "digests": {"weights": digest(weights), "predictions": digest(tensors)},
    }
    if layout is not None:
        last = trainer.layout
        values["layout"] = [last.pipeline_size, last.num_replicas, last.num_frozen_layers]
        values["num_microbatches"] = last.num_microbatches
    return values, tensors | weights


def prediction_tensors(prefix: str, predicted) -> dict[str, torch.Tensor]:
    tensors = {}
    for key in ("predictions", "label_ids"):
        arrays = getattr(predicted, key)
        arrays = arrays if isinstance(arrays, tuple) else (arrays,)
        tensors |= {f"{prefix}.{key}.{i}": torch.from_numpy(array.copy()) for i, array in enumerate(arrays)}
    return tensors


@torch.no_grad()
def plain_forward(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The outputs of the trained model called directly, on this rank: after `train()` it is whole."""
    trainer.model.eval()
    batch = collate([trainer.eval_dataset[index] for index in range(NUM_EVAL_SAMPLES)])
    return {key: value.clone() for key, value in trainer.model(**batch).items() if isinstance(value, torch.Tensor)}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].contiguous().numpy().tobytes())
    return state.hexdigest()


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train, ValueError)
