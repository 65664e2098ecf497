"""Accuracy against time: which runs count, what they say beside full fine-tuning, and a run of a tiny task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import ViTConfig, ViTForImageClassification, default_data_collator

from scripts.bench import front, front_adapters
from scripts.bench.front import FULL, TASKS, TaskData, answer_sentence, at_equal_time, finished, seconds_to
from scripts.bench.measure import REPOSITORY


CURVE = [(1.0, 50.0), (2.0, 60.0), (4.0, 60.0), (5.0, 70.0)]


@pytest.mark.parametrize(
    ("seconds", "score"), [(0.5, None), (1.0, 50.0), (1.5, 55.0), (3.0, 60.0), (4.5, 65.0), (9.0, 70.0)]
)
def test_the_curve_is_linear_between_its_points_and_level_after_them(seconds: float, score: float | None) -> None:
    assert at_equal_time(CURVE, seconds) == score


@pytest.mark.parametrize(("score", "seconds"), [(49.0, None), (50.0, 1.0), (55.0, 1.5), (60.0, 2.0), (71.0, None)])
def test_a_score_is_reached_where_the_curve_first_has_it(score: float, seconds: float | None) -> None:
    assert seconds_to(CURVE, score) == seconds


def test_contenders_are_compared_seed_by_seed_at_equal_time() -> None:
    def records(*points: tuple[float, float]) -> dict[int, dict[str, Any]]:
        return {
            seed: {"seconds": seconds, "scores": {"f1": score}, "settings": {"num_epochs": 1}}
            for seed, (seconds, score) in enumerate(points)
        }

    runs = {
        f"{FULL}1": records((10.0, 50.0), (20.0, 40.0)),
        f"{FULL}2": records((20.0, 60.0), (40.0, 60.0)),
        "prefix": records((15.0, 58.0), (30.0, 51.0), (99.0, 0.0)),
        "none": {},
    }
    report = front.task_report(runs, "f1")
    assert report["curve"] == [(15.0, 45.0), (30.0, 60.0)]
    rows = {row["contender"]: row for row in report["rows"]}
    assert list(rows) == [f"{FULL}1", f"{FULL}2", "prefix"]
    assert "against_full_at_equal_time" not in rows[f"{FULL}2"]
    # The curves of both seeds are at 55 and 50 then; a seed without a curve only counts in the means.
    assert rows["prefix"]["against_full_at_equal_time"]["points"] == [3.0, 1.0]
    assert rows["prefix"]["against_longest_full"]["mean"] == -5.5
    assert rows["prefix"]["time_over_longest_full"] == 0.75
    # 54.5 points take 24.5 seconds of full fine-tuning, and 22.5 of this.
    assert rows["prefix"]["times_as_fast_at_equal_score"] == pytest.approx(24.5 / 22.5, abs=1e-3)


@pytest.mark.parametrize(
    ("file", "name", "task", "curve"),
    [("front.json", name, task, FULL) for name, task in TASKS.items()]
    + [("front_adapters.json", name, task, front_adapters.CURVE) for name, task in front_adapters.TASKS.items()],
)
def test_the_committed_runs_are_those_of_the_report(file: str, name: str, task: Any, curve: str) -> None:
    """Read with the settings of now: a changed setting would no longer count them."""
    report = json.loads((REPOSITORY / "benchmarks" / file).read_text())["tasks"][name]
    runs = finished(REPOSITORY / "benchmarks" / "front" / f"{name}.jsonl", task.contenders())
    found = json.loads(json.dumps(front.task_report(runs, task.metric, curve)))
    assert found["curve"] == report["curve"] and found["num_runs"] == report["num_runs"]
    rows = {row["contender"]: row for row in report["rows"]}
    assert all(row.items() <= rows[row["contender"]].items() for row in found["rows"])


def test_a_context_is_cut_to_the_sentence_of_the_answer() -> None:
    context = "He is here. The U. S. won it. They left."
    answers = {"text": ["U. S.", "They"], "answer_start": [context.index("U. S."), context.index("They")]}
    found = answer_sentence({"context": context, "answers": answers})
    assert found == {"context": "The U. S. won it.", "answers": {"text": ["U. S."], "answer_start": [4]}}


def tiny(_data: Path, _models: Path) -> TaskData:
    config = ViTConfig(
        image_size=4, patch_size=2, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    rows = {"pixel_values": torch.randn(8, 3, 4, 4).tolist(), "labels": [0, 1] * 4}
    pool = Dataset.from_dict(rows).with_format("torch")
    return TaskData(
        pool, lambda: ViTForImageClassification(config), lambda model: {"accuracy": 50.0}, {}, default_data_collator
    )


def test_runs_go_on_where_they_stopped(tmp_path: Path) -> None:
    tasks = {"tiny": front.Task(tiny, "accuracy", 6, 2, 2, 2, 1e-3)}
    half = "first 1/2 frozen, half of the epochs"
    for seeds in ([0], [0, 1]):
        front.finish("", "", str(tmp_path), tasks, [f"{FULL}2", half], seeds)
    (file,) = tmp_path.iterdir()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(each["contender"], each["seed"]) for each in records] == [
        (f"{FULL}2", 0), (half, 0), (f"{FULL}2", 1), (half, 1)
    ]  # fmt: skip
    assert [each["num_steps"] for each in records] == [6, 3, 6, 3] and all(each["seconds"] > 0 for each in records)
    with file.open("a") as end:
        end.write('{"contender": "cut')
    settings = tasks["tiny"].contenders()
    assert set(finished(file, settings)[half]) == {0, 1}
    settings[half] = {**settings[half], "rate": 1.0}
    assert finished(file, settings)[half] == {}
