"""Search for outputs that several replicas cannot join in an evaluation: those without one row a sample."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from accelerate.utils import recursively_apply
from transformers import Trainer

from hf_pipetransformer import trainer_compat
from hf_pipetransformer.data.batches import batch_size, rows_per_sample
from hf_pipetransformer.data.flattened import sequences_of


REMEDY = (
    "Name the output in ignore_keys_for_eval of train() or ignore_keys of evaluate() and predict(), let "
    "preprocess_logits_for_metrics return one row a sample, or evaluate on one replica "
    "(pipeline_parallel_size as large as the number of processes, and elastic=False)."
)


def has_rows(tensor: torch.Tensor, num_samples: int) -> bool:
    """Return True if a tensor has a row for each sample."""
    return tensor.dim() > 0 and len(tensor) == num_samples


def shape_without_rows(trainer: Trainer, model: Any, inputs: dict[str, Any], ignored: list[str] | None) -> str | None:
    """Return the shape of the first tensor that evaluations of a training gather and that has no row for each sample.

    None if there is none, or if it takes an evaluation to know: it reads the loss alone, generates, or has a
    `prediction_step` of the user's. `inputs` is a batch for the model.
    """
    if trainer.compute_metrics is None or trainer.args.eval_strategy == "no" or trainer_compat.generates(trainer):
        return None
    is_known = not trainer_compat.is_overridden(trainer, "prediction_step")
    if not is_known or trainer.args.prediction_loss_only or sequences_of(inputs) is not None:
        return None
    size = batch_size(inputs)
    found: list[str] = []
    sizes = {size, size * rows_per_sample(inputs)}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if not any(has_rows(tensor, each) for each in sizes):
            found.append(str(tuple(tensor.shape)))
        return tensor

    preprocess = trainer.preprocess_logits_for_metrics or (lambda logits, _labels: logits)
    # What raises here raises in the evaluation, with its own cause.
    with suppress(Exception), torch.no_grad():
        _, outputs = trainer.compute_loss(model, dict(inputs), return_outputs=True)
        read = trainer_compat.preprocessed(trainer, preprocess, ignored, outputs, inputs)
        recursively_apply(look, read["preprocessed"])
    return found[0] if found else None
