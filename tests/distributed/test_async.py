"""Asynchronous 1F1B: each run gives the bits of one process that keeps every version of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.async_worker import CASES, KINDS, run_all
from tests.distributed.scenarios import start


# In every run of CI, on two processes.
QUICK = (
    *(f"{kind}-{optimizer}-a1" for kind, optimizer in zip(KINDS, ("adamw", "fused", "momentum") * 2, strict=True)),
    *("pipeoptim-sgd-a2", "drained", "by-stage", "by-last", "asked", "accumulated", "recomputed", "still"),
    *("saved", "elastic", "kept-cuts-stashing-momentum", "short"),
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def run(folder: Path, num_processes: int, names: list[str]) -> Path:
    start(run_all, folder, num_processes, {"names": names}, timeout=120, strict_nccl=True)
    return folder


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run(tmp_path_factory.mktemp("asynchronous"), 2, list(QUICK))
    return run(folder, 1, list(QUICK))


@pytest.fixture(scope="module")
def all_on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [name for name in CASES if name not in QUICK]
    folder = run(tmp_path_factory.mktemp("more"), 2, names)
    return run(folder, 1, names)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run(tmp_path_factory.mktemp("four"), 4, list(CASES))
    return run(folder, 1, list(CASES))


def logs(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def parameters() -> list[Any]:
    found = []
    for name, case in CASES.items():
        for stages, replicas in case.layouts:
            is_quick = name in QUICK and stages * replicas == 2
            fixture = "on_two" if is_quick else "on_four" if stages * replicas == 4 else "all_on_two"
            marks = [] if is_quick else [pytest.mark.slow]
            where = f"{name}-{stages}x{replicas}"
            found.append(pytest.param(where, fixture, replicas, id=where, marks=marks))
    return found


@pytest.mark.parametrize(("name", "fixture", "num_replicas"), parameters())
def test_weights_and_losses_are_those_of_one_process_with_explicit_delays(
    name: str, fixture: str, num_replicas: int, request: pytest.FixtureRequest
) -> None:
    """Difference 0.0, but where replicas sum gradients."""
    folder = request.getfixturevalue(fixture)
    found, expected = logs(folder, name), logs(folder, f"{name}-simulated")
    weights, simulated = (load_file(folder / f"{each}.safetensors") for each in (name, f"{name}-simulated"))
    if num_replicas > 1 or name.startswith("elastic"):  # Sums over replicas round differently.
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        return
    if name.startswith("bf16"):  # What passes between stages rounds in other places.
        assert found["loss"] == pytest.approx(expected["loss"], rel=2**-8)
        return
    assert found["loss"] == expected["loss"]
    assert found["learning_rate"] == expected["learning_rate"]
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    differences = {key: float((weights[key] - simulated[key]).abs().max()) for key in weights}
    assert max(differences.values()) == 0.0, differences


def test_weights_that_stand_still_give_trainers_numbers(on_two: Path) -> None:
    """Learning rate 0: whatever the delay, every forward sees the same weights."""
    found, plain = logs(on_two, "still-2x1"), logs(on_two, "still-plain")
    assert len(found["loss"]) == 12
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(plain[key], rel=1e-5)


def test_delays_do_change_what_is_learned(on_two: Path) -> None:
    """The cases would prove nothing if all kinds came to the same."""
    ends = [load_file(on_two / f"{kind}-2x1.safetensors") for kind in ("pipeoptim-adamw-a1", "vanilla-fused-a1")]
    assert max(float((ends[0][key] - ends[1][key]).abs().max()) for key in ends[0]) > 1e-4


def test_the_log_shows_what_a_stage_predicted(on_two: Path) -> None:
    lines = (on_two / "pipeoptim-adamw-a1-2x1" / "pipetransformer_events.jsonl").read_text().splitlines()
    told = [event for event in map(json.loads, lines) if event.get("what") == "prediction"]
    assert told
    for event in told:
        (stage,) = event["stages"]  # The last stage predicts nothing.
        assert stage["stage"] == 0
        assert stage["s"] == 1
    assert 0 < stage["error"] < 1
    assert 0 < stage["error_unpredicted"] < 1


@pytest.mark.parametrize("name", ["asked", "saved"])
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(name: str, on_two: Path) -> None:
    """One that everybody knew of before, and one that a callback asked for while forwards were in flight."""
    ends = [load_file(on_two / f"{name}-2x1{which}.safetensors") for which in ("", "-resumed")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_freed_ranks_become_replicas_between_two_windows(on_two: Path) -> None:
    lines = (on_two / "elastic-2x1" / "pipetransformer_events.jsonl").read_text().splitlines()
    moves = [event["to"] for event in map(json.loads, lines) if event["event"] == "transition"]
    assert [(to["num_frozen_layers"], to["num_stages"], to["num_replicas"]) for to in moves][-1] == (3, 1, 2)


def test_whoever_reads_the_model_finds_the_weights_of_one_step(on_two: Path) -> None:
    assert len(logs(on_two, "asked-2x1")["sums"]) == 2
    assert all(torch.tensor(logs(on_two, "asked-2x1")["sums"]).isfinite())
    assert (on_two / "asked-2x1" / "checkpoint-3" / "model.safetensors").exists()
