"""The picture of the study of accuracy against time, as SVG: one panel a task, the last one for the names.

A point lies above or below the mean curve of full fine-tuning by its difference to the curve, paired by seed: not all
contenders need to have run with all seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from front_report import Curve, at_equal_time
from front_table import TITLES


WIDTH, HEIGHT, NUM_COLUMNS = 380, 300, 3
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 30, 42
"""Margins of a panel, in pixels."""
CURVE = "#222222"
COLOURS = {"first": "#0072b2", "top": "#56b4e9", "LoRA": "#d55e00"}
POLICY = "#009e73"
"""Colours that people who do not tell red from green tell apart."""


def write_picture(report: dict[str, Any], path: Path) -> None:
    """Draw the report of `front_report.py`."""
    tasks = {name: task for name, task in report["tasks"].items() if task["curve"]}
    numbers: dict[str, int] = {}
    for task in tasks.values():
        for row in task["rows"]:
            if not is_full(row):
                numbers.setdefault(row["contender"], len(numbers) + 1)
    drawn = [panel(name, task, numbers) for name, task in tasks.items()] + [legend(numbers)]
    num_rows = math.ceil(len(drawn) / NUM_COLUMNS)
    width, height = WIDTH * min(NUM_COLUMNS, len(drawn)), HEIGHT * num_rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, elements in enumerate(drawn):
        x, y = WIDTH * (index % NUM_COLUMNS), HEIGHT * (index // NUM_COLUMNS)
        parts += [f'<g transform="translate({x},{y})">', *elements, "</g>"]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def is_full(row: dict[str, Any]) -> bool:
    """Whether a row is a point of the curve of full fine-tuning."""
    return "against_full_at_equal_time" not in row and row["contender"].startswith("full")


def panel(name: str, task: dict[str, Any], numbers: dict[str, int]) -> list[str]:
    """Axes, the curve of full fine-tuning, and a numbered point with its bar for each other contender."""
    curve = task["curve"]
    others = [(row, height_of(row, curve)) for row in task["rows"] if not is_full(row)]
    # The start of the curve, far below everything else, would leave no height for the rest: it is cut off.
    heights = [score for _, score in curve[1:] or curve] + [height for _, height in others]
    # An interval over few seeds may be many times as long as all points lie apart: it is cut off too.
    room = (max(heights) - min(heights)) / 2
    heights += [height + sign * min(bar_of(row), room) for row, height in others for sign in (-1, 1)]
    most_seconds = max([seconds for seconds, _ in curve] + [row["mean_seconds"] for row, _ in others])
    to_x = scale(0.0, 1.05 * most_seconds, LEFT, WIDTH - RIGHT)
    pad = 0.06 * (max(heights) - min(heights)) or 1.0
    lowest, highest = min(heights) - pad, max(heights) + pad
    to_y = scale(lowest, highest, HEIGHT - BOTTOM, TOP)
    frame = f'x="{LEFT}" y="{TOP}" width="{WIDTH - RIGHT - LEFT}" height="{HEIGHT - BOTTOM - TOP}"'
    parts = [
        f'<text x="{LEFT}" y="{TOP - 10}" font-size="13" font-weight="bold">{escape(TITLES[name])}</text>',
        f'<rect {frame} fill="none" stroke="#999999"/>',
        f'<clipPath id="{escape(name)}"><rect {frame}/></clipPath>',
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "processor seconds of training", "middle"),
        f'<text transform="translate(12,{(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(task['metric'])}, %</text>",
    ]
    for tick in ticks(0.0, 1.05 * most_seconds):
        parts += [line(to_x(tick), HEIGHT - BOTTOM, to_x(tick), HEIGHT - BOTTOM + 4, "#999999")]
        parts += [text(to_x(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle")]
    for tick in ticks(lowest, highest):
        parts += [line(LEFT - 4, to_y(tick), LEFT, to_y(tick), "#999999")]
        parts += [text(LEFT - 7, to_y(tick) + 4, f"{tick:g}", "end")]
    corners = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in curve)
    parts += [
        f'<g clip-path="url(#{escape(name)})">',
        f'<polyline points="{corners}" fill="none" stroke="{CURVE}" stroke-width="1.5"/>',
        *(circle(to_x(x), to_y(y), 3, CURVE) for x, y in curve),
    ]
    for row, height in others:
        x, y, bar = to_x(row["mean_seconds"]), to_y(height), bar_of(row)
        colour = colour_of(row["contender"])
        if bar:
            parts += [line(x, to_y(height - bar), x, to_y(height + bar), colour)]
        parts += [circle(x, y, 3.5, colour), text(x + 5, y - 4, str(numbers[row["contender"]]), colour=colour)]
    return [*parts, "</g>"]


def legend(numbers: dict[str, int]) -> list[str]:
    """Which number is which contender."""
    parts = [
        line(16, TOP - 4, 34, TOP - 4, CURVE), circle(25, TOP - 4, 3, CURVE),
        text(42, TOP, "full fine-tuning, fewer and more epochs"),
    ]  # fmt: skip
    step = min(16.0, (HEIGHT - TOP - 40) / max(1, len(numbers)))
    for name, number in numbers.items():
        y = TOP + step * number
        parts += [circle(25, y - 4, 3.5, colour_of(name)), text(42, y, f"{number}  {name}")]
    bars = "Bars: 95 % interval of the difference to full"
    return [*parts, text(16, HEIGHT - 20, bars), text(16, HEIGHT - 6, "fine-tuning at equal time, paired by seed.")]


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


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """From `low`..`high` to pixels."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def ticks(low: float, high: float) -> Sequence[float]:
    """Round numbers from `low` to `high`, three to seven."""
    rough = (high - low) / 7
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(index * step, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    """A straight one."""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"/>'


def circle(x: float, y: float, radius: float, colour: str) -> str:
    """A filled one."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#222222") -> str:
    """One line of words."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
