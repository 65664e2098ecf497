"""The report of one or several runs: one HTML page that needs no network, and a PNG of each chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hf_pipetransformer.report import printable
from hf_pipetransformer.report.drawing import DARK, LIGHT, converter, readable, save_chart
from hf_pipetransformer.report.files import create
from hf_pipetransformer.report.recorded import RecordedRun, is_finite, pipeline_size, read_runs


if TYPE_CHECKING:
    from hf_pipetransformer.report.charts import Chart


def write_report(folders: Sequence[str], page: str | None, pictures: str | None) -> list[str]:
    """Write the report of the runs in output folders; return the paths written.

    Args:
        page: HTML file to write; None for none.
        pictures: folder for a PNG of each chart; None for none.

    Raises:
        ValueError: a folder has no run in it, or a library that the report is made with is not installed.
    """
    converter()
    if find_spec("altair") is None:
        raise ValueError(
            "The report is made with altair, which is not installed: pip install altair, or "
            "'hf-pipetransformer[report]'."
        )
    from hf_pipetransformer.report.charts import all_charts  # Only the report needs Altair.

    written = []
    try:
        runs = read_runs(folders)
        charts = all_charts(runs)
        text = render(runs, charts)
    # One place for all charts and tables: each reads fields of events that it did not check.
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"An event of {', '.join(folders)} is not what this version writes ({type(error).__name__}: {error}): "
            "expected the folders as the runs left them."
        ) from error
    if page is not None:
        path = Path(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        with create(path) as file:  # A link in the folder of a run is not followed.
            file.write(text)
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
        # Both must have a clock: by steps alone no one can say what was reached in equal time.
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
    """Return the rows of the table of runs: name, steps, time, layouts, each metric of the model at the end."""
    names = list(dict.fromkeys(name for run in runs for name in run.final_names()))
    rows = []
    for run in runs:
        layouts = [f"{pipeline_size(layout)} x {layout['num_replicas']}" for _, layout in run.layouts()]
        shapes = " → ".join(shape for at, shape in enumerate(layouts) if at == 0 or shape != layouts[at - 1])
        seconds = "not recorded" if run.seconds is None else f"{run.seconds:.1f} s"
        values = [_final(run, name) for name in names]
        rows.append([run.name, str(run.num_steps), seconds, shapes or "no pipeline", *values])
    return [["run", "steps", "time", "K x R", *names], *rows]


def _final(run: RecordedRun, name: str) -> str:
    found = run.final_value(name)
    if found is None:
        return ""
    best, note = run.best, ""
    if best is not None and best.is_loaded and name != "loss":
        note = f" (best, step {best.step})" if name == best.name else f" (step {best.step})"
    elif best is not None and name == best.name:
        note = f" (best: {_number(best.value)}, step {best.step})"
    return _number(found) + note


def _number(value: float) -> str:
    return f"{value:.4g}"


# ---- the headlines ----


@dataclass(frozen=True)
class Headline:
    """Outcome of a run: a metric of its model, what to know of it, and the time that its layouts saved."""

    name: str
    metric: str
    value: str
    mark: str
    lines: list[str]
    verdict: str


def headline(run: RecordedRun) -> Headline:
    """Return the headline of a run: the model that the trainer has at its end, which is the best if it was loaded."""
    best, names = run.best, run.final_names()
    # The metric that checkpoints are chosen by says most; without one the first of evaluation.
    metric = best.name if best is not None else next((name for name in names if name != "loss"), "loss")
    found, values = run.final_value(metric), run.values_of(metric)
    lines, mark = [], "last"
    if best is not None and best.is_loaded:
        mark = f"best, step {best.step}"
        lines.append("This model was loaded at the end: it is the one that the trainer saves.")
        if values and values[-1][0].step != best.step:
            lines.append(f"The last one, of step {values[-1][0].step}, had {_number(values[-1][1])}.")
    elif values:
        mark = f"last, step {values[-1][0].step}"
        if best is not None and best.step == values[-1][0].step:
            mark += ", and best"
        elif best is not None:
            lines.append(
                f"The best, {_number(best.value)} of step {best.step}, is in its checkpoint only: "
                "load_best_model_at_end loads it."
            )
    if evaluated := [f"{name} {_number(run.after[name])}" for name in run.final_names() if name in run.after]:
        lines.append(f"Evaluated after the training: {', '.join(evaluated)}.")
    # Runs that were left to Trainer write no end either, and are not taken for stopped ones.
    if any(run.of_kind("run")) and not run.end:
        lines.append("No end was recorded: it still runs, or was stopped.")
    return Headline(run.name, metric, "" if found is None else _number(found), mark, lines, _verdict(run))


def _verdict(run: RecordedRun) -> str:
    """Return the seconds that later layouts saved against the first; empty where the layout never changed."""
    saved, taken = (run.end.get(name) for name in ("saved_seconds", "step_seconds"))
    if not is_finite(saved) or not is_finite(taken):
        return ""
    what = "saved against" if saved >= 0 else "more than with"
    return f"{abs(saved):.1f} s {what} the first layout: {taken:.1f} s of steps instead of {taken + saved:.1f} s."


# ---- what was run ----


@dataclass(frozen=True)
class OriginRow:
    """One fact of every run; `differs` is True if it is not the same in all."""

    name: str
    cells: list[str]

    @property
    def differs(self) -> bool:
        return len(set(self.cells)) > 1


def origins(runs: Sequence[RecordedRun]) -> list[OriginRow]:
    """Return model, data, options that are no defaults, revision, machine and versions; empty if none are recorded."""
    found = [run.origin for run in runs]
    if not any(found):
        return []
    options = dict.fromkeys(name for each in found for name in each.get("options", {}))
    rows = [
        OriginRow("model", [_model(each.get("model") or {}) for each in found]),
        OriginRow("data", [_data(each.get("data") or {}) for each in found]),
        *(OriginRow(name, [_option(each, name) for each in found]) for name in options),
        OriginRow("commit", [str(each.get("commit") or "") for each in found]),
        OriginRow("machine", [str(each.get("machine") or "") for each in found]),
        OriginRow("versions", [_versions(each.get("versions") or {}) for each in found]),
    ]
    return [row for row in rows if any(row.cells)]


def _model(found: dict[str, Any]) -> str:
    name, kind = found.get("name"), found.get("class")
    return f"{name} ({kind})" if name else str(kind or "")


def _data(found: dict[str, Any]) -> str:
    counts = [("train_samples", "to train"), ("eval_samples", "to evaluate")]
    words = [f"{found[name]:,} samples {of}" for name, of in counts if is_finite(found.get(name))]
    return ", ".join([str(found["name"]), *words] if found.get("name") else words)


def _option(origin: dict[str, Any], name: str) -> str:
    if not origin:
        return ""
    return str(origin["options"][name]) if name in origin.get("options", {}) else "default"


def _versions(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in found.items())


# ---- the page ----


def render(runs: Sequence[RecordedRun], charts: Sequence[Chart]) -> str:
    """Return the page; the scripts that draw its charts are in it."""

    def shown(value: Any) -> Any:
        return printable(value) if type(value) is str else value  # Not what is markup already.

    environment = Environment(
        loader=PackageLoader("hf_pipetransformer", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
    )
    environment.filters["readable"] = readable
    # JSON has no NaN: a browser would refuse the whole page, so rendering fails instead.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    # The end of the script's element in a string of the library would end it there.
    library = converter().javascript_bundle().replace("</script", "<\\/script")
    page: str = environment.get_template("page.html.jinja").render(
        title="Training report: " + ", ".join(run.name for run in runs),
        headlines=[headline(run) for run in runs],
        summary=summary(runs),
        compared=time_matched(runs),
        origins=origins(runs),
        charts=charts,
        transitions=transitions(runs),
        looks={"light": LIGHT, "dark": DARK},
        # Browsers read the text of a script as it is: escaped, it would not run.
        library=Markup(library),
    )
    return page
