"""Charts of recorded runs, as specifications of Vega-Lite; a chart without data says what was not recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_pipetransformer.report import printable
from hf_pipetransformer.report.recorded import RecordedRun, is_finite, pipeline_size


Row = dict[str, Any]
Spec = dict[str, Any]

WIDTH = 640
COLORS = ["#2563a8", "#d5672a", "#2f8f5b", "#8457a6", "#b8323f", "#5f6b76", "#a8851f", "#1a8fa3"]
CONFIG: Spec = {
    "background": "white",
    "font": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
    "view": {"stroke": "#d0d5da"},
    "axis": {"gridColor": "#eceff1", "labelColor": "#4a545e", "titleColor": "#2b333b", "titleFontWeight": 500},
    "legend": {"labelColor": "#2b333b", "titleColor": "#2b333b", "labelLimit": 260},
    "range": {"category": COLORS},
}
"""Look of every chart."""

MISSING_LIBRARY = (
    "Charts are drawn with vl-convert-python, which is not installed: pip install vl-convert-python, or "
    "'hf-pipetransformer[report]'."
)


@dataclass(frozen=True)
class Chart:
    """One chart of the report.

    Args:
        name: of its PNG file and its place in the page.
        text: what to see in it, in a sentence.
        spec: its specification; None if no run recorded what it shows.
        missing: what was not recorded, and what records it.
    """

    name: str
    title: str
    text: str
    spec: Spec | None
    missing: str


def all_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return every chart of the report, also those without data."""
    return [make(runs) for make in _CHARTS]


def converter() -> ModuleType:
    """Return the library that draws.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import vl_convert  # Only what draws needs it.
    except ImportError:
        raise ValueError(MISSING_LIBRARY) from None
    return vl_convert


def finished(spec: Spec) -> Spec:
    """Return a specification as it is drawn, with the look of every chart and names that the library can read."""
    drawn: Spec = _printable({**spec, "config": CONFIG})
    return drawn


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _printable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def save_chart(spec: Spec, path: Path) -> None:
    """Draw a chart in a file whose ending names the format: .svg, or else PNG.

    Raises:
        ValueError: the library that draws is not installed, or the file cannot be written.
    """
    library, chart = converter(), finished(spec)
    try:
        if path.suffix == ".svg":
            path.write_text(library.vegalite_to_svg(chart), encoding="utf-8")
        else:
            path.write_bytes(library.vegalite_to_png(chart, scale=1.25))
    except OSError as error:
        raise ValueError(f"The picture cannot be written to {path}: {error}.") from error


def rows_of(spec: Any) -> list[Row]:
    """Return the rows of all data in a specification."""
    if isinstance(spec, dict):
        own = spec.get("data", {}).get("values", []) if isinstance(spec.get("data"), dict) else []
        return [*own, *(row for key, part in spec.items() if key != "data" for row in rows_of(part))]
    return [row for part in spec for row in rows_of(part)] if isinstance(spec, list) else []


# ---- what the charts are made of ----


def _y(title: str, zero: bool = False, **more: Any) -> Spec:
    return {"field": "value", "type": "quantitative", "title": title, "scale": {"zero": zero}, **more}


def _x(field: str = "step", last: float | None = None) -> Spec:
    title = {"step": "optimizer step", "seconds": "seconds of training"}[field]
    scale = {"nice": False} if last is None else {"nice": False, "domain": [0, last]}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale}


def _by_run(runs: Sequence[RecordedRun]) -> Spec:
    """Color by run; one run needs no legend."""
    names = [run.name for run in runs]
    color = {"field": "run", "type": "nominal", "title": "run", "scale": {"domain": names, "range": COLORS}}
    return color if len(runs) > 1 else {**color, "legend": None}


def _line(rows: list[Row], x: Spec, y: Spec, color: Spec, **mark: Any) -> Spec:
    dots = {"filled": True, "size": 18} if len(rows) <= 400 and "interpolate" not in mark else False
    tooltip = [{"field": name, "type": "nominal"} for name in rows[0]]
    return {
        "data": {"values": rows},
        "mark": {"type": "line", "strokeWidth": 1.8, "point": dots, **mark},
        "encoding": {"x": x, "y": y, "color": color, "tooltip": tooltip},
    }


def _marked(runs: Sequence[RecordedRun], line: Spec, x: str = "step", height: int = 170) -> Spec:
    """Put a line over marks of the transitions of all runs."""
    key = {"step": "step", "seconds": "at_s"}[x]
    found = [{"run": run.name, x: event[key]} for run in runs for event in run.of_kind("transition")]
    layers = [line]
    if found:
        marks = {
            "data": {"values": found},
            "mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.55},
            "encoding": {"x": {"field": x, "type": "quantitative"}, "color": line["encoding"]["color"]},
        }
        if len(runs) == 1:
            marks["encoding"] = {"x": {"field": x, "type": "quantitative"}, "color": {"value": "#8a949e"}}
        layers = [marks, line]
    return {"width": WIDTH, "height": height, "layer": layers}


def _stacked(panels: Sequence[Spec]) -> Spec:
    return {"vconcat": list(panels), "spacing": 14}


def _last(runs: Sequence[RecordedRun]) -> int:
    return max(run.num_steps for run in runs)


def _progress(run: RecordedRun, value: Callable[[dict[str, Any]], Any]) -> list[Row]:
    """Return a figure of each progress event that has it."""
    rows = [{"run": run.name, "step": event["step"], "value": value(event)} for event in run.of_kind("progress")]
    return [row for row in rows if is_finite(row["value"])]


def _steps(run: RecordedRun, points: Iterable[tuple[int, float]]) -> list[Row]:
    """Return a line of values that last until the next, or the end of the run."""
    rows: list[Row] = [{"run": run.name, "step": step, "value": value} for step, value in points]
    return [*rows, {**rows[-1], "step": max(run.num_steps, rows[-1]["step"])}] if rows else []


# ---- the charts ----


def _metric_panels(runs: Sequence[RecordedRun], x: str, last: float | None) -> list[Spec]:
    panels = []
    for name in dict.fromkeys(name for run in runs for name in run.metric_names()):
        rows = [
            {"run": run.name, "step": entry.step, "seconds": entry.seconds, "value": value}
            for run in runs
            for entry, value in run.values_of(name)
            if x == "step" or entry.seconds is not None
        ]
        if rows:
            title = "training loss" if name == "loss" else name
            panels.append(_marked(runs, _line(rows, _x(x, last), _y(title), _by_run(runs)), x))
    return panels


def _metrics(runs: Sequence[RecordedRun]) -> Chart:
    panels = _metric_panels(runs, "step", _last(runs))
    return Chart(
        "metrics",
        "Loss and metrics",
        "What Trainer logged, by optimizer step. Dashed lines mark transitions.",
        _stacked(panels) if panels else None,
        "no loss or metric was logged: set logging_steps to less than the length of the run",
    )


def _metrics_by_time(runs: Sequence[RecordedRun]) -> Chart:
    panels = _metric_panels(runs, "seconds", max(run.seconds or 0.0 for run in runs) or None)
    estimated = [run.name for run in runs if run.estimates_time]
    more = f" Of {', '.join(estimated)} only train_runtime is known, spread evenly here." if estimated else ""
    return Chart(
        "metrics_by_time",
        "Loss and metrics against time",
        f"The same by seconds of training, evaluations and transitions included.{more}",
        _stacked(panels) if panels else None,
        "no log entry has a time: an events file or a train_runtime in the results is needed",
    )


def _layout(runs: Sequence[RecordedRun]) -> Chart:
    quantities: list[tuple[str, Callable[[dict[str, Any]], int]]] = [
        ("frozen layers F", lambda layout: int(layout["num_frozen_layers"])),
        ("cached layers", lambda layout: int(layout.get("cache_level", 0))),
        ("stages K", pipeline_size),
        ("replicas R", lambda layout: int(layout["num_replicas"])),
    ]
    panels = []
    for title, of in quantities:
        rows = [row for run in runs for row in _steps(run, [(step, of(layout)) for step, layout in run.layouts()])]
        if rows:
            top = max(row["value"] for row in rows)
            axis = {"tickMinStep": 1, "format": "d"}
            y = {**_y(title, axis=axis), "scale": {"domain": [0, max(1, top) * 1.08], "nice": False}}
            line = _line(rows, _x(last=_last(runs)), y, _by_run(runs), interpolate="step-after", strokeWidth=2.2)
            panels.append(_marked(runs, line, height=80))
    return Chart(
        "layout",
        "Frozen layers and layout",
        "Layers that are frozen and cached, and the K x R that the run had.",
        _stacked(panels) if panels else None,
        "there is no events file: the runs had no pipeline, and nothing froze",
    )


_ASK = "the run wrote no progress: it was left to Trainer, or by an earlier version, or logged nothing"


def _throughput(runs: Sequence[RecordedRun]) -> Chart:
    rows = [row for run in runs for row in _progress(run, lambda event: event["samples_per_second"])]
    line = _line(rows, _x(last=_last(runs)), _y("samples per second", zero=True), _by_run(runs)) if rows else None
    return Chart(
        "throughput",
        "Throughput",
        "Samples per second of optimizer steps between two log entries, without evaluations and checkpoints.",
        _marked(runs, line) if line else None,
        _ASK,
    )


def _step_time(runs: Sequence[RecordedRun]) -> Chart:
    rows = [
        {**row, "value": 1e3 * row["value"], "kind": "measured"}
        for run in runs
        for row in _progress(run, lambda event: event["step_s"])
    ]
    predicted = [row for run in runs for row in _predicted(run)]
    spec = None
    if rows and predicted:
        x, y = _x(last=_last(runs)), _y("milliseconds per step", zero=True)
        measured = _line(rows, x, y, _by_run(runs))
        plan = _line(predicted, x, y, _by_run(runs), interpolate="step-after", strokeWidth=2.2, strokeDash=[4, 2])
        plan["encoding"]["detail"] = {"field": "part", "type": "nominal"}
        spec = {"width": WIDTH, "height": 190, "layer": [plan, measured]}
    return Chart(
        "step_time",
        "Predicted and measured step time",
        "What the planner predicted at each decision (dashed), beside what the steps took.",
        spec,
        "no step time was predicted (the layout was given and nothing froze)" if rows else _ASK,
    )


def _predicted(run: RecordedRun) -> list[Row]:
    """Return the predicted milliseconds of a step, each from its decision to the next."""
    events = [event for event in run.events if event["event"] in ("run", "transition")]
    ends = [*(event["step"] for event in events[1:]), run.num_steps]
    rows = []
    for part, (event, end) in enumerate(zip(events, ends, strict=False)):
        if is_finite(event.get("predicted_step_s")):
            row = {"run": run.name, "value": 1e3 * event["predicted_step_s"], "kind": "predicted", "part": part}
            rows += [{**row, "step": event["step"]}, {**row, "step": end}]
    return rows


def _bubble(runs: Sequence[RecordedRun]) -> Chart:
    rows = [row for run in runs for row in _progress(run, lambda event: event["bubble_share"])]
    y = {**_y("share of time", zero=True), "axis": {"format": "%"}, "scale": {"domain": [0, 1]}}
    line = _line(rows, _x(last=_last(runs)), y, _by_run(runs)) if rows else None
    return Chart(
        "bubble",
        "Bubble share",
        "Share of the devices' time in forwards and backwards during which they wait for each other: the medians of "
        "the first steps of a layout, after its warm-up.",
        _marked(runs, line, height=130) if line else None,
        f"no layout lasted long enough to be measured, or {_ASK}",
    )


def _cache(runs: Sequence[RecordedRun]) -> Chart:
    hits, stored = [], []
    for run in runs:
        for event in run.of_kind("cache", what="epoch"):
            reads = event["hits"] + event["misses"]
            if reads:
                hits.append({"run": run.name, "step": event["step"], "value": event["hits"] / reads})
                stored.append({"run": run.name, "step": event["step"], "value": event["bytes_stored"] / 1e6})
    x, color = _x(last=_last(runs)), _by_run(runs)
    share = {**_y("cache hits"), "axis": {"format": "%"}, "scale": {"domain": [0, 1]}}
    panels = [
        _marked(runs, _line(rows, x, y, color), height=110)
        for rows, y in ((hits, share), (stored, _y("MB stored", zero=True)))
        if rows
    ]
    return Chart(
        "cache",
        "Activation cache",
        "Share of the samples of an epoch whose activations were read from the cache, and what the cache stores.",
        _stacked(panels) if panels else None,
        "no epoch read the activation cache: nothing froze, the cache was off, or too few epochs were left",
    )


def _gradients(runs: Sequence[RecordedRun]) -> Chart:
    panels = []
    for run in runs:
        rows = [row for found in _gradient_events(run) for row in _gradient_rows(*found)]
        if not rows:
            continue
        order = list(dict.fromkeys(row["layer"] for row in sorted(rows, key=lambda row: -row["place"])))
        color = {
            **{"field": "norm", "type": "quantitative", "title": "L2 norm"},
            "scale": {"type": "log", "scheme": "viridis"},
            "legend": {"format": ".1~g"},
        }
        tooltip = [{"field": name, "type": "nominal"} for name in ("step", "layer", "norm")]
        encoding = {
            "x": {**_x(last=_last(runs)), "field": "begin"},
            "x2": {"field": "step"},
            "y": {
                **{"field": "layer", "type": "nominal", "sort": order},
                "title": run.name if len(runs) > 1 else None,
            },
            "color": color,
            "tooltip": tooltip,
        }
        look = {"width": WIDTH, "height": {"step": max(11, min(22, 300 // len(order)))}, "view": {"fill": "#e3e6e9"}}
        panels.append({**look, "data": {"values": rows}, "mark": "rect", "encoding": encoding})
    return Chart(
        "gradients",
        "Gradient norms by layer",
        "L2 norm of the gradients of each layer at the log entries, logarithmic; gray where a layer is frozen.",
        _stacked(panels) if panels else None,
        _ASK,
    )


def _gradient_events(run: RecordedRun) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield begin, end and the norms by name: of progress events, else those that freeze decisions were given."""
    # Progress has the layers, the head and the embeddings, a decision no embeddings.
    for kind, num_others in (("progress", 2), ("freeze", 1)):
        begin = 0
        for event in run.of_kind(kind):
            norms = event.get("gradient_norms")
            if norms and event["step"] > begin:
                layers = [f"layer {number + 1}" for number in range(len(norms) - num_others)]
                yield begin, event["step"], dict(zip([*layers, "head", "embeddings"], norms, strict=False))
                begin = event["step"]
        if begin:
            return


def _gradient_rows(begin: int, end: int, norms: dict[str, float]) -> list[Row]:
    """Return the cells of one time; `place` orders the layers from the embeddings up."""
    return [
        {"begin": begin, "step": end, "layer": name, "norm": norm, "place": -1 if name == "embeddings" else place}
        for place, (name, norm) in enumerate(norms.items())
        if is_finite(norm) and norm > 0
    ]


def _memory(runs: Sequence[RecordedRun]) -> Chart:
    rows, kinds = [], set()
    for run in runs:
        for event in run.of_kind("progress"):
            kinds.add(event["memory"])
            for number, rank in enumerate(event["ranks"]):
                place = f"rank {number}: stage {rank['stage']}, replica {rank['replica']}"
                row = {"run": run.name, "step": event["step"], "rank": f"rank {number}", "place": place}
                rows.append({**row, "value": rank["memory_bytes"] / 1e9})
    spec = None
    if rows:
        y = _y("GB", zero=True)
        if len(runs) == 1:
            spec = _line(rows, _x(last=_last(runs)), y, {"field": "rank", "type": "nominal", "title": "rank"})
        else:
            spec = _line(rows, _x(last=_last(runs)), y, _by_run(runs))
            spec["encoding"]["strokeDash"] = {"field": "rank", "type": "nominal", "title": "rank"}
        spec = _marked(runs, spec)
    what = {"device": "Most device memory that torch allocated so far", "host": "Host memory of the process"}
    return Chart(
        "memory",
        "Memory by stage",
        f"{' or '.join(what[kind] for kind in sorted(kinds)) or 'Memory'}, of every rank; hover for its stage.",
        spec,
        _ASK,
    )


def _trace(runs: Sequence[RecordedRun]) -> Chart:
    panels = []
    for run in runs:
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in run.trace if e.get("name") == "thread_name"}
        rows = [
            {
                **{"lane": f"rank {e['pid']} {names[e['pid'], e['tid']]}", "kind": _kind_of(e), "what": e["name"]},
                **{"begin": e["ts"] / 1e3, "end": (e["ts"] + e["dur"]) / 1e3},
            }
            for e in run.trace
            if e.get("ph") == "X"
        ]
        if not rows:
            continue
        order = [f"rank {pid} {name}" for (pid, _), name in sorted(names.items())]
        lane = {"field": "lane", "type": "nominal", "sort": order, "title": run.name if len(runs) > 1 else None}
        encoding = {
            "x": {"field": "begin", "type": "quantitative", "title": "milliseconds"},
            "x2": {"field": "end"},
            "y": {**lane, "axis": {"labelLimit": 260}},
            "color": {"field": "kind", "type": "nominal", "title": None},
            "tooltip": [{"field": name, "type": "nominal"} for name in rows[0]],
        }
        mark = {"type": "bar", "stroke": "white", "strokeWidth": 0.5}
        panels.append({"width": WIDTH, "data": {"values": rows}, "mark": mark, "encoding": encoding})
    return Chart(
        "trace",
        "One step",
        "Computations, transfers and waits of every rank in the traced step; hover for the action.",
        _stacked(panels) if panels else None,
        "no step was traced: set pipeline_trace_step",
    )


def _kind_of(event: dict[str, Any]) -> str:
    """Return what a slice of a trace is: the operation, without the number of its micro-batch."""
    return str(event["name"]).rstrip("0123456789 ") if str(event["cat"]).startswith("stage") else str(event["cat"])


_CHARTS = (
    _metrics,
    _metrics_by_time,
    _layout,
    _step_time,
    _throughput,
    _bubble,
    _gradients,
    _cache,
    _memory,
    _trace,
)
