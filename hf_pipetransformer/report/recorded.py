"""A finished or running training as its output folder records it: events, log entries and results."""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.report.files import open_regular


STATE_FILE = "trainer_state.json"
RESULTS_FILES = ("all_results.json", "train_results.json", "eval_results.json")
NO_METRICS = re.compile(r"(^epoch|^step|_preparation_time|^total_flos|_num_tokens|_runtime|_per_second|_samples)$")


@dataclass(frozen=True)
class Entry:
    """Log entry: `seconds` of training so far, or None where nothing tells the time."""

    step: int
    seconds: float | None
    values: dict[str, Any]


@dataclass(frozen=True)
class Best:
    """Best value of the metric that checkpoints are compared by, and the step of its evaluation.

    `is_loaded` is True if the model of that step was loaded at the end, and so is the one that the trainer has.
    """

    name: str
    value: float
    step: int
    is_loaded: bool


@dataclass(frozen=True)
class RecordedRun:
    """One training.

    Args:
        events: events in order, without those that a resumed run repeated; `at_s` is the seconds since the start.
        entries: log entries in order.
        results: values of the results files.
        trace: events of the newest trace of a step, see `engine.timing`.
        best: None if no metric was followed.
        after: values that were logged after the training, such as those of `evaluate()`.
        estimates_time: seconds are `train_runtime` spread evenly over the steps.
    """

    name: str
    events: list[dict[str, Any]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    estimates_time: bool = False
    trace: list[dict[str, Any]] = field(default_factory=list)
    best: Best | None = None
    after: dict[str, Any] = field(default_factory=dict)

    def of_kind(self, kind: str, **values: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a kind with these values."""
        for event in self.events:
            if event["event"] == kind and all(event.get(name) == value for name, value in values.items()):
                yield event

    @property
    def num_steps(self) -> int:
        """Last step of which anything was recorded."""
        steps = [int(event["step"]) for event in self.events] + [entry.step for entry in self.entries]
        return max(steps, default=0)

    @property
    def seconds(self) -> float | None:
        """Seconds from the start of training to the last entry recorded in it."""
        known = [event["at_s"] for event in self.events] + [
            entry.seconds for entry in self.entries if entry.seconds is not None
        ]
        return max(known, default=None)

    def metric_names(self) -> list[str]:
        """Return the names of losses and metrics that were logged, training loss first."""
        found = {
            name
            for entry in self.entries
            for name, value in entry.values.items()
            if (name == "loss" or name.startswith("eval_")) and not NO_METRICS.search(name) and is_finite(value)
        }
        return sorted(found, key=lambda name: (name != "loss", name))

    def final_names(self) -> list[str]:
        """Return the names of the metrics that were logged in the training or after it, training loss first."""
        later = [name for name, value in self.after.items() if is_finite(value) and not NO_METRICS.search(name)]
        return list(dict.fromkeys([*self.metric_names(), *later]))

    def values_of(self, name: str) -> list[tuple[Entry, float]]:
        """Return the log entries with a finite value of this name."""
        return [(entry, entry.values[name]) for entry in self.entries if is_finite(entry.values.get(name))]

    def value_at(self, name: str, seconds: float) -> tuple[Entry, float] | None:
        """Return the last logged value of a metric at or before a time; None if there is none."""
        known = [found for found in self.values_of(name) if found[0].seconds is not None]
        earlier = [found for found in known if (found[0].seconds or 0.0) <= seconds]
        return earlier[-1] if earlier else None

    def is_best(self, name: str, entry: Entry) -> bool:
        """Return True for the entry that has the best value of the metric that checkpoints are compared by."""
        return self.best is not None and (self.best.name, self.best.step) == (name, entry.step)

    def final_value(self, name: str) -> float | None:
        """Return a metric of the model that the trainer has at the end, which is the best one if it was loaded."""
        values = self.values_of(name)
        if is_finite(self.after.get(name)):
            return float(self.after[name])
        # The training loss was logged for the last steps, whichever model was loaded after them.
        if self.best is not None and self.best.is_loaded and name != "loss":
            values = [(entry, value) for entry, value in values if entry.step == self.best.step]
        elif is_finite(self.results.get(name)):
            return float(self.results[name])
        return values[-1][1] if values else None

    @property
    def origin(self) -> dict[str, Any]:
        """Model, data, options, revision, machine and versions of the run; empty where they were not recorded."""
        return next((dict(event["origin"]) for event in self.of_kind("run") if event.get("origin")), {})

    @property
    def end(self) -> dict[str, Any]:
        """Event of the end; empty for a run that has not ended."""
        return next(self.of_kind("end"), {})

    def layouts(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return each layout with the event from which it applied."""
        field_of = {"run": "layout", "transition": "to"}
        return [(event, event[field_of[event["event"]]]) for event in self.events if event["event"] in field_of]


def is_finite(value: Any) -> TypeGuard[float]:
    """Return True for a number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def pipeline_size(layout: dict[str, Any]) -> int:
    """Return the ranks of a pipeline K of a layout in an event."""
    return int(layout["num_stages"]) // int(layout.get("num_chunks", 1))


def read_runs(folders: Sequence[str]) -> list[RecordedRun]:
    """Read several runs; each is named by the part of its folder in which it differs from the others.

    Raises:
        ValueError: a folder has no run in it; the message names it.
    """
    paths = [Path(folder) for folder in folders]
    return [read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def read_run(folder: Path, name: str) -> RecordedRun:
    """Read one run from its output folder.

    Raises:
        ValueError: no run is in it, or a file is not what it should be.
    """
    events_file = folder / EVENTS_FILE
    events, after = _joined(read_events(str(events_file))) if events_file.is_file() else ([], {})
    results: dict[str, Any] = {}
    # The first has the newest values of all phases, so it comes last.
    for each in reversed(RESULTS_FILES):
        if (folder / each).is_file():
            results |= _object(folder / each)
    entries = [Entry(event["step"], event["at_s"], event["values"]) for event in events if event["event"] == "log"]
    estimates = False
    if not entries:
        entries, after, estimates = _logged_by_trainer(folder, events, results)
    if not events and not entries:
        raise ValueError(
            f"{folder} has neither {EVENTS_FILE} nor {STATE_FILE}: expected the output_dir of a run, which has the "
            f"first if PipeTransformerTrainer trained there, and the second after `trainer.save_state()` or in a "
            "checkpoint."
        )
    best = _best(folder, events, entries)
    return RecordedRun(name, events, entries, results, estimates, _trace(folder), best, after)


def _names(paths: Sequence[Path]) -> list[str]:
    parts = [path.resolve().parts for path in paths]
    length = 1
    # As few of the folders' last parts as tell the runs apart: whole paths would fill the legend.
    while length < max(map(len, parts)) and len({part[-length:] for part in parts}) < len(paths):
        length += 1
    names = ["/".join(part[-length:]) for part in parts]
    return [name if names.count(name) == 1 else f"{name} ({at + 1})" for at, name in enumerate(names)]


def _object(path: Path) -> dict[str, Any]:
    try:
        with os.fdopen(open_regular(path), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): expected a JSON object.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has a {type(found).__name__}, expected a JSON object.")
    return found


def _joined(events: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of the last run in a file, and the values that were logged after its end.

    The events get `at_s`, seconds since the start; a resumed run continues the one before. Steps that were trained
    again after a kill are left out, but their time counts.
    """
    joined: list[dict[str, Any]] = []
    after: dict[str, Any] = {}
    has_ended = False
    begin = passed = 0.0
    for event in events:
        at = float(event.get("time_s") or 0.0)
        if event["event"] == "run":
            # A second training in the same folder starts its own report; only a resumed one continues the first.
            if "resumed_from" not in event or not joined:
                joined, passed = [], 0.0
            else:
                # Steps that a kill undid took their time all the same.
                passed = max(each["at_s"] for each in joined)
                joined = [each for each in joined if each["step"] <= event["step"] and each["event"] != "end"]
            begin, after, has_ended = at, {}, False
        elif event["event"] == "end":
            has_ended = True
        # What evaluate() logs after the training belongs to the final model, not to the curve.
        elif event["event"] == "log" and has_ended:
            after |= event["values"]
            continue
        # What belongs to no run, such as the inspection before the first, has no time.
        joined.append({**event, "at_s": max(0.0, passed + at - begin)})
    return joined, after


def _logged_by_trainer(
    folder: Path, events: Sequence[dict[str, Any]], results: dict[str, Any]
) -> tuple[list[Entry], dict[str, Any], bool]:
    """Return the entries of Trainer's own log, which have no time, values logged later, and True for estimated times.

    The entry with `train_runtime` ends a training.
    """
    path = _state_file(folder)
    if path is None:
        return [], {}, False
    history = _object(path).get("log_history")
    # Written by Trainer, but perhaps edited or of another program: a chart must not fail in its middle.
    if not isinstance(history, list) or not all(isinstance(each, dict) and "step" in each for each in history):
        raise ValueError(f"{path} has no log_history of entries with a step: expected the state of a Trainer.")
    ends = [at for at, each in enumerate(history) if is_finite(each.get("train_runtime"))]
    runtime = results.get("train_runtime", history[ends[-1]]["train_runtime"] if ends else None)
    after = {name: value for each in (history[ends[-1] + 1 :] if ends else ()) for name, value in each.items()}
    history = history[: ends[-1] + 1] if ends else history
    last = max((each["step"] for each in history), default=0)
    steps, seconds = [event["step"] for event in events], [event["at_s"] for event in events]
    entries = []
    for each in history:
        at = None
        if steps:
            # Trainer's log has steps alone; the events around an entry tell its time best.
            at = seconds[max(0, bisect_right(steps, each["step"]) - 1)]
        elif is_finite(runtime) and last:
            at = runtime * each["step"] / last
        entries.append(Entry(each["step"], at, each))
    return entries, after, not steps and is_finite(runtime)


def _best(folder: Path, events: Sequence[dict[str, Any]], entries: Sequence[Entry]) -> Best | None:
    """Return the best value that the run's end records, else that of the newest state of a Trainer."""
    for event in reversed(events):
        if event["event"] == "end" and "best" in event:
            found = event["best"]
            return None if found is None else Best(found["name"], found["value"], found["step"], found["is_loaded"])
    path = _state_file(folder)
    state = {} if path is None else _object(path)
    value, step = state.get("best_metric"), state.get("best_global_step")
    # A state does not name the metric, nor say whether that model was loaded.
    for entry in entries if is_finite(value) else ():
        for name, logged in entry.values.items():
            if entry.step == step and logged == value and name.startswith("eval_"):
                return Best(name, value, entry.step, is_loaded=False)
    return None


def _trace(folder: Path) -> list[dict[str, Any]]:
    # lstat: the age of a link in the folder is its own, and opening it is refused below.
    path = max(folder.glob("trace_step_*.json"), key=lambda path: path.lstat().st_mtime, default=None)
    found = [] if path is None else _object(path).get("traceEvents")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{path} has no list of traceEvents: expected the trace of a step.")
    return found


def _state_file(folder: Path) -> Path | None:
    """Return the newest state of a Trainer in an output folder: its own, else that of its last checkpoint."""
    if (folder / STATE_FILE).is_file():
        return folder / STATE_FILE
    found = [path for path in folder.glob(f"checkpoint-*/{STATE_FILE}") if path.parent.name[11:].isdigit()]
    return max(found, key=lambda path: int(path.parent.name[11:]), default=None)
