"""Language models that take images beside text follow plain Trainer on stages, in micro-batches and on replicas."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.distributed.launches import Outcome, Run, assert_trained_alike, launches_of, slow_unless
from tests.distributed.media_worker import (
    CASES,
    DIES_AT,
    ON_FOUR_STAGES,
    OTHERS,
    PROCESSED,
    QUICK,
    STEPS,
    die,
    go_on,
    grid,
    run_all,
    undisturbed,
)
from tests.distributed.scenarios import run, start
from tests.support.comparison import far_tensors
from tests.support.models import is_key_bias


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

launches = launches_of(run_all)


def runs() -> list[Any]:
    quick = [slow_unless(True, Run(case.name, (2, 1), case.plain.name)) for case in QUICK]
    rest = [(case, (2, 1)) for case in [*PROCESSED, *grid(), *OTHERS] if case not in QUICK]
    # One stage and one micro-batch ask for nothing that Trainer does not do.
    rest += [(case, (1, 2)) for case in grid() if case.num_microbatches > 1]
    rest += [(case, (2, 2)) for case in grid()]
    rest += [(case, (4, 1)) for case in ON_FOUR_STAGES]
    rest += [(case, (1, 2)) for case in PROCESSED]
    return [*quick, *(slow_unless(False, Run(case.name, layout, case.plain.name)) for case, layout in rest)]


@pytest.mark.parametrize("run", runs())
def test_losses_norms_and_weights_are_those_of_trainer(ours: Outcome, plain: Outcome, run: Run) -> None:
    assert len(ours.logged("loss")) == STEPS
    # The tower of some computes queries, keys and values at once.
    assert_trained_alike(ours, plain, ignored=lambda name: is_key_bias(name) or name.endswith(".qkv.bias"))
    assert ours.ranks[0]["evaluated"] == pytest.approx(plain.ranks[0]["evaluated"], rel=1e-5)
    layout, case = ours.ranks[0]["layout"], CASES[run.case]
    chunks = 2 if case.ours.get("pipeline_schedule") == "interleaved_1f1b" else 1
    assert (layout["num_stages"] // chunks, layout["num_replicas"]) == run.layout
    assert layout["num_microbatches"] == case.num_microbatches


@pytest.mark.slow
def test_a_run_that_was_killed_on_two_stages_goes_on_elsewhere(tmp_path: Path) -> None:
    expected = run(undisturbed, tmp_path, timeout=120)[0]
    weights = load_file(tmp_path / "weights.safetensors")
    result = start(die, tmp_path, 2, check=False, timeout=180)
    assert set(result.returncodes) == {-signal.SIGKILL}, result.output
    last = DIES_AT - 1
    assert (tmp_path / "killed" / f"checkpoint-{last}").is_dir()
    logged = {entry["step"]: entry for entry in expected["log_history"] if "loss" in entry}
    for number in (1, 2, 4):
        shutil.copytree(tmp_path / "killed", copied := tmp_path / f"killed-{number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = run(go_on, folder, number, {"source": str(copied)}, timeout=180)[0]
        assert ended["layout"]["num_stages"] == number
        found = {entry["step"]: entry for entry in ended["log_history"] if "loss" in entry}
        assert [*found] == [*logged]
        for step, entry in found.items():
            for key in ("loss", "grad_norm"):
                assert entry[key] == pytest.approx(logged[step][key], rel=1e-5), (number, step, key)
        assert ended["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
        assert far_tensors(load_file(folder / "weights.safetensors"), weights, 1e-5) == {}, number
