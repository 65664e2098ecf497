"""The trace of a step: each action of the action list once, in order, and nothing overlaps in a lane."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pipetransformer.engine.timing import StepTrace
from hf_pipetransformer.schedules.actions import Action, Op
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import find_schedule
from tests.support.models import build_model, collate, make_dataset
from tests.support.one_process import ModelPipeline
from tests.training.test_expectation import trainer_of


CPU = torch.device("cpu")
K, M = 2, 4


def slices(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def actions_of(events: Sequence[dict[str, Any]]) -> list[str]:
    """The actions in the order in which they began."""
    found = [event for event in slices(events) if "order" in event["args"]]
    in_order = sorted(found, key=lambda event: event["args"]["order"])
    assert [event["args"]["order"] for event in in_order] == list(range(len(found)))
    begins = [event["ts"] for event in in_order]
    assert begins == sorted(begins)
    return [event["args"]["action"] for event in in_order]


def check_lanes(events: Sequence[dict[str, Any]]) -> None:
    """No two slices of a lane overlap, and each lane has a name."""
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    lanes = defaultdict(list)
    for event in slices(events):
        assert event["dur"] >= 0 and event["ts"] >= 0 and event["name"]
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(lanes) <= named
    for times in lanes.values():
        times.sort()
        for (_, end), (begin, _) in zip(times, times[1:], strict=False):
            assert begin >= end - 2e-3, "times are rounded to a thousandth of a microsecond"


@pytest.mark.parametrize(
    ("name", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2)]
)
def test_each_action_is_traced_once_in_order(name: str, num_chunks: int) -> None:
    schedule = find_schedule(name)
    placement = Placement(K, num_chunks, schedule.abilities.placement)
    model = build_model("bert_sequence")
    num_blocks = 2 * model.config.num_hidden_layers + 2
    boundaries = [num_blocks * stage // placement.num_stages for stage in range(placement.num_stages + 1)]
    inputs = collate([make_dataset("bert_sequence", 8)[at] for at in range(8)])
    pipeline = ModelPipeline(model, boundaries, placement, inputs, M, splits=name.startswith("zb"))
    table = schedule.table(K, M, num_chunks, 0)
    for rank, engine in enumerate(pipeline.engines):
        engine.meter.trace = StepTrace(CPU, tuple(placement.stages_of(rank)))
    pipeline.run(table)
    for rank, engine in enumerate(pipeline.engines):
        assert engine.meter.trace is not None
        events = json.loads(json.dumps(engine.meter.trace.events(rank)))
        assert actions_of(events) == [str(action) for action in table[rank]]
        check_lanes(events)
        assert {event["pid"] for event in events} == {rank}
        receives = [action for action in table[rank] if action.op in (Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD)]
        waits = [event["name"] for event in slices(events) if event["cat"] == "waits"]
        assert {f"wait for {action}" for action in receives} <= set(waits) and len(set(waits)) == len(waits)
        assert not any("still_under_way" in event["args"] for event in slices(events))
        computed = {event["args"]["stage"] for event in slices(events) if event["cat"].startswith("stage")}
        assert computed == set(placement.stages_of(rank))


def test_transfers_that_overlap_lie_beside_each_other() -> None:
    trace = StepTrace(CPU, (0,))
    first, second = Action(Op.RECEIVE_FORWARD, 0), Action(Op.RECEIVE_FORWARD, 1)
    trace.post(first)
    trace.post(second)
    with trace.waiting(first):
        pass
    events = trace.events(3)
    check_lanes(events)
    assert actions_of(events) == ["RF0", "RF1"]
    lanes = {event["tid"] for event in slices(events) if event["cat"] == "transfers"}
    assert len(lanes) == 2
    left = [event["args"]["action"] for event in slices(events) if event["args"].get("still_under_way")]
    assert left == ["RF1"]


def test_a_run_writes_the_trace_of_the_step_that_was_asked_for(tmp_path: Path) -> None:
    options: dict[str, Any] = {"freeze_policy": "none", "freeze_at": None, "save_strategy": "no"}
    trainer = trainer_of(tmp_path, pipeline_trace_step=2, pipeline_parallel_num_microbatches=2, **options)
    trainer.train()
    assert [path.name for path in tmp_path.glob("trace*")] == ["trace_step_2.json"]
    events = json.loads((tmp_path / "trace_step_2.json").read_text())["traceEvents"]
    check_lanes(events)
    assert actions_of(events) == ["F0", "B0", "F1", "B1"]
    ends = [event["name"] for event in slices(events) if event["cat"] == "gradients and update"]
    assert ends[-2:] == ["clip gradients", "update"]


def test_a_step_that_never_comes_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path, pipeline_trace_step=99, max_steps=2, save_strategy="no")
    trainer.train()
    assert "pipeline_trace_step=99: this training did not come to that step" in caplog.text
    assert not list(tmp_path.glob("trace*"))
