"""fp16 over stages: the scale, the skipped steps and the weights are those of plain Trainer with its own scaler."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.fp16_worker import CASES, SAVED_AT, STEPS, run_all
from tests.distributed.scenarios import read_notes, start
from tests.support.models import has_zero_gradient


# One rounding of float16: the micro-batches are the same, but gradients are added in another order.
TOLERANCE = 2**-11
SCHEDULES = ("gpipe", "interleaved_1f1b", "zb_h1", "zb_v")
RESUMED = ("too_large", "first_stage")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp16")
    start(run_all, folder, 1, {"runs": [(case, 1, {}, False) for case in CASES], "is_plain": True}, timeout=200)
    return folder


@pytest.fixture(scope="module")
def on_two(plain: Path) -> Path:
    runs: list[Any] = [(case, 2, {}, False) for case in CASES] + [(case, 2, {}, True) for case in RESUMED]
    runs += [("first_stage", 2, {"pipeline_schedule": each}, False) for each in SCHEDULES]
    start(run_all, plain, 2, {"runs": runs}, timeout=400, strict_nccl=True)
    return plain


@pytest.fixture(scope="module")
def on_four(plain: Path) -> Path:
    runs: list[Any] = [(case, stages, {}, False) for case in CASES for stages in (4, 2)]
    start(run_all, plain, 4, {"runs": runs}, timeout=500, strict_nccl=True)
    return plain


def assert_equal(folder: Path, case: str, name: str, num_ranks: int) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = read_notes(folder, name, num_ranks, "")
    (expected,) = read_notes(folder, f"{case}-plain", 1, "")
    for rank in ranks:
        assert rank["scales"] == expected["scales"]
        assert rank["learning_rates"] == expected["learning_rates"]
    for key in ("loss", "grad_norm"):
        assert len(expected[key]) == STEPS
        assert ranks[0][key] == pytest.approx(expected[key], rel=TOLERANCE, nan_ok=True), key
    weights, others = load_file(folder / f"{name}.safetensors"), load_file(folder / f"{case}-plain.safetensors")
    assert weights.keys() == others.keys()
    for key, weight in others.items():
        if not has_zero_gradient("vit", key):
            assert float((weights[key] - weight).norm() / weight.norm().clamp_min(1e-3)) <= TOLERANCE, key
    return ranks


@pytest.mark.parametrize("case", CASES)
def test_two_stages_scale_and_skip_as_plain_trainer(case: str, on_two: Path) -> None:
    assert_equal(on_two, case, f"{case}-2x1", 2)


def test_the_scale_outlives_a_change_of_the_layout(on_two: Path) -> None:
    """The case compares nothing otherwise: it ends on one stage, with three layers frozen."""
    assert [rank["last"] for rank in read_notes(on_two, "elastic-2x1", 2, "")] == [[1, 3]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stages", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_four_processes_scale_and_skip_as_plain_trainer(case: str, stages: int, on_four: Path) -> None:
    assert_equal(on_four, case, f"{case}-{stages}x{4 // stages}", 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_schedules_scale_and_skip_alike(schedule: str, on_two: Path) -> None:
    assert_equal(on_two, "first_stage", f"first_stage-2x1-{schedule}", 2)


def test_an_overflow_in_one_stage_skips_the_step_of_both(on_two: Path) -> None:
    """Otherwise the cases would not show that the ranks agree."""
    ranks = read_notes(on_two, "first_stage-2x1", 2, "")
    seen = [[step for step, overflows in enumerate(rank["overflows"]) if overflows] for rank in ranks]
    assert sorted(seen) == [[2], [5]]


def test_the_cases_grow_and_shrink_the_scale(plain: Path) -> None:
    scales = {case: read_notes(plain, f"{case}-plain", 1, "")[0]["scales"] for case in CASES}
    assert len(set(scales["steady"])) == 1 and scales["grows"][-1] == 4 * scales["grows"][0]
    changes = {later / earlier for earlier, later in pairwise(scales["too_large"])}
    assert changes == {0.5, 1.0, 2.0}
    assert scales["first_stage"][-1] == scales["first_stage"][0] / 4
    assert scales["unclipped"][-1] == scales["unclipped"][0] / 2


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_goes_on_with_its_scale(case: str, on_two: Path) -> None:
    whole, resumed = (read_notes(on_two, name, 2, "") for name in (f"{case}-2x1", f"{case}-2x1-resumed"))
    for rank, again in zip(whole, resumed, strict=True):
        assert again["scales"] == rank["scales"][SAVED_AT:]
    assert resumed[0]["loss"] == whole[0]["loss"]
    weights, again = (load_file(on_two / f"{name}.safetensors") for name in (f"{case}-2x1", f"{case}-2x1-resumed"))
    assert all(torch.equal(again[key], weight) for key, weight in weights.items())
