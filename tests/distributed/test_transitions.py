"""Law 2: freezing as one process does it, whatever layouts the run goes through meanwhile.

Four processes go through many layouts, K from 4 to 1 and back, between any two optimizer steps. Two references on one
process freeze the same layers at the same steps: the same trainer, and plain Trainer with a callback that freezes by
hand, so that the reference itself is checked.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.distributed.launches import Outcome, assert_trained_alike
from tests.distributed.transition_cases import BROAD, CASES, NUM_EVAL_SAMPLES, SLOW_CASES, TransitionCase
from tests.distributed.transition_runs import TransitionRuns
from tests.support.comparison import METRIC_TOLERANCE, far_steps, relative_difference, tensor_difference, untimed
from tests.support.models import has_zero_gradient


pytestmark = [
    pytest.mark.distributed,
    # The first test waits for the launch of all cases.
    pytest.mark.timeout(2000),
]


def selectable(*names: str, compared: bool = False) -> list[Any]:
    """Cases as parameters: those named, or all."""
    marks = {id(case): [pytest.mark.slow] for case in SLOW_CASES}
    return [
        pytest.param(case, id=case.name, marks=marks.get(id(case), []))
        for case in [*CASES, *SLOW_CASES]
        if (not names or case.name in names) and (case.compares or not compared)
    ]


@pytest.fixture(params=["single", "plain"])
def reference(request: pytest.FixtureRequest, transition_runs: TransitionRuns, case: TransitionCase) -> Outcome:
    return transition_runs.reference(case, request.param)


@pytest.mark.parametrize("case", selectable(compared=True))
def test_losses_gradient_norms_and_weights_follow_one_process(
    moved: Outcome, reference: Outcome, case: TransitionCase
):
    assert_trained_alike(moved, reference, case.tolerance, ignored=partial(has_zero_gradient, case.model))
    for key in ("learning_rate", "epoch"):
        assert far_steps(moved.logged("loss"), reference.logged("loss"), key, 1e-12) == {}
    assert relative_difference(moved.ranks[0]["training_loss"], reference.ranks[0]["training_loss"]) <= case.tolerance


@pytest.mark.parametrize("case", selectable(compared=True))
def test_evaluation_under_changing_layouts_is_that_of_one_process(moved: Outcome, reference: Outcome):
    pairs = list(zip(moved.logged("eval_loss"), reference.logged("eval_loss"), strict=True))
    pairs.append((moved.ranks[0]["metrics"], reference.ranks[0]["metrics"]))
    for mine, theirs in pairs:
        mine, theirs = untimed(mine), untimed(theirs)
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert relative_difference(mine[key], value) <= METRIC_TOLERANCE, (key, mine[key], value)
    for rank in moved.ranks[1:]:
        assert untimed(rank["metrics"]) == untimed(moved.ranks[0]["metrics"])


@pytest.mark.parametrize("case", selectable("best-model"))
def test_the_best_model_of_an_earlier_layout_is_loaded_at_the_end(moved: Outcome, reference: Outcome):
    first, *later = moved.logged("eval_loss")
    assert len(later) >= 5
    assert moved.ranks[0]["best_global_step"] == first["step"] < moved.events("transition")[0]["step"]
    assert moved.ranks[0]["best_global_step"] == reference.ranks[0]["best_global_step"]
    assert moved.ranks[0]["metrics"]["eval_loss"] == pytest.approx(first["eval_loss"], rel=METRIC_TOLERANCE)
    assert moved.ranks[0]["metrics"]["eval_loss"] != pytest.approx(later[-2]["eval_loss"], rel=1e-2)


@pytest.mark.parametrize("case", selectable())
def test_every_rank_ends_with_the_same_whole_model_and_the_users_flags(moved: Outcome, case: TransitionCase):
    before, _ = moved.ranks[0]["flags"]
    assert all(before.values()) == (not any(change.startswith("freeze") for change in case.changes))
    for rank in moved.ranks:
        assert rank["weights"] == moved.ranks[0]["weights"]
        assert rank["flags"] == [before, before]
        assert rank["global_step"] == moved.ranks[0]["global_step"]


@pytest.mark.parametrize("case", selectable())
def test_all_ranks_were_under_the_planned_layout_at_every_step(moved: Outcome, case: TransitionCase):
    by_step = [[entry["layout"] for entry in rank["steps"]] for rank in moved.ranks]
    assert len(by_step[0]) == moved.ranks[0]["global_step"]
    assert all(layouts == by_step[0] for layouts in by_step)
    for entry in moved.ranks[0]["steps"] if case.plan else ():
        expected = [phase for phase in case.plan if phase[0] <= entry["step"]][-1]
        found = (entry["num_frozen"], entry["boundaries"], entry["num_microbatches"], entry["cache_level"])
        assert found == (expected[1], expected[2], expected[3], case.cache_level(expected)), entry["step"]


def test_the_cases_test_something():
    """Mid-epoch transitions, growing and shrinking pipelines, moves of frozen, active and no parts."""
    boundaries = [phase[2] for phase in BROAD.plan]
    lengths = [len(cuts) - 1 for cuts in boundaries]
    assert {(4, 2), (2, 1), (1, 2)} <= set(zip(lengths, lengths[1:], strict=False))
    steps_per_epoch = -(-BROAD.num_samples // 8)
    mid_epoch = {step % steps_per_epoch for step, *_ in BROAD.plan[1:]}
    assert 0 in mid_epoch and len(mid_epoch) > 3
    assert BROAD.epochs * steps_per_epoch > BROAD.plan[-1][0] > 30
    assert BROAD.num_samples % 8
    frozen = [phase[1] for phase in BROAD.plan]
    assert any(now == before for before, now in zip(frozen, frozen[1:], strict=False))
    assert NUM_EVAL_SAMPLES % 4


@pytest.mark.parametrize("case", selectable("user-froze-the-prefix"))
def test_a_prefix_that_the_user_froze_is_frozen_from_the_start(moved: Outcome):
    assert moved.events("run")[0]["layout"]["num_frozen_layers"] == 1
    assert [entry["num_frozen"] for entry in moved.ranks[0]["steps"]][:6] == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("case", selectable("user-froze-a-middle-layer"))
def test_a_layer_that_the_user_froze_stays_so_through_transitions(moved: Outcome, reference: Outcome):
    frozen = {name for name, flag in moved.ranks[0]["flags"][0].items() if not flag}
    assert frozen
    assert all(".layer.2." in name for name in frozen)
    for rank in moved.ranks:
        for entry in rank["steps"]:
            assert not frozen & {*entry["in_optimizer"], *entry["with_state"]}
    for name in frozen:
        assert tensor_difference(moved.weights[name], reference.weights[name]) == 0


@pytest.mark.parametrize("case", selectable("compiled-layers", "adamw-vit"))
def test_layers_are_compiled_where_that_is_asked_for(moved: Outcome, case: TransitionCase):
    for rank in moved.ranks:
        assert bool(rank["num_graphs"]) == (case.name == "compiled-layers")
        assert rank["graph_breaks"] == []
