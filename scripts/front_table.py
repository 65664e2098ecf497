"""The study of accuracy against time as a table to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


TITLES = {
    "sst2": "SST-2, accuracy",
    "sst2_no_dropout": "SST-2 without dropout, accuracy",
    "squad": "SQuAD, F1",
    "squad_no_dropout": "SQuAD without dropout, F1",
    "answers": "tags of SQuAD's answers, F1",
    "answers_no_dropout": "tags of SQuAD's answers without dropout, F1",
    "cifar10": "CIFAR-10, accuracy",
    "cifar10_augmented": "CIFAR-10 with random crop and flip, accuracy",
    "entailment": "does a sentence answer a question of SQuAD, accuracy",
    "digits": "handwritten digits, accuracy",
}
HEADER = (
    "| contender | score | seconds | points at equal time | as fast at equal score | points to the longest full run "
    "| its time | seeds |\n|---|---|---|---|---|---|---|---|"
)
EXPLANATION = """# Accuracy against time: all runs

Made by `python -m scripts.bench front`; how it was measured, and what it says:
[benchmarks](benchmarks.md#accuracy-against-time). Points are differences, paired by seed, with their 95 % intervals;
of two seeds both are given, of one seed just that one. *At equal time*: above full fine-tuning that takes as long,
linear between its runs and level after the longest. *As fast at equal score*: time of full fine-tuning up to that
score over time of the run; *beyond*: no full run ends as high; *below*: every one ends higher. *Its time*: time over
that of the longest full run, median over seeds.
"""


def as_markdown(report: Mapping[str, Any]) -> str:
    """A table for each task that has runs.

    Args:
        report: as `front_report.make_report` gives it.
    """
    parts = [EXPLANATION]
    for task, results in report["tasks"].items():
        if results["rows"]:
            parts.append("\n".join([f"## {TITLES[task]}\n", HEADER, *map(_row, results["rows"])]) + "\n")
    return "\n".join(parts)


def _row(row: Mapping[str, Any]) -> str:
    is_longest = "against_full_at_equal_time" not in row and row.get("time_over_longest_full") == 1
    cells = [
        row["contender"],
        f"{row['mean_score']:.2f}",
        f"{row['mean_seconds']:.0f}",
        points(row.get("against_full_at_equal_time")),
        _speed(row),
        "" if is_longest else points(row.get("against_longest_full")),
        f"{row['time_over_longest_full']:.2f}" if "time_over_longest_full" in row else "",
        str(len(row["seeds"])),
    ]
    return f"| {' | '.join(cells)} |"


def _speed(row: Mapping[str, Any]) -> str:
    speed = row.get("times_as_fast_at_equal_score")
    if speed is not None:
        return f"{speed:.2f}"
    if "score_is_beyond_full" not in row:
        return ""
    return "beyond" if row["score_is_beyond_full"] else "below"


def points(differences: Mapping[str, Any] | None) -> str:
    """A mean with its interval, where there are enough seeds for one that says something."""
    if differences is None or differences["mean"] is None:
        return ""
    values = differences["points"]
    if len(values) == 2:
        return ", ".join(f"{value:+.2f}" for value in values)
    low, high = differences.get("interval_95", (None, None))
    return f"{differences['mean']:+.2f}" + ("" if low is None else f" [{low:+.2f}, {high:+.2f}]")
