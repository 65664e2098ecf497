"""Weights that are saved in bfloat16: cast on their stages to float32, or trained as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.precision_worker import SAVED_AT, STEPS, run_all, save
from tests.distributed.scenarios import read_notes, start
from tests.support.models import has_zero_gradient


TOLERANCE = {"tied": 1e-5, "elastic": 1e-5, "autocast": 2e-2, "adapters": 2e-2, "bfloat16": 1e-5}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process: plain Trainer, or ours where layers freeze or gradients are added in another precision."""
    folder = tmp_path_factory.mktemp("precision")
    start(save, folder, timeout=100)
    start_runs(folder, 1, "plain", [(case, 1, {}) for case in ("tied", "autocast", "adapters")])
    start_runs(folder, 1, "single", [("elastic", 1, {}), ("bfloat16", 1, {})])
    start_runs(folder, 1, "pipeline", [("tied", 1, {})])
    return folder


@pytest.fixture(scope="module")
def on_two(references: Path) -> Path:
    runs = [(case, 2, {}) for case in TOLERANCE]
    start_runs(references, 2, "pipeline", [*runs, ("bfloat16", 2, {"pipeline_gradient_dtype": "weights"})])
    return references


@pytest.fixture(scope="module")
def on_four(references: Path) -> Path:
    runs = [(case, 4, {}) for case in TOLERANCE] + [(case, 2, {}) for case in TOLERANCE]
    start_runs(references, 4, "pipeline", [*runs, ("bfloat16", 2, {"pipeline_gradient_dtype": "weights"})])
    return references


def start_runs(folder: Path, num_processes: int, kind: str, runs: list[tuple[str, int, dict[str, str]]]) -> None:
    options = {"runs": runs, "kind": kind}
    start(run_all, folder, num_processes, options, timeout=500, strict_nccl=num_processes > 1)


Outcome = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]


def read(folder: Path, name: str, num_ranks: int = 1) -> Outcome:
    return read_notes(folder, name, num_ranks, ""), load_file(folder / f"{name}.safetensors")


def reference_of(folder: Path, case: str) -> Outcome:
    return read(folder, f"{case}-{'single' if case in ('elastic', 'bfloat16') else 'plain'}-1x1")


def layouts() -> list[Any]:
    found = [("tied", (1, 1), "references")]
    found += [(case, (2, 1), "on_two") for case in TOLERANCE]
    found += [(case, layout, "on_four") for case in TOLERANCE for layout in ((4, 1), (2, 2))]
    return [
        pytest.param(
            *each, id=f"{each[0]}-{each[1][0]}x{each[1][1]}", marks=[pytest.mark.slow] * (each[2] == "on_four")
        )
        for each in found
    ]


@pytest.fixture
def folder(fixture: str, request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(fixture)
    return found


@pytest.mark.parametrize(("case", "layout", "fixture"), layouts())
def test_the_numbers_are_those_of_one_process(case: str, layout: tuple[int, int], folder: Path) -> None:
    ranks, weights = read(folder, f"{case}-pipeline-{layout[0]}x{layout[1]}", layout[0] * layout[1])
    (expected, *_), others = reference_of(folder, case)
    for key in ("loss", "grad_norm"):
        assert len(expected[key]) == STEPS
        # A loss in bfloat16 has 8 bits itself.
        tolerance = 2**-8 if (case, key) == ("bfloat16", "loss") else TOLERANCE[case]
        assert ranks[0][key] == pytest.approx(expected[key], rel=tolerance), key
    assert weights.keys() == others.keys()
    for name, weight in others.items():
        assert weights[name].dtype is weight.dtype, name
        if not has_zero_gradient("bert_masked", name):
            distance = float((weights[name].float() - weight.float()).norm() / weight.float().norm().clamp_min(1e-3))
            assert distance <= TOLERANCE[case], name


@pytest.mark.parametrize(("case", "layout", "fixture"), [p for p in layouts() if p.values[0] != "bfloat16"])
def test_a_stage_alone_is_cast_and_saved_so_and_resumed_alike(
    case: str, layout: tuple[int, int], folder: Path
) -> None:
    name = f"{case}-pipeline-{layout[0]}x{layout[1]}"
    num_ranks = layout[0] * layout[1]
    (ranks, weights), (resumed, again) = read(folder, name, num_ranks), read(folder, f"{name}-resumed", num_ranks)
    for rank in ranks:
        assert rank["dtypes"] == [["torch.float32"]] * STEPS
        # One part of several, the tied vocabulary being in the first and the last.
        assert rank["held"] == [1.0] if layout[0] == 1 else max(rank["held"]) < 0.8
    if case == "elastic" and num_ranks > 1:
        assert ranks[0]["sizes"][0] > ranks[0]["sizes"][-1]
    assert resumed[0]["loss"] == ranks[0]["loss"]
    assert weights.keys() == again.keys()
    for key, weight in weights.items():
        assert torch.equal(again[key], weight), key
    saved = Path(ranks[0]["output"], f"checkpoint-{SAVED_AT}")
    if case == "adapters":
        assert {each.dtype for each in load_file(saved / "adapter_model.safetensors").values()} == {torch.float32}
        return
    assert {each.dtype for each in load_file(saved / "model.safetensors").values()} == {torch.float32}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("layout", "fixture"), [((2, 1), "on_two"), pytest.param((2, 2), "on_four", marks=pytest.mark.slow)]
)
def test_adding_the_gradients_in_bfloat16_gives_other_numbers(layout: tuple[int, int], folder: Path) -> None:
    """Without it, the comparison above would show nothing about `pipeline_gradient_dtype`."""
    name = f"bfloat16-pipeline-{layout[0]}x{layout[1]}"
    (expected, *_), _ = reference_of(folder, "bfloat16")
    norms = [read(folder, each, 2)[0][0]["grad_norm"][0] for each in (name, f"{name}-weights")]
    near, far = (abs(norm - expected["grad_norm"][0]) for norm in norms)
    assert near < far / 10
