"""Weights that are saved in bfloat16: cast on their stages to float32, or trained as they are."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launches import (
    Launches,
    Layout,
    Outcome,
    Run,
    assert_trained_alike,
    far_steps,
    launches_of,
    slow_unless,
)
from tests.distributed.precision_worker import RESUMED, SAVED_AT, STEPS, run_all
from tests.support.models import has_zero_gradient


TOLERANCE = {"tied": 1e-5, "elastic": 1e-5, "autocast": 2e-2, "adapters": 2e-2, "bfloat16": 1e-5}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

launches = launches_of(run_all)


def layouts(case: str) -> list[Layout]:
    return [*([(1, 1)] if case == "tied" else []), (2, 1), (4, 1), (2, 2)]


def runs() -> list[Any]:
    return [slow_unless(k * r <= 2, Run(case, (k, r))) for case in TOLERANCE for k, r in layouts(case)]


@pytest.mark.parametrize("run", runs())
def test_the_numbers_are_those_of_one_process(ours: Outcome, plain: Outcome, run: Run) -> None:
    tolerance, ignored = TOLERANCE[run.case], partial(has_zero_gradient, "bert_masked")
    assert len(plain.logged("loss")) == STEPS
    assert_trained_alike(ours, plain, tolerance, ("grad_norm",), ignored, floor=1e-3)
    # A loss in bfloat16 has 8 bits itself.
    assert (
        far_steps(ours.logged("loss"), plain.logged("loss"), "loss", max(tolerance, 2**-8 * (run.case == "bfloat16")))
        == {}
    )


def resumed_runs() -> list[Any]:
    found = []
    for case in TOLERANCE.keys() - {"bfloat16"}:
        for layout in layouts(case):
            run, again = Run(case, layout), Run(f"{case}{RESUMED}", layout, plain=case)
            marks = [pytest.mark.slow] if run.num_ranks == 4 else []
            found.append(pytest.param(run, again, id=str(run), marks=marks))
    return sorted(found, key=lambda param: param.id)


@pytest.mark.parametrize(("run", "again"), resumed_runs())
def test_a_stage_alone_is_cast_and_saved_so_and_resumed_alike(
    ours: Outcome, launches: Launches, run: Run, again: Run
) -> None:
    for rank in ours.ranks:
        assert rank["dtypes"] == [["torch.float32"]] * STEPS
        # One part of several, the tied vocabulary being in the first and the last.
        assert rank["held"] == [1.0] if run.layout[0] == 1 else max(rank["held"]) < 0.8
    if run.case == "elastic" and run.num_ranks > 1:
        assert ours.ranks[0]["sizes"][0] > ours.ranks[0]["sizes"][-1]
    resumed = launches.outcome(again)
    assert resumed.values("loss") == ours.values("loss")
    assert resumed.weights.keys() == ours.weights.keys()
    for key, weight in ours.weights.items():
        assert torch.equal(resumed.weights[key], weight), key
    saved = ours.output / f"checkpoint-{SAVED_AT}"
    if run.case == "adapters":
        assert {each.dtype for each in load_file(saved / "adapter_model.safetensors").values()} == {torch.float32}
        return
    assert {each.dtype for each in load_file(saved / "model.safetensors").values()} == {torch.float32}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("run", "other"),
    [
        pytest.param(Run("bfloat16", layout), Run("bfloat16-weights", layout, "bfloat16"), id=name, marks=marks)
        for layout, name, marks in (((2, 1), "2x1", []), ((2, 2), "2x2", [pytest.mark.slow]))
    ],
)
def test_adding_the_gradients_in_bfloat16_gives_other_numbers(
    ours: Outcome, plain: Outcome, launches: Launches, other: Run
) -> None:
    """Without it, the comparison above would show nothing about `pipeline_gradient_dtype`."""
    expected = plain.values("grad_norm")[0]
    near, far = (abs(each.values("grad_norm")[0] - expected) for each in (ours, launches.outcome(other)))
    assert near < far / 10
