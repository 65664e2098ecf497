"""After a training on several stages its trainer is as it was: a model, callbacks, and an error that says what is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.afterwards_worker import EVALUATED, end, end_in_own_method, look_afterwards
from tests.distributed.scenarios import run


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return run(look_afterwards, tmp_path_factory.mktemp("afterwards"), 2, timeout=120)


def test_a_callback_is_refused_while_the_model_is_whole(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["refusal"].startswith("ValueError: ReadsWhatIsPushed.on_push_begin reads the model")


@pytest.mark.parametrize("after", ["trained", "predicted"])
def test_the_wrapped_model_is_the_whole_one_and_callbacks_are_trainers_own(
    ranks: list[dict[str, Any]], after: str
) -> None:
    for found in ranks:
        assert found[after]["handler"] == "CallbackHandler"
        assert "Acts" in found[after]["callbacks"] and found[after]["callbacks"][-1] == "Late"
        assert len(set(found[after]["losses"])) == 1
    assert ranks[0][after]["losses"] == ranks[1][after]["losses"] == ranks[0]["trained"]["losses"]


def test_an_evaluation_within_another_takes_no_sample_twice(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["num_predicted"] == EVALUATED
        num_read, num_parameters = found["num_parameters_read"]
        assert num_read == num_parameters


@pytest.mark.parametrize("schedule", ["1f1b", "async_1f1b"])
def test_a_signal_to_one_rank_has_all_ranks_save_after_the_same_step_and_stop(
    ranks: list[dict[str, Any]], schedule: str
) -> None:
    for found in ranks:
        told = found[schedule]
        assert (told["stopped_at"], told["checkpoints"]) == (3, ["checkpoint-3"])
        whole, stopped, again = told["losses"]
        assert whole.keys() == {"1", "2", "3", "4", "5", "6"}
        assert stopped == {step: whole[step] for step in ("1", "2", "3")}
        assert again.keys() == whole.keys()
        if schedule == "1f1b":  # Stages that drain at another step see other weights.
            assert again == whole


def test_a_model_that_a_failure_left_in_parts_is_put_together_or_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["failure"].startswith("RuntimeError: planted") and found["num_missing"] > 0
        assert found["handler_after_failure"] == "CallbackHandler"
        assert found["num_missing_of_whole"] == 0
        assert found["resumption"].startswith("PipelineError: The model is not whole")


Ends = dict[str, tuple[Path, list[dict[str, Any]]]]

TOO_FEW_BYTES = 10_000
"""Of free memory, in which the tiny model has no room."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Folder and what each rank found, by how the training ended."""
    found: Ends = {}
    for name, options in {
        "always": {"gather": "always"},
        "never": {"gather": "never"},
        "no room": {"gather": "auto", "free": TOO_FEW_BYTES},
    }.items():
        folder = tmp_path_factory.mktemp("ends")
        found[name] = folder, run(end, folder, 2, options, timeout=120, strict_nccl=True)
    return found


@pytest.mark.parametrize("split", ["never", "no room"])
def test_a_model_that_is_left_on_its_stages_evaluates_predicts_and_is_saved_as_a_whole_one(
    ends: Ends, split: str
) -> None:
    (folder, gathered), (other, ranks) = ends["always"], ends[split]
    assert all(rank["held"] == rank["whole"] and rank["call"] == "" for rank in gathered)
    for rank in ranks:
        assert 0 < rank["held"] == rank["held_after_evaluation"] < rank["whole"]
        assert rank["call"].startswith("PipelineError: The model is not whole") and "save_model" in rank["call"]
        for key in ("best", "metrics", "predictions"):
            assert rank[key] == gathered[0][key], key
    assert sum(rank["held"] for rank in ranks) == ranks[0]["whole"]
    mine, expected = (load_file(path / "saved" / "model.safetensors") for path in (other, folder))
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[key], value) for key, value in expected.items())


def test_what_is_left_on_its_stages_is_put_together_for_another_training_or_for_user_code(ends: Ends) -> None:
    gathered, ranks = ends["always"][1], ends["never"][1]
    for rank in ranks:
        assert rank["whole_model"] == rank["again"] == ""
        assert rank["logits"] == gathered[0]["logits"]
        assert rank["losses_again"] == gathered[0]["losses_again"]


def test_what_does_not_fit_is_refused_with_numbers_before_anything_is_sent(ends: Ends) -> None:
    for rank in ends["no room"][1]:
        for key in ("whole_model", "again"):
            assert rank[key].startswith("ValueError") and "0.0 MiB free" in rank[key], rank[key]


def test_each_rank_reads_the_weights_of_its_own_stages_to_resume_and_for_the_best_model(ends: Ends) -> None:
    for _, ranks in ends.values():
        whole = sum(rank["own"] for rank in ranks)
        for rank in ranks:
            assert rank["best"] == 2
            assert rank["read"] == rank["read_to_resume"] == rank["own"] < whole
            assert rank["losses_resumed"] == ranks[0]["losses_resumed"] != {}


def test_a_best_model_loaded_by_a_users_method_is_the_best_one_on_every_rank(tmp_path: Path) -> None:
    for found in run(end_in_own_method, tmp_path, 2, timeout=120):
        assert found == {"was_whole": True, "best": 2, "stale": []}
