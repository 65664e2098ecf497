"""TRL's SFTTrainer keeps its numbers in a pipeline, also those that it logs beside the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.scenarios import run
from tests.distributed.sft_worker import CASES, train
from tests.support.adapted import QUANTIZED


TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def ends(folder: Path, num_processes: int) -> dict[str, Any]:
    found: dict[str, Any] = run(train, folder, num_processes, {"names": list(CASES)}, timeout=420)[0]
    return found


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ends(tmp_path_factory.mktemp("sft"), 1)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ends(tmp_path_factory.mktemp("sft"), 2)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ends(tmp_path_factory.mktemp("sft"), 4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_twenty_steps_are_those_of_sft_trainer(
    name: str, num_processes: int, on_one: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    found, expected = request.getfixturevalue({2: "on_two", 4: "on_four"}[num_processes])[name], on_one[name]
    assert len(found["logged"]) == len(expected["logged"]) == 6
    for own, plain in zip(found["logged"], expected["logged"], strict=True):
        # Copies, as other numbers of processes are compared with the same run of one.
        own, plain = dict(own), dict(plain)
        if CASES[name].get("model") in QUANTIZED:
            # TRL trains the adapters of a quantized model in bfloat16, in which Trainer computes the norm.
            assert own.pop("grad_norm", 0.0) == pytest.approx(plain.pop("grad_norm", 0.0), rel=2**-8)
        assert own == pytest.approx(plain, rel=TOLERANCE)
    last: dict[str, Any] = found["layout"]
    assert last["num_frozen_layers"] == (2 if name == "frozen" else 0)
    if name != "frozen":
        assert (last["num_stages"], last["num_replicas"]) == (2, num_processes // 2)
