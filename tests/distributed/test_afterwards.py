"""After a training on several stages its trainer is as it was: a model, callbacks, and an error that says what is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.afterwards_worker import EVALUATED, look_afterwards
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
