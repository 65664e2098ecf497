"""fp16 over stages: the scale, the skipped steps and the weights are those of plain Trainer with its own scaler."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.distributed.fp16_worker import CASES, RESUMED, SAVED_AT, SCHEDULES, STEPS, run_all
from tests.distributed.launches import Launches, Outcome, Run, assert_trained_alike, launches_of, slow_unless
from tests.support.models import has_zero_gradient


# One rounding of float16: the micro-batches are the same, but gradients are added in another order.
TOLERANCE = 2**-11
ON_SCHEDULES = {f"first_stage-{schedule}" for schedule in SCHEDULES}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

launches = launches_of(run_all)


def runs() -> list[Any]:
    found = [slow_unless(True, Run(case, (2, 1), case.partition("-")[0])) for case in CASES]
    layouts = [(case, layout) for case in CASES.keys() - ON_SCHEDULES for layout in ((4, 1), (2, 2))]
    return found + [slow_unless(False, Run(case, layout)) for case, layout in sorted(layouts)]


@pytest.mark.parametrize("run", runs())
def test_stages_scale_and_skip_as_plain_trainer(ours: Outcome, plain: Outcome) -> None:
    for rank in ours.ranks:
        for key in ("scales", "learning_rates"):
            assert rank[key] == plain.ranks[0][key]
    assert len(plain.logged("loss")) == STEPS
    assert_trained_alike(ours, plain, TOLERANCE, ignored=partial(has_zero_gradient, "vit"), floor=1e-3)


@pytest.mark.parametrize("run", [Run("elastic", (2, 1))], ids=str)
def test_the_scale_outlives_a_change_of_the_layout(ours: Outcome) -> None:
    """The case compares nothing otherwise: it ends on one stage, with three layers frozen."""
    for rank in ours.ranks:
        assert (rank["layout"]["num_stages"], rank["layout"]["num_frozen_layers"]) == (1, 3)


@pytest.mark.parametrize("run", [Run("first_stage", (2, 1))], ids=str)
def test_an_overflow_in_one_stage_skips_the_step_of_both(ours: Outcome) -> None:
    """Otherwise the cases would not show that the ranks agree."""
    seen = [[step for step, overflows in enumerate(rank["overflows"]) if overflows] for rank in ours.ranks]
    assert sorted(seen) == [[2], [5]]


@pytest.mark.parametrize(
    ("run", "changes"),
    [
        (Run("steady"), {1.0}),
        (Run("grows"), {1.0, 2.0}),
        (Run("too_large"), {0.5, 1.0, 2.0}),
        (Run("first_stage"), {0.5, 1.0}),
        (Run("unclipped"), {0.5, 1.0}),
    ],
    ids=str,
)
def test_the_cases_grow_and_shrink_the_scale(plain: Outcome, changes: set[float]) -> None:
    assert {later / earlier for earlier, later in pairwise(plain.ranks[0]["scales"])} == changes


@pytest.mark.parametrize(
    ("run", "again"),
    [(Run(case, (2, 1)), Run(f"{case}{RESUMED}", (2, 1), case)) for case in ("too_large", "first_stage")],
    ids=str,
)
def test_a_resumed_run_goes_on_with_its_scale(ours: Outcome, launches: Launches, again: Run) -> None:
    resumed = launches.outcome(again)
    for rank, other in zip(ours.ranks, resumed.ranks, strict=True):
        assert other["scales"] == rank["scales"][SAVED_AT:]
    assert resumed.values("loss") == ours.values("loss")
    assert all(torch.equal(resumed.weights[key], weight) for key, weight in ours.weights.items())
