"""What the parts of a run use of Trainer that it does not promise: its rules for columns, counts and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import datasets
import torch
from transformers import Trainer, TrainingArguments

from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import count_items
from hf_pipetransformer.splitters import adapters
from hf_pipetransformer.splitters.adapters import bare_model, has_adapters


def dataset_and_collator(trainer: Trainer, dataset: Any, description: str) -> tuple[Any, Any]:
    """The data set without the columns that the model does not take, and a collator that drops the rest."""
    if isinstance(dataset, datasets.Dataset):
        return trainer._remove_unused_columns(dataset, description=description), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)


def eval_sampler(trainer: Trainer) -> Callable[[Any], Any]:
    """Makes the order of an evaluation."""
    make: Callable[[Any], Any] = trainer._get_eval_sampler
    return make


def preparation(trainer: Trainer) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Puts a batch on the device."""
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = trainer._prepare_inputs
    return prepare


def shifts_labels(trainer: Trainer) -> bool:
    """Whether the loss predicts the next token."""
    return bool(trainer._loss_shifts_labels)


def items_of(trainer: Trainer, inputs: Any) -> int:
    """Items of a batch that the mean of the loss runs over."""
    return count_items(inputs, shifts_labels(trainer)) if inputs else 0


def items_of_own_mean(trainer: Trainer, inputs: Any) -> int:
    """Items that the mean of a loss runs over which is told no number.

    Trainer counts one label too many a sequence for causal models whose loss it does not know by name (GPT-2).
    """
    shifts = shifts_labels(trainer) or type(bare_model(trainer.model)).__name__.endswith("LMHeadModel")
    return count_items(inputs, shifts) if inputs else 0


def takes_num_items(trainer: Trainer) -> bool:
    """Whether Trainer tells a loss of labels by how many items of the whole step to divide."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def is_divided(trainer: Trainer, num_items: Any) -> bool:
    """Trainer's rule for a loss that is already divided over the accumulation."""
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    return (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func is not None


def has_plain_loss(trainer: Trainer) -> bool:
    """Whether the loss is the model's own, and no code of a user looks at batch and output."""
    is_models = trainer.compute_loss_func is None and trainer.label_smoother is None
    return is_models and not is_overridden(trainer, "compute_loss")


def is_overridden(trainer: Trainer, name: str) -> bool:
    """Whether another class than Trainer and this library's has a method, or the trainer itself."""
    package = __name__.partition(".")[0]
    kinds = [kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] != package]
    return name in vars(trainer) or next(kind for kind in kinds if name in vars(kind)) is not Trainer


def saved_names(trainer: Trainer) -> list[str] | None:
    """Names of the parameters that a saving of the model takes; None for all: code of a user's may take any."""
    is_users = is_overridden(trainer, "save_model") or is_overridden(trainer, "_save")
    return None if is_users or not has_adapters(trainer.model) else adapters.saved_names(trainer.model)


_NOT_CALLED_BELOW = (
    "training_step",
    "get_batch_samples",
    "get_total_train_batch_size",
    "_clip_grad_norm",
    "_get_num_items_in_batch",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
)
"""Methods of Trainer that a pipeline replaces altogether."""

_DOES_SOMETHING_UNDER = {"trl.trainer.sft_trainer.SFTTrainer.training_step": "activation_offloading"}
"""Methods of other trainers that are Trainer's unless an option is set."""


def check_taken_over(below: Any, args: TrainingArguments) -> None:
    """Refuse a trainer whose own steps would silently not run: the pipeline runs them.

    Args:
        below: the trainer as the classes after the mixin know it, its `super()`.
        args: its options.
    """
    for name in _NOT_CALLED_BELOW:
        method = getattr(below, name).__func__
        option = _DOES_SOMETHING_UNDER.get(f"{method.__module__}.{method.__qualname__}")
        if option is not None and getattr(args, option):
            raise ValueError(f"{option}=True is not supported with a pipeline: use pipeline_checkpoint='always'.")
        if option is None and method is not getattr(Trainer, name):
            raise ValueError(
                f"{getattr(below, name).__qualname__} would not run: PipeTransformerMixin stands before it and runs "
                f"the steps through the pipeline. Override compute_loss, or override {name} in a class that stands "
                "before the mixin and calls super()."
            )


_MAKERS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")
_DATALOADER = "_get_dataloader"


def check_loaders(kind: type, num_stages: int) -> None:
    """Refuse a class that makes its loaders itself, where its source says so: a pipeline reads through its own.

    Others are refused when they have made one.
    """
    for name in _MAKERS:
        method = getattr(kind, name)
        names = _names_in(method.__code__) if isinstance(method, FunctionType) else set()
        if method is not getattr(Trainer, name) and "DataLoader" in names and not names & {*_MAKERS, _DATALOADER}:
            raise ValueError(
                f"{method.__qualname__} makes a DataLoader, which knows nothing of the {num_stages} stages: build it "
                "with self._get_dataloader, override the sampler or the data collator instead, or set "
                "pipeline_parallel_size=1."
            )


def _names_in(code: CodeType) -> set[str]:
    """Global names and attributes that a function uses, and those inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def place_model(trainer: Trainer) -> None:
    """Put the whole model on this rank's device, as Trainer does without a pipeline."""
    trainer.place_model_on_device = True
    trainer._move_model_to_device(trainer.model, trainer.args.device)


def torch_optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """The optimizer without accelerate's wrapping."""
    optimizer: torch.optim.Optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return optimizer


def learning_rate(trainer: Trainer) -> float:
    """That of the optimizer's first group, for the step that comes; 0 where it has none, as Adafactor by default."""
    return float(torch_optimizer(trainer).param_groups[0].get("lr") or 0.0)


def unlogged_loss(trainer: Trainer) -> dict[str, Any]:
    """What this rank has lost since the last log entry, and the step of that entry."""
    return {"unlogged_loss": trainer._tr_loss.item(), "last_logged_step": trainer._globalstep_last_logged}


def take_up_loss(
    trainer: Trainer, topology: Topology, unlogged_loss: float, last_logged_step: int, **_others: Any
) -> None:
    """What was lost before a resumption belongs to the next log entry, not to this call's mean. A collective call."""
    trainer._tr_loss += unlogged_loss
    trainer._globalstep_last_logged = last_logged_step
    trainer._total_loss_scalar -= sum(topology.gather(unlogged_loss)) / topology.world_size


Notes = dict[str, dict[str, list[float]]]
"""Averages over batches that `compute_loss` noted, by mode ("train" or "eval") and name."""


def notes(trainer: Trainer) -> Notes | None:
    """Those of a trainer of TRL; None for a trainer that notes nothing."""
    found = getattr(trainer, "_metrics", None)
    if not isinstance(found, dict) or not {"train", "eval"} <= found.keys():
        return None
    return found if all(getattr(each, "default_factory", None) is list for each in found.values()) else None


def num_tokens_read(trainer: Trainer) -> int | None:
    """By this rank in training, as trainers of TRL count; None for others."""
    count: int | None = getattr(trainer, "_total_train_tokens", None)
    return count


def count_tokens_read(trainer: Trainer, num: int) -> None:
    """See `num_tokens_read`."""
    if num_tokens_read(trainer) is not None:
        trainer._total_train_tokens += num


@contextmanager
def counting_no_tokens(trainer: Trainer) -> Iterator[None]:
    """See `num_tokens_read`."""
    count = num_tokens_read(trainer)
    try:
        yield
    finally:
        if count is not None:
            trainer._total_train_tokens = count


@contextmanager
def gathering_nothing(accelerator: Any) -> Iterator[None]:
    """`accelerator.gather` gives the own value back, for code that only some ranks run."""
    accelerator.gather = lambda value: value
    try:
        yield
    finally:
        del accelerator.gather
