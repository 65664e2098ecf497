"""Which callbacks are given the whole model."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_callback import CallbackHandler

from hf_pipetransformer.trainer.callbacks import WholeModelCallbacks, reads_model


class Named(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen = model


class Looked(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = kwargs["model"]


class Got(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = kwargs.get("model")


class Inherited(Named):
    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)


class Blind(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = kwargs["optimizer"]


@pytest.mark.parametrize(
    ("kind", "reads"), [(Named, True), (Looked, True), (Got, True), (Inherited, True), (Blind, False)]
)
def test_a_callback_that_names_the_model_reads_it(kind: type[TrainerCallback], reads: bool) -> None:
    assert reads_model(kind(), "on_step_end") == reads
    assert not reads_model(kind(), "on_step_begin")


@pytest.mark.parametrize("event", [name for name in dir(TrainerCallback) if name.startswith("on_")])
def test_callbacks_of_transformers_cost_nothing(event: str) -> None:
    for callback in (DefaultFlowCallback(), EarlyStoppingCallback()):
        assert not reads_model(callback, event)


def test_the_model_is_whole_for_those_that_read_it_and_for_no_others() -> None:
    asked: list[Any] = []

    @contextmanager
    def whole(event: str, readers: list[str]) -> Any:
        asked.append((event, readers))
        yield

    reader = Named()
    handler = WholeModelCallbacks(CallbackHandler([reader, Blind], "model", *[None] * 3), whole)
    assert handler.readers() == {"Named": "on_step_end"}
    state, control = TrainerState(), TrainerControl()
    handler.on_step_end(None, state, control)
    assert asked == [("on_step_end", ["Named"])] and reader.seen == "model"
    handler.call_event("on_substep_end", None, state, control)
    assert len(asked) == 1
    handler.remove_callback(Named)
    handler.on_step_end(None, state, control)
    assert len(asked) == 1
