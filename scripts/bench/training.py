"""Short runs of plain `Trainer` and of ours that experiments look into."""

from __future__ import annotations

import itertools
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import BertForSequenceClassification, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE, read_events

from .measure import PeakMemory
from .models import training_options


Events = list[dict[str, Any]]
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


class Timed(PipeTransformerTrainer):
    """Keeps when steps end, and the seconds that each waited for its batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.waited: list[float] = []
        self.clock = StepClock()
        super().__init__(*args, **kwargs)
        self.add_callback(self.clock)

    @property
    def meter(self) -> Any:
        """The parts of the steps under the last layout."""
        return self.pipeline_run.pipeline.settings.meter

    @property
    def events(self) -> Events:
        """What the run wrote down; rank 0 has it."""
        return read_events(str(Path(self.args.output_dir) / EVENTS_FILE))

    def get_batch_samples(self, *args: Any) -> Any:
        start = time.perf_counter()
        fetched = super().get_batch_samples(*args)
        if fetched[0]:  # Trainer also asks at the end of an epoch.
            self.waited.append(time.perf_counter() - start)
        return fetched


def make_trainer(given: dict[str, Any], batch: int, kind: type[Trainer] = Timed, **options: Any) -> Any:
    """A quiet trainer of ours, or plain `Trainer` as `kind`, in a new folder that all ranks of a launch share.

    Args:
        given: its arguments beside the options.
        batch: of all processes together.
    """
    own = batch // int(os.environ.get("WORLD_SIZE", "1"))
    common = training_options(
        output_dir=f"output-{next(_numbers)}", per_device_train_batch_size=own, per_device_eval_batch_size=own
    )
    if kind is Trainer:
        trainer = Trainer(
            args=TrainingArguments(**{**common, "ddp_find_unused_parameters": False, **options}), **given
        )
        if isinstance(trainer.model, BertForSequenceClassification):
            trainer.model_accepts_loss_kwargs = False  # Its loss ignores num_items_in_batch.
    else:
        defaults = {"learning_rate": 1e-5, "pipeline_timeout": 120}
        trainer = kind(args=PipeTransformerArguments(**{**common, **defaults, **options}), **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(given: dict[str, Any], batch: int, kind: type[Trainer] = Timed, **options: Any) -> Any:
    """Run a training and return its trainer."""
    trainer = make_trainer(given, batch, kind, **options)
    trainer.train()
    return trainer


def cache_epochs(events: Events) -> Events:
    """What the activation cache did, epoch by epoch."""
    return [event for event in events if event["event"] == "cache" and event["what"] == "epoch"]


def losses_of(trainer: Trainer) -> list[float]:
    """Every logged training loss."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
