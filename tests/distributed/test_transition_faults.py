"""Law 7 around transitions: a rank that disagrees, differs or dies ends the run on every rank, the cause named."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from tests.distributed.launcher import LaunchResult
from tests.distributed.scenarios import start
from tests.distributed.test_faults import GRACE, PIPELINE_TIMEOUT, assert_all_ended_by_themselves, last_error
from tests.distributed.transition_fault_worker import READY, TAMPERED, train_with


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
    assert re.search(r"Lost contact while .*mov|rank 1 does not answer: killed.*process of rank 1 has ended", said)


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
