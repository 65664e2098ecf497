"""Events file: one JSON line for each decision and event of a run."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.report.files import open_regular
from hf_pipetransformer.schedules.json_values import entries, entry, text, whole_number
from hf_pipetransformer.schedules.layout import MOST_MICROBATCHES, Layout


EVENTS_FILE = "pipetransformer_events.jsonl"
KINDS = ("run", "freeze", "transition", "profile", "cache", "checkpoint", "log", "progress", "fault", "end")

_LONGEST_LINE = 2**24
"""Bytes; what has a longer line is no events file, and is not read into memory."""

# A fault of another rank is written by the thread that learns of it, while the main thread may write too.
_WRITING = threading.Lock()


class EventLog:
    """Writer of `<output_dir>/pipetransformer_events.jsonl`; writes nothing if `output_dir` is None."""

    def __init__(self, output_dir: str | None) -> None:
        self.path = None if output_dir is None else os.path.join(output_dir, EVENTS_FILE)
        self._start = time.time()

    def write(self, event: str, step: int, epoch: float | None, **fields: Any) -> None:
        """Append one event. `fields` are its inputs and must be JSON values."""
        assert event in KINDS, event
        if self.path is None:
            return
        line = {"event": event, "step": step, "epoch": epoch, "time_s": round(time.time() - self._start, 3), **fields}
        with _WRITING:
            # Here and not at the start: a run that writes no event leaves no folder.
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            # Opened for each line: a kill loses nothing, and a file that was moved away begins anew.
            with os.fdopen(open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b") as file:
                _finish_last_line(file, self.path)
                file.write(json.dumps(line).encode() + b"\n")

    def check(self) -> None:
        """Raise ValueError if something lies in the place of the file that no event can be added to."""
        if self.path is None:
            return
        try:
            with os.fdopen(open_regular(self.path, os.O_RDWR), "r+b") as file:
                _finish_last_line(file, self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be written ({error}): expected the events file of a run, or none. Remove it, or "
                "set another output_dir."
            ) from error


def _finish_last_line(file: IO[bytes], path: str) -> None:
    """Repair a line that a kill cut short: end it if it is a whole event, else remove it."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 1))
    if file.read() in (b"", b"\n"):
        return
    # Only the end is read: the file of a long run may be larger than memory.
    begin = file.seek(max(0, end - _LONGEST_LINE))
    _, newline, line = file.read().rpartition(b"\n")
    if begin and not newline:
        raise OSError(errno.EINVAL, f"its last line has more than {_LONGEST_LINE} bytes", path)
    if _event_of(line) is not None:
        file.write(b"\n")
    else:
        file.truncate(end - len(line))


def _event_of(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
        text(entry(entries(event, "event"), "event"), "event")
        whole_number(entry(event, "step"), "step")
    # What is no JSON may nest brackets deeper than the parser can follow.
    except (ValueError, RecursionError):
        return None
    return dict(event)


def read_events(path: str) -> list[dict[str, Any]]:
    """Return the events of a file, in order; skip a truncated last line with a warning.

    Raises:
        ValueError: another line is not an event.
    """
    return [event for _at, event in _numbered_events(path)]


def _numbered_events(path: str) -> list[tuple[int, dict[str, Any]]]:
    try:
        # The user names this file; those that a run finds in its own folder are never links.
        file = os.fdopen(open_regular(path, follows_links=True), "rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}): expected the events file of a run.") from error
    events = []
    with file:
        # A file that is no events file may have no newline at all.
        for at, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
            event = _event_of(line)
            if event is not None:
                events.append((at, event))
            # A kill can cut short the last line alone, which then has no newline.
            elif line.endswith(b"\n") or len(line) == _LONGEST_LINE:
                raise ValueError(
                    f"{path} is not the events file of a run: line {at} is {line.rstrip()[:60]!r}, expected an event. "
                    "Give the pipetransformer_events.jsonl of an earlier run, or remove that line."
                )
            else:
                logger.warning(f"{path}: the last line was cut off ({line[:60]!r}) and is ignored.")
    return events


def read_layouts(path: str) -> dict[int, Layout]:
    """Return the layout plan of an earlier run from its events: optimizer step to the layout from that step on.

    Raises:
        ValueError: not an events file, no run in it, or impossible events; the message names the line.
    """
    layouts: dict[int, Layout] = {}
    for line, event in _numbered_events(path):
        with _at_line(path, line):
            kind, step = event["event"], event["step"]
            if kind not in KINDS:
                raise ValueError(f"found an event {kind[:60]!r}, expected one of {KINDS}")
            if kind == "run":
                # A resumed run replaces the layouts from the step it resumed at.
                layouts = {earlier: layout for earlier, layout in layouts.items() if earlier < step}
                layouts[step] = Layout.from_event(entry(event, "layout"))
            elif kind == "transition" or (kind == "profile" and text(entry(event, "what"), "what") == "trial"):
                if not layouts or step < max(layouts):
                    last = f"one of step {max(layouts)}" if layouts else "no run"
                    raise ValueError(f"found a {kind} of step {step} after {last}, expected the events in their order")
                if kind == "transition":
                    layouts[step] = Layout.from_event(entry(event, "to"))
                else:
                    # A trial of micro-batches changes M alone, and no transition is written for it.
                    m = whole_number(entry(event, "num_microbatches"), "num_microbatches", 1, MOST_MICROBATCHES)
                    layouts[step] = replace(layouts[max(layouts)], num_microbatches=m)
    if not layouts:
        raise ValueError(f"{path} holds no run: expected the events of a run that began to train.")
    return dict(sorted(layouts.items()))


@contextmanager
def _at_line(path: str, number: int) -> Iterator[None]:
    """Add the line number to a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{path} is not the events file of a run: line {number}: {str(error).rstrip('.')}. Give the "
            "pipetransformer_events.jsonl of an earlier run as it was written."
        ) from error


def read_known_microbatches(path: str | None, layout: Layout, samples_per_device: int) -> dict[tuple[int, int], int]:
    """Return and log the best M of earlier trials in this folder with the same schedule and batch, by (K, V)."""
    if path is None or not os.path.isfile(path):
        return {}
    known = {}
    world_size = layout.pipeline_size * layout.num_replicas
    try:
        for event in read_events(path):
            if event["event"] == "profile" and event["what"] == "microbatches":
                size, num_chunks = (
                    whole_number(event[name], name, 1, MOST_MICROBATCHES) for name in ("pipeline_size", "num_chunks")
                )
                found = (event["num_layers"], event["num_replicas"], event["samples_per_pipeline"], event["schedule"])
                batch = samples_per_device * size
                if found == (layout.num_layers, world_size // size, batch, layout.schedule):
                    known[size, num_chunks] = whole_number(event["num_microbatches"], "num_microbatches", 1, batch)
    # An older version may have written other fields; what was measured is a shortcut, never a condition.
    except (KeyError, TypeError, ValueError) as error:
        logger.warning(f"{path} cannot be read ({type(error).__name__}: {error}): M is measured again.")
        return {}
    if known:
        taken = ", ".join(
            f"M={count} for K={size}" + (f" V={num_chunks}" if num_chunks > 1 else "")
            for (size, num_chunks), count in sorted(known.items())
        )
        announce(
            f"{taken}: measured by an earlier run in this folder ({path}). Remove that file, or set "
            "pipeline_parallel_num_microbatches, to choose otherwise."
        )
    return known


def read_unfit(path: str | None, conditions: dict[str, Any]) -> int:
    """Return and log the longest pipeline that ran out of memory in this folder under `conditions`, or 0."""
    unfit = 0
    try:
        for event in read_events(path) if path is not None and os.path.isfile(path) else ():
            if event["event"] == "fault" and event.get("out_of_memory") and event.get("conditions") == conditions:
                unfit = max(unfit, Layout.from_event(event["layout"]).pipeline_size)
    except (KeyError, TypeError, ValueError) as error:
        logger.warning(f"{path} cannot be read ({type(error).__name__}: {error}): what ran out of memory is unknown.")
    if unfit:
        announce(
            f"K={unfit} ran out of memory in an earlier run in this folder ({path}): only longer pipelines are "
            "planned. Remove that file, or set pipeline_parallel_size, to choose otherwise."
        )
    return unfit
