"""The events of a run, each written with the step at which it happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import Trainer

from hf_pipetransformer.report.events import EventLog


@dataclass
class Journal:
    """Writes events with the trainer's present step and epoch.

    Args:
        trainer: tells them.
        log: the file.
    """

    trainer: Trainer
    log: EventLog
    tried: dict[str, Any] = field(default_factory=dict, init=False)
    """The layout in force, or that the run moves to, and the conditions of its memory, as JSON values."""

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event with its inputs."""
        self.log.write(kind, self.trainer.state.global_step, self.trainer.state.epoch, **fields)
