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
from hf_pipetransformer.report.recorded import RecordedRun, is_finite, read_runs


if TYPE_CHECKING:
    from hf_pipetransformer.report.charts import Chart


def write_report(folders: Sequence[str], page: str, pictures: str | None) -> list[str]:
    """Write the report of the runs in output folders; return the paths written.

    Args:
        page: HTML file to write.
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
    path = Path(page)
    path.parent.mkdir(parents=True, exist_ok=True)
    with create(path) as file:  # A link in the folder of a run is not followed.
        file.write(text)
    written = [str(path)]
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
    """Return the rows of the table of transitions: run, step, time, why, bytes moved, seconds."""
    return [
        [
            run.name,
            str(event["step"]),
            f"{event['at_s']:.1f} s",
            str(event.get("reason", "")),
            f"{event['bytes_moved'] / 2**20:.2f} MiB",
            f"{event['seconds']:.2f} s",
        ]
        for run in runs
        for event in run.of_kind("transition")
    ]


def summary(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return the table of runs: its head, and for each its name, steps, time, savings, and metrics at the end."""
    names = dict.fromkeys(name for run in runs for name in run.final_names())
    columns = {
        "run": [run.name for run in runs],
        "steps": [str(run.num_steps) for run in runs],
        "time": [_time(run) for run in runs],
        "saved by later layouts": [_saved(run) for run in runs],
        **{name: [_final(run, name) for run in runs] for name in names},
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    return [[*shown], *map(list, zip(*shown.values(), strict=True))]


def _time(run: RecordedRun) -> str:
    seconds = "not recorded" if run.seconds is None else f"{run.seconds:.1f} s"
    # Runs that were left to Trainer write no end either, and are not taken for stopped ones.
    return f"{seconds}, no end recorded" if any(run.of_kind("run")) and not run.end else seconds


def _saved(run: RecordedRun) -> str:
    """Return the seconds that later layouts saved against the first; empty where the layout never changed."""
    saved, taken = (run.end.get(name) for name in ("saved_seconds", "step_seconds"))
    if not is_finite(saved) or not is_finite(taken):
        return ""
    # Without the sign of a zero.
    return f"{round(saved, 1) + 0.0:.1f} s of {taken + saved:.1f} s"


def _final(run: RecordedRun, name: str) -> str:
    """Return a metric of the model at the end, and the step of the best one if it is not the last."""
    value, best = run.final_value(name), run.best
    if value is None or best is None or (name != best.name and (not best.is_loaded or name == "loss")):
        return "" if value is None else f"{value:.4g}"
    if not best.is_loaded:
        return f"{value:.4g} (best: {best.value:.4g}, step {best.step})"
    return f"{value:.4g} ({'best, ' if name == best.name else ''}step {best.step})"


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
    told = [run.origin for run in runs]
    if not any(told):
        return []
    options = dict.fromkeys(name for origin in told for name in origin.get("options", {}))
    rows = [
        OriginRow("model", [_model(origin.get("model") or {}) for origin in told]),
        OriginRow("data", [_data(origin.get("data") or {}) for origin in told]),
        *(OriginRow(name, [_option(origin, name) for origin in told]) for name in options),
        OriginRow("commit", [str(origin.get("commit") or "") for origin in told]),
        OriginRow("machine", [str(origin.get("machine") or "") for origin in told]),
        OriginRow("versions", [_versions(origin.get("versions") or {}) for origin in told]),
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
    absent: dict[str, list[str]] = {}
    for chart in charts:
        if chart.spec is None:
            absent.setdefault(chart.missing, []).append(chart.title)
    page: str = environment.get_template("page.html.jinja").render(
        title="Training report: " + ", ".join(run.name for run in runs),
        summary=summary(runs),
        compared=time_matched(runs),
        origins=origins(runs),
        charts=charts,
        transitions=transitions(runs),
        absent=absent,
        looks={"light": LIGHT, "dark": DARK},
        # Browsers read the text of a script as it is: escaped, it would not run.
        library=Markup(library),
    )
    return page
