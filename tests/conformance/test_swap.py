"""A script's own subclass of Trainer works with the other base class, or is refused with the reason."""

from __future__ import annotations

import re

import pytest

from tests.conformance.runs import TOLERANCE, Run, cases_of, differences, differs, logged
from tests.conformance.swap_worker import swap_all
from tests.distributed.launches import Launches, Layout
from tests.support.comparison import tensor_difference, untimed
from tests.support.models import has_zero_gradient


MODEL = "bert_sequence"

ALONE, TWO_STAGES, TWO_REPLICAS = (1, 1), (2, 1), (1, 2)

EVERYWHERE = ("WeightsClasses", "Distills", "AddsAMetric", "EvaluatesByItself", "WatchesSteps")
WITH_OWN_LOADER = ("LoadsByItself", "LoadsEvaluationByItself")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def run_of(name: str, layout: Layout | None) -> Run:
    return Run(name, {"class": name}, layout)


WORKING = [
    *(run_of(name, TWO_STAGES) for name in EVERYWHERE),
    *(run_of(name, TWO_REPLICAS) for name in EVERYWHERE),
    *(run_of(name, ALONE) for name in ("WeightsClasses", "LoadsByItself")),
]
REFUSED = [run_of(name, TWO_STAGES) for name in WITH_OWN_LOADER]


def _id(run: Run) -> str:
    return f"{run.layout[0]}x{run.layout[1]}-{run.name}" if run.layout else run.name


def _marked(run: Run) -> object:
    return pytest.param(run, id=_id(run), marks=[] if run.layout == TWO_STAGES else [pytest.mark.slow])


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    runs = [item.callspec.params["run"] for item in request.session.items if item.path == request.path]
    selected = {str(run): run for one in runs for run in (one, one.reference)}
    return Launches(swap_all, tmp_path_factory.mktemp("swap"), cases_of(list(selected.values())))


@pytest.mark.parametrize("run", list(map(_marked, WORKING)))
def test_a_subclass_gives_trainers_numbers(launches: Launches, run: Run):
    ours, plain = launches.outcome(run.layout, run.name), launches.outcome(None, run.name)
    found, expected = logged(ours), logged(plain)
    assert [list(entry) for entry in found] == [list(entry) for entry in expected]
    assert [wrong for one, other in zip(found, expected, strict=True) if (wrong := differences(one, other))] == []
    for rank in ours.ranks:
        for key in ("before", "metrics"):
            assert differences(untimed(rank[key]), untimed(plain.ranks[0][key])) == {}, key
        assert not differs(rank["training_loss"], plain.ranks[0]["training_loss"])
    assert ours.tensors.keys() == plain.tensors.keys()
    far = {
        name: difference
        for name, theirs in plain.tensors.items()
        if not has_zero_gradient(MODEL, name)
        and (difference := tensor_difference(ours.tensors[name], theirs)) > TOLERANCE
    }
    assert far == {}


@pytest.mark.parametrize("run", list(map(_marked, REFUSED)))
def test_a_loader_of_ones_own_is_refused_with_more_processes(launches: Launches, run: Run):
    for rank in launches.ranks(run.layout, run.name, allows_errors=True):
        assert "ValueError" in rank["error"]
        assert re.search(r"dataloader makes a DataLoader, .*self\._get_dataloader", rank["error"])
