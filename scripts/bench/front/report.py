"""What the runs say: each contender beside full fine-tuning at equal time, and all of it as a table to read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..study import Record, Runs, paired
from .contenders import FRESH, FULL, SETTINGS, VIEWS_EPOCHS


Curve = Sequence[tuple[float, float]]
"""Points (seconds, score), in the order of seconds."""
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
    "sst2_middle": "6,400 phrases of SST-2, accuracy",
    "squad_middle": "3,200 questions of SQuAD, F1",
    "sst2_long": "20,000 phrases of SST-2, accuracy",
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


# ---- figures ----


def at_equal_time(curve: Curve, seconds: float) -> float | None:
    """The curve's score after so many seconds, linear between its points; None before its first point.

    After its last point it is that one's: whoever has more time may still stop there.
    """
    return float(np.interp(seconds, *zip(*curve, strict=True))) if curve and seconds >= curve[0][0] else None


def seconds_to(curve: Curve, score: float) -> float | None:
    """Seconds after which the curve first reaches a score, linear between its points.

    None if it never does, or if its first point is beyond already.
    """
    if not curve or curve[0][1] > score:
        return None
    for (before, low), (after, high) in pairwise([curve[0], *curve]):
        if high >= score:
            return before + (after - before) * (score - low) / (high - low) if high > low else before
    return None


def curves_by_seed(runs: Runs, metric: str) -> dict[int, Curve]:
    """Full fine-tuning over the numbers of epochs that most seeds have; a seed that lacks one of them has no curve."""
    full = {name: by_seed for name, by_seed in runs.items() if name.startswith(FULL)}
    seeds = {seed for by_seed in full.values() for seed in by_seed}
    lengths = [by_seed for by_seed in full.values() if 2 * len(by_seed) > len(seeds)]
    whole = sorted(seed for seed in seeds if all(seed in by_seed for by_seed in lengths))
    return {seed: sorted(_point(by_seed[seed], metric) for by_seed in lengths) for seed in whole}


def mean_curve(curves: Mapping[int, Curve]) -> Curve:
    """Over seeds."""
    return [_mean_point(points) for points in zip(*curves.values(), strict=True)]


def _point(record: Record, metric: str) -> tuple[float, float]:
    return record["seconds"], record["scores"][metric]


def _mean_point(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.mean(x for x, _ in points), statistics.mean(y for _, y in points)


def task_report(runs: Runs, metric: str) -> dict[str, Any]:
    """The mean curve, and a row for each contender that has a run; `metric` is the score that is compared."""
    curves = curves_by_seed(runs, metric)
    rows = []
    for name, by_seed in runs.items():
        if not by_seed:
            continue
        records = {seed: by_seed[seed] for seed in sorted(by_seed)}
        points = {seed: _point(record, metric) for seed, record in records.items()}
        seconds, score = _mean_point(list(points.values()))
        row = {
            "contender": name, "settings": next(iter(by_seed.values()))["settings"], "seeds": list(points),
            "seconds": [x for x, _ in points.values()], "scores": [y for _, y in points.values()],
            "mean_seconds": round(seconds, 2), "mean_score": round(score, 3),
            "gauge_seconds": [record["gauge_seconds"] for record in records.values()],
            "frozen": {str(seed): record["frozen"] for seed, record in records.items()},
            "cache_off": sorted({reason for record in records.values() for reason in record["cache_off"]}),
        }  # fmt: skip
        shared = {seed: curves[seed] for seed in points if seed in curves}
        if shared:
            row |= ({} if name.startswith(FULL) else at_equal(points, shared)) | beside_longest(points, shared)
        rows.append(row)
    return {"metric": metric, "num_runs": sum(map(len, runs.values())), "curve": mean_curve(curves), "rows": rows}


def at_equal(points: Mapping[int, tuple[float, float]], curves: Mapping[int, Curve]) -> dict[str, Any]:
    """A contender's points by seed beside the curves of the same seeds, at equal time and at equal score."""
    then = {seed: at_equal_time(curve, points[seed][0]) for seed, curve in curves.items()}
    seconds, score = _mean_point([points[seed] for seed in curves])
    mean = mean_curve(curves)  # A curve of one seed rises too unevenly.
    reached = seconds_to(mean, score)
    return {
        "against_full_at_equal_time": paired(
            {seed: points[seed][1] - other for seed, other in then.items() if other is not None}
        ),
        "runs_shorter_than_full": sum(other is None for other in then.values()),
        "runs_longer_than_full": sum(points[seed][0] > curve[-1][0] for seed, curve in curves.items()),
        "score_is_beyond_full": score > max(score for _, score in mean),
        "times_as_fast_at_equal_score": None if reached is None else round(reached / seconds, 3),
    }


def beside_longest(points: Mapping[int, tuple[float, float]], curves: Mapping[int, Curve]) -> dict[str, Any]:
    """A contender's points by seed beside the last ones of the curves of the same seeds."""
    times = [points[seed][0] / curve[-1][0] for seed, curve in curves.items()]
    return {
        "against_longest_full": paired({seed: points[seed][1] - curve[-1][1] for seed, curve in curves.items()}),
        "time_over_longest_full": round(statistics.median(times), 3),
    }


def front_report(runs: Mapping[str, Runs]) -> dict[str, Any]:
    """All tasks."""
    return {"tasks": {task: task_report(found, SETTINGS[task].metric) for task, found in runs.items()}}


def views_report(runs: Runs) -> dict[str, Any]:
    """Means over seeds, and each contender minus fresh augmentation, paired by seed."""
    rows = []
    for name, by_seed in runs.items():
        points = {seed: _point(record, "accuracy") for seed, record in sorted(by_seed.items())}
        if points:
            fresh = {seed: _point(runs[FRESH][seed], "accuracy") for seed in points if seed in runs[FRESH]}
            seconds, accuracy = _mean_point(list(points.values()))
            times = [points[seed][0] / fresh[seed][0] for seed in fresh]
            rows.append({
                "contender": name, "seeds": list(points), "accuracy": round(accuracy, 2),
                "seconds": round(seconds, 1),
                "hits": round(statistics.mean(record["hits"] for record in by_seed.values())),
                "minus_fresh": paired({seed: points[seed][1] - fresh[seed][1] for seed in fresh}),
                "time_of_fresh": round(statistics.mean(times), 3) if times else None,
            })  # fmt: skip
    return {"epochs": VIEWS_EPOCHS, "rows": rows}


# ---- table ----


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return a table for each task of a report that has runs."""
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
