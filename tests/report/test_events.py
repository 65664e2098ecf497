"""The events file after a run that was killed while it wrote, and what is read of it."""

from __future__ import annotations

import json
import logging
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from hf_pipetransformer.report import announce
from hf_pipetransformer.report.events import (
    EVENTS_FILE,
    EventLog,
    read_events,
    read_known_microbatches,
    read_layouts,
    read_unfit,
)
from hf_pipetransformer.schedules.layout import Layout
from tests.support.mutations import GONE, NO_FILES, draw_mutations, mutated, refusal_of


LAYOUT = Layout(
    num_layers=4,
    num_frozen_layers=0,
    num_stages=2,
    num_replicas=1,
    boundaries=(0, 5, 10),
    num_microbatches=2,
    schedule="1f1b",
)
TRIAL = {
    "what": "microbatches",
    "pipeline_size": 2,
    "num_chunks": 1,
    "num_layers": 4,
    "num_replicas": 1,
    "samples_per_pipeline": 8,
    "schedule": "1f1b",
    "num_microbatches": 6,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of one run, two events."""
    log = EventLog(str(tmp_path))
    log.write("run", 0, 0.0, layout=LAYOUT.as_event())
    log.write("profile", 3, 0.1, **TRIAL)
    return tmp_path / EVENTS_FILE


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def kinds(path: Path) -> list[str]:
    return [event["event"] for event in read_events(str(path))]


def test_a_run_after_a_torn_line_begins_on_a_line_of_its_own(path: Path):
    cut(path, 10)
    EventLog(str(path.parent)).write("run", 0, 0.0, layout=LAYOUT.as_event())
    assert kinds(path) == ["run", "run"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_whole_event_without_its_line_end_is_kept(path: Path):
    cut(path, 1)
    EventLog(str(path.parent)).write("end", 4, 1.0)
    assert kinds(path) == ["run", "profile", "end"]


@pytest.mark.parametrize("content", [b"", b'{"event": "ru', b"\0" * 40, b"\xff\xfe", b"\n", b"5"])
def test_whatever_is_left_of_a_first_line_is_no_part_of_the_next(tmp_path: Path, content: bytes):
    (tmp_path / EVENTS_FILE).write_bytes(content)
    EventLog(str(tmp_path)).write("run", 0, 0.0, layout=LAYOUT.as_event())
    assert json.loads((tmp_path / EVENTS_FILE).read_bytes().splitlines()[-1])["event"] == "run"


@pytest.mark.parametrize("num_bytes", [2, 20, 60])
def test_a_torn_last_line_does_not_spoil_a_plan(path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture):
    cut(path, num_bytes)
    assert read_layouts(str(path)) == {0: LAYOUT}
    assert "the last line was cut off" in caplog.text


@pytest.mark.parametrize("line", [b'{"event": "free{"event": "run", "step": 0}', b"[]", b"", b"\xff", b"null"])
def test_a_torn_line_before_others_is_refused_by_its_number(path: Path, line: bytes):
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, line + b"\n", *others]))
    with pytest.raises(ValueError, match=r"not the events file of a run: line 2 is"):
        read_layouts(str(path))
    # M is not worth ending a run for.
    assert read_known_microbatches(str(path), LAYOUT, 4) == {}


DEEP = "[" * 50_000


@pytest.mark.parametrize(
    ("what", "change", "said"),
    [
        ("num_microbatches", "1.5", "found 1.5 as 'num_microbatches', expected a whole number from 1 to"),
        ("num_microbatches", "NaN", "found nan as 'num_microbatches', expected a whole number"),
        ("num_microbatches", "1000000000", "found 1000000000 as 'num_microbatches', expected a whole number"),
        ("num_microbatches", "[]", r"found \[\] as 'num_microbatches', expected a whole number"),
        ("num_microbatches", DEEP, "expected an event"),
        ("num_layers", "4.0", "found 4.0 as 'num_layers'"),
        ("num_layers", "-1", "found -1 as 'num_layers'"),
        ("boundaries", "[]", "do not cut 10 blocks into 2"),
        ("boundaries", '"05"', "found '05' as 'boundaries', expected a list"),
        ("boundaries", "[0, 5.5, 10]", "found 5.5 as 'boundaries'"),
        ("schedule", '"1f2b"', "Unknown schedule '1f2b'"),
        ("schedule", "null", "found None as 'schedule', expected a text"),
        ("token_slices", "[3]", "found 3 as 'token_slices', expected a list"),
        ("speed", "3", "found 'speed' in a layout"),
        (None, "3", "found 3 as 'layout', expected an object"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_its_line(path: Path, what: str | None, change: str, said: str):
    text = json.dumps({"event": "transition", "step": 4, "to": {**LAYOUT.as_event(), what: "@"} if what else "@"})
    with path.open("a", encoding="utf-8") as file:
        file.write(text.replace('"@"', change) + "\n" + '{"event": "end", "step": 9}\n')
    with pytest.raises(ValueError, match=rf"{path} is not the events file of a run: line 3.*{said}") as caught:
        read_layouts(str(path))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("step", ["3.5", "-5", "NaN", "1e30", "true", "null", '"3"', str(10**30)])
def test_a_step_that_cannot_be_is_no_event(path: Path, step: str):
    with path.open("a", encoding="utf-8") as file:
        file.write('{"event": "end", "step": @}\n'.replace("@", step))
    with pytest.raises(ValueError, match="line 3 is .*expected an event"):
        read_layouts(str(path))


def test_events_in_another_order_are_no_plan(path: Path):
    log = EventLog(str(path.parent))
    for step in (7, 4):
        log.write("transition", step, 0.5, to=LAYOUT.as_event())
    with pytest.raises(
        ValueError,
        match="line 4: found a transition of step 4 after one of step 7, expected the events in their order",
    ):
        read_layouts(str(path))


@pytest.mark.parametrize("count", [1.5, 0, -3, 9, 10**9, float("nan"), "4", None, []])
def test_a_number_of_micro_batches_that_cannot_be_is_measured_anew(
    path: Path, count: object, caplog: pytest.LogCaptureFixture
):
    EventLog(str(path.parent)).write("profile", 5, 0.2, **{**TRIAL, "num_microbatches": count})
    assert read_known_microbatches(str(path), LAYOUT, 4) == {}
    assert f"{path} cannot be read" in caplog.text and "M is measured again" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"event": "walk", "step": 0}', "found an event 'walk', expected one of"),
        ('{"event": "run", "step": 0}', "line 1: found no 'layout'. Give the .* of an earlier run as it was written"),
        ('{"event": "end", "step": 0}', "holds no run: expected the events of a run that began to train"),
    ],
)
def test_a_plan_without_a_run_is_refused(tmp_path: Path, content: str, words: str):
    (tmp_path / EVENTS_FILE).write_text(content + "\n")
    with pytest.raises(ValueError, match=words):
        read_layouts(str(tmp_path / EVENTS_FILE))


def test_a_missing_plan_is_refused_in_words(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot be read \(.*none\.jsonl.*\): expected the events file of a run"):
        read_layouts(str(tmp_path / "none.jsonl"))


def test_a_known_number_of_micro_batches_is_not_taken_in_silence(path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        assert read_known_microbatches(str(path), LAYOUT, 4) == {(2, 1): 6}
        assert f"M=6 for K=2: measured by an earlier run in this folder ({path})" in caplog.text
        caplog.clear()
        assert read_known_microbatches(str(path), LAYOUT, 16) == {}
        assert caplog.text == ""


def test_numbers_of_micro_batches_are_known_by_the_stages_of_a_rank_too(path: Path, caplog: pytest.LogCaptureFixture):
    EventLog(str(path.parent)).write("profile", 5, 0.2, **{**TRIAL, "num_chunks": 3, "num_microbatches": 4})
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        assert read_known_microbatches(str(path), LAYOUT, 4) == {(2, 1): 6, (2, 3): 4}
    assert "M=6 for K=2, M=4 for K=2 V=3: measured" in caplog.text


def test_what_ran_out_of_memory_is_remembered_for_the_same_conditions(path: Path, caplog: pytest.LogCaptureFixture):
    log, conditions = EventLog(str(path.parent)), {"device_bytes": 1e9, "num_microbatches": None}
    fault = {"layout": LAYOUT.as_event(), "conditions": conditions}
    log.write("fault", 3, 0.1, cause="KeyError: no such column", out_of_memory=False, **fault)
    log.write("fault", 0, 0.0, cause="OutOfMemoryError, before there was a layout", out_of_memory=True)
    assert read_unfit(str(path), conditions) == 0
    log.write("fault", 5, 0.2, cause="rank 1: OutOfMemoryError", out_of_memory=True, **fault)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        assert read_unfit(str(path), {**conditions, "device_bytes": 2e9}) == 0
        assert caplog.text == ""
        assert read_unfit(str(path), conditions) == 2
        assert f"K=2 ran out of memory in an earlier run in this folder ({path})" in caplog.text
    assert read_unfit(None, conditions) == 0


def test_a_script_that_sets_up_logging_as_those_of_transformers_do_gets_the_lines(caplog: pytest.LogCaptureFixture):
    root, own = logging.getLogger(), logging.getLogger("hf_pipetransformer")
    levels = root.level, own.level
    try:
        root.setLevel(logging.WARNING)  # as after basicConfig(handlers=[...])
        own.setLevel(logging.NOTSET)
        announce("K=2")
        assert "K=2" in caplog.text
        own.setLevel(logging.WARNING)
        announce("K=1")
        assert "K=1" not in caplog.text
    finally:
        root.setLevel(levels[0])
        own.setLevel(levels[1])


def a_plan(folder: Path) -> list[dict[str, object]]:
    """The events of a run with everything that a replay reads."""
    sliced = replace(LAYOUT, schedule="token", token_slices=((4,), (6, 2)))
    frozen = replace(LAYOUT, num_frozen_layers=2, num_stages=1, num_replicas=2, boundaries=(0, 10), cache_level=1)
    log = EventLog(str(folder))
    log.write("run", 0, 0.0, layout=LAYOUT.as_event())
    log.write("profile", 2, 0.1, what="trial", num_microbatches=4)
    log.write("transition", 3, 0.1, **{"from": LAYOUT.as_event(), "to": sliced.as_event()})
    log.write("transition", 5, 0.2, **{"from": LAYOUT.as_event(), "to": frozen.as_event()})
    log.write("end", 8, 1.0, train_loss=0.5)
    return [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]


def is_unread(path: tuple[str | int, ...]) -> bool:
    """Places of an event that a replay does not read."""
    return path[1:2] in (("epoch",), ("time_s",), ("from",), ("train_loss",))


# A layout without these is that of an earlier release.
HAVE_DEFAULTS = {"cache_level", "num_chunks", "placement", "token_slices"}


def test_a_mutated_events_file_is_refused_in_one_sentence(tmp_path: Path):
    events = a_plan(tmp_path)
    assert read_layouts(str(tmp_path / EVENTS_FILE)).keys() == {0, 2, 3, 5}
    path, num_refused = tmp_path / "mutated.jsonl", 0
    for place, new in draw_mutations(events, 400, seed=30, spared=lambda path: len(path) == 1 or is_unread(path)):
        if new is GONE and place[-1] in HAVE_DEFAULTS:
            continue
        path.write_text("".join(json.dumps(event) + "\n" for event in mutated(events, place, new)))
        text = refusal_of(lambda: read_layouts(str(path)))
        assert text is not None, f"{place} may be {new!r}"
        assert text.startswith(str(path)) and f"line {int(place[0]) + 1}" in text, (place, new, text)
        assert "\n" not in text and len(text) < 600
        num_refused += 1
    assert num_refused >= 300


def test_an_events_file_with_any_bytes_changed_is_read_or_refused_in_one_sentence(tmp_path: Path):
    """Whatever stands in the file, nothing but a ValueError with its path comes of it."""
    a_plan(tmp_path)
    path, draw = tmp_path / EVENTS_FILE, random.Random(30)
    whole = path.read_bytes()
    num_refused = num_read = 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            start = draw.randrange(len(content))
            content[start : start + draw.randrange(3)] = draw.choice(
                [b"", b"\0", b"9", b"-", b"e9", b"[", b'"', b"}", b"\n", b"\xff", b"null", b"1" * 5000]
            )
        path.write_bytes(content)
        text = refusal_of(lambda: read_layouts(str(path)))
        if text is not None:
            assert text.startswith(str(path)) and "\n" not in text, text
            num_refused += 1
        else:
            for step, layout in read_layouts(str(path)).items():
                assert isinstance(step, int) and step >= 0 and isinstance(layout.num_microbatches, int)
                num_read += 1
        read_known_microbatches(str(path), LAYOUT, 4)
        read_unfit(str(path), {})
    assert num_refused and num_read


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_neither_read_nor_written(tmp_path: Path, what: str):
    path = tmp_path / EVENTS_FILE
    NO_FILES[what](path)
    with pytest.raises(OSError):  # noqa: PT011
        EventLog(str(tmp_path)).write("end", 4, 1.0)
    # A plan may be a link to the events of a run.
    said = "line 1 is" if what == "link" else "cannot be read .*expected the events file of a run"
    with pytest.raises(ValueError, match=said):
        read_layouts(str(path))


def test_a_file_without_end_is_not_read(tmp_path: Path):
    path = tmp_path / EVENTS_FILE
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(ValueError, match="cannot be written .*its last line has more than 16777216 bytes"):
        EventLog(str(tmp_path)).check()
    with pytest.raises(ValueError, match="line 1 is"):
        read_layouts(str(path))
