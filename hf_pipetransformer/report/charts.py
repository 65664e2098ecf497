"""Charts of recorded runs, made with Altair; a chart without data says what was not recorded.

Axes are named as trackers name the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import altair as alt

from hf_pipetransformer.report.recorded import Entry, RecordedRun, is_finite, pipeline_size


if TYPE_CHECKING:
    from hf_pipetransformer.report.drawing import Row, Spec


WIDTH = 640
"""Width of the plots of a picture; the page sets its own."""

_Panel = Any
"""One plot: `alt.Chart` or `alt.LayerChart`."""

_ZOOM = "wheel![event.ctrlKey || event.metaKey]"
"""Event that zooms: the wheel alone scrolls the page."""


@dataclass(frozen=True)
class Chart:
    """One chart of the report.

    Args:
        name: of its PNG file and its place in the page.
        spec: its specification of Vega-Lite; None if no run recorded what it shows.
        missing: what was not recorded, and what records it.
        text: what neither its title nor its axes say.
    """

    name: str
    title: str
    spec: Spec | None
    missing: str
    text: str = ""


def all_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return every chart of the report, also those without data; one against time only to compare runs."""
    return [make(runs) for make in _CHARTS if len(runs) > 1 or make is not _metrics_by_time]


# ---- what the charts are made of ----


def _y(title: str, zero: bool = False, **more: Any) -> alt.Y:
    return alt.Y(field="value", type="quantitative", title=title, **{"scale": alt.Scale(zero=zero), **more})


def _x(field: str = "step", last: float | None = None) -> alt.X:
    title = "seconds of training" if field == "seconds" else "optimizer step"
    # The same ends in all panels, whatever each recorded first and last: they are zoomed and moved together.
    scale = alt.Scale(nice=False) if last is None else alt.Scale(nice=False, domain=[0, last])
    return alt.X(field=field, type="quantitative", title=title, scale=scale)


def _by_run(runs: Sequence[RecordedRun]) -> alt.Color:
    """Color by run; one run needs no legend."""
    legend: Any = alt.Undefined if len(runs) > 1 else None
    # All runs, so that one keeps its color in a chart in which another has no data.
    scale = alt.Scale(domain=[run.name for run in runs])
    return alt.Color(field="run", type="nominal", title="run", scale=scale, legend=legend)


def _tooltip(rows: Sequence[Row]) -> list[alt.Tooltip]:
    return [alt.Tooltip(field=name, type="nominal") for name in rows[0]]


def _chart_of(rows: list[Row]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def _line(rows: list[Row], x: alt.X, y: alt.Y, color: alt.Color, **mark: Any) -> alt.Chart:
    # Beyond some hundred points dots hide the line, and a step function has no points.
    dots: Any = alt.OverlayMarkDef(filled=True, size=18) if len(rows) <= 400 and "interpolate" not in mark else False
    line = _chart_of(rows).mark_line(**{"strokeWidth": 1.8, "point": dots, **mark})
    return line.encode(x=x, y=y, color=color, tooltip=_tooltip(rows))


def _marked(runs: Sequence[RecordedRun], lines: Sequence[alt.Chart], x: str = "step", height: int = 170) -> _Panel:
    """Put lines over marks of the transitions of all runs."""
    key = {"step": "step", "seconds": "at_s"}[x]
    found = [{"run": run.name, x: event[key]} for run in runs for event in run.of_kind("transition")]
    layers = list(lines)
    if found:
        color: Any = _by_run(runs) if len(runs) > 1 else alt.value("#8a949e")
        rules = _chart_of(found).mark_rule(strokeDash=[3, 3], opacity=0.55)
        # Below the lines, which must stay readable where many transitions lie close.
        layers.insert(0, rules.encode(x=alt.X(field=x, type="quantitative"), color=color))
    return alt.layer(*layers).properties(width=WIDTH, height=height)


def _stacked(panels: Sequence[_Panel]) -> Spec | None:
    """Return charts below each other, zoomed and moved together along x; None if there are none."""
    if not panels:
        return None
    # Zoom is bound to views by name, which a layered chart hands on to its first layer.
    for at, panel in enumerate(panels):
        (panel.layer[0] if isinstance(panel, alt.LayerChart) else panel).name = f"panel_{at}"
    zoom = alt.TopLevelSelectionParameter(
        name="zoom",
        select=alt.IntervalSelectionConfig(type="interval", encodings=["x"], zoom=_ZOOM),
        bind="scales",
        views=[f"panel_{at}" for at in range(len(panels))],
    )
    stacked = alt.vconcat(*panels, spacing=14, params=[zoom])
    # Its version is that of the page's own library, and no address need be in the page.
    return {name: value for name, value in stacked.to_dict().items() if name not in ("$schema", "config")}


def _last(runs: Sequence[RecordedRun]) -> int:
    return max(run.num_steps for run in runs)


def _progress(run: RecordedRun, name: str, factor: float = 1.0) -> list[Row]:
    """Return a figure of each progress event that has it."""
    events = [event for event in run.of_kind("progress") if is_finite(event[name])]
    return [{"run": run.name, "step": event["step"], "value": factor * event[name]} for event in events]


def _over_steps(
    runs: Sequence[RecordedRun], rows: list[Row], y: alt.Y, height: int, below: Sequence[alt.Chart] = (), **mark: Any
) -> list[_Panel]:
    """Return a plot of one line of each run over others; none without any row."""
    if not rows:
        return []
    line = _line(rows, _x(last=_last(runs)), y, _by_run(runs), **mark)
    return [_marked(runs, [*below, line], height=height)]


def _steps(run: RecordedRun, points: Iterable[tuple[int, float]]) -> list[Row]:
    """Return a line of values that last until the next, or the end of the run."""
    rows: list[Row] = [{"run": run.name, "step": step, "value": value} for step, value in points]
    return [*rows, {**rows[-1], "step": max(run.num_steps, rows[-1]["step"])}] if rows else []


# ---- the charts ----


def _metric_panels(runs: Sequence[RecordedRun], x: str, last: float | None) -> list[_Panel]:
    panels = []
    for name in dict.fromkeys(name for run in runs for name in run.metric_names()):
        points = [(run, entry, value) for run in runs for entry, value in run.values_of(name)]
        points = [each for each in points if x == "step" or each[1].seconds is not None]
        # A metric without any time would leave an empty panel.
        if not points:
            continue
        lines = [_line([_row(*each) for each in points], _x(x, last), _y(name), _by_run(runs))]
        best = [_row(run, entry, value) for run, entry, value in points if run.is_best(name, entry)]
        if best:
            ring = _chart_of(best).mark_point(size=150, strokeWidth=2.2)
            lines.append(ring.encode(x=_x(x, last), y=_y(name), color=_by_run(runs), tooltip=_tooltip(best)))
        panels.append(_marked(runs, lines, x))
    return panels


def _row(run: RecordedRun, entry: Entry, value: float) -> Row:
    return {"run": run.name, "step": entry.step, "seconds": entry.seconds, "value": value}


def _metrics(runs: Sequence[RecordedRun]) -> Chart:
    panels = _metric_panels(runs, "step", _last(runs))
    return Chart(
        "metrics",
        "Loss and metrics",
        _stacked(panels),
        "no loss or metric was logged: set logging_steps to less than the length of the run",
        "Dashed lines mark transitions, a ring the best value.",
    )


def _metrics_by_time(runs: Sequence[RecordedRun]) -> Chart:
    panels = _metric_panels(runs, "seconds", max(run.seconds or 0.0 for run in runs) or None)
    estimated = [run.name for run in runs if run.estimates_time]
    text = f"Of {', '.join(estimated)} only train_runtime is known, spread evenly here." if estimated else ""
    return Chart(
        "metrics_by_time",
        "Loss and metrics against time",
        _stacked(panels),
        "no log entry has a time: an events file or a train_runtime in the results is needed",
        text,
    )


def _layout(runs: Sequence[RecordedRun]) -> Chart:
    quantities: list[tuple[str, Callable[[dict[str, Any]], int]]] = [
        ("frozen_layers", lambda layout: int(layout["num_frozen_layers"])),
        ("cached_layers", lambda layout: int(layout.get("cache_level", 0))),
        ("pipeline_stages", pipeline_size),
        ("pipeline_replicas", lambda layout: int(layout["num_replicas"])),
    ]
    panels = list[_Panel]()
    for title, of in quantities:
        rows = [
            row for run in runs for row in _steps(run, [(event["step"], of(each)) for event, each in run.layouts()])
        ]
        top = max([1, *(row["value"] for row in rows)])
        y = _y(
            title,
            axis=alt.Axis(tickMinStep=1, format="d"),
            # A little room above: a line on the frame cannot be seen.
            scale=alt.Scale(domain=[0, top * 1.08], nice=False),
        )
        panels += _over_steps(runs, rows, y, 96, interpolate="step-after", strokeWidth=2.2)
    return Chart(
        "layout",
        "Frozen layers and layout",
        _stacked(panels),
        "there is no events file: the runs had no pipeline, and nothing froze",
    )


_ASK = "the run wrote no progress: it was left to Trainer, or by an earlier version, or logged nothing"


def _step_time(runs: Sequence[RecordedRun]) -> Chart:
    measured = [row for run in runs for row in _progress(run, "step_s", 1e3)]
    predicted = [row for run in runs for row in _predicted(run)]
    y, below = _y("milliseconds per step", zero=True), []
    if predicted:
        plan = _line(predicted, _x(), y, _by_run(runs), interpolate="step-after", strokeWidth=2.2, strokeDash=[4, 2])
        # A line of its own for each decision: a layout without a prediction must not be bridged by its neighbors'.
        below = [plan.encode(detail=alt.Detail(field="part", type="nominal"))]
    return Chart(
        "step_time",
        "Time of a step",
        _stacked(_over_steps(runs, measured, y, 190, below)),
        _ASK,
        "Without evaluations and checkpoints; dashed as each decision predicted it." if predicted else "",
    )


def _predicted(run: RecordedRun) -> list[Row]:
    """Return the predicted milliseconds of a step, each from its decision to the next."""
    events = [event for event, _layout in run.layouts()]
    # A prediction holds for its own layout only.
    ends = [*(event["step"] for event in events[1:]), run.num_steps]
    rows = []
    for part, (event, end) in enumerate(zip(events, ends, strict=False)):
        if is_finite(event.get("predicted_step_s")):
            row = {"run": run.name, "value": 1e3 * event["predicted_step_s"], "kind": "predicted", "part": part}
            rows += [{**row, "step": event["step"]}, {**row, "step": end}]
    return rows


def _bubble(runs: Sequence[RecordedRun]) -> Chart:
    rows = [row for run in runs for row in _progress(run, "bubble_share")]
    y = _y("bubble_share", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]))
    return Chart(
        "bubble",
        "Bubble share",
        _stacked(_over_steps(runs, rows, y, 130)),
        _ASK,
        "Medians of the first steps of a layout, after its warm-up.",
    )


def _cache(runs: Sequence[RecordedRun]) -> Chart:
    hits, stored = [], []
    for run in runs:
        for event in run.of_kind("cache", what="epoch"):
            reads = event["hits"] + event["misses"]
            if reads:
                hits.append({"run": run.name, "step": event["step"], "value": event["hits"] / reads})
                stored.append({"run": run.name, "step": event["step"], "value": event["bytes_stored"] / 1e6})
    share = _y("cache_hit_rate", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]))
    stores = _y("MB stored", zero=True)
    return Chart(
        "cache",
        "Activation cache",
        _stacked([*_over_steps(runs, hits, share, 110), *_over_steps(runs, stored, stores, 110)]),
        "no epoch read the activation cache: nothing froze, the cache was off, or too few epochs were left",
    )


def _gradients(runs: Sequence[RecordedRun]) -> Chart:
    panels = []
    for run in runs:
        rows = [row for found in _gradient_events(run) for row in _gradient_rows(*found)]
        if not rows:
            continue
        order = list(dict.fromkeys(row["layer"] for row in sorted(rows, key=lambda row: -row["place"])))
        # The gray background is what shows frozen layers: they have no cell.
        chart = alt.Chart(alt.InlineData(values=rows), view=alt.ViewBackground(fill="#80889038")).mark_rect()
        chart = chart.encode(
            x=_x("begin", _last(runs)),
            x2=alt.X2(field="step"),
            y=alt.Y(field="layer", type="nominal", sort=order, title=run.name if len(runs) > 1 else None),
            color=alt.Color(
                field="norm",
                type="quantitative",
                title="gradient_norm",
                # Norms of layers differ by orders of magnitude.
                scale=alt.Scale(type="log", scheme="viridis"),
                legend=alt.Legend(format=".1~g"),
            ),
            tooltip=[alt.Tooltip(field=name, type="nominal") for name in ("step", "layer", "norm")],
        )
        # Names of layers overlap in lower rows, and rows of few layers need no more than a line of text.
        height = alt.Step(max(11, min(22, 300 // len(order))))
        panels.append(chart.properties(width=WIDTH, height=height))
    return Chart(
        "gradients",
        "Gradient norms by layer",
        _stacked(panels),
        _ASK,
        "Gray where a layer is frozen.",
    )


def _gradient_events(run: RecordedRun) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield begin, end and the norms by name: of progress events, else those that freeze decisions were given."""
    # Progress has the layers, the head and the embeddings, a decision no embeddings.
    for kind, num_others in (("progress", 2), ("freeze", 1)):
        begin = 0
        for event in run.of_kind(kind):
            norms = event.get("gradient_norms")
            if norms and event["step"] > begin:
                layers = [f"layer_{number + 1}" for number in range(len(norms) - num_others)]
                yield begin, event["step"], dict(zip([*layers, "head", "embeddings"], norms, strict=False))
                begin = event["step"]
        if begin:
            return


def _gradient_rows(begin: int, end: int, norms: dict[str, float]) -> list[Row]:
    """Return the cells of one time; `place` orders the layers from the embeddings up."""
    return [
        {"begin": begin, "step": end, "layer": name, "norm": norm, "place": -1 if name == "embeddings" else place}
        for place, (name, norm) in enumerate(norms.items())
        # A logarithmic scale has no color for 0.
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
        rank = {"field": "rank", "type": "nominal", "title": "rank"}
        color = alt.Color(**rank) if len(runs) == 1 else _by_run(runs)
        line = _line(rows, _x(last=_last(runs)), _y("memory_gb", zero=True), color)
        # Color tells ranks apart in one run; of several it tells the runs, and dashes the ranks.
        line = line if len(runs) == 1 else line.encode(strokeDash=alt.StrokeDash(**rank))
        spec = _stacked([_marked(runs, [line])])
    what = {"device": "Most device memory that torch allocated so far", "host": "Host memory of the process"}
    return Chart(
        "memory",
        "Memory by stage",
        spec,
        _ASK,
        f"{' or '.join(what[kind] for kind in sorted(kinds))}; hover for a rank's stage.",
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
        chart = _chart_of(rows).mark_bar(stroke="white", strokeWidth=0.5)
        chart = chart.encode(
            x=alt.X(field="begin", type="quantitative", title="milliseconds"),
            x2=alt.X2(field="end"),
            y=alt.Y(field="lane", type="nominal", sort=order, title=run.name if len(runs) > 1 else None),
            color=alt.Color(field="kind", type="nominal", title=None),
            tooltip=_tooltip(rows),
        )
        panels.append(chart.properties(width=WIDTH))
    return Chart(
        "trace",
        "One step",
        _stacked(panels),
        "no step was traced: set pipeline_trace_step",
        "Hover for the action.",
    )


def _kind_of(event: dict[str, Any]) -> str:
    """Return what a slice of a trace is: the operation, without the number of its micro-batch."""
    return str(event["name"]).rstrip("0123456789 ") if str(event["cat"]).startswith("stage") else str(event["cat"])


_CHARTS = (
    _metrics,
    _metrics_by_time,
    _layout,
    _step_time,
    _bubble,
    _gradients,
    _cache,
    _memory,
    _trace,
)
