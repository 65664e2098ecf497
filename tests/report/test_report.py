"""The report of runs: what is read from an output folder, what is drawn, and that the page stands alone."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cli import main
from hf_pipetransformer.report import printable
from hf_pipetransformer.report.charts import all_charts
from hf_pipetransformer.report.drawing import save_chart
from hf_pipetransformer.report.events import EVENTS_FILE, EventLog, read_events
from hf_pipetransformer.report.page import origins, render, summary, time_matched, transitions
from hf_pipetransformer.report.recorded import Best, Entry, RecordedRun, read_run, read_runs
from hf_pipetransformer.training.progress import bubble_share
from tests.report.test_events import LAYOUT
from tests.support.models import build_model, collate, make_dataset


CHARTS = {"metrics", "layout", "step_time", "bubble", "gradients", "cache", "memory", "trace"}
OF_SEVERAL = CHARTS | {"metrics_by_time"}
NUM_STEPS, FREEZES_AT = 24, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of 8 epochs in one process, two of whose layers freeze and are cached."""
    folder = tmp_path_factory.mktemp("run")
    args = PipeTransformerArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        max_steps=NUM_STEPS, per_device_train_batch_size=4, freeze_policy="fixed", freeze_at=f"{FREEZES_AT}:2",
        activation_cache="on", activation_cache_dir=str(folder / "cache"), save_strategy="no", eval_strategy="epoch",
        learning_rate=1e-3, pipeline_trace_step=3,
    )  # fmt: skip
    data = make_dataset("bert_sequence", 12)
    model = build_model("bert_sequence")
    trainer = PipeTransformerTrainer(model, args, train_dataset=data, eval_dataset=data, data_collator=collate)
    trainer.train()
    trainer.save_state()
    return folder


def visible(page: str) -> str:
    """The page without the library that draws."""
    return re.sub(r'<script id="library".*?</script>', "", page, flags=re.DOTALL)


def test_every_chart_of_a_run_has_data(folder: Path) -> None:
    charts = all_charts(read_runs([str(folder)]))
    assert {chart.name for chart in charts} == CHARTS
    for chart in charts:
        assert chart.spec is not None, f"{chart.name}: {chart.missing}"
        assert sum(map(len, chart.spec["datasets"].values())) > 1, chart.name


def test_the_page_stands_alone_and_every_chart_has_a_picture(folder: Path, tmp_path: Path) -> None:
    page, pictures = tmp_path / "site" / "run.html", tmp_path / "pictures"
    main(["report", str(folder), "--html", str(page), "--png", str(pictures)])
    text = page.read_text(encoding="utf-8")
    assert "http" not in visible(text)
    assert not re.search(r"<(link|iframe|img|object)\b|<script[^>]*\bsrc=|@import|url\(", visible(text))
    assert len(re.findall('<div class="chart"', text)) == len(CHARTS)
    specs = re.findall(r'<script type="application/json" id="spec-(\w+)">(.*?)</script>', text)
    assert {name for name, spec in specs if json.loads(spec)} == CHARTS
    assert "Not recorded" not in visible(text)
    assert {path.stem for path in pictures.iterdir()} == CHARTS
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures.iterdir())


def test_the_log_in_the_events_is_trainers_log_with_times(folder: Path) -> None:
    run = read_run(folder, "run")
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert [entry["loss"] for entry in history if "loss" in entry] == [value for _, value in run.values_of("loss")]
    assert len(run.values_of("eval_loss")) == NUM_STEPS // 3
    times = [entry.seconds for entry in run.entries]
    assert times == sorted(times) and run.seconds is not None and times[-1] <= run.seconds


def test_progress_counts_every_step_and_sample_once(folder: Path) -> None:
    events = [event for event in read_events(str(folder / EVENTS_FILE)) if event["event"] == "progress"]
    assert sum(event["num_steps"] for event in events) == NUM_STEPS
    num_samples = sum(event["samples_per_second"] * event["step_s"] * event["num_steps"] for event in events)
    assert num_samples == pytest.approx(4 * NUM_STEPS)
    frozen = [event["layout"]["num_frozen_layers"] for event in events]
    assert [event["step"] for event, count in zip(events, frozen, strict=True) if count][0] == FREEZES_AT + 1
    for event in events:
        layers, (head, embeddings) = event["gradient_norms"][:-2], event["gradient_norms"][-2:]
        is_frozen = event["layout"]["num_frozen_layers"] > 0
        assert [norm == 0 for norm in layers] == [is_frozen and at < 2 for at in range(len(layers))]
        assert head > 0 and (embeddings == 0) == is_frozen


def test_the_logged_norm_is_that_of_the_layers_together(folder: Path) -> None:
    run = read_run(folder, "run")
    logged = {entry.step: value for entry, value in run.values_of("grad_norm")}
    for event in run.of_kind("progress"):
        norm = sum(norm**2 for norm in event["gradient_norms"]) ** 0.5
        assert norm == pytest.approx(logged[event["step"]], rel=1e-5)


def test_a_transition_has_its_row(folder: Path) -> None:
    (row,) = transitions(read_runs([str(folder)]))
    assert row[1] == str(FREEZES_AT) and row[3].startswith("fixed")
    assert row[4].endswith("MiB") and row[5].endswith("s")


HOSTILE = ("a<!--<script>b", "c</script>d", "e\u2028f", "g\u2029\x00h", "i\udcffj", "k\"'\\l", "m | n & o")


def test_names_of_runs_and_metrics_break_no_chart_and_no_page(folder: Path, tmp_path: Path) -> None:
    runs = read_runs([str(folder)] * len(HOSTILE))
    runs = [replace(run, name=name) for run, name in zip(runs, HOSTILE, strict=True)]
    for run in runs:
        for entry in run.entries:
            entry.values.update({f"eval_{name}": 1.0 for name in HOSTILE})
    told = dict.fromkeys(("model", "data", "commit", "machine", "versions", "options"))
    for run, name in zip(runs, HOSTILE, strict=True):
        told |= {"model": {"name": name, "class": name}, "data": {"name": name}, "commit": name, "machine": name}
        next(run.of_kind("run"))["origin"] = told | {"versions": {name: name}, "options": {name: name}}
    runs[0] = replace(runs[0], best=Best(f"eval_{HOSTILE[0]}", 1.0, 3, is_loaded=True), after={HOSTILE[1]: 1.0})
    charts = all_charts(runs)
    page = tmp_path / "run.html"
    page.write_text(render(runs, charts), encoding="utf-8")
    shown = visible(page.read_text(encoding="utf-8"))
    # Beside those of the charts, one script has their looks.
    assert shown.count("<script") == shown.count("</script") == len(OF_SEVERAL) + 1 and "<!--" not in shown
    words = html.unescape(re.sub(r"<script.*?</script>|<[^>]*>", "", shown, flags=re.DOTALL))
    for name in map(printable, HOSTILE):
        assert words.count(name) >= 7, name  # title, summary, model, data, commit, machine, versions
    specs = re.findall(r'id="spec-(\w+)">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert {name for name, spec in specs if json.loads(spec) and "<" not in spec} == OF_SEVERAL
    for chart in charts:
        assert chart.spec is not None
        save_chart(chart.spec, tmp_path / "chart.svg")
    if shutil.which("chromium") is not None:
        found = look(page, tmp_path)
        assert len(re.findall('data-state="drawn"', found.stdout)) == len(OF_SEVERAL) and "CONSOLE" not in found.stderr


def look(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a browser made of a page."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    home = ["--enable-logging=stderr", f"--user-data-dir={folder / 'browser'}"]
    return subprocess.run(
        ["chromium", *options, *home, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )


@pytest.mark.skipif(shutil.which("chromium") is None, reason="looks at the page in Chromium, which is not installed")
def test_a_browser_draws_every_chart_without_an_error(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    main(["report", str(folder), "--html", str(page)])
    found = look(page, tmp_path)
    assert len(re.findall('data-state="drawn"', found.stdout)) == len(CHARTS)
    assert "CONSOLE" not in found.stderr
    drawn = found.stdout.split('<div class="chart')[1:]
    assert all("<path" in chart.split("</svg>")[0] for chart in drawn)


PHONE = """
<script type="module">
const wait = setInterval(() => {
  if (document.querySelectorAll("div.chart:not([data-state])").length) return;
  clearInterval(wait);
  const wide = [...document.body.querySelectorAll("*")].filter((each) => !each.closest(".scroll"));
  const ends = wide.map((each) => [each.getBoundingClientRect().right, each.outerHTML.slice(0, 80)]);
  const [right, widest] = ends.reduce((most, each) => (each[0] > most[0] ? each : most));
  Object.assign(document.body.dataset, {right, widest});
}, 100);
</script>
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="looks at the page in Chromium, which is not installed")
def test_nothing_is_wider_than_a_phone(folder: Path, tmp_path: Path) -> None:
    """Tables scroll by themselves."""
    page = tmp_path / "run.html"
    main(["report", str(folder), str(folder), "--html", str(page)])
    text = page.read_text(encoding="utf-8")
    narrow = text.replace("\n<body>\n", '\n<body style="width: 390px; margin: 0">\n', 1)
    page.write_text(narrow + PHONE, encoding="utf-8")
    found = look(page, tmp_path)
    assert len(re.findall('data-state="drawn"', found.stdout)) == len(OF_SEVERAL)
    (right,) = re.findall('data-right="(.*?)"', found.stdout)
    assert 300 < float(right) <= 390
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text


ZOOM = """
<script type="module">
const wait = setInterval(async () => {
  if (document.querySelectorAll("div.chart:not([data-state])").length) return;
  clearInterval(wait);
  const svg = document.querySelector("div.chart svg");
  svg.scrollIntoView();
  const {x, y, width} = svg.getBoundingClientRect();
  const place = {clientX: x + width / 2, clientY: y + 90};
  const plot = document.elementFromPoint(place.clientX, place.clientY);
  for (const ctrlKey of [false, true]) {
    const turned = {deltaY: -500, ctrlKey, ...place, bubbles: true, cancelable: true};
    plot.dispatchEvent(new WheelEvent("wheel", turned));
    await new Promise((done) => setTimeout(done, 300));
    const labels = [...svg.querySelectorAll("g.role-axis-label text")].map((each) => each.textContent);
    document.body.dataset[ctrlKey ? "zoomed" : "scrolled"] = labels.filter((label) => label === "0").length;
  }
}, 100);
</script>
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="looks at the page in Chromium, which is not installed")
def test_the_wheel_zooms_all_panels_of_a_chart_with_ctrl_alone(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    main(["report", str(folder), "--html", str(page)])
    page.write_text(page.read_text(encoding="utf-8") + ZOOM, encoding="utf-8")
    found = look(page, tmp_path).stdout
    # The axes of loss and evaluation loss begin at step 0, until both are zoomed.
    assert 'data-scrolled="2"' in found and 'data-zoomed="0"' in found


# ---- what came out, and of what ----


SCORES = (0.25, 0.75, 0.5, 0.5)


def test_the_summary_has_the_model_that_was_loaded_and_what_the_layouts_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = iter([*SCORES, SCORES[1]])
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        num_train_epochs=4, per_device_train_batch_size=4, freeze_policy="fixed", freeze_at="6:2",
        save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True, learning_rate=1e-3,
        metric_for_best_model="score", greater_is_better=True, hub_token="hf_secret",
    )  # fmt: skip
    data = make_dataset("bert_sequence", 12)
    trainer = PipeTransformerTrainer(
        build_model("bert_sequence"), args, train_dataset=data, eval_dataset=data, data_collator=collate,
        compute_metrics=lambda prediction: {"score": next(scores)},
    )  # fmt: skip
    with caplog.at_level("INFO", logger="hf_pipetransformer"):
        trainer.train()
    metrics = trainer.evaluate()
    run = read_run(tmp_path, "run")
    assert run.best == Best("eval_score", 0.75, 6, is_loaded=True)
    assert trainer.state.best_global_step == 6
    # An evaluation after the training is no point of its curve.
    assert [value for _, value in run.values_of("eval_score")] == list(SCORES)
    assert run.after["eval_loss"] == metrics["eval_loss"]
    found = dict(zip(*summary([run]), strict=True))
    assert found["eval_score"] == "0.75 (best, step 6)"
    assert found["eval_loss"] == f"{metrics['eval_loss']:.4g} (step 6)"
    # The same seconds as on the console.
    ((said, word),) = re.findall(r"([\d.]+) s (less|more) than \d+ steps", caplog.text)
    assert float(found["saved by later layouts"].split()[0]) == (float(said) if word == "less" else -float(said))
    rows = {row.name: row.cells[0] for row in origins([run])}
    assert rows["model"] == "BertForSequenceClassification"
    assert rows["data"] == "12 samples to train, 12 samples to evaluate"
    assert (rows["learning_rate"], rows["freeze_at"]) == ("0.001", "6:2")
    assert rows["machine"].startswith("1 process, ") and "transformers 5." in rows["versions"]
    assert "seed" not in rows and "hf_secret" not in (tmp_path / EVENTS_FILE).read_text()


def test_a_best_model_that_was_not_loaded_is_told_apart(tmp_path: Path) -> None:
    history = [{"step": step, "eval_score": score} for step, score in enumerate(SCORES)]
    history += [{"step": 3, "train_runtime": 8.0}, {"step": 3, "eval_score": 0.5, "eval_loss": 1.5}]
    state = {"log_history": history, "best_metric": 0.75, "best_global_step": 1}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    run = read_run(tmp_path, "run")
    assert run.best == Best("eval_score", 0.75, 1, is_loaded=False)
    assert len(run.entries) == 5 and run.after == history[-1]
    assert summary([run]) == [
        ["run", "steps", "time", "eval_score", "eval_loss"],
        ["run", "3", "8.0 s", "0.5 (best: 0.75, step 1)", "1.5"],
    ]


def test_a_run_that_goes_on_forgets_what_was_evaluated_at_its_earlier_end(tmp_path: Path) -> None:
    a_log(tmp_path, {1: 2.0, 2: 1.5}, 1.0)
    log = EventLog(str(tmp_path))
    log.write("end", 2, None, best=None, saved_seconds=-2.0, step_seconds=5.0)
    log.write("log", 2, None, values={"eval_loss": 1.0})
    run = read_run(tmp_path, "run")
    assert (run.after, run.final_names()) == ({"eval_loss": 1.0}, ["loss", "eval_loss"])
    assert summary([run]) == [
        ["run", "steps", "time", "saved by later layouts", "loss", "eval_loss"],
        ["run", "2", f"{run.seconds:.1f} s", "-2.0 s of 3.0 s", "1.5", "1"],
    ]
    log.write("run", 2, None, layout=LAYOUT.as_event(), resumed_from="checkpoint-2")
    run = read_run(tmp_path, "run")
    assert (run.after, run.end) == ({}, {})
    assert summary([run])[1] == ["run", "2", f"{run.seconds:.1f} s, no end recorded", "1.5"]


def test_options_in_which_runs_differ_are_marked() -> None:
    events = [
        [{"event": "run", "step": 0, "at_s": 0.0, "origin": {"options": options, "commit": "c0ffee"}}]
        for options in ({"learning_rate": 0.1, "seed": 1}, {"seed": 1})
    ]
    runs = [RecordedRun(name, events=found) for name, found in zip("ab", events, strict=True)]
    found = [(row.name, row.cells, row.differs) for row in origins([*runs])]
    assert found == [
        ("learning_rate", ["0.1", "default"], True),
        ("seed", ["1", "1"], False),
        ("commit", ["c0ffee", "c0ffee"], False),
    ]
    assert origins([RecordedRun("c")]) == []
    # What is the same in all runs stands in the page once.
    page = visible(render(runs, []))
    assert page.count("c0ffee") == 1 and page.count('<tr class="differs">') == 1 and 'colspan="2">1</td>' in page


# ---- what counts as a metric ----


def test_counters_and_times_of_an_evaluation_are_no_metrics() -> None:
    """TRL's trainers count the tokens that they evaluate."""
    counted = {"eval_num_tokens": 9.0, "eval_runtime": 1.0, "eval_samples_per_second": 2.0, "eval_samples": 3}
    entries = [Entry(1, None, {"loss": 2.0, "grad_norm": 1.0}), Entry(1, None, {"eval_loss": 1.0, **counted})]
    assert RecordedRun("run", entries=entries).metric_names() == ["loss", "eval_loss"]


# ---- runs that recorded less ----


def a_log(folder: Path, losses: dict[int, float], seconds_per_step: float, **more: Any) -> None:
    """Events of a run that logged these losses by step."""
    log = EventLog(str(folder))
    log.write("run", 0, 0.0, layout=LAYOUT.as_event(), **more)
    for step, loss in losses.items():
        log.write("log", step, None, values={"loss": loss})
    lines = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    timed = [{**line, "time_s": 10 + seconds_per_step * line["step"]} for line in lines]
    (folder / EVENTS_FILE).write_text("".join(json.dumps(line) + "\n" for line in timed))


def test_a_chart_without_data_is_left_out_and_said(tmp_path: Path) -> None:
    a_log(tmp_path, {1: 2.0, 2: 1.0}, 1.0)
    main(["report", str(tmp_path)])
    text = visible((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert re.findall('data-chart="(.*?)"', text) == ["metrics", "layout"]
    absent = text[text.index("Not recorded") :]
    assert "Activation cache: no epoch read the activation cache" in absent
    assert (
        "Time of a step, Bubble share, Gradient norms by layer, Memory by stage: the run wrote no progress" in absent
    )
    assert absent.count("<li>") == 3, "each reason once"


def test_a_run_of_plain_trainer_is_drawn_by_its_log(tmp_path: Path) -> None:
    history = [{"step": step, "epoch": 1.0, "loss": 3.0 - step} for step in (1, 2)] + [{"step": 2, "train_runtime": 8}]
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text('{"log_history": []}')
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    run = read_run(tmp_path, "plain")
    assert [(entry.seconds, value) for entry, value in run.values_of("loss")] == [(4.0, 2.0), (8.0, 1.0)]
    assert run.estimates_time
    charts = {chart.name: chart for chart in all_charts([run, replace(run, name="other", estimates_time=False)])}
    assert "Of plain only train_runtime is known" in charts["metrics_by_time"].text
    assert {name for name, chart in charts.items() if chart.spec is not None} == {"metrics", "metrics_by_time"}


def test_runs_are_compared_at_the_time_at_which_the_shorter_ended(tmp_path: Path) -> None:
    for name in ("short", "long"):
        (tmp_path / name).mkdir()
    a_log(tmp_path / "short", {1: 2.0, 2: 1.0}, 1.0)
    a_log(tmp_path / "long", {1: 2.5, 2: 1.5, 3: 1.25, 4: 0.5}, 0.75)
    runs = read_runs([str(tmp_path / "short"), str(tmp_path / "long")])
    # After 2 s the longer run was past its step 2, at 1.5 s, and before its step 3.
    assert time_matched(runs) == [["loss", "long", "short (2.0 s)", "1", "1.5 (step 2)", "+0.5"]]
    ended = ", no end recorded"
    assert summary(runs)[1:] == [["short", "2", f"2.0 s{ended}", "1"], ["long", "4", f"3.0 s{ended}", "0.5"]]


def test_a_resumed_run_goes_on_and_a_new_one_begins_anew(tmp_path: Path) -> None:
    a_log(tmp_path, {1: 9.0}, 1.0)
    a_log(tmp_path / "other", {1: 2.0, 2: 1.5, 3: 1.25}, 1.0)
    log = EventLog(str(tmp_path))
    first = (tmp_path / "other" / EVENTS_FILE).read_text()
    (tmp_path / EVENTS_FILE).write_text((tmp_path / EVENTS_FILE).read_text() + first)
    log.write("run", 2, None, layout=LAYOUT.as_event(), resumed_from="checkpoint-2")
    log.write("log", 3, None, values={"loss": 1.0})
    run = read_run(tmp_path, "run")
    assert [(entry.step, value) for entry, value in run.values_of("loss")] == [(1, 2.0), (2, 1.5), (3, 1.0)]
    # The step that was trained again took its time.
    assert run.entries[-1].seconds == pytest.approx(3.0, abs=0.5)


def test_ranks_that_wait_have_a_bubble() -> None:
    ranks = [{"busy_s": 3.0, "pipeline_s": 4.0}, {"busy_s": 1.0, "pipeline_s": 3.5}]
    assert bubble_share(ranks, 2) == 0.5
    assert bubble_share(ranks, 1) == 0
    assert bubble_share([*ranks, {"busy_s": None, "pipeline_s": None}], 3) is None


def test_trackers_get_speed_and_memory_where_the_layout_is_not_trainers_own(folder: Path) -> None:
    """The events have them for every layout."""
    for entry, _ in read_run(folder, "run").values_of("loss"):
        found = {"samples_per_second", "memory_gb", "bubble_share"} & entry.values.keys()
        assert len(found) == (3 if entry.step > FREEZES_AT else 0)


def test_a_folder_without_a_run_and_a_missing_library_are_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="has neither .* nor trainer_state.json: expected the output_dir"):
        main(["report", str(tmp_path)])
    (tmp_path / EVENTS_FILE).write_text('{"event": "run", "step": 0}\n')
    with pytest.raises(SystemExit, match="An event of .* is not what this version writes .KeyError: 'layout'"):
        main(["report", str(tmp_path)])
    (tmp_path / EVENTS_FILE).unlink()
    (tmp_path / "trainer_state.json").write_text("[]")
    with pytest.raises(SystemExit, match=r" has a .*, expected a JSON object"):
        main(["report", str(tmp_path)])
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(SystemExit, match=r"trainer_state\.json cannot be read \(.*: expected a JSON object"):
        main(["report", str(tmp_path)])
    (tmp_path / "trainer_state.json").write_text('{"log_history": 3}')
    with pytest.raises(SystemExit, match=r"has no log_history of entries with a step"):
        main(["report", str(tmp_path)])
    (tmp_path / "trainer_state.json").write_text('{"log_history": [{"step": 1}]}')
    (tmp_path / "trace_step_1.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"has no list of traceEvents"):
        main(["report", str(tmp_path)])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "altair", None)
        with pytest.raises(SystemExit, match="The report is made with altair, which is not installed"):
            main(["report", str(tmp_path)])
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(SystemExit, match="Charts are drawn with vl-convert-python, which is not installed"):
        main(["report", str(tmp_path)])
