"""Batches whose samples stand in one row give in any pipeline what they give as one row in plain Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.flattened_worker import CASES, MANY, ON_FOUR, ON_ONE, ON_TWO, STEPS, run_all, run_case
from tests.distributed.scenarios import start


TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the ends of all runs; those of plain Trainer are written when first asked for."""
    return tmp_path_factory.mktemp("flattened")


def launched(folder: Path, num_processes: int, cases: dict[str, Any]) -> None:
    start(run_all, folder, num_processes, {"names": list(cases)}, timeout=400, strict_nccl=True)


@pytest.fixture(scope="module")
def on_one(folder: Path) -> None:
    for name, case in ON_ONE.items():
        run_case(name, case, folder)


@pytest.fixture(scope="module")
def on_two(folder: Path) -> None:
    launched(folder, 2, ON_TWO)


@pytest.fixture(scope="module")
def many(folder: Path) -> None:
    launched(folder, 2, MANY)


@pytest.fixture(scope="module")
def on_four(folder: Path) -> None:
    launched(folder, 4, ON_FOUR)


def end(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found, load_file(folder / f"{name}.safetensors")


def parameters() -> list[Any]:
    groups = [("on_one", 1, ON_ONE), ("on_two", 2, ON_TWO), ("many", 2, MANY), ("on_four", 4, ON_FOUR)]
    return [
        pytest.param(name, num, fixture, id=name, marks=[pytest.mark.slow] if fixture in ("many", "on_four") else [])
        for fixture, num, cases in groups
        for name in cases
    ]


@pytest.mark.parametrize(("name", "num_processes", "fixture"), parameters())
def test_a_row_cut_into_parts_gives_what_it_gives_whole(
    name: str, num_processes: int, fixture: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(fixture)
    case = CASES[num_processes][name]
    plain = case.plain
    if not (folder / f"{plain.name}.json").exists():
        run_case(plain.name, plain, folder)
    (found, tensors), (expected, expected_tensors) = end(folder, name), end(folder, plain.name)
    assert len(found["loss"]) == STEPS
    for key in ("loss", "grad_norm", "metrics"):
        assert found[key] == pytest.approx(expected[key], rel=TOLERANCE), key
    if "freeze_policy" not in case.options:
        assert (found["layout"]["num_stages"], found["layout"]["num_replicas"]) == case.layout
        assert found["layout"]["num_microbatches"] == case.options["pipeline_parallel_num_microbatches"]
    for name, value in expected_tensors.items():
        if (
            "k_proj.bias" not in name and "c_attn.bias" not in name
        ):  # Gradients of key biases are zero but for rounding.
            assert tensors[name].shape == value.shape
            is_padding = value == -100
            assert torch.equal(tensors[name] == -100, is_padding), name
            own, whole = (each[~is_padding].double() for each in (tensors[name], value))
            assert (own - whole).norm() <= TOLERANCE * whole.norm(), name
