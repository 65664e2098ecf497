"""What the study of asynchronous training makes of its runs."""

from __future__ import annotations

import pytest
from study_async import is_of_study, mean_errors, paired


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
