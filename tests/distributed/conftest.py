"""One launch for all tests of changing layouts: starting Python takes longer than most cases."""

from __future__ import annotations

import pytest

from tests.distributed.transition_cases import CASES, SLOW_CASES, TransitionCase
from tests.distributed.transition_runs import Outcome, TransitionRuns


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
