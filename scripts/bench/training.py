"""Short runs of the trainer that experiments look into."""

from __future__ import annotations

import itertools
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE, read_events

from .models import training_options


Events = list[dict[str, Any]]
_numbers = itertools.count()


def world_size() -> int:
    """Processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def run_options(batch: int, **options: Any) -> dict[str, Any]:
    """Arguments of a quiet run with this global batch, in a new folder that all ranks of a launch share."""
    own = batch // world_size()
    sizes = {"per_device_train_batch_size": own, "per_device_eval_batch_size": own}
    return training_options(**{"output_dir": f"output-{next(_numbers)}", **sizes, **options})


class StepClock(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """From the end of each step to that of the next."""
        return [after - before for before, after in pairwise(self.ends)]


class Timed(PipeTransformerTrainer):
    """Keeps the losses, the seconds of each step, and those of them that waited for its batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        self.waited: list[float] = []
        self._began: list[float] = []
        self._clock = StepClock()
        super().__init__(*args, **kwargs)
        self.add_callback(self._clock)
        self.remove_callback(PrinterCallback)

    @property
    def seconds(self) -> list[float]:
        """Of each step, from fetching its batch on."""
        return [end - began for began, end in zip(self._began, self._clock.ends, strict=True)]

    @property
    def meter(self) -> Any:
        """The parts of the steps under the last layout."""
        return self.pipeline_run.pipeline.settings.meter

    @property
    def events(self) -> Events:
        """What the run wrote down; rank 0 has it."""
        return read_events(str(Path(self.args.output_dir) / EVENTS_FILE))

    def _fetch(self, num_batches: int) -> Any:
        self._began.append(time.perf_counter())
        fetched = super()._fetch(num_batches)
        self.waited.append(time.perf_counter() - self._began[-1])
        return fetched

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])
        super().log(logs, start_time)


def make_trainer(given: dict[str, Any], batch: int, kind: type[Timed] = Timed, **options: Any) -> Any:
    """A trainer in the processes of this launch; `given` are its arguments beside the options."""
    args = PipeTransformerArguments(
        **run_options(batch, **{"learning_rate": 1e-5, "pipeline_timeout": 120, **options})
    )
    return kind(args=args, **given)


def train(given: dict[str, Any], batch: int, kind: type[Timed] = Timed, **options: Any) -> Any:
    """Run a training and return its trainer."""
    trainer = make_trainer(given, batch, kind, **options)
    trainer.train()
    return trainer


def cache_epochs(events: Events) -> Events:
    """What the activation cache did, epoch by epoch."""
    return [event for event in events if event["event"] == "cache" and event["what"] == "epoch"]
