"""Law 1: whatever the layout, the numbers are those of plain Trainer.

Plain Trainer runs in one process with the same global batch. All cases of one layout run in one launch, all references
in another; the tests below look at what they wrote down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from hf_pipetransformer.schedules.tables import find_schedule
from tests.distributed.cases import CI_CASES, LAYOUTS, NUM_EVAL_SAMPLES, SLOW_CASES, Case
from tests.distributed.equality_worker import EVAL_SEED, run_all
from tests.distributed.launches import Launches, Outcome, Run, selected_runs
from tests.support.comparison import (
    METRIC_TOLERANCE,
    far_steps,
    far_tensors,
    relative_difference,
    tensor_difference,
    untimed,
)
from tests.support.models import MODELS, has_zero_gradient, real_positions


CASES = {
    Run(case.name, layout, case.reference.name): case
    for layout in LAYOUTS
    for case in [*CI_CASES[layout], *SLOW_CASES[layout]]
}


def _selectable_runs() -> Iterator[Any]:
    for run, case in CASES.items():
        marks = [] if case in CI_CASES[run.layout] else [pytest.mark.slow]
        yield pytest.param(run, id=f"{run.layout[0]}x{run.layout[1]}-{case.name}", marks=marks)


pytestmark = [
    pytest.mark.distributed,
    # The first test of a layout waits for the launch of all its cases.
    pytest.mark.timeout(3000),
    pytest.mark.parametrize("run", list(_selectable_runs())),
]


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    plain = {run.reference: case.reference for run, case in CASES.items()}
    cases = {run: (CASES | plain)[run].as_json() for run in selected_runs(request)}
    return Launches(run_all, tmp_path_factory.mktemp("equality"), cases)


@pytest.fixture
def case(run: Run) -> Case:
    return CASES[run]


def test_losses_and_gradient_norms_follow_trainer(ours: Outcome, plain: Outcome, case: Case):
    for key in ("loss", "grad_norm"):
        far = far_steps(ours.logged("loss"), plain.logged("loss"), key, case.tolerance)
        assert far == {}, f"{key} by step: ours, Trainer's"
    ends = ours.ranks[0]["training_loss"], plain.ranks[0]["training_loss"]
    assert relative_difference(*ends) <= case.tolerance


def test_learning_rates_steps_and_log_keys_equal_trainers(ours: Outcome, plain: Outcome, run: Run, case: Case):
    layout_scalars = {
        *("pipeline_stages", "pipeline_replicas", "pipeline_microbatches"),
        *("frozen_layers", "cached_layers"),
    }
    if run.layout[0] > 1 and find_schedule(case.schedule).abilities.default_chunks > 1:
        layout_scalars.add("pipeline_chunks")
    if run.layout[0] == 1 and not case.num_frozen_layers:
        layout_scalars = set()  # It is one that Trainer has too.
    count = None
    # A layout that is decided on before the first step has an entry of its own, as later transitions have.
    at_start = [entry.keys() - {"epoch", "step"} for entry in ours.history if entry["step"] == 0]
    assert at_start in ([], [layout_scalars])
    for index, (mine, theirs) in enumerate(zip(ours.logged("loss"), plain.logged("loss"), strict=True)):
        # The first entry under a layout shows the layout, beside what Trainer logs; one that tries numbers of
        # micro-batches has several.
        more = mine.keys() - theirs.keys()
        if layout_scalars:
            assert {"samples_per_second", "memory_gb"} <= more
            more -= {"samples_per_second", "tokens_per_second", "memory_gb", "bubble_share"}
        is_first = (index == 0 and not at_start) or (mine.get("pipeline_microbatches") != count and bool(more))
        assert more == (layout_scalars if is_first else set())
        count = mine.get("pipeline_microbatches", count)
        assert theirs.keys() <= mine.keys()
        assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-12)
        assert mine["epoch"] == pytest.approx(theirs["epoch"], rel=1e-12)
    ends = ours.history[-1], plain.history[-1]
    summaries = [[entry for entry in outcome.history if "train_runtime" in entry] for outcome in (ours, plain)]
    assert [len(summary) for summary in summaries] == [1, 1]
    assert summaries[0][0].keys() == summaries[1][0].keys()
    assert [untimed(entry).keys() for entry in ours.logged("eval_loss")] == [
        untimed(entry).keys() for entry in plain.logged("eval_loss")
    ]
    assert ends[0]["step"] == ends[1]["step"]
    for key in ("global_step", "max_steps", "epoch", "best_global_step"):
        assert ours.ranks[0][key] == plain.ranks[0][key], key


def test_weights_follow_trainer(ours: Outcome, plain: Outcome, case: Case):
    assert far_tensors(ours.weights, plain.weights, case.tolerance, partial(has_zero_gradient, case.model)) == {}


def test_evaluation_equals_trainers(ours: Outcome, plain: Outcome, case: Case):
    tolerance = max(METRIC_TOLERANCE, case.tolerance if case.options.get("bf16") else 0)
    pairs = [(ours.ranks[0][key], plain.ranks[0][key]) for key in ("metrics", "test_metrics")]
    pairs += zip(ours.logged("eval_loss"), plain.logged("eval_loss"), strict=True)
    for mine, theirs in pairs:
        mine, theirs = untimed(mine), untimed(theirs)
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert relative_difference(mine[key], value) <= tolerance, (key, mine[key], value)


def test_predictions_are_complete_and_in_order(ours: Outcome, plain: Outcome, case: Case):
    found, expected = ours.named("predictions."), plain.named("predictions.")
    assert found.keys() == expected.keys()
    assert any(name.startswith("before.") for name in expected) == case.evaluate_first
    real = real_positions(case.model, NUM_EVAL_SAMPLES, EVAL_SEED)
    for name, theirs in expected.items():
        mine = found[name]
        assert len(mine) == NUM_EVAL_SAMPLES
        if "label_ids" in name:
            assert torch.equal(mine, theirs)
            continue
        if real is not None:
            # What stands at padding depends on how far a batch was padded, and means nothing.
            assert mine.shape == theirs.shape
            mine, theirs = mine[real], theirs[real]
        elif MODELS[case.model].task == "question":
            # A constant added to every position means nothing either, and is moved by rounding noise alone.
            mine, theirs = mine.log_softmax(-1), theirs.log_softmax(-1)
        for position, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert tensor_difference(one, other) <= case.tolerance, (name, position)


def test_every_rank_ends_with_the_same_whole_model(ours: Outcome, run: Run):
    assert len(ours.ranks) == run.num_ranks
    for rank in ours.ranks[1:]:
        assert rank["digests"] == ours.ranks[0]["digests"]
        assert rank["test_metrics"].keys() == ours.ranks[0]["test_metrics"].keys()
        for key in ("global_step", "best_metric"):
            assert rank[key] == ours.ranks[0][key]


def test_the_layout_is_the_one_asked_for(ours: Outcome, run: Run, case: Case):
    for rank in ours.ranks:
        assert rank["layout"] == [*run.layout, case.num_frozen_layers]
        if case.num_microbatches != "auto":
            assert rank["num_microbatches"] == case.num_microbatches
        else:
            assert rank["num_microbatches"] == ours.ranks[0]["num_microbatches"] >= 1


def test_callbacks_see_trainers_events_on_every_rank(ours: Outcome, plain: Outcome):
    for rank in ours.ranks:
        assert rank["events"] == plain.ranks[0]["events"]


def test_the_case_tests_something(plain: Outcome, case: Case):
    """A comparison of two runs that learn nothing, never clip or stop too soon would show nothing."""
    steps = plain.logged("loss")
    whole_run = case.num_samples > 8 and not case.stop_early and case.epochs > 1 and "max_steps" not in case.options
    if whole_run and "logging_steps" not in case.options:
        assert len(steps) >= 20
    if case.change == "nan":
        assert 2 < sum(not math.isnan(entry["grad_norm"]) for entry in steps) < len(steps)
        return
    limit = case.options.get("max_grad_norm", 0.5)
    if limit:
        assert sum(entry["grad_norm"] > limit for entry in steps) > len(steps) / 3
    assert len({entry["learning_rate"] for entry in steps}) > len(steps) / 2
    if case.stop_early:
        assert plain.ranks[0]["global_step"] == 6
    if case.options.get("load_best_model_at_end"):
        assert plain.ranks[0]["best_global_step"] < plain.ranks[0]["global_step"]
