"""What the runs of the study of accuracy against time say: each contender beside full fine-tuning at equal time."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench.measure import interval_95


Curve = Sequence[tuple[float, float]]
"""Points (seconds, score), in the order of seconds."""
DEFAULTS = "freeze_defaults"
"""Among the settings of a run with a policy: the options of freezing that were left as they are."""
Runs = dict[str, dict[int, dict[str, Any]]]
"""Records of finished runs by contender and seed."""


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of finished runs; a last one that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def are_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether settings are the same; an option that one of them does not know yet has changed nothing."""
    of_found, of_expected = found.get(DEFAULTS, {}), expected.get(DEFAULTS, {})
    if any(of_found[name] != of_expected[name] for name in of_found.keys() & of_expected.keys()):
        return False
    return {**found, DEFAULTS: None} == {**expected, DEFAULTS: None}


def in_force(
    records: Iterable[dict[str, Any]], settings: Mapping[str, dict[str, Any]], retired: Collection[str] = ()
) -> Runs:
    """Select the runs with the settings that the study has now, by contender and seed.

    Args:
        settings: by contender.
        retired: contenders that the study no longer runs, whose results stay.
    """
    runs: Runs = {name: {} for name in settings}
    for record in records:
        name = record["contender"]
        if name in retired or (name in settings and are_same(record["settings"], settings[name])):
            runs.setdefault(name, {}).setdefault(record["seed"], record)
    return runs


def at_equal_time(curve: Curve, seconds: float) -> float | None:
    """The curve's score after so many seconds, linear between its points; None before its first point.

    After its last point it is that one's: whoever has more time may still stop there.
    """
    if not curve or seconds < curve[0][0]:
        return None
    for (before, low), (after, high) in pairwise(curve):
        if seconds < after:
            return low + (high - low) * (seconds - before) / (after - before)
    return curve[-1][1]


def seconds_to(curve: Curve, score: float) -> float | None:
    """Seconds after which the curve first reaches a score, linear between its points.

    None if it never does, or if its first point is beyond already.
    """
    if not curve or curve[0][1] > score:
        return None
    if curve[0][1] == score:
        return curve[0][0]
    for (before, low), (after, high) in pairwise(curve):
        if high >= score:
            return before + (after - before) * (score - low) / (high - low)
    return None


def paired(differences: Mapping[int, float]) -> dict[str, Any]:
    """Mean of differences by seed, and its 95 % interval where there are two or more."""
    values = [differences[seed] for seed in sorted(differences)]
    row: dict[str, Any] = {"seeds": sorted(differences), "points": [round(value, 3) for value in values]}
    row["mean"] = round(statistics.mean(values), 3) if values else None
    if len(values) > 1:
        row["interval_95"] = [round(end, 3) for end in interval_95(values)]
    return row


def curves_by_seed(runs: Runs, full: Sequence[str], metric: str) -> dict[int, Curve]:
    """Full fine-tuning over the numbers of epochs that most seeds have; a seed that lacks one of them has no curve."""
    seeds = {seed for name in full for seed in runs[name]}
    lengths = [name for name in full if 2 * len(seeds & set(runs[name])) > len(seeds)]
    whole = sorted(seed for seed in seeds if all(seed in runs[name] for name in lengths))
    return {seed: sorted(_point(runs[name][seed], metric) for name in lengths) for seed in whole}


def mean_curve(curves: Mapping[int, Curve]) -> Curve:
    """Over seeds."""
    return [
        (statistics.mean(x for x, _ in points), statistics.mean(y for _, y in points))
        for points in zip(*curves.values(), strict=True)
    ]


def _point(record: dict[str, Any], metric: str) -> tuple[float, float]:
    return record["seconds"], record["scores"][metric]


def compare(runs: Runs, full: Sequence[str], metric: str) -> list[dict[str, Any]]:
    """A row for each contender that has a run.

    Args:
        full: the contenders that train everything, with fewer epochs first.
        metric: of the scores, in percent.
    """
    curves = curves_by_seed(runs, full, metric)
    longest = {seed: curve[-1] for seed, curve in curves.items()}
    rows = []
    for name, by_seed in runs.items():
        if not by_seed:
            continue
        points = {seed: _point(by_seed[seed], metric) for seed in sorted(by_seed)}
        seconds, score = (statistics.mean(point[axis] for point in points.values()) for axis in (0, 1))
        row: dict[str, Any] = {
            "contender": name, "settings": next(iter(by_seed.values()))["settings"], "seeds": list(points),
            "seconds": [x for x, _ in points.values()], "scores": [y for _, y in points.values()],
            "mean_seconds": round(seconds, 2), "mean_score": round(score, 3),
            "gauge_seconds": [by_seed[seed]["gauge_seconds"] for seed in points],
            "frozen": {str(seed): by_seed[seed]["frozen"] for seed in points},
            "cache_off": sorted({reason for record in by_seed.values() for reason in record["cache_off"]}),
        }  # fmt: skip
        shared = [seed for seed in points if seed in curves]
        if name not in full and shared:
            then = {seed: at_equal_time(curves[seed], points[seed][0]) for seed in shared}
            score_of_shared = statistics.mean(points[seed][1] for seed in shared)
            # Of means: a curve of one seed rises too unevenly.
            mean = mean_curve({seed: curves[seed] for seed in shared})
            reached = seconds_to(mean, score_of_shared)
            row |= {
                "against_full_at_equal_time": paired(
                    {seed: points[seed][1] - other for seed, other in then.items() if other is not None}
                ),
                "runs_shorter_than_full": sum(other is None for other in then.values()),
                "runs_longer_than_full": sum(points[seed][0] > longest[seed][0] for seed in shared),
                "score_is_beyond_full": score_of_shared > max(score for _, score in mean),
                "times_as_fast_at_equal_score": None if reached is None else round(
                    reached / statistics.mean(points[seed][0] for seed in shared), 3
                ),
            }  # fmt: skip
        if shared:
            row["against_longest_full"] = paired({seed: points[seed][1] - longest[seed][1] for seed in shared})
            row["time_over_longest_full"] = round(
                statistics.median(points[seed][0] / longest[seed][0] for seed in shared), 3
            )
        rows.append(row)
    return rows


def make_report(
    folder: Path,
    settings: Mapping[str, Mapping[str, dict[str, Any]]],
    metrics: Mapping[str, str],
    full: str,
    retired: Collection[str] = (),
) -> dict[str, Any]:
    """What is told of all tasks; runs that are left out are printed.

    Args:
        folder: of the files of finished runs.
        settings: of task and contender, those in force.
        metrics: by task, the score that is compared.
        full: what the names of contenders that train everything begin with.
    """
    tasks = {}
    for task, by_contender in settings.items():
        records = read_records(folder / f"{task}.jsonl")
        runs = in_force(records, by_contender, retired)
        num_kept = sum(len(by_seed) for by_seed in runs.values())
        if num_kept < len(records):
            print(f"{task}: left out {len(records) - num_kept} runs with other settings, or done twice.")
        of_curve = [name for name in by_contender if name.startswith(full)]
        rows = compare(runs, of_curve, metrics[task])
        curve = mean_curve(curves_by_seed(runs, of_curve, metrics[task]))
        tasks[task] = {"metric": metrics[task], "num_runs": num_kept, "curve": curve, "rows": rows}
    return {
        "what": (
            "Accuracy against processor time of training, one process, one thread; scores in percent on samples that "
            "no run trains on. Differences in points, paired by seed, with 95 % intervals by Student's t. At equal "
            "time: the curve of full fine-tuning over its numbers of epochs, each with a learning-rate schedule of "
            "its own, seed by seed, linear between its points and level after its last. Gauge: seconds of a fixed "
            "piece of work before, between and after a run's steps; where it took longer, other work slowed that run "
            "down."
        ),
        "date": str(date.today()), "machine": f"{platform.processor() or platform.machine()}, one thread a run",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "tasks": tasks,
    }  # fmt: skip
