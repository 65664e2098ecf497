"""The events file: one JSON line for everything that was decided or happened to the run."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any


EVENTS_FILE = "pipetransformer_events.jsonl"
KINDS = ("run", "freeze", "transition", "profile", "cache", "checkpoint", "fault", "end")

logger = logging.getLogger("hf_pipetransformer")


class EventLog:
    """Appends events to `<output_dir>/pipetransformer_events.jsonl`, each line flushed as it is written.

    Args:
        output_dir: the run's folder; None on ranks that do not write.
    """

    def __init__(self, output_dir: str | None) -> None:
        self.path = None if output_dir is None else os.path.join(output_dir, EVENTS_FILE)
        self._start = time.time()

    def write(self, event: str, step: int, epoch: float | None, **fields: Any) -> None:
        """Append one event with its inputs."""
        assert event in KINDS, event
        if self.path is None:
            return
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        line = {"event": event, "step": step, "epoch": epoch, "time_s": round(time.time() - self._start, 3), **fields}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def announce(text: str) -> None:
    """One readable line for the person who started the run."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    logger.info(text)
