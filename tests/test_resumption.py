"""Which checkpoint a run goes on from and under which layout, without one: how often its files are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_pipetransformer import checkpoint
from hf_pipetransformer.freeze.policies import Fixed
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.run import resumption
from hf_pipetransformer.run.resumption import Resumption, find_resumption
from hf_pipetransformer.run.thawing import longest_pipeline


@pytest.mark.parametrize("where", [True, "checkpoint-4"])
def test_every_file_of_the_checkpoint_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: Any):
    """Reading hashes them, which takes as long as reading a large model."""
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    newest, read = str(tmp_path / "checkpoint-4"), []

    def read_state(folder: str) -> dict[str, Any]:
        read.append(folder)
        return {"layout": {}, "step": 4}

    monkeypatch.setattr(checkpoint, "read_state", read_state)
    monkeypatch.setattr(resumption, "is_plain", lambda folder: False)
    monkeypatch.setattr(resumption, "check_same_run", lambda *_: None)
    trainer = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path)))
    description: Any = SimpleNamespace(trainer=trainer, fields={}, data=dict)
    topology: Any = SimpleNamespace(decide=lambda call: call())
    found = find_resumption(where if where is True else newest, topology, description)
    assert (found.folder, found.step) == (newest, 4)
    assert read == [newest]


L = 4
WHOLE, SHORT = Layout(L, 0, 2, 1, (0, 5, 10), 2, "1f1b"), Layout(L, 3, 1, 2, (0, 10), 1, "1f1b")


def gone_on_with(policy: Any, plan: dict[int, Layout] | None, saved_size: int) -> tuple[Resumption, Layout]:
    """A run of two processes, saved with three layers frozen; K=1 is enough then, K=2 with none."""
    asked = {"pipeline_parallel_size": None, "pipeline_parallel_num_microbatches": None}
    fields = {"arguments": asked | {"pipeline_schedule": "1f1b", "pipeline_chunks": None}}
    args = SimpleNamespace(per_device_train_batch_size=4, pipeline_size=None, layout_plan="plan")
    description: Any = SimpleNamespace(fields=fields, trainer=SimpleNamespace(args=args))
    saved = Layout(L, 3, saved_size, 1, (0, 10) if saved_size == 1 else (0, 8, 10), 1, "1f1b")
    saved = replace(saved, num_replicas=2) if saved_size == 1 else saved
    layouts = {"layout": saved.as_event(), "first_layout": WHOLE.as_event()}
    # What was asked for is another thing now if it was saved with two stages.
    before = asked | {"pipeline_schedule": "1f1b", "pipeline_chunks": None if saved_size == 1 else 2}
    state = {**layouts, "step": 5, "arguments": before}
    structure = SimpleNamespace(num_layers=L, cut_positions=lambda: range(11))

    def planned(samples: int, num_frozen: int = 0) -> Layout:
        return SHORT if num_frozen else WHOLE

    plans = SimpleNamespace(layout=planned, probe=SimpleNamespace(structure=structure), unfit=0)
    start_up: Any = SimpleNamespace(plans=plans, probe=plans.probe)
    resumption = Resumption("checkpoint-5", state, description)
    return resumption, resumption.choose_layout(start_up, plan, 2, policy)


def test_a_run_that_goes_on_elsewhere_may_grow_to_what_it_would_have_begun_under() -> None:
    falling, growing = Fixed({2: 3, 8: 0}), Fixed({2: 3})
    resumption, layout = gone_on_with(falling, None, saved_size=2)
    assert (resumption.is_elsewhere, layout, resumption.first_layout) == (True, SHORT, WHOLE)
    assert longest_pipeline(layout, resumption.first_layout, falling, None) == 2
    resumption, layout = gone_on_with(growing, None, saved_size=2)
    assert (resumption.is_elsewhere, layout, resumption.first_layout) == (True, SHORT, None)
    resumption, layout = gone_on_with(falling, None, saved_size=1)
    assert (resumption.is_elsewhere, layout, resumption.first_layout) == (False, SHORT, WHOLE)
    assert longest_pipeline(layout, resumption.first_layout, growing, None) == 1
    plan = {0: WHOLE, 2: SHORT, 8: WHOLE}
    resumption, layout = gone_on_with(growing, plan, saved_size=1)
    assert layout == SHORT
    assert longest_pipeline(layout, resumption.first_layout, growing, plan) == 2
