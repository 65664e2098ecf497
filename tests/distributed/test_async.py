"""Asynchronous 1F1B: each run gives the bits of one process that keeps every version of the weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.distributed.async_worker import CASES, KINDS, PLAIN, RESUMED, SIMULATED, run_all
from tests.distributed.launches import Launches, Outcome, Run, assert_trained_alike, launches_of, slow_unless


# In every run of CI, on two processes.
QUICK = (
    *(f"{kind}-{optimizer}-a1" for kind, optimizer in zip(KINDS, ("adamw", "fused", "momentum") * 2, strict=True)),
    *("pipeoptim-sgd-a2", "drained", "by-stage", "by-last", "asked", "accumulated", "recomputed", "still"),
    *("saved", "elastic", "kept-cuts-stashing-momentum", "short"),
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


launches = launches_of(run_all)


def simulated(name: str, layout: tuple[int, int]) -> Run:
    """The run of a case in a pipeline, which is compared with its simulation."""
    return Run(name, layout, f"{Run(name, layout)}{SIMULATED}")


def runs() -> list[Any]:
    return [
        slow_unless(name in QUICK and k * r == 2, simulated(name, (k, r)))
        for name, case in CASES.items()
        for k, r in case.layouts
    ]


def of_two(name: str) -> Any:
    return pytest.mark.parametrize("run", [simulated(name, (2, 1))], ids=str)


@pytest.mark.parametrize("run", runs())
def test_weights_and_losses_are_those_of_one_process_with_explicit_delays(
    ours: Outcome, plain: Outcome, run: Run
) -> None:
    """Difference 0.0, but where replicas sum gradients."""
    if run.layout[1] > 1 or run.case == "elastic":  # Sums over replicas round differently.
        assert ours.values("loss") == pytest.approx(plain.values("loss"), rel=1e-5)
        return
    if run.case.startswith("bf16"):  # What passes between stages rounds in other places.
        assert ours.values("loss") == pytest.approx(plain.values("loss"), rel=2**-8)
        return
    assert_trained_alike(ours, plain, 0.0, ("loss", "learning_rate"))
    assert ours.values("grad_norm") == pytest.approx(plain.values("grad_norm"), rel=1e-5)


@pytest.mark.parametrize("run", [Run("still", (2, 1), f"still{PLAIN}")], ids=str)
def test_weights_that_stand_still_give_trainers_numbers(ours: Outcome, plain: Outcome) -> None:
    """Learning rate 0: whatever the delay, every forward sees the same weights."""
    assert len(ours.logged("loss")) == 12
    assert_trained_alike(ours, plain)


@pytest.mark.parametrize(
    ("run", "other"), [(simulated("pipeoptim-adamw-a1", (2, 1)), simulated("vanilla-fused-a1", (2, 1)))], ids=str
)
def test_delays_do_change_what_is_learned(ours: Outcome, launches: Launches, other: Run) -> None:
    """The cases would prove nothing if all kinds came to the same."""
    ends = ours.weights, launches.outcome(other).weights
    assert max(float((ends[0][key] - ends[1][key]).abs().max()) for key in ends[0]) > 1e-4


@of_two("pipeoptim-adamw-a1")
def test_the_log_shows_what_a_stage_predicted(ours: Outcome) -> None:
    lines = (ours.output / "pipetransformer_events.jsonl").read_text().splitlines()
    told = [event for event in map(json.loads, lines) if event.get("what") == "prediction"]
    assert told
    for event in told:
        (stage,) = event["stages"]  # The last stage predicts nothing.
        assert stage["stage"] == 0
        assert stage["s"] == 1
    assert 0 < stage["error"] < 1
    assert 0 < stage["error_unpredicted"] < 1


@pytest.mark.parametrize(
    ("run", "again"),
    [
        (simulated(name, (2, 1)), Run(f"{name}{RESUMED}", (2, 1), f"{Run(name, (2, 1))}{SIMULATED}"))
        for name in ("asked", "saved")
    ],
    ids=str,
)
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(
    ours: Outcome, launches: Launches, again: Run
) -> None:
    """One that everybody knew of before, and one that a callback asked for while forwards were in flight."""
    resumed = launches.outcome(again).weights
    assert all(torch.equal(resumed[key], weight) for key, weight in ours.weights.items())


@of_two("elastic")
def test_freed_ranks_become_replicas_between_two_windows(ours: Outcome) -> None:
    last = ours.events("transition")[-1]["to"]
    assert (last["num_frozen_layers"], last["num_stages"], last["num_replicas"]) == (3, 1, 2)


@of_two("asked")
def test_whoever_reads_the_model_finds_the_weights_of_one_step(ours: Outcome) -> None:
    sums = ours.ranks[0]["sums"]
    assert len(sums) == 2
    assert all(torch.tensor(sums).isfinite())
    assert (ours.output / "checkpoint-3" / "model.safetensors").exists()
