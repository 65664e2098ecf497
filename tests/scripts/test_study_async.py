"""What the study of asynchronous training makes of its runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.bench import async_study
from scripts.bench.async_study import TASKS, Cell, cell_of, finish, is_of_study, mean_errors, paired


def test_a_second_call_runs_only_the_cells_of_other_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Cell] = []

    def run(cell: Cell, task: object) -> dict[str, object]:
        ran.append(cell)
        settings = {
            "rate": async_study.RATES[cell.task, cell.optimizer],
            "num_steps": async_study.NUM_STEPS[cell.task],
        }
        return {**asdict(cell), **settings, "num_correct": 1, "num_evaluated": 2, "cpu_seconds": 0.0}

    monkeypatch.setattr(async_study, "run", run)
    monkeypatch.setitem(TASKS, "sst2", lambda data, models: object())
    for seeds in ([0], [0], [0, 7]):
        finish(tmp_path, tmp_path, tmp_path, seeds, ["sst2"])
    assert [cell.seed for cell in ran] == [0] * 32 + [7] * 32
    assert [cell_of(record) for record in async_study.read_cells(tmp_path / "sst2.jsonl")] == ran


def test_differences_are_paired_by_seed():
    row = paired({0: 81.0, 1: 83.0, 2: 85.0, 7: 10.0}, {0: 80.0, 1: 81.0, 2: 82.0, 5: 99.0})
    assert (row["seeds"], row["mean_accuracy_percent"], row["mean_difference_points"]) == ([0, 1, 2], 83.0, 2.0)
    # 1, 2 and 3 points: a standard deviation of 1, times 4.303 / sqrt(3).
    assert row["interval_95_points"] == pytest.approx([-0.48, 4.48])


def test_one_seed_gives_no_interval():
    assert "interval_95_points" not in paired({0: 81.0}, {0: 80.0})
    assert paired({0: 81.0}, {1: 80.0})["mean_difference_points"] is None


def test_runs_with_other_settings_are_left_out():
    record = {"task": "sst2", "optimizer": "adamw", "rate": 1e-4, "num_steps": 160}
    assert is_of_study(record)
    assert not is_of_study({**record, "num_steps": 80})
    assert not is_of_study({**record, "rate": 3e-4})


def test_errors_are_means_by_stage_and_part_of_the_run():
    def part(error: float) -> dict[str, object]:
        stage = {"num_micro_batches": 2, "s": 1.0, "error": error, "error_unpredicted": 2 * error}
        return {"step": 20, "stages": [stage, None]}

    (mean,) = mean_errors([{"errors": [part(1.0)]}, {"errors": [part(3.0)]}])
    assert mean == {"until_step": 20, "stages": [{"s": 1.0, "error": 2.0, "error_unpredicted": 4.0}, None]}
