"""The picture of `benchmark_memory.py`, as SVG: one panel a model and number of stages, bars of all sides by phase."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from front_picture import line, scale, text, ticks


WIDTH, HEIGHT, NUM_COLUMNS = 640, 300, 2
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 44, 78
"""Margins of a panel, in pixels."""
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")
LIMIT = 0.5
"""Multiple of the model that no phase should exceed."""


def write_picture(results: dict[str, Any], path: Path) -> None:
    """Draw the results file."""
    sides = list(dict.fromkeys(side for panel in results.values() for side in panel))
    num_rows = -(-len(results) // NUM_COLUMNS)
    width, height = WIDTH * min(NUM_COLUMNS, len(results)), HEIGHT * num_rows
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (name, found) in enumerate(results.items()):
        x, y = WIDTH * (index % NUM_COLUMNS), HEIGHT * (index // NUM_COLUMNS)
        parts += [f'<g transform="translate({x},{y})">', *panel(name, found, sides), "</g>"]
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def panel(name: str, found: dict[str, Any], sides: Sequence[str]) -> list[str]:
    """A group of bars for each phase, the most of all ranks; figures above the bars."""
    peaks = {side: found[side]["most on a rank"] for side in sides if side in found}
    phases = list(dict.fromkeys(phase for by_phase in peaks.values() for phase in by_phase))
    most = 1.1 * max(LIMIT, *(value for by_phase in peaks.values() for value in by_phase.values()))
    to_y = scale(0.0, most, HEIGHT - BOTTOM, TOP)
    parts = [text(LEFT, 16, f"{name}: most of all ranks, multiples of the bf16 model")]
    for tick in ticks(0.0, most):
        parts += [line(LEFT, to_y(tick), WIDTH - RIGHT, to_y(tick), "#dddddd")]
        parts += [text(LEFT - 5, to_y(tick) + 4, f"{tick:g}", "end")]
    room = (WIDTH - LEFT - RIGHT) / len(phases)
    bar = 0.8 * room / len(sides)
    for at, side in enumerate(sides):
        color = COLORS[at % len(COLORS)]
        x = LEFT + 90 * at
        parts += [f'<rect x="{x}" y="24" width="10" height="10" fill="{color}"/>', text(x + 14, 33, escape(side))]
        for index, phase in enumerate(phases):
            value = peaks.get(side, {}).get(phase)
            if value is None:
                continue
            x, top = LEFT + room * index + 0.1 * room + bar * at, to_y(max(0.0, value))
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{bar:.1f}" height="{HEIGHT - BOTTOM - top:.1f}" '
                f'fill="{color}"/>'
            )
            parts.append(f'<g font-size="9">{text(x + bar / 2, top - 3, f"{value:.2f}", "middle")}</g>')
    for index, phase in enumerate(phases):
        x = LEFT + room * (index + 0.5)
        parts.append(
            f'<text transform="translate({x:.1f},{HEIGHT - BOTTOM + 14}) rotate(-30)" text-anchor="end">'
            f"{escape(phase)}</text>"
        )
    limit = to_y(LIMIT)
    dashes = 'stroke="#222222" stroke-dasharray="4 3"'
    parts.append(f'<line x1="{LEFT}" y1="{limit:.1f}" x2="{WIDTH - RIGHT}" y2="{limit:.1f}" {dashes}/>')
    return parts
