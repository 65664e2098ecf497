"""What the study of accuracy against time makes of its runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import BertForTokenClassification

from scripts.bench import front, study
from scripts.bench.front.contenders import (
    FULL,
    LORA,
    SETTINGS,
    Contender,
    cells_of,
    contenders,
    settings_of,
)
from scripts.bench.front.picture import height_of, write_picture
from scripts.bench.front.report import (
    TITLES,
    as_markdown,
    at_equal_time,
    curves_by_seed,
    front_report,
    points,
    seconds_to,
)
from scripts.bench.front.runs import arguments, prepare_model
from scripts.bench.front.tasks import (
    IGNORED,
    TASKS,
    answer_sentence,
    answer_tags,
    best_span,
    read_images,
    span_f1,
    without_dropout,
)
from scripts.bench.measure import REPOSITORY, Settings
from scripts.bench.study import DEFAULTS, are_same, in_force, paired, read_records
from tests.support.tiny_bert import make_bert


CURVE = [(10.0, 60.0), (20.0, 80.0), (40.0, 84.0)]


# --- at equal time


@pytest.mark.parametrize(
    ("seconds", "score"), [(9.9, None), (10, 60), (15, 70), (20, 80), (25, 81), (40, 84), (1000, 84)]
)
def test_between_two_runs_the_score_is_linear_in_time(seconds: float, score: float | None) -> None:
    assert at_equal_time(CURVE, seconds) == score


@pytest.mark.parametrize(
    ("score", "seconds"), [(59, None), (60, 10), (70, 15), (80, 20), (82, 30), (84, 40), (85, None)]
)
def test_a_score_is_first_reached_on_the_way_up(score: float, seconds: float | None) -> None:
    assert seconds_to(CURVE, score) == seconds
    assert seconds_to([(1.0, 5.0), (2.0, 3.0), (4.0, 7.0)], 6) == 3.5


def test_a_curve_without_points_says_nothing() -> None:
    assert at_equal_time([], 1.0) is None
    assert seconds_to([], 1.0) is None


def test_differences_are_paired_by_seed() -> None:
    # 1, 2 and 3 points: a standard deviation of 1, times 4.303 / sqrt(3).
    row = paired({2: 3.0, 0: 1.0, 1: 2.0})
    assert (row["seeds"], row["points"], row["mean"]) == ([0, 1, 2], [1.0, 2.0, 3.0], 2.0)
    assert row["interval_95"] == pytest.approx([-0.484, 4.484])
    assert "interval_95" not in paired({0: 1.0})
    assert paired({})["mean"] is None


# --- from lines to the report


def record(contender: str, seed: int, seconds: float, score: float, **settings: Any) -> dict[str, Any]:
    return {
        "contender": contender, "seed": seed, "settings": {"rate": 1, **settings}, "seconds": seconds,
        "scores": {"accuracy": score}, "frozen": [[0, 2]], "cache_off": [], "gauge_seconds": [1.0, 1.0],
    }  # fmt: skip


def test_runs_with_other_settings_or_done_twice_are_left_out() -> None:
    records = [record("a", 0, 1, 50, rate=2), record("a", 0, 2, 51), record("a", 0, 3, 52)]
    assert in_force(records, {"a": {"rate": 1}}) == {"a": {0: records[1]}}


def test_a_line_that_was_cut_off_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_records(path) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a":')
    assert read_records(path) == [{"a": 1}, {"a": 2}]


@pytest.fixture
def report() -> dict[str, Any]:
    """Two seeds whose curves differ by 10 points; a third seed lacks a part of its curve."""
    short, longest = f"{FULL}1", f"{FULL}2"
    lines = [
        *(record(short, seed, 10, 60 + 10 * seed) for seed in (0, 1, 2)),
        *(record(longest, seed, 20, 80 + 10 * seed) for seed in (0, 1)),
        record("other", 0, 15, 71), record("other", 1, 15, 83), record("other", 2, 15, 99),
        record("other", 0, 1, 0, rate=3), record("quick", 0, 5, 50), record("long", 0, 30, 80.5),
    ]  # fmt: skip
    settings = {name: {"rate": 1} for name in (short, longest, "other", "quick", "long", "never run")}
    return front_report({"sst2": in_force(lines, settings), "squad": {}})


def test_contenders_are_compared_with_the_curve_of_their_own_seed(report: dict[str, Any]) -> None:
    task = report["tasks"]["sst2"]
    rows = {row["contender"]: row for row in task["rows"]}
    assert task["num_runs"] == 10
    assert list(rows) == [f"{FULL}1", f"{FULL}2", "other", "quick", "long"]
    # 71 beside 70, 83 beside 80; the third seed has no whole curve.
    assert rows["other"]["against_full_at_equal_time"]["points"] == [1.0, 3.0]
    assert rows["other"]["against_longest_full"]["points"] == [-9.0, -7.0]
    assert rows["other"]["time_over_longest_full"] == 0.75
    # 77 on average, which the mean curve of 65 and 85 reaches after 16 seconds.
    assert rows["other"]["times_as_fast_at_equal_score"] == pytest.approx(16 / 15, abs=1e-3)
    assert rows["quick"]["against_full_at_equal_time"]["mean"] is None
    assert rows["quick"]["runs_shorter_than_full"] == 1
    assert rows["long"]["against_full_at_equal_time"]["points"] == [0.5]
    assert rows["long"]["runs_longer_than_full"] == 1
    # Beside the curve of its own seed, which ends at 80; that of both ends at 85.
    assert rows["long"]["times_as_fast_at_equal_score"] is None
    assert [rows[name]["score_is_beyond_full"] for name in ("other", "quick", "long")] == [False, False, True]
    assert "against_full_at_equal_time" not in rows[f"{FULL}2"]


def test_a_length_that_most_seeds_lack_is_in_no_curve_and_a_seed_that_lacks_one_has_none() -> None:
    runs = {
        f"{FULL}1": {0: record("1", 0, 10, 60)}, f"{FULL}2": {s: record("2", s, 20, 70 + s) for s in (0, 1)},
        f"{FULL}3": {s: record("3", s, 30, 80 + s) for s in (0, 1, 2)}, f"{FULL}4": {1: record("4", 1, 40, 90)},
        "other": {seed: record("5", seed, 50, 99) for seed in range(9)},
    }  # fmt: skip
    assert curves_by_seed(runs, "accuracy") == {0: [(20, 70), (30, 80)], 1: [(20, 71), (30, 81)]}
    assert curves_by_seed({f"{FULL}1": {}}, "accuracy") == curves_by_seed({}, "accuracy") == {}


def test_the_table_has_a_row_for_every_contender(report: dict[str, Any]) -> None:
    lines = as_markdown(report).splitlines()
    assert [line for line in lines if line.startswith("## ")] == ["## SST-2, accuracy"]
    assert lines[-5:] == [
        f"| {FULL}1 | 70.00 | 10 |  |  | -20.00, -20.00 | 0.50 | 3 |",
        f"| {FULL}2 | 85.00 | 20 |  |  |  | 1.00 | 2 |",
        "| other | 84.33 | 15 | +1.00, +3.00 | 1.07 | -9.00, -7.00 | 0.75 | 3 |",
        "| quick | 50.00 | 5 |  | below | -30.00 | 0.25 | 1 |",
        "| long | 80.50 | 30 | +0.50 | beyond | +0.50 | 1.50 | 1 |",
    ]
    assert points({"mean": 2.0, "points": [1.0, 2.0, 3.0], "interval_95": [-0.484, 4.484]}) == "+2.00 [-0.48, +4.48]"
    assert points({"mean": None, "points": []}) == points(None) == ""


def test_the_picture_shows_every_contender(report: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "front.svg"
    write_picture(report, path)
    drawn = ElementTree.parse(path).getroot()
    words = ["".join(element.itertext()) for element in drawn.iter() if element.tag.endswith("text")]
    assert {"SST-2, accuracy", "1  other", "2  quick", "3  long"} <= set(words)
    assert "squad" not in words


def test_a_point_lies_off_the_curve_by_its_difference(report: dict[str, Any]) -> None:
    task = report["tasks"]["sst2"]
    rows = {row["contender"]: row for row in task["rows"]}
    # The mean curve of two seeds is at 75 after 15 seconds.
    assert task["curve"] == [(10, 65), (20, 85)]
    assert height_of(rows["other"], task["curve"]) == 77
    assert height_of(rows["quick"], task["curve"]) == rows["quick"]["mean_score"] == 50


# --- contenders


@pytest.mark.parametrize("name", [*SETTINGS, "views"])
def test_every_contender_can_be_run(name: str, tmp_path: Path) -> None:
    for cell in cells_of(name).values():
        args = arguments(SETTINGS[cell.task], cell.contender, 3, str(tmp_path))
        assert (args.num_train_epochs, args.seed, args.pipeline_size) == (cell.contender.num_epochs, 3, 1)
        assert args.learning_rate == cell.settings["rate"]


@pytest.mark.parametrize(("folder", "groups"), [("front", list(SETTINGS)), ("views", ["views"])])
def test_runs_that_were_finished_earlier_still_count(folder: str, groups: list[str]) -> None:
    runs = front.finished(REPOSITORY / "benchmarks" / folder, groups)
    for group in groups:
        records = read_records(REPOSITORY / "benchmarks" / folder / f"{group}.jsonl")
        counted = {(name, seed) for name, by_seed in runs[group].items() for seed in by_seed}
        assert counted == {(record["contender"], record["seed"]) for record in records}
    assert any(runs[groups[0]].values())


def test_runs_are_chosen_by_names_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(study, "launch", lambda function, processes, *where, minutes: asked.append(where[3:]))
    names = ["LoRA", "LoRA, half of the epochs"]
    chosen = Settings(tmp_path, tmp_path, tmp_path, True, ["answers*"], [7, 8], ["LoRA*"])
    assert front.front(chosen)["tasks"].keys() == SETTINGS.keys()
    front.views(Settings(tmp_path, tmp_path, tmp_path, True))
    front.views(Settings(tmp_path, tmp_path, tmp_path, True, seeds=[]))
    assert asked == [(["answers", "answers_no_dropout"], [7, 8], names), (["views"], (0,), ["views: 1"])]
    for option, found in (("tasks", "sst"), ("contenders", "lora")):
        with pytest.raises(SystemExit, match=f"Found --{option} '{found}'; expected names or patterns of .*"):
            front.front(Settings(tmp_path, tmp_path, tmp_path, True, **{option: [found]}))


def test_prefixes_are_shares_of_the_layers() -> None:
    table = contenders(SETTINGS["cifar10"])
    frozen = [table[f"first {share} frozen"].options["freeze_at"] for share in ("1/3", "1/2", "2/3")]
    assert frozen == ["0:4", "0:6", "0:8"]
    assert table["top 2/3 only, no cache"].num_top_layers == 8


def test_a_rate_may_be_a_multiple_of_that_of_full_fine_tuning() -> None:
    cells = cells_of("sst2")
    name = "first 1/2 frozen, half of the epochs"
    assert cells[f"{name}, twice the rate"].settings == {**cells[name].settings, "rate": 2e-4}


def test_results_of_contenders_that_are_gone_stay_in_the_report() -> None:
    record = {"contender": "saliency", "seed": 3, "settings": {"rate": 1}}
    assert in_force([record], {"other": {"rate": 2}}) == {"other": {}, "saliency": {3: record}}


def test_settings_change_with_what_a_run_hangs_on() -> None:
    task, contender = SETTINGS["sst2"], Contender(2)
    settings = settings_of(task, contender)
    assert settings == json.loads(json.dumps(settings))
    for other in (replace(task, num_training=7), replace(task, rate=7.0), replace(task, batch=7)):
        assert settings_of(other, contender) != settings
    assert settings_of(task, replace(contender, num_epochs=3)) != settings
    assert settings_of(replace(task, num_epochs=7), contender) == settings


def test_runs_with_other_defaults_of_their_policy_are_not_the_same() -> None:
    contender = contenders(SETTINGS["sst2"])["gradient_norm"]
    settings = settings_of(SETTINGS["sst2"], contender)
    defaults = settings[DEFAULTS]
    assert {"freeze_alpha", "freeze_warmup"} <= set(defaults)
    assert "freeze_policy" not in defaults
    assert are_same({**settings, DEFAULTS: {**defaults, "freeze_not_there_yet": 1}}, settings)
    assert not are_same({**settings, DEFAULTS: {**defaults, "freeze_alpha": 0.2}}, settings)
    assert not are_same({**settings, "rate": 7}, settings)
    assert DEFAULTS not in settings_of(SETTINGS["sst2"], contenders(SETTINGS["sst2"])["first 1/2 frozen"])


def tiny_bert() -> Any:
    return make_bert(BertForTokenClassification, vocab_size=20)


def test_top_layers_only_leaves_the_rest_as_it_is() -> None:
    model = prepare_model(tiny_bert(), Contender(1, num_top_layers=1), 2)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[3] for name in trained if ".layer." in name} == {"1"}
    assert {"classifier.weight", "classifier.bias"} <= trained
    assert not any("embeddings" in name for name in trained)


def test_a_task_without_dropout_has_the_same_model_else() -> None:
    model, inputs = tiny_bert().train(), torch.arange(8).reshape(2, 4)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert not torch.equal(model(inputs).logits, model(inputs).logits)
    model = without_dropout(model)
    assert torch.equal(model(inputs).logits, model(inputs).logits)
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert {name.removesuffix("_no_dropout") for name in SETTINGS} == set(TASKS)
    assert set(SETTINGS) == set(TITLES)


def test_lora_sits_on_every_linear_layer_and_the_head_is_trained() -> None:
    model = prepare_model(tiny_bert(), Contender(1, lora=LORA), 2)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # Two matrices for each of six linear layers of two layers; weight and bias of the head.
    assert sum("lora_" in name for name in trained) == 2 * 6 * 2
    assert len(trained) == 2 * 6 * 2 + 2


# --- answers as tags


@pytest.mark.parametrize(
    ("answers", "context"),
    [(["Rome", "Bonn"], "It is Rome."), (["No"], "No."), (["It is Rome. Bonn"], "It is Rome. Bonn was it")],
)
def test_a_context_is_cut_to_the_sentence_of_the_answer(answers: list[str], context: str) -> None:
    whole = "No. It is Rome. Bonn was it"
    row = {"context": whole, "answers": {"text": answers, "answer_start": [whole.index(answer) for answer in answers]}}
    found = answer_sentence(row)
    assert found["context"] == context
    assert found["answers"]["text"] == answers[:1]
    [start] = found["answers"]["answer_start"]
    assert context[start:].startswith(answers[0])


def test_answer_tokens_are_tagged_inside_of_the_context() -> None:
    starts = [-1, -1, -1, 0, 4, 9, 12, -1]
    none = IGNORED
    assert answer_tags(starts, range(4, 7)) == [none, none, none, 0, 1, 2, 2, none]
    assert answer_tags(starts, range(3, 4)) == [none, none, none, 1, 0, 0, 0, none]
    # Both on the first token, which is none of the context's: no answer.
    assert answer_tags(starts, range(1)) == [none, none, none, 0, 0, 0, 0, none]


def test_the_best_span_begins_where_an_answer_is_likeliest() -> None:
    # Columns O, B, I. Token 1 is none of the context's, token 5 begins most likely, though O is likelier still.
    logits = np.array([[0, -9, 0], [0, 9, 0], [0, -5, 1], [0, -3, 2], [0, -4, 3], [0, -1, 0], [2, 0, 3], [2, 0, 1]])
    is_context = np.array([False, False, True, True, True, True, True, True])
    assert best_span(logits, is_context) == range(5, 7)
    assert best_span(logits[:6], is_context[:6]) == range(5, 6)
    is_context[5] = False
    assert best_span(logits, is_context) == range(6, 7)


def test_spans_are_scored_by_their_tokens() -> None:
    true = range(3, 6)
    assert span_f1(true, true) == 1
    # Two of three tokens, with two others.
    assert span_f1(range(4, 8), true) == pytest.approx(2 * 2 / 7)
    assert span_f1(range(6, 8), true) == 0


def test_augmented_images_differ_from_access_to_access() -> None:
    image = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    rows = {"image": [image] * 8, "label": [0] * 8}
    plain = read_images(rows, augments=False)["pixel_values"]
    assert all(pixels.equal(plain[0]) for pixels in plain)
    augmented = read_images(rows, augments=True)["pixel_values"]
    assert {pixels.shape for pixels in augmented} == {(3, 32, 32)}
    assert not all(pixels.equal(augmented[0]) for pixels in augmented)
