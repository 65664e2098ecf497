"""The events file: one JSON line for everything that was decided or happened to the run."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from hf_pipetransformer.layout import Layout


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


def read_events(path: str) -> list[dict[str, Any]]:
    """The events of a file, in order; a last line that was cut off by a kill is left out."""
    events = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                events.append(json.loads(line))
    return events


def read_layouts(path: str) -> dict[int, Layout]:
    """The layout plan of an earlier run: optimizer step to the layout from that step on, from its events.

    Raises:
        ValueError: not an events file, or one without a run.
    """
    layouts: dict[int, Layout] = {}
    try:
        for event in read_events(path):
            kind, step = event["event"], event["step"]
            if kind == "run":
                # A resumed run takes over from where it resumed.
                layouts = {earlier: layout for earlier, layout in layouts.items() if earlier < step}
                layouts[step] = Layout.from_event(event["layout"])
            elif kind == "transition":
                layouts[step] = Layout.from_event(event["to"])
            elif kind == "profile" and event["what"] == "trial":
                before = layouts[max(layouts)]
                layouts[step] = replace(before, num_microbatches=event["num_microbatches"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not the events file of a run ({type(error).__name__}: {error}): expected "
            "pipetransformer_events.jsonl of an earlier run."
        ) from error
    if not layouts:
        raise ValueError(f"{path} holds no run: expected the events of a run that began to train.")
    return dict(sorted(layouts.items()))


def read_known_microbatches(path: str | None, layout: Layout, samples_per_device: int) -> dict[int, int]:
    """The M that earlier trials in this folder found best, by K, for the same schedule and batch."""
    if path is None or not os.path.isfile(path):
        return {}
    known = {}
    world_size = layout.num_stages * layout.num_replicas
    try:
        for event in read_events(path):
            if event["event"] == "profile" and event["what"] == "microbatches":
                num_stages = int(event["num_stages"])
                found = (event["num_layers"], event["num_replicas"], event["samples_per_pipeline"], event["schedule"])
                batch = samples_per_device * num_stages
                if found == (layout.num_layers, world_size // num_stages, batch, layout.schedule):
                    known[num_stages] = int(event["num_microbatches"])
    except (KeyError, ValueError) as error:
        logger.warning(f"{path} cannot be read ({type(error).__name__}: {error}): M is measured anew.")
    return known


class _AboveProgressBar(logging.Handler):
    """Writes a line without tearing the progress bar that may stand below it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def announce(text: str) -> None:
    """One readable line for the person who started the run."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = _AboveProgressBar()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    logger.info(text)
