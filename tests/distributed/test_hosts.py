"""Law 7 between hosts: one that is lost at any moment ends the run on every rank, and a new launch resumes it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.elastic import transition
from hf_pipetransformer.runtime import gathering
from tests.distributed.fault_worker import fall_silent
from tests.distributed.hosts import ENVIRONMENT, cut_cable, move_to, two_hosts
from tests.distributed.launcher import LaunchResult
from tests.distributed.scenarios import RANK, run, scenario, start
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import losses_of, our_arguments


MODEL = "bert_sequence"
LOST = "lost at"
SAVED_AT, LOST_AT, NUM_STEPS = 2, 4, 8


def lose_host() -> None:
    cut_cable()
    print(LOST, time.time(), flush=True)


def lose_rank() -> None:
    print(LOST, time.time(), flush=True)
    fall_silent()


LOSSES = {"host": lose_host, "rank": lose_rank}


class LosingTrainer(PipeTransformerTrainer):
    """In its step or evaluation `LOST_AT`, if it has something to lose."""

    lose_in: dict[str, Any] = {}

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.state.global_step == LOST_AT and self.is_in_train and model.training:
            self.lose_in.pop("step", lambda: None)()
        return super().compute_loss(model, inputs, *args, **kwargs)

    def prediction_step(self, *args, **kwargs):
        if self.state.global_step == LOST_AT:
            self.lose_in.pop("evaluation", lambda: None)()
        return super().prediction_step(*args, **kwargs)


class LoseBetweenSteps(TrainerCallback):
    """Has the next save, or the next transition, lose something in the middle."""

    def __init__(self, lose_in: dict[str, Any]) -> None:
        self.lose_in = lose_in

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == LOST_AT and "saving" in self.lose_in:
            gathering.collect_parameters = _after(self.lose_in["saving"], gathering.collect_parameters)
        if state.global_step == LOST_AT and "transition" in self.lose_in:
            transition.exchange = _after(self.lose_in["transition"], transition.exchange)


def _after(lose: Any, call: Any) -> Any:
    def lose_and_call(*args: Any, **kwargs: Any) -> Any:
        lose()
        return call(*args, **kwargs)

    return lose_and_call


@scenario
def train_with_loss_of(
    folder: Path,
    what: str,
    moment: str,
    rank: int = 1,
    timeout: float = 6,
    resume: bool = False,
    hosts: Sequence[int] = (),
) -> dict[str, Any]:
    """Train until a host or a rank is lost in a step, an evaluation, a save or a transition; `resume` goes on.

    Args:
        hosts: process IDs on the hosts of the ranks, if they are several.
    """
    if hosts:
        move_to(hosts[RANK])
    lose_in = {moment: LOSSES[what]} if rank == RANK and not resume else {}
    trainer = LosingTrainer(
        model=build_model(MODEL),
        args=our_arguments(
            folder, 2, max_steps=NUM_STEPS, save_strategy="steps", save_steps=SAVED_AT, eval_strategy="steps",
            eval_steps=LOST_AT, pipeline_parallel_num_microbatches=2, pipeline_timeout=timeout,
            freeze_policy="fixed", freeze_at=f"{LOST_AT}:2", freeze_warmup=0, pipeline_compression="memory",
        ),
        train_dataset=make_dataset(MODEL, 53),
        eval_dataset=make_dataset(MODEL, 20),
        data_collator=collate,
        callbacks=[LoseBetweenSteps(lose_in)],
    )  # fmt: skip
    trainer.lose_in = lose_in
    trainer.train(resume_from_checkpoint=resume)
    return {
        "step": trainer.state.global_step,
        "losses": losses_of(trainer),
    }


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

TIMEOUT = 6
GRACE = 10
MOMENTS = ("step", "saving", "evaluation", "transition")


def seconds_to_the_end(result: LaunchResult, begun: float, losing: int) -> dict[int, float]:
    """Return the seconds from the loss to the end of each rank that ended by itself."""
    lost = float(re.search(rf"{LOST} ([\d.]+)", result.outputs[losing])[1]) - begun
    return {rank: ended - lost for rank, ended in enumerate(result.ended) if ended is not None}


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=pytest.mark.slow) for each in MOMENTS if each != "saving"] + ["saving"]
)
def test_a_cut_between_hosts_ends_all_ranks_and_the_newest_checkpoint_resumes(tmp_path: Path, moment: str):
    options = {"what": "host", "moment": moment, "timeout": TIMEOUT}
    with two_hosts() as hosts:
        begun = time.time()
        result = start(
            train_with_loss_of, tmp_path, 2, options | {"hosts": hosts}, timeout=120, grace=GRACE, check=False,
            env=ENVIRONMENT,
        )  # fmt: skip
    assert not result.timed_out, result.output
    ended = seconds_to_the_end(result, begun, losing=1)
    assert max(ended.values()) < TIMEOUT + GRACE, ended
    assert "rank 1 does not answer: killed, as when memory runs out, hanging, or cut off" in result.outputs[0]
    assert "rank 0, which hosts the ranks' store, does not answer" in result.outputs[1]
    records = run(train_with_loss_of, tmp_path, 2, options | {"resume": True}, timeout=90)
    assert [record["step"] for record in records] == [NUM_STEPS] * 2


@pytest.mark.parametrize(
    "moment",
    [pytest.param("saving", marks=pytest.mark.slow), "evaluation", pytest.param("transition", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_falls_silent_between_steps_is_given_up_after_the_timeout(tmp_path: Path, moment: str, rank: int):
    """Where those that are alive may take as long as `ddp_timeout`."""
    options = {"what": "rank", "moment": moment, "timeout": TIMEOUT, "rank": rank}
    begun = time.time()
    result = start(train_with_loss_of, tmp_path, 2, options, timeout=120, check=False, grace=1)
    assert result.ended[rank] is None
    (seconds,) = seconds_to_the_end(result, begun, rank).values()
    assert seconds < TIMEOUT + GRACE
    assert re.search(
        r"rank 1 does not answer|rank 0, which hosts the ranks' store, does not", result.outputs[1 - rank]
    )
