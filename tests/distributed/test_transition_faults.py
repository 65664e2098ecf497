"""Law 7 around transitions: a rank that disagrees, differs or dies ends the run on every rank, the cause named."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.elastic import transition
from hf_pipetransformer.freeze.policy import FreezePolicy
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.state import resumption as replay
from tests.distributed.launcher import LaunchResult
from tests.distributed.scenarios import RANK, WORLD_SIZE, scenario, start
from tests.distributed.test_faults import GRACE, PIPELINE_TIMEOUT, assert_all_ended_by_themselves, last_error
from tests.distributed.transition_cases import Phase, TransitionCase
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import our_arguments


MODEL = "bert_sequence"
NUM_STEPS = 8
CHANGE_AT = 4
READY = "right before the transition"
TAMPERED = "bert.encoder.layer.2.output.dense.weight"

SHRINK: list[Phase] = [(0, 0, [0, 5, 10], 2), (CHANGE_AT, 2, [0, 10], 2)]
OTHER: list[Phase] = [(0, 0, [0, 5, 10], 2), (CHANGE_AT, 1, [0, 3, 10], 2)]
MULTIPLIED: list[Phase] = [(0, 0, [0, 10], 2), (CHANGE_AT, 1, [0, 5, 10], 2)]


class BeforeTransition(TrainerCallback):
    """Does something between the last step before the transition and the transition."""

    def __init__(self, act: Callable[[Any], None]) -> None:
        self.act = act
        self.trainer: Any = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == CHANGE_AT:
            print(READY, flush=True)
            self.act(self.trainer)


def nothing(trainer: Any) -> None:
    pass


def tamper_with_the_layout(trainer: Any) -> None:
    trainer.pipeline_run.pipelined.pipeline.stage.layout = replace(
        trainer.pipeline_run.pipelined.pipeline.stage.layout, num_microbatches=3
    )


def flip(tensor: torch.Tensor) -> None:
    """The lowest bit of the first element."""
    tensor.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def flip_a_weight(trainer: Any) -> None:
    flip(dict(trainer.model.named_parameters())[TAMPERED])


def flip_a_moment(trainer: Any) -> None:
    parameter = dict(trainer.model.named_parameters())[TAMPERED]
    flip(trainer.pipeline_run.pipelined.training.optimizer.optimizer.state[parameter]["exp_avg_sq"])


def die_in_the_exchange(trainer: Any) -> None:
    transition.exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def fail_in_the_exchange(trainer: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted failure")

    transition.exchange = fail


class OfThisRank(FreezePolicy):
    """A policy that does not answer alike on all ranks: it looked at a clock, say."""

    def target_num_frozen(self, signal):
        return 2.0 if RANK == 0 and signal.step >= CHANGE_AT else 0.0


class OfTheOtherRank(FreezePolicy):
    def target_num_frozen(self, signal):
        return 2.0 if RANK == 1 and signal.step >= CHANGE_AT else 0.0


def run_out_of_memory(trainer: Any) -> None:
    """In the forward of the next step, under the layout that follows."""

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("planted shortage")

    trainer.compute_loss = fail


def read_another_plan(path: str) -> Any:
    return real_read(write_plan(Path(path).with_suffix(".other"), OTHER))


real_read = replay.read_layouts

DECIDES = {"freeze_policy": "fixed", "freeze_at": f"{CHANGE_AT}:2", "pipeline_compression": "memory"}

# `act` happens on rank 1 only.
FAULTS: dict[str, dict[str, Any]] = {
    "none": {"plan": SHRINK},
    "tampered_layout": {"options": DECIDES, "act": tamper_with_the_layout},
    "flipped_weight": {"plan": MULTIPLIED, "act": flip_a_weight},
    "flipped_moment": {"plan": MULTIPLIED, "act": flip_a_moment},
    "killed_in_exchange": {"plan": SHRINK, "act": die_in_the_exchange},
    "exception_in_exchange": {"plan": SHRINK, "act": fail_in_the_exchange},
    "policy_of_rank_0": {"policy": OfThisRank, "options": {"freeze_interval": 2, "freeze_policy": "none"}},
    "policy_of_rank_1": {"policy": OfTheOtherRank, "options": {"freeze_interval": 2, "freeze_policy": "none"}},
    "out_of_memory": {
        "options": DECIDES | {"freeze_at": f"{CHANGE_AT}:3", "save_strategy": "steps", "save_steps": 2},
        "act": run_out_of_memory,
    },
    "other_plan": {"plan": SHRINK, "reads": read_another_plan},
}


def write_plan(path: Path, plan: list[Phase]) -> str:
    unfinished = path.with_suffix(f".part{RANK}")
    unfinished.write_text(TransitionCase("", plan=plan).plan_lines(WORLD_SIZE))
    unfinished.rename(path)
    return str(path)


@scenario
def train_with(
    folder: Path, fault: str, timeout: float = 15, max_steps: int = NUM_STEPS, resume: bool = False
) -> None:
    """Train with one of `FAULTS`; `resume` goes on after the fault, which does not come again."""
    what = FAULTS[fault]
    options: dict[str, Any] = {
        "max_steps": max_steps,
        "pipeline_parallel_num_microbatches": 2,
        "pipeline_timeout": timeout,
        "freeze_warmup": 0,
        "freeze_min_active_layers": 0,
        **what.get("options", {}),
    }
    if "plan" in what:
        options["layout_plan"] = write_plan(folder / "plan.jsonl", what["plan"])
    if "reads" in what and RANK == 1:
        replay.read_layouts = what["reads"]
    callback = BeforeTransition(what.get("act", nothing) if RANK == 1 and not resume else nothing)
    trainer = PipeTransformerTrainer(
        model=build_model(MODEL),
        args=our_arguments(folder, 2, **options),
        train_dataset=make_dataset(MODEL, 53),
        data_collator=collate,
        policy=what["policy"]() if "policy" in what else None,
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    print(f"rank {RANK} trained to the end with {trainer.layout.num_frozen_layers} frozen layers", flush=True)


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


def run_with_fault(fault: str, output: Path, **options: Any) -> LaunchResult:
    options = {"fault": fault, "timeout": PIPELINE_TIMEOUT, **options}
    return start(train_with, output, 2, options, timeout=120, check=False, grace=GRACE)


def assert_cause(result: LaunchResult, pattern: str) -> None:
    """Every rank ended by itself in an error that says what went wrong."""
    assert_all_ended_by_themselves(result, seconds=GRACE)
    for text in result.outputs:
        assert re.search(pattern, last_error(text), re.DOTALL), text


def test_a_rank_with_another_layout_ends_all_at_the_next_decision(tmp_path: Path):
    result = run_with_fault("tampered_layout", tmp_path)
    assert READY in result.outputs[1]
    assert_cause(result, r"\b[Rr]ank 1\b is at layout .*'num_microbatches': 3.*rank 0")


@pytest.mark.parametrize(
    "fault", ["flipped_weight", pytest.param("flipped_moment", marks=pytest.mark.slow)], ids=["weight", "moment"]
)
def test_a_bit_that_differs_between_replicas_is_found_at_the_next_transition(tmp_path: Path, fault: str):
    result = run_with_fault(fault, tmp_path)
    assert READY in result.outputs[1]
    assert_cause(result, rf"{re.escape(TAMPERED)} \(one of 1\) differs between .*rank 0, rank 1")


def test_a_rank_killed_in_the_middle_of_a_transition_ends_all(tmp_path: Path):
    result = run_with_fault("killed_in_exchange", tmp_path)
    assert READY in result.outputs[1]
    assert result.returncodes[1] == -signal.SIGKILL
    assert_all_ended_by_themselves(result, seconds=GRACE)
    # The message that breaks off is told, or the process that is gone, whichever is found first.
    said = last_error(result.outputs[0])
    assert re.search(r"Lost contact while .*mov|First cause: rank 1 does not answer: killed", said)


@pytest.mark.slow
def test_an_exception_in_the_middle_of_a_transition_reaches_every_rank(tmp_path: Path):
    assert_cause(run_with_fault("exception_in_exchange", tmp_path), "RuntimeError: planted failure")


def test_ranks_that_read_different_plans_end_with_the_cause_named(tmp_path: Path):
    """Two nodes may see two files under one name."""
    assert_cause(run_with_fault("other_plan", tmp_path), r"(layout|plan).*\brank 1\b|\b[Rr]ank 1\b.*(layout|plan)")


@pytest.mark.parametrize(
    ("fault", "num_frozen"),
    [("policy_of_rank_0", 2), pytest.param("policy_of_rank_1", 0, marks=pytest.mark.slow)],
    ids=["rank-0-freezes", "rank-1-would"],
)
def test_rank_0_decides_where_a_users_policy_answers_differently(tmp_path: Path, fault: str, num_frozen: int):
    result = run_with_fault(fault, tmp_path, max_steps=30)
    assert result.returncode == 0, result.output
    for rank, text in enumerate(result.outputs):
        assert f"rank {rank} trained to the end with {num_frozen} frozen layers" in text


def test_a_layout_that_ran_out_of_memory_is_not_planned_again(tmp_path: Path):
    """K=1 has no room in its first step; the run goes on from before it, freezes as it wanted to, and keeps K=2."""
    first = run_with_fault("out_of_memory", tmp_path)
    assert READY in first.outputs[1]
    assert_cause(first, r"OutOfMemoryError: planted shortage")
    assert "First cause: rank 1: OutOfMemoryError: planted shortage" in last_error(first.outputs[0])
    assert "pipeline_compression='memory'" in last_error(first.outputs[0])
    events = read_events(str(tmp_path / EVENTS_FILE))
    (moved,) = [event for event in events if event["event"] == "transition"]
    assert (moved["from"]["num_stages"], moved["to"]["num_stages"]) == (2, 1)
    assert (events[-1]["event"], events[-1]["layout"]) == ("fault", moved["to"])
    second = run_with_fault("out_of_memory", tmp_path, resume=True)
    assert second.returncode == 0, second.output
    assert "K=1 ran out of memory in an earlier run in this folder" in second.outputs[0]
    for rank, text in enumerate(second.outputs):
        assert f"rank {rank} trained to the end with 3 frozen layers" in text
    later = read_events(str(tmp_path / EVENTS_FILE))[len(events) :]
    layouts = [event.get("to") or event["layout"] for event in later if event["event"] in ("run", "transition")]
    assert {layout["num_stages"] for layout in layouts} == {2}
    assert layouts[-1]["num_frozen_layers"] == 3


@pytest.mark.slow
def test_a_sound_run_ends_well(tmp_path: Path):
    """Else the tests above would show nothing."""
    result = run_with_fault("none", tmp_path)
    assert result.returncode == 0
    for rank, text in enumerate(result.outputs):
        assert f"rank {rank} trained to the end with 2 frozen layers" in text
