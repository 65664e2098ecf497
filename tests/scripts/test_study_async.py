"""What the study of asynchronous training makes of its runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import async_study
from scripts.bench.async_study import CONTENDERS, NUM_STEPS, RATES, Contender, compared, finish, mean_errors, runs_of
from scripts.bench.measure import REPOSITORY


def record(task: str, contender: Contender, seed: int, **others: Any) -> dict[str, Any]:
    settings = {"rate": RATES[task][contender.optimizer], "num_steps": NUM_STEPS}
    figures = {"num_correct": 1, "num_evaluated": 2, "cpu_seconds": 0.0}
    return {"task": task, **contender._asdict(), "seed": seed, **settings, **figures, **others}


def test_a_second_call_runs_only_the_cells_of_other_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, str]] = []

    def run(name: str, task: object, contender: Contender, seed: int) -> dict[str, Any]:
        ran.append((seed, str(contender)))
        return record(name, contender, seed)

    monkeypatch.setattr(async_study, "run", run)
    monkeypatch.setattr(async_study, "make_task", lambda name, data, models: object())
    for seeds in ([0], [0], [0, 7]):
        finish(str(tmp_path), str(tmp_path), str(tmp_path), ["sst2"], seeds, list(CONTENDERS))
    assert ran == [(seed, name) for seed in (0, 7) for name in CONTENDERS]
    assert len(CONTENDERS) == 32
    assert all(list(by_seed) == [0, 7] for by_seed in runs_of(tmp_path, "sst2").values())


def test_the_committed_report_is_that_of_the_committed_runs() -> None:
    folder = REPOSITORY / "benchmarks"
    committed = json.loads((folder / "async_study.json").read_text())
    found = async_study.report(folder / "async_study")
    assert found["rows"] == committed["rows"]
    assert found["num_runs"] == committed["num_runs"]


def compare(found: dict[int, int], expected: dict[int, int]) -> dict[str, Any]:
    """Of accuracies in percent, by seed."""
    contender = Contender("adamw", 4, "pipeoptim")
    both = (
        {seed: record("sst2", contender, seed, num_correct=each, num_evaluated=100) for seed, each in figures.items()}
        for figures in (found, expected)
    )
    return compared(*both)


def test_differences_are_paired_by_seed() -> None:
    row = compare({0: 81, 1: 83, 2: 85, 7: 10}, {0: 80, 1: 81, 2: 82, 5: 99})
    assert (row["seeds"], row["mean_accuracy_percent"], row["mean_difference_points"]) == ([0, 1, 2], 83.0, 2.0)
    # 1, 2 and 3 points: a standard deviation of 1, times 4.303 / sqrt(3).
    assert row["interval_95_points"] == pytest.approx([-0.48, 4.48])


def test_one_seed_gives_no_interval() -> None:
    assert "interval_95_points" not in compare({0: 81}, {0: 80})
    assert compare({0: 81}, {1: 80})["mean_difference_points"] is None


def test_runs_with_other_settings_are_left_out(tmp_path: Path) -> None:
    contender = Contender("adamw", 4, "pipeoptim")
    lines = [record("sst2", contender, 0), record("sst2", contender, 1, num_steps=80)]
    lines += [record("sst2", contender, 2, rate=3e-4)]
    (tmp_path / "sst2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert runs_of(tmp_path, "sst2")[str(contender)] == {0: lines[0]}


def test_errors_are_means_by_stage_and_part_of_the_run():
    def part(error: float) -> dict[str, object]:
        stage = {"num_micro_batches": 2, "s": 1.0, "error": error, "error_unpredicted": 2 * error}
        return {"step": 20, "stages": [stage, None]}

    (mean,) = mean_errors([{"errors": [part(1.0)]}, {"errors": [part(3.0)]}])
    assert mean == {"until_step": 20, "stages": [{"s": 1.0, "error": 2.0, "error_unpredicted": 4.0}, None]}
