"""What a training says of itself when it is called in a way that cannot work, on stand-ins for its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.elastic.decisions import Decisions
from hf_pipetransformer.engine.engine import ActionListRun as EngineRun
from hf_pipetransformer.runtime import gathering
from hf_pipetransformer.runtime.pipeline import PipelineShell
from hf_pipetransformer.training import expectation, start, weights
from hf_pipetransformer.training.training import Training


def test_actions_that_have_not_run() -> None:
    with pytest.raises(ValueError, match="2 actions of the previous list have not run"):
        EngineRun.extend(cast(Any, SimpleNamespace(_position=1, actions=[1, 2, 3])), [])


def test_a_layout_that_changes_behind_steps_that_were_read() -> None:
    training = SimpleNamespace(
        steps=SimpleNamespace(are_over=lambda _: False, num_read_ahead=1),
        loader=None,
        resumption=None,
        transitions=SimpleNamespace(before_step=lambda: "moved"),
    )
    with pytest.raises(RuntimeError, match="The layout changes although steps were read ahead"):
        Training.begin_step(cast(Any, training), iter([]), 1)


def test_a_model_that_must_be_gathered_to_be_saved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_compat, "why_gathered_to_save", lambda _: "it saves in a way of its own")
    run = SimpleNamespace(context=SimpleNamespace(trainer=SimpleNamespace(model=nn.Linear(1, 1))), _warned=set())
    for _ in range(2):
        assert weights.ModelWeights._gathered_to_save(cast(Any, run)) is None
    assert caplog.text.count("Saving gathers the whole model in the memory of rank 0") == 1


def test_a_second_training_of_a_model_that_fits_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    room = SimpleNamespace(needed=2, free=1)
    monkeypatch.setattr(weights, "least_room", lambda *_: room)
    stage = SimpleNamespace(
        is_training=False, is_spread=True, store=SimpleNamespace(named=dict), settings=SimpleNamespace(topology=None)
    )
    pipeline = SimpleNamespace(stage=stage)
    put = SimpleNamespace(run=SimpleNamespace(is_started=lambda _: True, pipeline=pipeline))
    with pytest.raises(ValueError, match="was called again, and a training starts from the whole model"):
        weights.ModelWeights.put_together(cast(Any, put))
    room.needed = 1


def test_parameters_that_freeze_in_use(caplog: pytest.LogCaptureFixture) -> None:
    decisions = SimpleNamespace(
        write=lambda *_, **__: None, policy=SimpleNamespace(describe=lambda: "some"), _num_fruitless=1
    )
    decision = SimpleNamespace(as_event=dict, freezes=True)
    Decisions._report(cast(Any, decisions), cast(Any, decision), ["embeddings.weight"])
    assert "Frozen with the first layers although layers above use them too: embeddings.weight" in caplog.text


def test_decisions_by_the_epoch_of_a_stream(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(start, "check_policy", lambda *_: [])
    pipeline = SimpleNamespace(layout=SimpleNamespace(num_layers=4))
    own = SimpleNamespace(
        context=SimpleNamespace(
            args=SimpleNamespace(freeze_interval="epoch", freeze_min_active_layers=1), topology=SimpleNamespace(rank=0)
        ),
        run=SimpleNamespace(policy=SimpleNamespace(freezes=True), pipeline=pipeline),
    )
    assert start.TrainingSetup._steps_per_epoch(cast(Any, own), iter([]), 9) == 9
    assert "the data set has no length, so no decision comes before the end" in caplog.text


def test_an_optimizer_that_cannot_be_timed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(expectation, "_copies", fail)
    assert expectation.optimizer_seconds(cast(Any, None), []) == 0
    assert "The optimizer step could not be timed" in caplog.text


def test_a_call_of_a_model_in_parts() -> None:
    runner = SimpleNamespace(stage=SimpleNamespace(view=SimpleNamespace(is_running=False, is_installed=True)))
    runner.present = None
    shell = SimpleNamespace(runner=runner)
    with pytest.raises(RuntimeError, match="can be called with keyword arguments under"):
        PipelineShell.forward(cast(Any, shell), 1)


def test_a_whole_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "least_room", lambda *_: SimpleNamespace(needed=2, free=1))
    stage = SimpleNamespace(
        groups=SimpleNamespace(pipeline_size=2),
        store=SimpleNamespace(held=dict, named=dict),
        settings=SimpleNamespace(topology=None),
    )
    words = "The whole model does not fit into the free memory of every node"
    with pytest.raises(ValueError, match=words), gathering.whole_on_every_rank(cast(Any, stage), gathering.HOST):
        pass
