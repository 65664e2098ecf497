"""The events file after a run that was killed while it wrote, and what is read of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hf_pipetransformer.layout import Layout
from hf_pipetransformer.report.events import (
    EVENTS_FILE,
    EventLog,
    announce,
    read_events,
    read_known_microbatches,
    read_layouts,
    read_unfit,
)


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
