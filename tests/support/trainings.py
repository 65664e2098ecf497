"""Short trainings: the options that they share, and what they end with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments


WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

End = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""What a training ended with: JSON values of each rank, and tensors, of which those of rank 0 count."""

QUIET: dict[str, Any] = {
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
"""Log every step, and nothing else."""


def options_for(output: Path, batch: int = 8, **options: Any) -> dict[str, Any]:
    """Return options of a short training, `batch` samples over all processes; `options` change them."""
    return {"output_dir": str(output), "per_device_train_batch_size": batch // WORLD_SIZE, **QUIET, **options}


def plain_arguments(output: Path, **options: Any) -> TrainingArguments:
    """Return arguments of plain Trainer, see `options_for`."""
    return TrainingArguments(**options_for(output, **options))


def our_arguments(output: Path, num_stages: int | str, **options: Any) -> PipeTransformerArguments:
    """Return arguments of a pipeline that freezes nothing unless told to, see `options_for`."""
    # A rank that hangs is to end the run within the time limit of a launch.
    own = {"pipeline_parallel_size": num_stages, "freeze_policy": "none", "pipeline_timeout": 60}
    return PipeTransformerArguments(**options_for(output, **{**own, **options}))


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of the weights of a whole model, as tensors of an `End`."""
    return {f"weights.{name}": value.detach().clone() for name, value in trainer.model.named_parameters()}


def end_of(trainer: Trainer, **values: Any) -> End:
    """Return what a training has logged, its last layout, further values, and its weights."""
    layout = getattr(trainer, "layout", None)  # Plain Trainer has none.
    own = {"log_history": trainer.state.log_history, "layout": None if layout is None else layout.as_event()}
    return own | values, weights_of(trainer)


def losses_of(trainer: Trainer) -> list[float]:
    """Return the losses that a training has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
