"""Outcomes of runs, for the test modules whose fixture `launches` launches them all together."""

from __future__ import annotations

import pytest

from tests.distributed.launches import Launches, Outcome, Run
from tests.distributed.transition_cases import CASES, SLOW_CASES, TransitionCase
from tests.distributed.transition_runs import TransitionRuns


@pytest.fixture
def ours(launches: Launches, run: Run) -> Outcome:
    """The run that the test's parameter names."""
    return launches.outcome(run)


@pytest.fixture
def plain(launches: Launches, run: Run) -> Outcome:
    """What that run is compared with, on one process."""
    return launches.outcome(run.reference)


@pytest.fixture(scope="session")
def transition_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TransitionRuns:
    """The cases that the selected tests ask for by their parameter `case`, and those that these replay."""
    known = {case.name: case for case in [*CASES, *SLOW_CASES]}
    wanted = set()
    for item in request.session.items:
        if "transition_runs" in getattr(item, "fixturenames", ()):
            case = item.callspec.params["case"]
            wanted |= {case.name, case.follows}
    selected = {name: case for name, case in known.items() if name in wanted}
    return TransitionRuns(tmp_path_factory.mktemp("transitions"), selected)


@pytest.fixture
def moved(transition_runs: TransitionRuns, case: TransitionCase) -> Outcome:
    """The run on four processes."""
    return transition_runs.pipeline(case)
