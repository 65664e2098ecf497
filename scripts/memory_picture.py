"""The picture of `benchmark_memory.py`: one panel a model and number of stages, bars of all sides by phase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_pipetransformer.report.charts import Row, Spec, save_chart


WIDTH, HEIGHT, NUM_COLUMNS = 580, 180, 2
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")
LIMIT = 0.5
"""Multiple of the model that no phase should exceed."""


def write_picture(results: dict[str, Any], path: Path) -> None:
    """Draw the results file."""
    sides = list(dict.fromkeys(side for panel in results.values() for side in panel))
    panels = [panel(name, found, sides) for name, found in results.items()]
    save_chart(
        {"concat": panels, "columns": NUM_COLUMNS, "bounds": "flush", "spacing": {"row": 110, "column": 50}}, path
    )


def panel(name: str, found: dict[str, Any], sides: Sequence[str]) -> Spec:
    """A group of bars for each phase, the most of all ranks; figures above the bars."""
    rows: list[Row] = [
        {"side": side, "phase": phase, "value": max(0.0, value), "words": f"{value:.2f}"}
        for side in sides
        for phase, value in found.get(side, {}).get("most on a rank", {}).items()
    ]
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    place: Spec = {
        "x": {"field": "phase", "type": "nominal", "sort": phases, "title": None, "axis": {"labelAngle": -30}},
        "xOffset": {"field": "side", "type": "nominal", "sort": list(sides), "scale": {"domain": list(sides)}},
        "y": {"field": "value", "type": "quantitative", "title": None},
    }
    color = {
        "field": "side", "type": "nominal", "scale": {"domain": list(sides), "range": list(COLORS)},
        "legend": {"title": None, "orient": "top"},
    }  # fmt: skip
    bars = {"mark": "bar", "encoding": {**place, "color": color}}
    figures = {
        "mark": {"type": "text", "dy": -5, "fontSize": 9},
        "encoding": {**place, "text": {"field": "words"}},
    }
    limit = {
        "data": {"values": [{"limit": LIMIT}]},
        "mark": {"type": "rule", "strokeDash": [4, 3], "color": "#222222"},
        "encoding": {"y": {"field": "limit", "type": "quantitative"}},
    }
    return {
        "title": {"text": f"{name}: most of all ranks, multiples of the bf16 model", "anchor": "start", "offset": 14},
        "width": WIDTH,
        "height": HEIGHT,
        "data": {"values": rows},
        "layer": [bars, limit, figures],
    }
