"""Scenarios: functions that every rank of a launch calls, started by one worker with one protocol.

A scenario stands in any module below `tests`, the worker's command line is `worker.py MODULE:FUNCTION FOLDER OPTIONS`:

    @scenario
    def answers(folder: Path, num_stages: int) -> dict[str, Any]: ...

In a test `run` starts it, with a time limit and every rank's output, and returns what each rank returned. `start` is
for launches that fail, `run_each` for many cases in as few launches as they allow:

    records = run(answers, folder, num_processes=2, options={"num_stages": 2}, timeout=60)
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file

from tests.distributed.launcher import LaunchResult, launch


WORKER = Path(__file__).with_name("worker.py")
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Scenario = TypeVar("Scenario", bound=Callable[..., Any])

_SCENARIOS: dict[str, Callable[..., Any]] = {}


class Lines(logging.Handler):
    """Keeps the texts that a logger is given."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def scenario(function: Scenario) -> Scenario:
    """Register a function `(folder, **options)` whose options and result are JSON values."""
    _SCENARIOS[_name_of(function)] = function
    return function


def find(name: str) -> Callable[..., Any]:
    """Return the scenario `MODULE:FUNCTION`."""
    importlib.import_module(name.partition(":")[0])
    return _SCENARIOS[name]


def _name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__name__}"


def arguments_of(function: Callable[..., Any], folder: Path, options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the arguments of `WORKER`, for the launchers that `run` does not call."""
    name = _name_of(function)
    assert name in _SCENARIOS, f"{name} is no @scenario"
    return [name, str(folder), json.dumps(dict(options or {}))]


def run(
    function: Callable[..., Any],
    folder: Path,
    num_processes: int = 1,
    options: Mapping[str, Any] | None = None,
    **launching: Any,
) -> list[Any]:
    """Run a scenario as `start` does; return what each rank returned, None where it returned nothing."""
    start(function, folder, num_processes, options, **launching)
    return records(folder, num_processes)


def start(
    function: Callable[..., Any],
    folder: Path,
    num_processes: int = 1,
    options: Mapping[str, Any] | None = None,
    **launching: Any,
) -> LaunchResult:
    """Run a scenario on every rank, with the time limit and the other options of `launch`."""
    for rank in range(num_processes):
        noted(folder, "record", rank).unlink(missing_ok=True)
    return launch(WORKER, arguments_of(function, folder, options), num_processes, **launching)


def records(folder: Path, num_processes: int) -> list[Any]:
    """Return what each rank of the last launch in a folder returned."""
    paths = [noted(folder, "record", rank) for rank in range(num_processes)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def run_each(
    function: Callable[..., Any],
    folder: Path,
    cases: Mapping[str, Any],
    num_processes: int,
    seconds: tuple[float, float],
    *,
    noted_in: str = ".",
    options: Mapping[str, Any] | None = None,
    **launching: Any,
) -> str:
    """Run a scenario that takes the path of a list of cases, and return all output.

    A case that ends its launch does not take the ones behind it along: they get another launch.

    Args:
        cases: by name, under which rank 0 notes the outcome.
        seconds: that a launch may take to start, and for each case.
        noted_in: where in the folder the last outcome of a case is noted.
    """
    left, output = dict(cases), ""
    while left:
        listed = folder / f"{next(iter(left))}.cases"
        listed.write_text(json.dumps(list(left.values())))
        result = start(
            function, folder, num_processes, {"listed": str(listed), **(options or {})},
            timeout=seconds[0] + seconds[1] * len(left), check=False, grace=70, **launching,
        )  # fmt: skip
        output += result.output
        if result.returncode == 0:
            break
        done = [name for name in left if noted(folder / noted_in, name, 0).exists()]
        left = dict(list(left.items())[max(len(done), 1) :])
    return output


def read_notes(folder: Path, name: str, num_ranks: int, output: str, allows_errors: bool = False) -> list[Any]:
    """Return what each rank noted of a case; fail, with the launch's output, if it came to no end or to an error."""
    paths = [noted(folder, name, rank) for rank in range(num_ranks)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        pytest.fail(f"{missing} were not written.\n{output}", pytrace=False)
    ranks = [json.loads(path.read_text()) for path in paths]
    errors = [f"rank {rank}:\n{values['error']}" for rank, values in enumerate(ranks) if "error" in values]
    if errors and not allows_errors:
        pytest.fail("\n".join([name, *errors]), pytrace=False)
    return ranks


# On a rank.


def noted(folder: Path, name: str, rank: int = RANK) -> Path:
    return folder / f"{name}.rank{rank}.json"


def note(folder: Path, name: str, values: Any) -> None:
    """Write what this rank found; a reader sees all of it or nothing."""
    unfinished = noted(folder, name).with_suffix(".part")
    unfinished.write_text(json.dumps(values))
    unfinished.rename(noted(folder, name))


def run_case(
    folder: Path, name: str, act: Callable[[], tuple[dict[str, Any], dict[str, torch.Tensor]]], *refusals: type
) -> None:
    """Note the values that `act` returns, and save its tensors on rank 0; note errors too.

    The next case may follow a refusal, which is alike on all ranks; any other error ends the launch.
    """
    begin = time.monotonic()
    print(f"case {name}", flush=True)
    try:
        values, tensors = act()
    except BaseException as error:
        note(folder, name, {"error": traceback.format_exc()})
        if isinstance(error, refusals):
            return
        raise
    if RANK == 0:
        whole = {key: value.contiguous() for key, value in tensors.items()}
        save_file(whole, folder / f"{name}.safetensors")
    note(folder, name, {**values, "seconds": time.monotonic() - begin})
