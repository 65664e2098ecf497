"""The events of a run, each written with the step at which it happened."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from hf_pipetransformer.report.events import EventLog


class Journal:
    """Writes events with the trainer's present step and epoch.

    Args:
        trainer: tells them.
        log: the file.
    """

    def __init__(self, trainer: Trainer, log: EventLog) -> None:
        self.trainer = trainer
        self.log = log
        self.tried: dict[str, Any] = {}
        """The layout in force, or that the run moves to, and the conditions of its memory, as JSON values."""

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event with its inputs."""
        self.log.write(kind, self.trainer.state.global_step, self.trainer.state.epoch, **fields)
