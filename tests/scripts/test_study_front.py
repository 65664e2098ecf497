"""What the study of accuracy against time makes of its runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import front_tasks
import numpy as np
import pytest
import study_front
import torch
from front_picture import height_of, write_picture
from front_report import (
    DEFAULTS,
    are_same,
    at_equal_time,
    curves_by_seed,
    in_force,
    make_report,
    paired,
    read_records,
    seconds_to,
)
from front_spans import IGNORED, answer_sentence, answer_tags, best_span, span_f1, true_span
from front_table import TITLES, as_markdown, points
from front_tasks import SETTINGS
from PIL import Image
from study_front import (
    FULL,
    Contender,
    arguments,
    contenders,
    is_chosen,
    prepare_model,
    settings_of,
)
from torch import nn
from transformers import BertForTokenClassification

from tests.tiny_bert import make_bert


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
    records = [record("a", 0, 1, 50, rate=2), record("a", 0, 2, 51), record("a", 0, 3, 52), record("b", 0, 1, 50)]
    assert in_force(records, {"a": {"rate": 1}}) == {"a": {0: records[1]}}


def test_a_line_that_was_cut_off_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_records(path) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a":')
    assert read_records(path) == [{"a": 1}, {"a": 2}]


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    """Two seeds whose curves differ by 10 points; a third seed lacks a part of its curve."""
    short, longest = f"{FULL}1", f"{FULL}2"
    lines = [
        *(record(short, seed, 10, 60 + 10 * seed) for seed in (0, 1, 2)),
        *(record(longest, seed, 20, 80 + 10 * seed) for seed in (0, 1)),
        record("other", 0, 15, 71), record("other", 1, 15, 83), record("other", 2, 15, 99),
        record("other", 0, 1, 0, rate=3), record("quick", 0, 5, 50), record("long", 0, 30, 80.5),
    ]  # fmt: skip
    (tmp_path / "sst2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {name: {"rate": 1} for name in (short, longest, "other", "quick", "long", "never run")}
    return make_report(tmp_path, {"sst2": settings, "squad": {}}, {"sst2": "accuracy", "squad": "f1"}, FULL)


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
        "1": {0: record("1", 0, 10, 60)}, "2": {seed: record("2", seed, 20, 70 + seed) for seed in (0, 1)},
        "3": {seed: record("3", seed, 30, 80 + seed) for seed in (0, 1, 2)}, "4": {1: record("4", 1, 40, 90)},
    }  # fmt: skip
    assert curves_by_seed(runs, ["1", "2", "3", "4"], "accuracy") == {0: [(20, 70), (30, 80)], 1: [(20, 71), (30, 81)]}
    assert curves_by_seed({"1": {}}, ["1"], "accuracy") == curves_by_seed({}, [], "accuracy") == {}


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


@pytest.mark.parametrize("name", SETTINGS)
def test_every_contender_can_be_run(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    assert contenders(settings)
    for contender in contenders(settings).values():
        args = arguments({}, settings, contender, 3, str(tmp_path))
        assert (args.num_train_epochs, args.seed, args.pipeline_size) == (contender.num_epochs, 3, 1)


def test_contenders_are_chosen_by_name_or_pattern() -> None:
    names = ["first 1/3 frozen", "first 1/3 frozen, twice the epochs", "LoRA"]
    assert [is_chosen(name, None) for name in names] == [True, True, True]
    assert [is_chosen(name, ["first 1/3 frozen"]) for name in names] == [True, False, False]
    assert [is_chosen(name, ["first*", "LoRA"]) for name in names] == [True, True, True]


def test_prefixes_are_shares_of_the_layers() -> None:
    table = contenders(SETTINGS["cifar10"])
    frozen = [table[f"first {share} frozen"].options["freeze_at"] for share in ("1/6", "1/3", "1/2", "2/3")]
    assert frozen == ["0:2", "0:4", "0:6", "0:8"]
    assert table["top 1/3 only, no cache"].num_top_layers == 4


def test_results_of_contenders_that_are_gone_stay_in_the_report() -> None:
    record = {"contender": "saliency", "seed": 3, "settings": {"rate": 1}}
    assert in_force([record], {}) == {}
    assert in_force([record], {}, study_front.RETIRED) == {"saliency": {3: record}}
    assert study_front.RETIRED.isdisjoint(contenders(SETTINGS["sst2"]))


def test_settings_change_with_what_a_run_hangs_on() -> None:
    task, contender = SETTINGS["sst2"], Contender("lora", 2, lora=study_front.LORA)
    settings = settings_of(task, contender)
    assert settings == json.loads(json.dumps(settings))
    for other in (replace(task, num_training=7), replace(task, rates={"lora": 7.0}), replace(task, batch=7)):
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
    model = prepare_model(tiny_bert(), Contender("top", 1, num_top_layers=1), 2)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[3] for name in trained if ".layer." in name} == {"1"}
    assert {"classifier.weight", "classifier.bias"} <= trained
    assert not any("embeddings" in name for name in trained)


class WithDropout(front_tasks.Task):
    pool, arguments, given = None, {"a": 1}, {"b": 2}

    def model(self) -> Any:
        model = tiny_bert()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        return model.train()

    def score(self, model: Any) -> dict[str, float]:
        return {"parameters": model.num_parameters()}


def test_a_task_without_dropout_is_the_same_else() -> None:
    task, inputs = WithDropout(), torch.arange(8).reshape(2, 4)
    without = front_tasks.WithoutDropout(task)
    for one, is_repeatable in ((task, False), (without, True)):
        model = one.model()
        assert torch.equal(model(inputs).logits, model(inputs).logits) == is_repeatable
        assert one.score(model) == {"parameters": model.num_parameters()}
    assert (without.pool, without.arguments, without.given) == (None, {"a": 1}, {"b": 2})
    assert set(front_tasks.TASKS) == set(SETTINGS) == set(TITLES)


def test_lora_sits_on_every_linear_layer_and_the_head_is_trained() -> None:
    model = prepare_model(tiny_bert(), Contender("lora", 1, lora=study_front.LORA), 2)
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
    assert answer_tags(starts, 4, 6) == [none, none, none, 0, 1, 2, 2, none]
    assert answer_tags(starts, 3, 3) == [none, none, none, 1, 0, 0, 0, none]
    # Both on the first token, which is none of the context's: no answer.
    assert answer_tags(starts, 0, 0) == [none, none, none, 0, 0, 0, 0, none]


def test_the_best_span_begins_where_an_answer_is_likeliest() -> None:
    # Columns O, B, I. Token 1 is none of the context's, token 5 begins most likely, though O is likelier still.
    logits = np.array([[0, -9, 0], [0, 9, 0], [0, -5, 1], [0, -3, 2], [0, -4, 3], [0, -1, 0], [2, 0, 3], [2, 0, 1]])
    is_context = np.array([False, False, True, True, True, True, True, True])
    assert best_span(logits, is_context) == range(5, 7)
    assert best_span(logits[:6], is_context[:6]) == range(5, 6)
    is_context[5] = False
    assert best_span(logits, is_context) == range(6, 7)


def test_spans_are_scored_by_their_tokens() -> None:
    true = true_span([IGNORED, 0, 0, 1, 2, 2, 0, IGNORED])
    assert true == range(3, 6)
    assert span_f1(true, true) == 1
    # Two of three tokens, with two others.
    assert span_f1(range(4, 8), true) == pytest.approx(2 * 2 / 7)
    assert span_f1(range(6, 8), true) == 0


def test_augmented_images_differ_from_access_to_access() -> None:
    image = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    rows = {"image": [image] * 8, "label": [0] * 8}
    plain = front_tasks.ImageReader(augments=False)(rows)["pixel_values"]
    assert all(pixels.equal(plain[0]) for pixels in plain)
    augmented = front_tasks.ImageReader(augments=True)(rows)["pixel_values"]
    assert {pixels.shape for pixels in augmented} == {(3, 32, 32)}
    assert not all(pixels.equal(augmented[0]) for pixels in augmented)
