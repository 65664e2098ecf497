"""Whatever combination of Trainer's features a script uses, the numbers are those of plain Trainer.

Every pair of features that may meet is in some row of a covering array (`features.py`). Plain Trainer runs each row in
one process with the same global batch. All rows of a layout run in one launch, all references in another; the tests
below look at what they wrote down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.conformance.conformance_worker import run_rows
from tests.conformance.covering import allowed_pairs, pairs_of, rows_with_every_level
from tests.conformance.features import FACTORS, REFUSED, Refusal, all_rows, exclusions
from tests.conformance.runs import (
    IN_EVERY_ENTRY,
    LAYOUT_SCALARS,
    TOLERANCE,
    differences,
    differs,
    logged,
)
from tests.distributed.launches import Launches, Outcome, Run, selected_runs
from tests.support.comparison import relative_difference, tensor_difference, untimed
from tests.support.models import IGNORED, MODELS, has_zero_gradient


TWO_STAGES, TWO_REPLICAS, BOTH = (2, 1), (1, 2), (2, 2)

# Tags of what a clock says.
TIMED = ("runtime", "per_second", "time")

ROWS = all_rows()
BASE_ROW = {factor: next(iter(levels)) for factor, levels in FACTORS.items()}

pytestmark = [
    pytest.mark.distributed,
    # The first test of a layout waits for the launch of all its rows.
    pytest.mark.timeout(3000),
]


def _runs() -> Iterator[Any]:
    """Every row on two stages, and in turn on two replicas or on both; a few rows hold every feature once."""
    few = rows_with_every_level(ROWS)
    for index, row in enumerate(ROWS):
        for layout in (TWO_STAGES, (TWO_REPLICAS, BOTH)[index % 2]):
            marks = [] if layout == TWO_STAGES and row in few else [pytest.mark.slow]
            run = Run(f"row{index:02}", layout)
            yield pytest.param(run, id=f"{layout[0]}x{layout[1]}-{run.case}", marks=marks)


def _refused_runs() -> Iterator[Any]:
    for index, refusal in enumerate(REFUSED):
        run = Run(f"refused{index:02}", TWO_STAGES)
        yield pytest.param(run, refusal, id=" with ".join(map("-".join, refusal.pair)).replace(" ", "_"))


FEATURES = {f"row{index:02}": row for index, row in enumerate(ROWS)}
FEATURES |= {f"refused{index:02}": BASE_ROW | dict(refusal.pair) for index, refusal in enumerate(REFUSED)}

compared = pytest.mark.parametrize("run", list(_runs()))


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    cases = {run: FEATURES[run.case] for run in selected_runs(request)}
    without = {run: features for run, features in cases.items() if run.layout or run.case.startswith("row")}
    return Launches(run_rows, tmp_path_factory.mktemp("conformance"), without, strict=())


@pytest.fixture(autouse=True)
def _shown_features(request: pytest.FixtureRequest) -> None:
    """A test that fails shows what its row changes."""
    if hasattr(request.node, "callspec"):
        features = FEATURES[request.node.callspec.params["run"].case]
        print({factor: level for factor, level in features.items() if level != BASE_ROW[factor]})


@compared
def test_the_log_is_trainers(ours: Outcome, plain: Outcome, run: Run):
    found, expected = logged(ours), logged(plain)
    assert [list(entry) for entry in found] == [list(entry) for entry in expected]
    assert [wrong for one, other in zip(found, expected, strict=True) if (wrong := differences(one, other))] == []


@compared
def test_metrics_and_state_are_trainers(ours: Outcome, plain: Outcome, run: Run):
    mine, theirs = ours.ranks[0], plain.ranks[0]
    for key in ("metrics", "test_metrics"):
        assert differences(untimed(mine[key]), untimed(theirs[key])) == {}, key
    assert differences(mine["state"], theirs["state"]) == {}
    keys = ["training_loss", "num_input_tokens_seen", "checkpoints"]
    # Replicas may pad their texts to lengths of their own, which Trainer's estimate counts, and the cache saves work.
    pads_alike = run.layout == TWO_STAGES or MODELS[FEATURES[run.case]["model"]].task == "image"
    if pads_alike and FEATURES[run.case]["activation_cache"] == "off":
        keys.append("total_flos")
    assert {key: (mine[key], theirs[key]) for key in keys if differs(mine[key], theirs[key])} == {}


@compared
def test_callbacks_see_trainers_events_on_every_rank(ours: Outcome, plain: Outcome, run: Run):
    for rank in ours.ranks:
        assert differences(rank["events"], plain.ranks[0]["events"]) == {}


@compared
def test_weights_follow_trainer(ours: Outcome, plain: Outcome, run: Run):
    """Those at the end, those that a callback averaged, and those in checkpoints as `from_pretrained` loads them."""
    prefixes = ("weights.", "averaged.", "saved in ")
    found, expected = ours.starting_with(*prefixes), plain.starting_with(*prefixes)
    assert found.keys() == expected.keys()
    far = {}
    for name, theirs in expected.items():
        parameter = re.sub(r"^(weights|averaged|saved in checkpoint-\d+)\.", "", name)
        difference = tensor_difference(found[name], theirs)
        if difference > TOLERANCE and not has_zero_gradient(FEATURES[run.case]["model"], parameter):
            far[name] = difference
    assert far == {}


@compared
def test_predictions_are_trainers(ours: Outcome, plain: Outcome, run: Run):
    prefixes = ("predictions", "label_ids", "whole")
    found, expected = ours.starting_with(*prefixes), plain.starting_with(*prefixes)
    assert found.keys() == expected.keys()
    far = {}
    for name, theirs in expected.items():
        mine = found[name]
        assert mine.shape == theirs.shape, name
        labels = expected.get(name.replace("predictions", "label_ids")) if name.startswith("predictions") else None
        if labels is not None and labels.ndim > 1:
            # What stands where no label is may be padding, whose value depends on how far a batch was padded.
            mine, theirs = mine[labels != IGNORED], theirs[labels != IGNORED]
        elif MODELS[FEATURES[run.case]["model"]].task == "question" and theirs.is_floating_point() and theirs.ndim > 1:
            # A constant added to every position means nothing, and is moved by rounding noise alone; but not what
            # Trainer fills short batches with.
            is_real = theirs != IGNORED
            mine, theirs = mine.log_softmax(-1)[is_real], theirs.log_softmax(-1)[is_real]
        if (difference := tensor_difference(mine, theirs)) > TOLERANCE:
            far[name] = difference
    assert far == {}


@compared
def test_reports_hold_trainers_scalars(ours: Outcome, plain: Outcome, run: Run):
    mine, theirs = ours.ranks[0]["scalars"], plain.ranks[0]["scalars"]
    assert bool(theirs) == (FEATURES[run.case]["reports"] == "tensorboard" and find_spec("tensorboard") is not None)
    own = {f"train/{name}" for name in LAYOUT_SCALARS | {"total_flos"}}
    found, expected = (
        {tag: entries for tag, entries in scalars.items() if tag not in own and not tag.endswith(TIMED)}
        for scalars in (mine, theirs)
    )
    assert found.keys() == expected.keys()
    for tag, entries in expected.items():
        if tag.removeprefix("train/") in IN_EVERY_ENTRY:
            assert [entry for entry in entries if entry not in found[tag]] == [], tag
            continue
        assert [step for step, _ in found[tag]] == [step for step, _ in entries], tag
        pairs = [(one, other) for (_, one), (_, other) in zip(found[tag], entries, strict=True)]
        assert [pair for pair in pairs if relative_difference(*pair) > TOLERANCE] == [], tag


@compared
def test_every_rank_ends_with_the_same_whole_model(ours: Outcome, run: Run):
    for rank in ours.ranks[1:]:
        assert rank["digests"] == ours.ranks[0]["digests"]
        assert differences(rank["state"], ours.ranks[0]["state"]) == {}


@compared
def test_the_row_tests_something(plain: Outcome, run: Run):
    """A comparison of runs that train too little, or do not use their features, would show nothing."""
    reference, features = plain.ranks[0], FEATURES[run.case]
    assert 2 <= reference["state"]["global_step"] <= 24
    at_the_end_and_start = 1 + (features["evaluation on start"] == "yes")
    num_sets = 2 if features["evaluation"] == "several sets" else 1
    assert (reference["events"]["on_evaluate"] > num_sets * at_the_end_and_start) == (
        features["evaluation"] != "never"
    )
    assert bool(reference["checkpoints"]) == (features["saving"] != "never")
    assert bool(plain.starting_with("averaged.")) == (features["weights averaged by a callback"] == "yes")
    assert (reference["num_input_tokens_seen"] > 0) == (features["tokens seen"] == "counted")


@pytest.mark.parametrize(("run", "refusal"), list(_refused_runs()))
def test_what_is_refused_is_refused_before_training(launches: Launches, run: Run, refusal: Refusal):
    for rank in launches.ranks(run, allows_errors=True):
        assert "ValueError" in rank["error"]
        assert re.search(refusal.text, rank["error"])


def test_every_allowed_pair_of_features_is_in_a_row():
    levels = {factor: list(features) for factor, features in FACTORS.items()}
    covered = set().union(*map(pairs_of, ROWS))
    assert covered == set(allowed_pairs(levels, exclusions()))
    assert sum(len(features) - 1 for features in FACTORS.values()) >= 25
