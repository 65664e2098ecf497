"""Drawing of charts: their look, and the library that draws them without a browser."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from hf_pipetransformer.report import printable


Row = dict[str, Any]
Spec = dict[str, Any]
"""Chart as a specification of Vega-Lite."""


def _look(text: str, pale: str, grid: str, frame: str, background: str, colors: list[str]) -> Spec:
    return {
        "background": background,
        "font": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
        "view": {"stroke": frame},
        "axis": {
            **{"gridColor": grid, "domainColor": frame, "tickColor": frame},
            **{"labelColor": pale, "titleColor": text, "titleFontWeight": 500, "labelLimit": 260},
        },
        # Vega cuts those of a legend at 160 pixels by default, and names of runs are parts of paths.
        "legend": {"labelColor": text, "titleColor": text, "labelLimit": 260, "orient": "top"},
        "title": {"color": text},
        "range": {"category": colors},
    }


LIGHT = _look(
    *("#2b333b", "#4a545e", "#eceff1", "#d0d5da", "white"),
    ["#2563a8", "#d5672a", "#2f8f5b", "#8457a6", "#b8323f", "#5f6b76", "#a8851f", "#1a8fa3"],
)
DARK = _look(
    *("#e4e8ec", "#aeb7c0", "#2a3138", "#414a53", "transparent"),
    ["#6aa8ee", "#f0915a", "#5fc58d", "#bb92dd", "#ee7681", "#a3aeb9", "#d9b74e", "#4fc3d6"],
)
"""Looks of every chart on white paper and on a dark page."""

MISSING_LIBRARY = (
    "Charts are drawn with vl-convert-python, which is not installed: pip install vl-convert-python, or "
    "'hf-pipetransformer[report]'."
)


def converter() -> ModuleType:
    """Return the library that draws.

    Raises:
        ValueError: it is not installed.
    """
    try:
        # A compiled library of tens of megabytes, which no training should load.
        import vl_convert  # Only what draws needs it.
    except ImportError:
        raise ValueError(MISSING_LIBRARY) from None
    return vl_convert


def readable(value: Any) -> Any:
    """Return a specification with names that the library can read."""
    if isinstance(value, dict):
        return {key: readable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [readable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def save_chart(spec: Spec, path: Path) -> None:
    """Draw a chart in a file whose ending names the format: .svg, or else PNG.

    Raises:
        ValueError: the library that draws is not installed, or the file cannot be written.
    """
    library, chart = converter(), readable({**spec, "config": LIGHT})
    try:
        if path.suffix == ".svg":
            path.write_text(library.vegalite_to_svg(chart), encoding="utf-8")
        else:
            path.write_bytes(library.vegalite_to_png(chart, scale=1.25))
    except OSError as error:
        raise ValueError(f"The picture cannot be written to {path}: {error}.") from error
