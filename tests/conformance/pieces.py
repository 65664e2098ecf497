"""What features put into a run, as scripts write it: losses, optimizers, data sets, collators, metrics, callbacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    BatchEncoding,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    TrainerCallback,
    default_data_collator,
)

from tests.distributed.equality_worker import summed_loss, to_classes
from tests.support.models import IGNORED, MASK, MODELS, NUM_LAYERS, PAD, VOCABULARY, Row, collate


__all__ = [
    "OPTIMIZER_CLASS",
    "AverageWeights",
    "EncodingCollator",
    "EvaluateAt",
    "FocalLoss",
    "LastFirst",
    "LayerwiseRates",
    "Scores",
    "StopAt",
    "Stream",
    "TorchDataset",
    "WithoutWords",
    "arrow_dataset",
    "classes_of",
    "collate",
    "early_stopping",
    "freeze",
    "is_below_head",
    "is_in_first_layers",
    "is_in_middle_layer",
    "library_collator",
    "only_tokenizer",
    "optimizer_and_scheduler",
    "summed_loss",
    "tensorboard_options",
    "transformed_dataset",
    "with_more_columns",
    "with_words",
]

LEARNING_RATE = 1e-3

# ---- losses ----


class FocalLoss:
    """A user's `compute_loss`: a mean over what has a label."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        counted = labels != IGNORED
        log_probability = outputs.logits[counted].log_softmax(-1).gather(-1, labels[counted].unsqueeze(-1)).squeeze(-1)
        loss = -((1 - log_probability.exp()) ** 2 * log_probability).mean()
        return (loss, outputs) if return_outputs else loss


# ---- optimizers ----

OPTIMIZER_CLASS = (torch.optim.RAdam, {"lr": LEARNING_RATE, "weight_decay": 0.01})

_HEAD = re.compile(r"^(classifier|qa_outputs|cls)\.")


def _head_and_body(model: nn.Module) -> list[dict[str, Any]]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        {"params": [parameter for name, parameter in trained.items() if _HEAD.match(name)], "lr": 3 * LEARNING_RATE},
        {"params": [parameter for name, parameter in trained.items() if not _HEAD.match(name)]},
    ]


def optimizer_and_scheduler(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """What a script gives as `optimizers`."""
    optimizer = torch.optim.AdamW(_head_and_body(model), lr=LEARNING_RATE, weight_decay=0.05)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


class LayerwiseRates:
    """A user's `create_optimizer`: the head learns faster."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(
                _head_and_body(self.model), lr=self.args.learning_rate, weight_decay=self.args.weight_decay
            )
        return self.optimizer


# ---- data sets ----


def arrow_dataset(rows: list[Row], is_for_training: bool) -> Dataset:
    return Dataset.from_list(rows)


def transformed_dataset(rows: list[Row], is_for_training: bool) -> Dataset:
    """Samples that are changed when they are read."""
    dataset = Dataset.from_list(rows)
    dataset.set_transform(_changed)
    return dataset


def _changed(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    changed = dict(batch)
    if "input_ids" in batch:
        changed["input_ids"] = [list(reversed(words)) for words in batch["input_ids"]]
    if "pixel_values" in batch:
        changed["pixel_values"] = [(0.5 * torch.tensor(pixels)).tolist() for pixels in batch["pixel_values"]]
    return changed


class TorchDataset(torch.utils.data.Dataset):
    """Samples by index."""

    def __init__(self, rows: list[Row], is_for_training: bool) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    """Samples one after the other; several workers share them. The last batches of an evaluation are short."""

    def __init__(self, rows: list[Row], is_for_training: bool) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        worker = torch.utils.data.get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([dict(row) for row in islice(self.rows, start, None, step)])


def with_words(index: int, row: Row) -> Row:
    """A column for `length_column_name`, not the lengths that Trainer would find by itself."""
    return {**row, "num_words": 5 + index * 7 % 11}


def with_more_columns(index: int, row: Row) -> Row:
    """Columns that no collator can put into a tensor."""
    return {"identifier": f"sample {index}", **row, "source": {"page": index, "words": ["a"] * (index % 3)}}


class LastFirst:
    """A user's sampler."""

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return _Backwards(len(dataset))


class _Backwards(torch.utils.data.Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


# ---- collators ----


class EncodingCollator:
    """A collator that returns what a tokenizer returns, a mapping that is no dict."""

    def __call__(self, rows: list[Row]) -> BatchEncoding:
        return BatchEncoding(collate(rows))


class WithoutWords:
    """A collator that takes the columns that it knows."""

    def __init__(self, collate_known: Callable[[list[Row]], Any]) -> None:
        self.collate_known = collate_known

    def __call__(self, rows: list[Row]) -> Any:
        return self.collate_known([{key: value for key, value in row.items() if key != "num_words"} for row in rows])


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {f"word{index}": index for index in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="word4")),
        unk_token="word4",
        pad_token=f"word{PAD}",
        mask_token=f"word{MASK}",
    )


def library_collator(model: str) -> dict[str, Any]:
    """The collator of transformers for this task, beside its tokenizer."""
    task = MODELS[model].task
    if task == "image":
        return {"data_collator": default_data_collator}
    tokenizer = _tokenizer()
    if task in ("token", "masked"):
        return {"data_collator": DataCollatorForTokenClassification(tokenizer), "processing_class": tokenizer}
    return {
        "data_collator": DataCollatorWithPadding(tokenizer, pad_to_multiple_of=4),
        "processing_class": tokenizer,
    }


def only_tokenizer(model: str) -> dict[str, Any]:
    """No collator: Trainer chooses one."""
    return {"data_collator": None, "processing_class": None if MODELS[model].task == "image" else _tokenizer()}


# ---- metrics ----


class Scores:
    """A user's `compute_metrics`, also for single batches; a wrong order of samples changes its result."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.sums = {"right": 0.0, "weighted": 0.0, "items": 0.0, "inputs": 0.0, "losses": 0.0, "num_losses": 0.0}
        self.num_samples = 0

    def __call__(self, evaluation, compute_result: bool = True) -> dict[str, float]:
        for predictions, labels in zip(_parts(evaluation.predictions), _parts(evaluation.label_ids), strict=True):
            self._add(predictions, labels)
        if evaluation.inputs is not None:
            for values in _parts(evaluation.inputs):
                # Without what text is padded with, which depends on the batch's longest sample.
                self.sums["inputs"] += float(values[values > PAD].astype(np.float64).sum())
        if evaluation.losses is not None:
            for values in _parts(evaluation.losses):
                self.sums["losses"] += float(values.sum())
                self.sums["num_losses"] += values.size
        if not compute_result:
            return {}
        sums = self.sums
        result = {
            "accuracy": sums["right"] / sums["items"],
            "weighted_accuracy": sums["weighted"] / sums["items"],
            "num_items": sums["items"],
            "sum_of_inputs": sums["inputs"],
            "mean_loss": sums["losses"] / max(sums["num_losses"], 1),
        }
        self._forget()
        return result

    def _add(self, predictions, labels) -> None:
        for guess, truth in zip(_tuple(predictions), _tuple(labels), strict=True):
            classes = guess.argmax(-1) if guess.ndim > truth.ndim else guess
            counted = truth != IGNORED
            right = (classes == truth) & counted
            position = self.num_samples + np.arange(1, len(truth) + 1).reshape(-1, *[1] * (truth.ndim - 1))
            self.sums["right"] += float(right.sum())
            self.sums["weighted"] += float((position * right).sum())
            self.sums["items"] += float(counted.sum())
        self.num_samples += len(truth)


def _parts(values: Any) -> list[Any]:
    """The batches of what Trainer gathered: one, or a list of them with `eval_do_concat_batches=False`."""
    return [_as_numpy(part) for part in values] if isinstance(values, list) else [_as_numpy(values)]


def _as_numpy(values: Any) -> Any:
    if isinstance(values, tuple):
        return tuple(_as_numpy(value) for value in values)
    return values.numpy() if isinstance(values, torch.Tensor) else values


def _tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def classes_of(logits: Any, labels: Any) -> Any:
    """A user's `preprocess_logits_for_metrics`, also for answers, whose logits are two."""
    return (
        tuple(to_classes(part, labels) for part in logits) if isinstance(logits, tuple) else to_classes(logits, labels)
    )


# ---- callbacks ----


class StopAt(TrainerCallback):
    """Ends the training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.step


class EvaluateAt(TrainerCallback):
    """Asks for an evaluation, and for a line of the log, after one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_evaluate = control.should_log = True


class AverageWeights(TrainerCallback):
    """A running mean of the weights, as for evaluation with smoothed weights."""

    def __init__(self) -> None:
        self.mean: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.mean = {name: value.detach().clone() for name, value in model.named_parameters()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, value in model.named_parameters():
            self.mean[name].lerp_(value.detach(), 0.3)


def early_stopping() -> EarlyStoppingCallback:
    return EarlyStoppingCallback(early_stopping_patience=1)


def tensorboard_options() -> dict[str, Any]:
    """Nothing where tensorboard is not installed."""
    return {"report_to": "tensorboard"} if find_spec("tensorboard") else {}


# ---- frozen parameters ----


def freeze(model: nn.Module, is_frozen: Callable[[str], bool]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))


def is_in_first_layers(name: str) -> bool:
    return ".embeddings." in name or bool(re.search(r"\.layers?\.0\.", name))


def is_in_middle_layer(name: str) -> bool:
    return bool(re.search(rf"\.layers?\.{NUM_LAYERS // 2}\.", name))


def is_below_head(name: str) -> bool:
    return not _HEAD.match(name)
