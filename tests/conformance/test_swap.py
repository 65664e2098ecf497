"""A script's own subclass of Trainer works with the other base class, or is refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from tests.conformance.runs import TOLERANCE, differences, differs, logged
from tests.conformance.swap_worker import swap_all
from tests.distributed.launches import Launches, Layout, Outcome, Run, launches_of, slow_unless
from tests.support.comparison import far_tensors, untimed
from tests.support.models import has_zero_gradient


MODEL = "bert_sequence"

ALONE, TWO_STAGES, TWO_REPLICAS = (1, 1), (2, 1), (1, 2)

EVERYWHERE = ("WeightsClasses", "Distills", "AddsAMetric", "EvaluatesByItself", "WatchesSteps")
WITH_OWN_LOADER = ("LoadsByItself", "LoadsEvaluationByItself")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


launches = launches_of(swap_all)


def runs(names: Iterable[str], layout: Layout) -> list[Any]:
    return [slow_unless(layout == TWO_STAGES, Run(name, layout)) for name in names]


@pytest.mark.parametrize(
    "run",
    [
        *runs(EVERYWHERE, TWO_STAGES),
        *runs(EVERYWHERE, TWO_REPLICAS),
        *runs(("WeightsClasses", "LoadsByItself"), ALONE),
    ],
)
def test_a_subclass_gives_trainers_numbers(ours: Outcome, plain: Outcome):
    found, expected = logged(ours), logged(plain)
    assert [list(entry) for entry in found] == [list(entry) for entry in expected]
    assert [wrong for one, other in zip(found, expected, strict=True) if (wrong := differences(one, other))] == []
    for rank in ours.ranks:
        for key in ("before", "metrics"):
            assert differences(untimed(rank[key]), untimed(plain.ranks[0][key])) == {}, key
        assert not differs(rank["training_loss"], plain.ranks[0]["training_loss"])
    assert far_tensors(ours.tensors, plain.tensors, TOLERANCE, partial(has_zero_gradient, MODEL)) == {}


@pytest.mark.parametrize("run", runs(WITH_OWN_LOADER, TWO_STAGES))
def test_a_loader_of_ones_own_is_refused_with_more_processes(launches: Launches, run: Run):
    for rank in launches.ranks(run, allows_errors=True):
        assert "ValueError" in rank["error"]
        assert re.search(r"dataloader makes a DataLoader, .*self\._get_dataloader", rank["error"])
