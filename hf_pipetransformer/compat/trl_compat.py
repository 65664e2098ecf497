"""Access to what TRL's trainers do not promise: metrics, reference models, and which of them a pipeline can run.

What the package sets on their objects is in the list of `trainer_compat`. TRL itself is not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import nn
from transformers import Trainer

from hf_pipetransformer.compat.trainer_compat import with_attributes
from hf_pipetransformer.data.batches import IGNORED_LABEL, SampleBatch
from hf_pipetransformer.splitters.adapters import bare_model


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments


Metrics = dict[str, dict[str, list[float]]]
"""Batch averages that `compute_loss` recorded, by mode ("train" or "eval") and name."""

_OF_PAIRS = ("RewardTrainer", "DPOTrainer")
"""TRL's trainers whose samples are pairs: a batch has all chosen texts, then all rejected ones."""


def rows_of_sample(trainer: Trainer) -> int:
    """Return how many rows of a batch a sample has."""
    return 2 if any(each.__name__ in _OF_PAIRS and is_trls(each) for each in type(trainer).__mro__) else 1


def is_trls(kind: type) -> bool:
    """Return True for a class of TRL."""
    # By the module's name, since TRL need not be installed.
    return kind.__module__.partition(".")[0] == "trl"


def has_fused_head(trainer: Trainer) -> bool:
    """Return True if TRL has given the model a head that turns pieces of logits into log-probabilities at once."""
    forward = vars(bare_model(trainer.model)).get("forward")
    # By the parameters that it has itself, since it says it has those of the forward that it wraps.
    return forward is not None and "fused_lm_head" in inspect.signature(forward, follow_wrapped=False).parameters


# ---- metrics ----


RECORDED = ("_metrics", "_total_train_tokens")
"""Attributes of a TRL trainer that its loss writes; `MetricAccumulator` has them for all ranks."""


def metrics(trainer: Trainer) -> Metrics | None:
    """Return the metrics of a TRL trainer; None for a trainer that records none."""
    found = getattr(trainer, "_metrics", None)
    if not isinstance(found, dict) or not {"train", "eval"} <= found.keys():
        return None
    # TRL's are `defaultdict(list)`; a `_metrics` of another make belongs to the user's code.
    return found if all(getattr(each, "default_factory", None) is list for each in found.values()) else None


_OVER_TOKENS = {"entropy": None, "mean_token_accuracy": 0, "logits/chosen": 0, "logits/rejected": 1}
"""Metrics that are averages over label tokens, with the block of rows whose tokens count; None: those of all blocks.

The others are averages over samples, or the least or largest value of a batch.
"""


def metric_weights(batch: SampleBatch) -> Callable[[str], int]:
    """Return a function from a metric's name to the number of samples or tokens of a batch that it averages over."""
    num_samples, tokens = batch.size, _label_tokens(batch)

    def weight(name: str) -> int:
        if name not in _OVER_TOKENS or not tokens:
            return num_samples
        block = _OVER_TOKENS[name]
        return sum(tokens) if block is None else tokens[min(block, len(tokens) - 1)]

    return weight


def _label_tokens(batch: SampleBatch) -> list[int]:
    """Count the predicted tokens by block of rows: not the first of a sequence. Empty for a batch without labels."""
    # Shifted already: the first place of a row is predicted as well.
    if "shift_labels" in batch:
        is_label = batch["shift_labels"] != IGNORED_LABEL
    elif "labels" in batch:
        is_label = batch["labels"][..., 1:] != IGNORED_LABEL
    # DPOTrainer's batches have no labels: its loss counts the tokens that this mask marks.
    elif "completion_mask" in batch:
        is_label = batch["completion_mask"][..., 1:] != 0
    else:
        return []
    counts: list[int] = is_label.reshape(batch.rows, -1).sum(dim=1).tolist()
    return counts


def num_tokens_read(trainer: Trainer) -> int | None:
    """Return the training tokens that this rank has counted, as TRL's trainers do; None for others."""
    return getattr(trainer, "_total_train_tokens", None)


def count_tokens_read(trainer: Trainer, num: int) -> None:
    """Add to the count of `num_tokens_read`."""
    if num_tokens_read(trainer) is not None:
        trainer._total_train_tokens += num


def kept_token_count(trainer: Trainer) -> AbstractContextManager[None]:
    """Restore the count of `num_tokens_read` on exit."""
    count = num_tokens_read(trainer)
    return with_attributes(trainer, {} if count is None else {"_total_train_tokens": count})


# ---- the frozen reference of DPOTrainer ----

_REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")


def has_reference(trainer: Trainer) -> bool:
    """Return True if the loss compares the model with a frozen reference, as DPOTrainer's does."""
    return callable(getattr(trainer, "compute_ref_log_probs", None))


def is_precomputed(trainer: Trainer) -> bool:
    """Return True if the data sets hold what the reference says of them, or will after `precompute_reference`."""
    return bool(getattr(trainer, "precompute_ref_logps", False))


def reference(trainer: Trainer, shell: nn.Module) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return a function from a batch to the reference's entries of it; None where there is no reference to run.

    On a stage it runs that stage's part of the reference, which is the model without its adapters.
    """
    if not has_reference(trainer) or is_precomputed(trainer):
        return None
    return lambda inputs: reference_entries(trainer, shell, inputs)


@torch.no_grad()
def reference_entries(trainer: Any, shell: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the reference's log-probabilities of a batch's texts, `(batch,)` each, as entries that the loss reads."""
    trained = [(parameter, parameter.requires_grad) for parameter in trainer.model.parameters()]
    try:
        return dict(zip(_REFERENCE, trainer.compute_ref_log_probs(shell, inputs), strict=True))
    finally:
        # PEFT makes all adapters trainable when it switches them on again, those that the run has frozen too.
        for parameter, was_trained in trained:
            if parameter.requires_grad != was_trained:
                parameter.requires_grad_(was_trained)


def with_reference(trainer: Trainer, shell: nn.Module, batch: SampleBatch) -> SampleBatch:
    """Return a batch with what the reference says of it, where the loss reads one."""
    return batch | reference_entries(trainer, shell, dict(batch)) if has_reference(trainer) else batch


def reading_reference(trainer: Trainer, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Make the loss read the reference's log-probabilities from the batch, if they are there, and run no reference."""
    are_there = has_reference(trainer) and not is_precomputed(trainer) and _REFERENCE[0] in inputs
    return with_attributes(trainer, {"precompute_ref_logps": True} if are_there else {})


def precompute_reference(trainer: Any) -> None:
    """Compute what the reference says of the trainer's data sets, which its constructor has left to do.

    Collective: call on every rank.
    """
    if not is_precomputed(trainer):
        return
    args, size = trainer.args, trainer.args.precompute_ref_batch_size
    train_size, eval_size = size or args.per_device_train_batch_size, size or args.per_device_eval_batch_size
    trainer.train_dataset = trainer._precompute_ref_logps(trainer.train_dataset, "train", train_size)
    given = trainer.eval_dataset
    if isinstance(given, dict):
        trainer.eval_dataset = {
            name: trainer._precompute_ref_logps(dataset, name, eval_size) for name, dataset in given.items()
        }
    elif given is not None:
        trainer.eval_dataset = trainer._precompute_ref_logps(given, "eval", eval_size)


def with_columns(dataset: datasets.Dataset, entries: list[dict[str, torch.Tensor]]) -> datasets.Dataset:
    """Return a data set with the entries of all its samples, given in batches, as columns in memory."""
    for name in _REFERENCE:
        values = torch.cat([entry[name] for entry in entries])
        # numpy has no bfloat16.
        dataset = dataset.add_column(name, values.float().numpy())
    return dataset


# ---- which trainers a pipeline can run ----

_REFUSED = {
    "KTOTrainer": (
        "its loss compares each sample with a mean over the whole batch, for which it runs the model a second time. "
        "Train on pairs with DPOTrainer"
    ),
}
"""TRL's trainers that a pipeline cannot run, with the reason and what to use in their place."""


def check_trainer(kind: type[Trainer], args: PipeTransformerArguments, values: Mapping[str, Any]) -> None:
    """Refuse trainers of TRL, or uses of them, that a pipeline cannot run.

    Args:
        values: arguments of the constructor by name.
    """
    for each in kind.__mro__:
        if not is_trls(each):
            continue
        reason = _REFUSED.get(each.__name__)
        # Told by their methods, such as GRPOTrainer's `_generate`: a list would miss those that TRL adds.
        if reason is None and any(name.startswith("_generate") for name in vars(each)):
            reason = (
                "it generates text with the model while it trains, which needs the whole model between two steps. "
                "Generate the texts before the training, and train on them with SFTTrainer or DPOTrainer"
            )
        if reason is not None:
            raise ValueError(
                f"{each.__name__} does not run in a pipeline: {reason}, or leave PipeTransformerMixin out."
            )
    if getattr(kind, "compute_ref_log_probs", None) is not None:
        _check_reference(kind.__name__, args, values)


def _check_reference(name: str, args: Any, values: Mapping[str, Any]) -> None:
    # TRL puts adapters on a model if it is given `peft_config`; a script may also pass a model that has some.
    has_adapters = values.get("peft_config") is not None or hasattr(values.get("model"), "get_base_model")
    is_second_model = values.get("ref_model") is not None or not (has_adapters or args.precompute_ref_log_probs)
    if is_second_model:
        raise ValueError(
            f"{name} would hold a second model as its reference, which a pipeline does not split. Leave ref_model "
            "out, and train adapters (peft_config), whose reference is the model without them; or set "
            "precompute_ref_log_probs=True, which computes what the reference says before the training."
        )
    if has_adapters and not args.precompute_ref_log_probs and (why := args.abilities.refuses.get("reference")):
        raise ValueError(
            f"pipeline_schedule={args.pipeline_schedule!r} {why}, and {name} has a reference: set "
            "precompute_ref_log_probs=True, or pipeline_schedule='1f1b'."
        )
