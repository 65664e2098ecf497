"""The activation cache gives nothing old and nothing wrong, whatever changes around it, and leaves nothing behind.

Nearly every test compares a run with the cache and the same run without: no wrong activation goes unnoticed there.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.cache_worker import (
    ALONE,
    EPOCHS,
    GLOBAL_BATCH,
    MEETING,
    NUM_SAMPLES,
    PAIRED,
    SAVED_AT,
    STEPS_PER_EPOCH,
    act_all,
)
from tests.distributed.scenarios import read_notes, run_each
from tests.support.comparison import far_tensors, relative_difference
from tests.support.models import has_zero_gradient


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

TOLERANCE = 1e-5
START_SECONDS = 90
SCENARIO_SECONDS = 20


@dataclass(frozen=True)
class Outcome:
    """What the ranks of a scenario wrote down."""

    ranks: list[dict[str, Any]]
    path: Path

    def of(self, run: str, key: str) -> Any:
        return self.ranks[0]["runs"][run][key]

    def all_of(self, run: str, key: str) -> list[Any]:
        """Of all ranks, in one list."""
        return [item for rank in self.ranks for item in rank["runs"][run][key]]

    def read(self, run: str) -> int:
        """Samples that all ranks read from the data set in training."""
        return sum(rank["runs"][run]["num_read"] for rank in self.ranks)

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        return load_file(f"{self.path}.{run}.safetensors")

    def cache_events(self, run: str, what: str) -> list[dict[str, Any]]:
        return [event for event in self.of(run, "events") if event["what"] == what]

    def total(self, run: str, name: str) -> float:
        return sum(event[name] for event in self.cache_events(run, "epoch"))


class Outcomes:
    """Launches when the first outcome is asked for; of the scenarios of selected tests alone, by their names."""

    def __init__(self, folder: Path, wanted: set[str]) -> None:
        self.folder = folder
        self._wanted = wanted
        self._output: dict[int, str] = {}

    def of(self, act: Any, num_ranks: int) -> Outcome:
        if num_ranks not in self._output:
            self._output[num_ranks] = self._launch_all(num_ranks)
        ranks = read_notes(self.folder, act.__name__, num_ranks, self._output[num_ranks])
        return Outcome(ranks, self.folder / act.__name__)

    def _launch_all(self, num_ranks: int) -> str:
        if num_ranks == 2:
            return self._launch([act.__name__ for act in PAIRED if act.__name__ in self._wanted], 2)
        meeting = self.folder / "meeting"
        meeting.mkdir()
        for turn in range(len(MEETING)):
            os.mkfifo(meeting / str(turn))
        with ThreadPoolExecutor() as pool:
            alone = [act for act in ALONE if act.__name__ in self._wanted]
            groups = [[act.__name__ for act in acts] for acts in (MEETING[:1], [*MEETING[1:], *alone])]
            return "\n".join(pool.map(lambda names: self._launch(names, 1), groups))

    def _launch(self, names: list[str], num_ranks: int) -> str:
        seconds = START_SECONDS, SCENARIO_SECONDS
        return run_each(act_all, self.folder, {name: name for name in names}, num_ranks, seconds)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Outcomes:
    names = {getattr(item, "originalname", "").removeprefix("test_") for item in request.session.items}
    return Outcomes(tmp_path_factory.mktemp("cache"), names)


@pytest.fixture
def outcome(outcomes: Outcomes, request: pytest.FixtureRequest) -> Outcome:
    """Of the scenario that the test is named after."""
    name = request.node.originalname.removeprefix("test_")
    ranks = {act.__name__: (act, 2) for act in PAIRED} | {act.__name__: (act, 1) for act in ALONE}
    return outcomes.of(*ranks[name])


def assert_equal_runs(outcome: Outcome) -> None:
    """With the cache and without: the same losses, metrics and weights."""
    for key in ("losses", "eval_losses"):
        found, expected = outcome.of("with", key), outcome.of("without", key)
        assert len(found) == len(expected)
        far = {
            step: pair
            for step, pair in enumerate(zip(found, expected, strict=True), start=1)
            if not relative_difference(*pair) <= TOLERANCE
        }
        assert far == {}, f"{key}: with the cache, without"
    assert outcome.of("with", "losses")
    weights = outcome.weights("with"), outcome.weights("without")
    assert far_tensors(*weights, TOLERANCE, partial(has_zero_gradient, "bert_sequence")) == {}
    assert outcome.of("without", "events") == []


def assert_served(outcome: Outcome, run: str = "with") -> None:
    """Else nothing was compared: each sample came from the store once, or more often."""
    assert outcome.total(run, "hits") >= NUM_SAMPLES


def warnings_of(outcome: Outcome, run: str, text: str) -> list[str]:
    return [warning for warning in outcome.all_of(run, "warnings") if text in warning]


def assert_ended_once(outcome: Outcome, cause: str) -> None:
    """The cache was given up with one warning that names the cause, and left nothing."""
    found = [[text for text in rank["runs"]["with"]["warnings"] if "cache is off" in text] for rank in outcome.ranks]
    texts = [text for rank in found for text in rank]
    assert texts and all(cause in text for text in texts), outcome.all_of("with", "warnings")
    # Two replicas may come upon it at the same time.
    assert max(map(len, found)) == 1
    assert outcome.all_of("with", "left") == []


# ---- weights that change


def test_weights_change_in_place(outcome: Outcome):
    assert_equal_runs(outcome)
    assert_served(outcome)
    assert warnings_of(outcome, "with", "changed from outside")
    # Every sample that is drawn afterwards is computed once more.
    assert outcome.total("with", "misses") >= 2 * NUM_SAMPLES


def test_weights_change_behind_autograd(outcome: Outcome):
    assert_equal_runs(outcome)
    assert_served(outcome)
    assert warnings_of(outcome, "with", "changed from outside")
    assert outcome.total("with", "misses") >= 2 * NUM_SAMPLES


def test_weights_change_after_the_fetch(outcome: Outcome):
    assert_equal_runs(outcome)
    assert_served(outcome)
    assert warnings_of(outcome, "with", "changed from outside")


def test_weights_change_after_the_fetch_of_images(outcome: Outcome):
    assert_equal_runs(outcome)
    assert_served(outcome)
    assert warnings_of(outcome, "with", "changed from outside")


def test_weights_change_on_the_later_stage(outcome: Outcome):
    first, later = (rank["runs"]["with"]["changed"] for rank in outcome.ranks)
    assert later and not first and later == outcome.ranks[1]["runs"]["without"]["changed"]
    assert_equal_runs(outcome)
    assert_served(outcome)
    assert warnings_of(outcome, "with", "changed from outside")


def test_weights_change_within_an_accumulation(outcome: Outcome):
    assert_equal_runs(outcome)
    assert_served(outcome)
    assert warnings_of(outcome, "with", "changed from outside")


def test_evaluated_with_other_weights(outcome: Outcome):
    assert_equal_runs(outcome)
    assert len(outcome.of("with", "eval_losses")) == EPOCHS + 1


def test_resumed_with_other_weights(outcome: Outcome):
    """The store that the first run kept holds rows of its later weights: they are no hits."""
    assert outcome.of("first", "left")
    assert_equal_runs(outcome)
    assert relative_difference(outcome.of("first", "losses")[-1], outcome.of("with", "losses")[-1]) > 1e-3
    steps_left = EPOCHS * STEPS_PER_EPOCH - SAVED_AT
    assert len(outcome.of("with", "losses")) in (steps_left, steps_left + SAVED_AT)
    assert outcome.total("with", "misses") >= NUM_SAMPLES
    # A run that comes to the same weights ends as the first one did, and uses what there is once as much is frozen.
    assert outcome.of("undisturbed", "losses")[-1] == outcome.of("first", "losses")[-1]
    assert outcome.total("undisturbed", "misses") <= GLOBAL_BATCH


def test_best_model(outcome: Outcome):
    """The best weights were frozen less far than those that rows were stored for at last."""
    assert_equal_runs(outcome)
    assert_served(outcome)
    assert outcome.of("with", "best_step") == outcome.of("without", "best_step") == STEPS_PER_EPOCH
    assert outcome.all_of("with", "left") == []
    # Saving a checkpoint makes no row invalid.
    assert outcome.total("with", "misses") == NUM_SAMPLES


def test_trained_twice(outcome: Outcome):
    """Layers that froze in the first training are trained again in the second, and other rows belong to them."""
    assert len(outcome.of("with", "losses")) == 2 * EPOCHS * STEPS_PER_EPOCH
    assert_equal_runs(outcome)
    assert_served(outcome)
    assert outcome.all_of("with", "left") == []


# ---- stores that are there already


def test_kept_for_another_head(outcome: Outcome):
    """A second run with another learning rate computes nothing of what the first has stored."""
    # Nothing is read that a run without the cache would not read.
    assert {outcome.read(run) for run in ("first", "with", "without")} == {EPOCHS * NUM_SAMPLES}
    assert outcome.total("with", "hits") == EPOCHS * NUM_SAMPLES
    assert_equal_runs(outcome)
    assert len(outcome.of("with", "left")) == 1


def test_kept_for_other_samples(outcome: Outcome):
    assert_equal_runs(outcome)
    assert relative_difference(outcome.of("first", "losses")[0], outcome.of("with", "losses")[0]) > 1e-3
    # They are computed once, and then read.
    assert outcome.total("with", "hits") == (EPOCHS - 1) * NUM_SAMPLES


def test_kept_without_a_name(outcome: Outcome):
    assert outcome.total("with", "hits") == (EPOCHS - 1) * NUM_SAMPLES
    for run in ("first", "with"):
        assert len(warnings_of(outcome, run, "no fingerprint")) == 1


@pytest.mark.parametrize("number", range(len(MEETING)))
def test_two_runs_at_a_time_have_a_store_each(outcomes: Outcomes, number: int):
    """They have different weights and one folder, and know nothing of each other."""
    outcome = outcomes.of(MEETING[number], 1)
    assert len(outcome.of("with", "places")) == 2
    assert_equal_runs(outcome)
    assert_served(outcome)
    assert outcome.of("without", "left") == []


# ---- data sets that are no function of the index


def test_samples_change(outcome: Outcome):
    """Each is computed again that is not what it was; where most are others, nothing is stored any more."""
    assert_equal_runs(outcome)
    assert outcome.total("with", "hits") > 0
    assert warnings_of(outcome, "with", "is not what it was when its activation was stored")
    assert_ended_once(outcome, "were others when they were read again")


def test_random_augmentation(outcome: Outcome):
    (event,) = outcome.cache_events("with", "off")
    assert "draw random numbers (augmentation, random masks)" in event["reason"]
    assert len(warnings_of(outcome, "with", "draw random numbers")) == 1
    assert outcome.cache_events("with", "epoch") == []
    assert outcome.read("with") == EPOCHS * NUM_SAMPLES
    assert set(outcome.of("with", "cached_levels")) == {0}


# ---- a disk that fails


def test_shards_are_deleted(outcome: Outcome):
    assert_served(outcome)
    assert_ended_once(outcome, "has vanished")
    assert_equal_runs(outcome)


def test_a_byte_is_flipped(outcome: Outcome):
    assert_served(outcome)
    assert_ended_once(outcome, "is not what was written")
    assert_equal_runs(outcome)


def test_little_room(outcome: Outcome):
    """A part of the samples is stored, the same one all the time."""
    last = outcome.cache_events("with", "epoch")[-1]
    assert 0 < last["hits"] < NUM_SAMPLES
    assert last["hits"] + last["misses"] == NUM_SAMPLES
    assert all(event["bytes_stored"] <= 40e3 for event in outcome.cache_events("with", "epoch"))
    assert warnings_of(outcome, "with", "takes no more records")
    assert_equal_runs(outcome)


# ---- folders that are not the run's own


def test_cleaned_before_the_end(outcome: Outcome):
    """A training that is done is not lost because its cache is gone."""
    assert_served(outcome)
    assert_equal_runs(outcome)
    assert outcome.of("with", "left") == []


def test_the_default_folder_is_a_link(outcome: Outcome):
    """Nothing is done behind it, and the run goes on without the cache."""
    (event,) = outcome.cache_events("with", "off")
    assert "follows no links" in event["reason"]
    assert len(warnings_of(outcome, "with", "follows no links")) == 1
    assert outcome.of("with", "home") == ["thesis.txt"]
    assert_equal_runs(outcome)


def test_left_by_a_killed_run(outcome: Outcome):
    assert outcome.of("with", "left") == []


# ---- when there is one


def test_frozen_by_the_user(outcome: Outcome):
    """A prefix that does not train from the first step on is stored from the first step on."""
    assert outcome.of("with", "cached_levels")[0] == 1
    assert outcome.read("with") == outcome.read("without")
    assert outcome.total("with", "hits") == (EPOCHS - 1) * NUM_SAMPLES
    assert_equal_runs(outcome)


def test_frozen_by_the_user_and_cut_anew(outcome: Outcome):
    assert outcome.total("with", "hits") == (EPOCHS - 1) * NUM_SAMPLES
    assert_equal_runs(outcome)


def test_one_epoch_left(outcome: Outcome):
    (decision,) = outcome.cache_events("with", "decision")
    assert decision["level"] == 0
    assert "no record would be read again" in decision["reason"]
    assert set(outcome.of("with", "cached_levels")) == {0}
    assert outcome.cache_events("with", "epoch") == []
    assert outcome.all_of("with", "left") == []


# ---- the end


def test_interrupted(outcome: Outcome):
    for run, error in {"exception": "RuntimeError", "interrupt": "KeyboardInterrupt"}.items():
        assert outcome.of(run, "ended_by") == error
        assert outcome.of(run, "held") > 0
        assert outcome.of(run, "left") == []


def test_a_rank_fails(outcome: Outcome):
    assert all("planted" in rank["runs"]["with"]["ended_by"] for rank in outcome.ranks)
    assert outcome.of("with", "held") > 0
    assert outcome.of("with", "left") == []
