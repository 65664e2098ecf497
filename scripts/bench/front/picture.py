"""The picture of the study: one panel a task, the last one for the names.

A point lies above or below the mean curve of full fine-tuning by its difference to the curve, paired by seed: not all
contenders need to have run with all seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_pipetransformer.report.drawing import Row, Spec, save_chart

from .contenders import FULL
from .report import TITLES, Curve, at_equal_time


WIDTH, HEIGHT, NUM_COLUMNS, LINE_HEIGHT = 310, 230, 3, 15
"""Pixels, but for the columns; a line is one of the names."""
CURVE = "#222222"
COLORS = {"first": "#0072b2", "top": "#56b4e9", "LoRA": "#d55e00"}
POLICY = "#009e73"
"""Colors that people who do not tell red from green tell apart."""
EXPLANATION = ["Bars: 95 % interval of the difference to full", "fine-tuning at equal time, paired by seed."]
POINT = {"type": "point", "filled": True, "opacity": 1, "size": 36}


def write_picture(report: dict[str, Any], path: Path) -> None:
    """Draw what `front_report` returned."""
    tasks = {name: task for name, task in report["tasks"].items() if task["curve"]}
    others = [r["contender"] for task in tasks.values() for r in task["rows"] if not r["contender"].startswith(FULL)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(others), start=1)}
    panels = [panel(name, task, numbers) for name, task in tasks.items()] + [legend(numbers)]
    # Aligned by what is drawn in them, the panels of a row are not all at one height.
    save_chart({"concat": panels, "columns": NUM_COLUMNS, "bounds": "flush", "spacing": 84}, path)


def panel(name: str, task: dict[str, Any], numbers: dict[str, int]) -> Spec:
    """The curve of full fine-tuning, and a numbered point with its bar for each other contender."""
    curve, points = task["curve"], list[Row]()
    for row in task["rows"]:
        if (contender := row["contender"]) in numbers:
            height, bar = height_of(row, curve), bar_of(row)
            points.append({
                "contender": contender, "number": numbers[contender], "seconds": row["mean_seconds"], "score": height,
                "low": height - bar, "high": height + bar, "color": color_of(contender),
            })  # fmt: skip
    # The start of the curve, far below everything else, would leave no height for the rest: it is cut off.
    heights = [score for _, score in curve[1:] or curve] + [point["score"] for point in points]
    # An interval over few seeds may be many times as long as all points lie apart: it is cut off too.
    room = (max(heights) - min(heights)) / 2
    heights += [max(point["low"], point["score"] - room) for point in points]
    heights += [min(point["high"], point["score"] + room) for point in points]
    pad = 0.06 * (max(heights) - min(heights)) or 1.0
    most_seconds = max([seconds for seconds, _ in curve] + [point["seconds"] for point in points])
    x = axis("seconds", "processor seconds of training", 0.0, 1.05 * most_seconds)
    y = axis("score", f"{task['metric']}, %", min(heights) - pad, max(heights) + pad)
    dots = {"filled": True, "size": 28, "color": CURVE}
    full: Spec = {
        "data": {"values": [{"seconds": seconds, "score": score} for seconds, score in curve]},
        "mark": {"type": "line", "color": CURVE, "strokeWidth": 1.5, "point": dots, "clip": True},
        "encoding": {"x": x, "y": y},
    }
    bars = drawn(points, {"type": "rule"}, {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}})
    words = drawn(
        points,
        {"type": "text", "align": "left", "dx": 5, "dy": -5},
        {"x": x, "y": y, "text": {"field": "number", "type": "nominal"}},
    )
    layers = [full, bars, drawn(points, POINT, {"x": x, "y": y}), words]
    return {"title": {"text": TITLES[name], "anchor": "start"}, "width": WIDTH, "height": HEIGHT, "layer": layers}


def axis(field: str, title: str, low: float, high: float) -> Spec:
    """One that ends where the panel does."""
    scale = {"domain": [low, high], "nice": False, "zero": False}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": {"tickCount": 6}}


def drawn(rows: list[Row], mark: Spec, encoding: Spec) -> Spec:
    """Marks in the colors of the rows, cut off where the panel ends."""
    color = {"field": "color", "type": "nominal", "scale": None}
    return {"data": {"values": rows}, "mark": {**mark, "clip": True}, "encoding": {**encoding, "color": color}}


def legend(numbers: dict[str, int]) -> Spec:
    """Which number is which contender."""
    rows: list[Row] = [{"place": 0, "words": "full fine-tuning, fewer and more epochs", "color": CURVE}]
    rows += [{"place": at, "words": f"{at}  {name}", "color": color_of(name)} for name, at in numbers.items()]
    y = {"field": "place", "type": "ordinal", "axis": None}
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
        "width": WIDTH, "height": LINE_HEIGHT * len(rows), "view": {"stroke": None},
        "layer": [through, drawn(rows, POINT, {"x": {"value": 8}, "y": y}), words],
    }  # fmt: skip


def height_of(row: Row, curve: Curve) -> float:
    """Where a contender lies: its mean score, if it shares no seed or no time with the curve."""
    difference = row.get("against_full_at_equal_time", {}).get("mean")
    there = at_equal_time(curve, row["mean_seconds"])
    return row["mean_score"] if difference is None or there is None else there + difference


def bar_of(row: Row) -> float:
    """Half of the interval of the difference at equal time; 0 if there is none."""
    low, high = row.get("against_full_at_equal_time", {}).get("interval_95", (0.0, 0.0))
    return (high - low) / 2


def color_of(name: str) -> str:
    """The same for contenders of a kind."""
    return next((color for beginning, color in COLORS.items() if name.startswith(beginning)), POLICY)
