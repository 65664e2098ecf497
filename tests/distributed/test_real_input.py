"""Law 1 on real input: pretrained checkpoints, real sentences, real images."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.real_worker import NUM_STEPS, ten_steps
from tests.distributed.scenarios import run


TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.shared_data, pytest.mark.timeout(300)]


def logged_steps(task: str, model: Path, data: Path, output: Path, num_stages: int, num_processes: int):
    output.mkdir(parents=True)
    options = {"task": task, "model": str(model), "data": str(data), "num_stages": num_stages}
    # One cache of data sets per run, so that nothing is written outside of the test's folder.
    env = {"HF_DATASETS_CACHE": str(output / "cache")}
    histories = run(ten_steps, output, num_processes, options, timeout=140, env=env)
    steps = [[entry for entry in history if "loss" in entry] for history in histories]
    assert all(entries == steps[0] for entries in steps)
    return steps[0]


@pytest.mark.parametrize("task", ["text", pytest.param("images", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_stages", "num_processes"),
    [pytest.param(2, 2, id="2x1"), pytest.param(1, 2, id="1x2", marks=pytest.mark.slow)],
)
def test_first_losses_on_real_input_equal_trainers(
    request: pytest.FixtureRequest, tmp_path: Path, shared_data: Path, task: str, num_stages: int, num_processes: int
):
    model = request.getfixturevalue({"text": "minilm", "images": "shared_vit"}[task])
    plain = logged_steps(task, model, shared_data, tmp_path / "plain", 0, 1)
    ours = logged_steps(task, model, shared_data, tmp_path / "pipeline", num_stages, num_processes)
    assert len(plain) == len(ours) == NUM_STEPS
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
        assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-12)
    assert len({entry["loss"] for entry in plain}) == NUM_STEPS
