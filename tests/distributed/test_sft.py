"""TRL's SFTTrainer keeps its numbers in a pipeline, also those that it logs beside the loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import launch
from tests.distributed.sft_worker import CASES


WORKER = Path(__file__).with_name("sft_worker.py")
TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def ends(folder: Path, num_processes: int) -> Path:
    launch(WORKER, [folder, *CASES], num_processes=num_processes, timeout=300)
    return folder


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ends(tmp_path_factory.mktemp("sft"), 1)


@pytest.fixture(scope="module")
def on_two(on_one: Path) -> Path:
    return ends(on_one, 2)


@pytest.fixture(scope="module")
def on_four(on_one: Path) -> Path:
    return ends(on_one, 4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_twenty_steps_are_those_of_sft_trainer(
    name: str, num_processes: int, on_one: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue({2: "on_two", 4: "on_four"}[num_processes])
    found, expected = (json.loads((folder / f"{name}-{number}.json").read_text()) for number in (num_processes, 1))
    assert len(found["logged"]) == len(expected["logged"]) == 6
    for own, plain in zip(found["logged"], expected["logged"], strict=True):
        assert own == pytest.approx(plain, rel=TOLERANCE)
    last: dict[str, Any] = found["layout"]
    assert last["num_frozen_layers"] == (2 if name == "frozen" else 0)
    if name != "frozen":
        assert (last["num_stages"], last["num_replicas"]) == (2, num_processes // 2)
