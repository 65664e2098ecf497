"""Trainers of the experiments, plain and ours, and the times of their steps."""

from __future__ import annotations

import itertools
import os
import time
from itertools import pairwise
from typing import Any

from transformers import BertForSequenceClassification, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

from .measure import PeakMemory


_numbers = itertools.count()


class StepClock(TrainerCallback):
    """When each optimizer step ended; the phase `training` of memory begins after the first one."""

    def __init__(self, memory: PeakMemory | None = None) -> None:
        self.ends: list[float] = []
        self.memory = memory

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())
        if self.memory is not None and len(self.ends) == 1:
            self.memory.begin("training")

    @property
    def seconds(self) -> list[float]:
        """From the end of each step to that of the next."""
        return [after - before for before, after in pairwise(self.ends)]


def make_trainer(
    given: dict[str, Any], batch: int, kind: type[Trainer] = PipeTransformerTrainer, **options: Any
) -> Any:
    """A quiet trainer of ours that saves nothing, or plain `Trainer` as `kind`, in a new folder of the launch.

    Args:
        given: its arguments beside the options.
        batch: of all processes together.
    """
    own = batch // int(os.environ.get("WORLD_SIZE", "1"))
    common = {
        "output_dir": f"output-{next(_numbers)}", "per_device_train_batch_size": own,
        "per_device_eval_batch_size": own, "save_strategy": "no", "report_to": "none", "logging_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    if issubclass(kind, PipeTransformerTrainer):
        defaults = {"learning_rate": 1e-5, "pipeline_timeout": 120}
        trainer = kind(args=PipeTransformerArguments(**{**common, **defaults, **options}), **given)
    else:
        # Without the option DDP would look for unused parameters in each step, to the disadvantage of plain Trainer.
        trainer = kind(args=TrainingArguments(**{**common, "ddp_find_unused_parameters": False, **options}), **given)
        if isinstance(trainer.model, BertForSequenceClassification):
            trainer.model_accepts_loss_kwargs = False  # Its loss ignores num_items_in_batch.
    trainer.remove_callback(PrinterCallback)
    return trainer


def without_launch_variables() -> None:
    """Let plain Trainer not wrap the model for processes that are not there."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)


def losses_of(trainer: Trainer) -> list[float]:
    """Every logged training loss."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
