"""The events of a run, each written with the step at which it happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    _place: tuple[int, float | None] | None = field(default=None, init=False)

    @contextmanager
    def at(self, step: int, epoch: float | None) -> Iterator[None]:
        """Events are of this step inside: before a run has begun, Trainer's state is that of an earlier one."""
        self._place = (step, epoch)
        try:
            yield
        finally:
            self._place = None

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event with its inputs."""
        state = self.trainer.state
        self.log.write(kind, *(self._place or (state.global_step, state.epoch)), **fields)
