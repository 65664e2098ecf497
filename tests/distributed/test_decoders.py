"""Causal language models follow plain Trainer on one process: whole sequences, and slices of them (TeraPipe)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.decoder_worker import CASES, ELASTIC, HEADS, SLICED, STEPS, STORED, run_all
from tests.distributed.scenarios import start


# In every run of CI: positions that are learned, rotary ones, and layers of two kinds; on two processes only.
FAMILIES = ("family-gpt2", "family-llama", "family-gemma2", "classes-gpt2", "packed-llama", "stored-packed")
OTHERS = [name for name in CASES if name not in {*FAMILIES, *SLICED, *HEADS, *ELASTIC}]
TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def ends(folder: Path, num_processes: int, names: list[str]) -> Path:
    """Where the ends of runs on so many processes lie, beside those on one."""
    start(run_all, folder, num_processes, {"names": names}, timeout=300)
    return folder


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ends(tmp_path_factory.mktemp("decoders"), 1, [*FAMILIES, *SLICED, *HEADS, *ELASTIC])


@pytest.fixture(scope="module")
def on_two(on_one: Path) -> Path:
    return ends(on_one, 2, [*FAMILIES, *SLICED, *HEADS, *ELASTIC])


@pytest.fixture(scope="module")
def on_four(on_one: Path) -> Path:
    return ends(on_one, 4, [*SLICED, *HEADS, *ELASTIC])


@pytest.fixture(scope="module")
def families(on_one: Path) -> Path:
    """All of them on two and four processes, a few with each launch."""
    for first in range(0, len(OTHERS), 8):
        for num_processes in (1, 2, 4):
            ends(on_one, num_processes, OTHERS[first : first + 8])
    return ends(on_one, 4, list(FAMILIES))


def end(folder: Path, name: str, layout: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{layout[0]}x{layout[1]}.json").read_text())
    return found


def parameters() -> list[Any]:
    found = []
    for name, case in CASES.items():
        for layout in case.layouts:
            is_large = layout[0] * layout[1] == 4
            of_families = name in OTHERS or (is_large and name in FAMILIES)
            fixture = "families" if of_families else "on_four" if is_large else "on_two"
            marks = [pytest.mark.slow] if of_families or is_large else []
            found.append(pytest.param(name, layout, fixture, id=f"{name}-{layout[0]}x{layout[1]}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "layout", "fixture"), parameters())
def test_losses_gradients_and_evaluation_follow_plain_trainer(
    name: str, layout: tuple[int, int], fixture: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(fixture)
    found, expected = end(folder, name, layout), end(folder, name)
    assert len(found["loss"]) == STEPS
    for key in ("loss", "grad_norm", "evaluated"):
        assert found[key] == pytest.approx(expected[key], rel=TOLERANCE), key
    last, case = found["layout"], CASES[name]
    if not case.freezes:
        assert last["num_stages"] == layout[0]
        assert last["num_replicas"] == layout[1]
    if "pipeline_token_slices" in case.options:
        (lengths,) = last["token_slices"]
        assert len(lengths) > 2


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """What happened on two stages."""
    lines = (folder / f"{name}-2x1" / "pipetransformer_events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", list(ELASTIC))
def test_layers_freeze_as_the_table_says(name: str, on_two: Path) -> None:
    last = end(on_two, name, (2, 1))["layout"]
    assert last["num_frozen_layers"] == 2
    events = events_of(on_two, name)
    assert [event["num_frozen"] for event in events if event["event"] == "freeze"][-2:] == [1, 2]


@pytest.mark.parametrize(
    ("name", "fixture"),
    [
        pytest.param(name, "families", marks=pytest.mark.slow) if name in OTHERS else (name, "on_two")
        for name in STORED
    ],
)
def test_what_frozen_layers_give_is_read_in_the_last_epochs(
    name: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    events = events_of(request.getfixturevalue(fixture), name)
    epochs = [event for event in events if event["event"] == "cache" and event["what"] == "epoch"]
    num_rows = CASES[name].num_rows
    assert [(epoch["hits"], epoch["misses"]) for epoch in epochs] == [(0, num_rows), (num_rows, 0), (num_rows, 0)]
