"""The report of one or several runs: one HTML page that needs no network, and a PNG of each chart."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_pipetransformer.report import printable
from hf_pipetransformer.report.charts import Chart, all_charts, converter, finished, save_chart
from hf_pipetransformer.report.recorded import RecordedRun, is_finite, pipeline_size, read_runs


def write_report(folders: Sequence[str], page: str | None, pictures: str | None) -> list[str]:
    """Write the report of the runs in output folders; return the paths written.

    Args:
        page: HTML file to write; None for none.
        pictures: folder for a PNG of each chart; None for none.

    Raises:
        ValueError: a folder has no run in it, or the library that draws is not installed.
    """
    library = converter()
    runs = read_runs(folders)
    written = []
    try:
        charts = all_charts(runs)
        text = render(runs, charts, library)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"An event of {', '.join(folders)} is not what this version writes ({type(error).__name__}: {error}): "
            "expected the folders as the runs left them."
        ) from error
    if page is not None:
        path = Path(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(str(path))
    if pictures is not None:
        folder = Path(pictures)
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            if chart.spec is not None:
                path = folder / f"{chart.name}.png"
                save_chart(chart.spec, path)
                written.append(str(path))
    return written


# ---- tables ----


def time_matched(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Compare each run with each one that ended earlier, at that one's end: rows of a table.

    Columns: metric, the longer run, the run that ended, its last value, the longer run's last value until then, and
    their difference.
    """
    rows = []
    for longer, ended in permutations(runs, 2):
        if longer.seconds is None or ended.seconds is None or ended.seconds > longer.seconds:
            continue
        for name in (name for name in ended.metric_names() if name in longer.metric_names()):
            last, then = ended.value_at(name, ended.seconds), longer.value_at(name, ended.seconds)
            if last is None:
                continue
            cells = [name, longer.name, f"{ended.name} ({ended.seconds:.1f} s)", f"{last[1]:.4g}"]
            if then is None:
                rows.append([*cells, "nothing logged yet", ""])
            else:
                rows.append([*cells, f"{then[1]:.4g} (step {then[0].step})", f"{then[1] - last[1]:+.4g}"])
    return rows


def transitions(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return the rows of the table of transitions: run, step, time, what changed, why, bytes moved, seconds."""
    return [
        [
            run.name,
            str(event["step"]),
            f"{event['at_s']:.1f} s",
            f"{_layout_in_words(event['from'])} → {_layout_in_words(event['to'])}",
            str(event.get("reason", "")),
            f"{event['bytes_moved'] / 2**20:.2f} MiB",
            f"{event['seconds']:.2f} s",
        ]
        for run in runs
        for event in run.of_kind("transition")
    ]


def _layout_in_words(layout: dict[str, Any]) -> str:
    cached = f", {layout['cache_level']} cached" if layout.get("cache_level") else ""
    return f"{pipeline_size(layout)} x {layout['num_replicas']}, {layout['num_frozen_layers']} frozen{cached}"


def summary(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return the rows of the table of runs: name, steps, time, layouts, last value of each metric."""
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names()))
    rows = []
    for run in runs:
        layouts = [f"{pipeline_size(layout)} x {layout['num_replicas']}" for _, layout in run.layouts()]
        shapes = " → ".join(shape for at, shape in enumerate(layouts) if at == 0 or shape != layouts[at - 1])
        seconds = "not recorded" if run.seconds is None else f"{run.seconds:.1f} s"
        rows.append([run.name, str(run.num_steps), seconds, shapes or "no pipeline", *_last_values(run, names)])
    return [["run", "steps", "time", "K x R", *names], *rows]


def _last_values(run: RecordedRun, names: Iterable[str]) -> list[str]:
    found = []
    for name in names:
        values = run.values_of(name)
        last = run.results.get(name) if is_finite(run.results.get(name)) else values[-1][1] if values else None
        found.append("" if last is None else f"{last:.4g}")
    return found


# ---- the page ----

_STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1f262d;
       max-width: 960px; margin: 32px auto; padding: 0 20px; }
h1 { font-size: 24px; margin-bottom: 4px; } h2 { font-size: 18px; margin: 34px 0 2px; }
p { margin: 2px 0 10px; color: #4a545e; }
table { border-collapse: collapse; font-size: 13px; margin: 8px 0 12px; }
th, td { text-align: left; vertical-align: top; padding: 4px 14px 4px 0; border-bottom: 1px solid #e3e6e9; }
th, .short { white-space: nowrap; } th { font-weight: 600; } .scroll { overflow-x: auto; }
ul { color: #4a545e; font-size: 14px; padding-left: 20px; }
"""

_SCRIPT = """
for (const place of document.querySelectorAll("div.chart")) {
  const spec = JSON.parse(document.getElementById("spec-" + place.dataset.chart).textContent);
  vegaEmbed(place, spec, {mode: "vega-lite", renderer: "svg", actions: false})
    .then(() => { place.dataset.state = "drawn"; })
    .catch((error) => { place.dataset.state = "failed"; place.textContent = String(error); });
}
"""


def render(runs: Sequence[RecordedRun], charts: Sequence[Chart], library: ModuleType) -> str:
    """Return the page; the scripts that draw its charts are in it."""
    title = "Training report: " + ", ".join(run.name for run in runs)
    head, *rows = summary(runs)
    parts = [f"<h1>{_text(title)}</h1>", _table(head, rows)]
    if compared := time_matched(runs):
        parts += ["<h2>At equal time</h2>", "<p>Each run at the time at which the other had ended.</p>"]
        parts.append(_table(["metric", "run", "at the end of", "it had", "run then", "difference"], compared))
    for chart in charts:
        if chart.spec is not None:
            parts.append(f"<h2>{_text(chart.title)}</h2><p>{_text(chart.text)}</p>")
            parts.append(f'<div class="chart" data-chart="{chart.name}"></div>')
        if chart.name == "layout" and (moved := transitions(runs)):
            head = ["run", "step", "time", "K x R, layers", "why", "moved", "took"]
            parts += ["<h2>Transitions</h2>", _table(head, moved)]
    if absent := [chart for chart in charts if chart.spec is None]:
        items = "".join(f"<li>{_text(f'{chart.title}: {chart.missing}.')}</li>" for chart in absent)
        parts.append(f"<h2>Not recorded</h2><ul>{items}</ul>")
    specs = [
        f'<script type="application/json" id="spec-{chart.name}">{_json(finished(chart.spec))}</script>'
        for chart in charts
        if chart.spec is not None
    ]
    scripts = library.javascript_bundle().replace("</script", "<\\/script")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *parts,
            *specs,
            f'<script id="library" type="module">{scripts}\n{_SCRIPT}</script>',
            "</body>\n</html>\n",
        ]
    )


def _json(value: Any) -> str:
    # Not only "</": "<!--" and "<script" change how a page reads the rest of a script.
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _text(text: str) -> str:
    return html.escape(printable(text))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{_text(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{titles}</tr>{lines}</table></div>'


def _cell(text: str) -> str:
    kind = ' class="short"' if len(text) <= 16 else ""
    return f"<td{kind}>{_text(text)}</td>"
