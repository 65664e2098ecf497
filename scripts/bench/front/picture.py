"""The picture of the study of accuracy against time: one panel a task, the last one for the names.

A point lies above or below the mean curve of full fine-tuning by its difference to the curve, paired by seed: not all
contenders need to have run with all seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_pipetransformer.report.charts import Row, Spec, save_chart

from .report import TITLES, Curve, at_equal_time


WIDTH, HEIGHT, NUM_COLUMNS = 310, 230, 3
LINE_HEIGHT = 15
"""Height of a line of the names, in pixels."""
CURVE = "#222222"
COLOURS = {"first": "#0072b2", "top": "#56b4e9", "LoRA": "#d55e00"}
POLICY = "#009e73"
"""Colours that people who do not tell red from green tell apart."""
EXPLANATION = ["Bars: 95 % interval of the difference to full", "fine-tuning at equal time, paired by seed."]


def write_picture(report: dict[str, Any], path: Path) -> None:
    """Draw the report of `front_report.py`."""
    tasks = {name: task for name, task in report["tasks"].items() if task["curve"]}
    numbers: dict[str, int] = {}
    for task in tasks.values():
        for row in task["rows"]:
            if not is_full(row):
                numbers.setdefault(row["contender"], len(numbers) + 1)
    panels = [panel(name, task, numbers) for name, task in tasks.items()] + [legend(numbers)]
    # Aligned by what is drawn in them, the panels of a row are not all at one height.
    save_chart({"concat": panels, "columns": NUM_COLUMNS, "bounds": "flush", "spacing": 84}, path)


def is_full(row: dict[str, Any]) -> bool:
    """Whether a row is a point of the curve of full fine-tuning."""
    return "against_full_at_equal_time" not in row and row["contender"].startswith("full")


def panel(name: str, task: dict[str, Any], numbers: dict[str, int]) -> Spec:
    """The curve of full fine-tuning, and a numbered point with its bar for each other contender."""
    curve = task["curve"]
    others = [(row, height_of(row, curve)) for row in task["rows"] if not is_full(row)]
    # The start of the curve, far below everything else, would leave no height for the rest: it is cut off.
    heights = [score for _, score in curve[1:] or curve] + [height for _, height in others]
    # An interval over few seeds may be many times as long as all points lie apart: it is cut off too.
    room = (max(heights) - min(heights)) / 2
    heights += [height + sign * min(bar_of(row), room) for row, height in others for sign in (-1, 1)]
    pad = 0.06 * (max(heights) - min(heights)) or 1.0
    ends = [min(heights) - pad, max(heights) + pad]
    most_seconds = max([seconds for seconds, _ in curve] + [row["mean_seconds"] for row, _ in others])
    x = axis("seconds", "processor seconds of training", [0.0, 1.05 * most_seconds])
    y = axis("score", f"{task['metric']}, %", ends)
    points = [
        {
            "contender": row["contender"], "number": numbers[row["contender"]], "seconds": row["mean_seconds"],
            "score": height, "low": height - bar_of(row), "high": height + bar_of(row),
            "color": colour_of(row["contender"]),
        }
        for row, height in others
    ]  # fmt: skip
    corners = [{"seconds": seconds, "score": score} for seconds, score in curve]
    dots: Spec = {"filled": True, "size": 28, "color": CURVE}
    full: Spec = {
        "data": {"values": corners},
        "mark": {"type": "line", "color": CURVE, "strokeWidth": 1.5, "point": dots, "clip": True},
        "encoding": {"x": x, "y": y},
    }
    bars = drawn(points, {"type": "rule"}, {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}})
    marks = drawn(points, {"type": "point", "filled": True, "opacity": 1, "size": 36}, {"x": x, "y": y})
    words = drawn(
        points,
        {"type": "text", "align": "left", "dx": 5, "dy": -5},
        {"x": x, "y": y, "text": {"field": "number", "type": "nominal"}},
    )
    title = {"text": TITLES[name], "anchor": "start"}
    return {"title": title, "width": WIDTH, "height": HEIGHT, "layer": [full, bars, marks, words]}


def axis(field: str, title: str, domain: Sequence[float]) -> Spec:
    """One that ends where the panel does."""
    scale = {"domain": list(domain), "nice": False, "zero": False}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": {"tickCount": 6}}


def drawn(rows: list[Row], mark: Spec, encoding: Spec) -> Spec:
    """Marks in the colors of the rows, cut off where the panel ends."""
    color = {"field": "color", "type": "nominal", "scale": None}
    return {"data": {"values": rows}, "mark": {**mark, "clip": True}, "encoding": {**encoding, "color": color}}


def legend(numbers: dict[str, int]) -> Spec:
    """Which number is which contender."""
    rows: list[Row] = [{"place": 0, "words": "full fine-tuning, fewer and more epochs", "color": CURVE}]
    rows += [
        {"place": number, "words": f"{number}  {name}", "color": colour_of(name)} for name, number in numbers.items()
    ]
    y = {"field": "place", "type": "ordinal", "axis": None}
    point = drawn(rows, {"type": "point", "filled": True, "opacity": 1, "size": 36}, {"x": {"value": 8}, "y": y})
    through: Spec = {
        "data": {"values": rows[:1]},
        "mark": {"type": "rule", "color": CURVE, "strokeWidth": 1.5},
        "encoding": {"x": {"value": 0}, "x2": {"value": 16}, "y": y},
    }
    words: Spec = {
        "data": {"values": rows},
        "mark": {"type": "text", "align": "left", "color": CURVE},
        "encoding": {"x": {"value": 22}, "y": y, "text": {"field": "words"}},
    }
    return {
        "title": {"text": EXPLANATION, "anchor": "start", "fontWeight": "normal", "fontSize": 11, "orient": "bottom"},
        "width": WIDTH,
        "height": LINE_HEIGHT * len(rows),
        "view": {"stroke": None},
        "layer": [through, point, words],
    }


def height_of(row: dict[str, Any], curve: Curve) -> float:
    """Where a contender lies: its mean score, if it shares no seed or no time with the curve."""
    difference = row.get("against_full_at_equal_time", {}).get("mean")
    there = at_equal_time(curve, row["mean_seconds"])
    score: float = row["mean_score"] if difference is None or there is None else there + difference
    return score


def bar_of(row: dict[str, Any]) -> float:
    """Half of the interval of the difference at equal time; 0 if there is none."""
    ends = row.get("against_full_at_equal_time", {}).get("interval_95")
    return (ends[1] - ends[0]) / 2 if ends else 0.0


def colour_of(name: str) -> str:
    """The same for contenders of a kind."""
    return next((colour for beginning, colour in COLOURS.items() if name.startswith(beginning)), POLICY)
