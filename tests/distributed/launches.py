"""Trainings beside each other: many short runs in few launches, what their ranks wrote down, and the comparison.

A worker trains one case and returns what it ended with:

    def train(case: str, layout: Layout | None, output: Path) -> End: ...

    @scenario
    def run_all(folder: Path, listed: str) -> None:
        run_listed(folder, listed, train)

A test module names the runs by its parameters, and looks at their outcomes:

    launches = launches_of(run_all)

    @pytest.mark.parametrize("run", [Run("tied", (2, 1))], ids=str)
    def test_follows_trainer(ours: Outcome, plain: Outcome) -> None:
        assert_trained_alike(ours, plain)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launcher import LaunchError
from tests.distributed.scenarios import read_notes, run_case, run_each
from tests.support.comparison import far_steps, far_tensors
from tests.support.trainings import End


# Seconds a launch may take: to start, and for each run.
START_SECONDS = 120
# What Triton interprets is slow.
RUN_SECONDS = 25 if os.environ.get("TRITON_INTERPRET") != "1" else 600

ON_DEVICES = (2, 4, 8)
"""Numbers of processes that run under the double of NCCL unless a test module says otherwise."""

Layout = tuple[int, int]
"""K stages x R replicas."""


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        case: its name.
        layout: that it begins with; None for the one that others are compared with, on one process.
        plain: the name of that one, if it is another than `case`.
    """

    case: str
    layout: Layout | None = None
    plain: str | None = None

    def __str__(self) -> str:
        return f"{self.case}-{self.layout[0]}x{self.layout[1]}" if self.layout else f"{self.case}-plain"

    @property
    def num_ranks(self) -> int:
        return self.layout[0] * self.layout[1] if self.layout else 1

    @property
    def reference(self) -> Run:
        return Run(self.plain or self.case)


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one run wrote down, and the tensors that rank 0 saved.

    Args:
        ranks: one dict each.
        path: of the files, without their endings.
    """

    ranks: list[dict[str, Any]]
    path: Path

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(f"{self.path}.safetensors")

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.named("weights.")

    @property
    def output(self) -> Path:
        """The `output_dir` of the run."""
        return self.path.with_name(f"{self.path.name}-output")

    @property
    def history(self) -> list[dict[str, float]]:
        return self.ranks[0]["log_history"]

    def logged(self, key: str) -> list[dict[str, float]]:
        """Return the entries of the log that have `key`."""
        return [entry for entry in self.history if key in entry]

    def values(self, key: str) -> list[float]:
        """Return what was logged under `key`, in order."""
        return [entry[key] for entry in self.logged(key)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind in the events file of the run."""
        lines = (self.output / "pipetransformer_events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def starting_with(self, *prefixes: str) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.tensors.items() if name.startswith(prefixes)}

    def named(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors that start with `prefix`, without it."""
        return {name.removeprefix(prefix): value for name, value in self.starting_with(prefix).items()}


class Launches:
    """Launches runs, all of one number of processes together, when the first of them is asked for.

    Args:
        scenario: runs a list of them, see `run_listed`.
        folder: for what the runs write.
        cases: what the scenario is given of each run, a JSON value.
        strict: numbers of processes that run under the double of NCCL.
    """

    def __init__(
        self,
        scenario: Callable[..., None],
        folder: Path,
        cases: Mapping[Run, Any],
        strict: Collection[int] = ON_DEVICES,
    ) -> None:
        self.scenario = scenario
        self.folder = folder
        self.cases = cases
        self.strict = strict
        asking = sorted((run for run in cases if run.layout is not None), key=lambda run: -run.num_ranks)
        # The last one stays: the fewest ranks of the runs that are compared with a reference.
        self._asked_by = {run.reference: run.num_ranks for run in asking}
        self._output: dict[tuple[int, int], str] = {}
        self._refused: dict[tuple[int, int], str] = {}

    def ranks(self, run: Run, allows_errors: bool = False) -> list[dict[str, Any]]:
        """Return what each rank noted of a run."""
        group = self._group(run)
        if group not in self._output:
            try:
                self._output[group] = self._launch_all(group)
            except LaunchError as error:
                self._output[group] = self._refused[group] = str(error)
        if group in self._refused:
            pytest.fail(self._refused[group], pytrace=False)
        return read_notes(self.folder, str(run), run.num_ranks, self._output[group], allows_errors)

    def outcome(self, run: Run) -> Outcome:
        return Outcome(self.ranks(run), self.folder / str(run))

    def _group(self, run: Run) -> tuple[int, int]:
        """Return what the runs that start together have in common."""
        # References apart, those of two ranks and of four, too: one of them may read what the run of ours wrote.
        return run.num_ranks, self._asked_by.get(run, 1) if run.layout is None else 0

    def _launch_all(self, group: tuple[int, int]) -> str:
        runs = [run for run in self.cases if self._group(run) == group]
        jobs = {str(run): {"name": str(run), "case": self.cases[run], "layout": run.layout} for run in runs}
        seconds, is_strict = (START_SECONDS, RUN_SECONDS), group[0] in self.strict
        return run_each(self.scenario, self.folder, jobs, group[0], seconds, strict_nccl=is_strict)


def selected_runs(request: pytest.FixtureRequest) -> list[Run]:
    """Return the runs that parameters of the selected tests of a module name, and what they are compared with."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    named = [value for item in items for value in item.callspec.params.values() if isinstance(value, Run)]
    return list(dict.fromkeys(each for run in named for each in (run, run.reference)))


def launches_of(scenario: Callable[..., None], strict: Collection[int] = ON_DEVICES) -> Any:
    """Make the fixture `launches` of a test module whose scenario knows its cases by name."""

    @pytest.fixture(scope="module")
    def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
        folder = tmp_path_factory.mktemp(request.path.stem)
        return Launches(scenario, folder, {run: run.case for run in selected_runs(request)}, strict)

    return launches


def run_params(
    layouts: Mapping[str, Iterable[Layout]],
    is_quick: Callable[[Run], bool],
    marks: Callable[[Run], Collection[Any]] = lambda run: (),
) -> list[Any]:
    """Return parameters for each layout of each case; those that are not quick are slow."""
    runs = [Run(case, layout) for case, its_layouts in layouts.items() for layout in its_layouts]
    return [slow_unless(is_quick(run), run, *marks(run)) for run in runs]


def slow_unless(is_quick: bool, run: Run, *marks: Any) -> Any:
    return pytest.param(run, id=str(run), marks=[*marks, *([] if is_quick else [pytest.mark.slow])])


def assert_trained_alike(
    found: Outcome,
    expected: Outcome,
    tolerance: float = 1e-5,
    keys: Collection[str] = ("loss", "grad_norm"),
    ignored: Callable[[str], bool] = lambda name: False,
    floor: float = 1e-12,
    weight_tolerance: float | None = None,
) -> None:
    """Check what was logged in the same steps, and the weights after the last one.

    Args:
        tolerance: largest relative difference.
        keys: of what was logged.
        ignored: tells weights whose gradient is zero by mathematics.
        floor: a smaller norm of a weight counts as that.
        weight_tolerance: of weights, if it is another.
    """
    assert found.logged("loss"), "nothing was logged"
    for key in keys:
        far = far_steps(found.logged(key), expected.logged(key), key, tolerance)
        assert far == {}, f"{key} by step, found and expected: {far}"
    bound = tolerance if weight_tolerance is None else weight_tolerance
    distances = far_tensors(found.weights, expected.weights, bound, ignored, floor)
    assert distances == {}, f"weights that differ: {distances}"


# On a rank.


def run_listed(
    folder: Path, listed: str, train: Callable[[Any, Layout | None, Path], End], *refusals: type[Exception]
) -> None:
    """Train each run of a list and note its end; the next one may follow one that is refused alike on all ranks."""
    for job in json.loads(Path(listed).read_text()):
        layout = tuple(job["layout"]) if job["layout"] else None
        output = folder / f"{job['name']}-output"
        run_case(folder, job["name"], partial(train, job["case"], layout, output), *refusals)
