"""Which callbacks are given the whole model, and what the others find in its place."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    BertConfig,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_callback import CallbackHandler

from hf_pipetransformer.training.callbacks import (
    StageCallbacks,
    check_callbacks,
    running_callbacks,
    takes_model,
)


class Named(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen = model


class Looked(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = kwargs["model"].num_parameters()


class Got(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        self.seen = others.get("model").num_parameters()


class Hidden(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        name = "model"
        self.seen = kwargs[name].num_parameters()


class Configured(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = kwargs["model"].config.hidden_size


class ConfiguredByGet(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = kwargs.get("model").config.hidden_size


class Asked(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        name = "model"
        self.seen = hasattr(kwargs[name], "peft_config")


class Inherited(Named):
    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)


class Blind(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.seen = kwargs["optimizer"]


MODEL = SimpleNamespace(config=BertConfig(hidden_size=24), num_parameters=lambda: 7)


class Double:
    """What the handler knows of a pipeline."""

    def __init__(self, *callbacks: Any, num_stages: int = 2, is_inside_step: bool = False) -> None:
        self.is_in_parts = num_stages > 1
        self.is_inside_step = is_inside_step
        self.num_times_whole = 0
        self.warned_events: set[str] = set()
        self.handler = StageCallbacks(CallbackHandler(list(callbacks), MODEL, *[None] * 3), self, None)

    @contextmanager
    def whole_model(self) -> Any:
        self.num_times_whole += 1
        yield

    def call(self, event: str = "on_step_end") -> None:
        self.handler.call_event(event, None, TrainerState(), TrainerControl())


@pytest.mark.parametrize("kind", [Named, Inherited, Looked, Got, Hidden, Configured, ConfiguredByGet, Asked, Blind])
def test_a_callback_takes_the_model_as_an_argument_or_where_its_code_reads_it(kind: type[TrainerCallback]) -> None:
    assert takes_model(kind(), "on_step_end") == (kind in (Named, Inherited, Looked, Got))
    assert not takes_model(kind(), "on_step_begin")


@pytest.mark.parametrize("event", [name for name in dir(TrainerCallback) if name.startswith("on_")])
def test_callbacks_of_transformers_cost_nothing(event: str) -> None:
    for callback in (DefaultFlowCallback(), EarlyStoppingCallback()):
        assert not takes_model(callback, event)


def test_the_model_is_whole_for_those_that_take_it_and_for_no_others() -> None:
    reader = Named()
    double = Double(reader, Blind)
    double.call()
    assert double.num_times_whole == 1 and reader.seen is MODEL
    double.call("on_substep_end")
    assert double.num_times_whole == 1
    double.handler.remove_callback(Named)
    double.call()
    assert double.num_times_whole == 1


def test_a_callback_that_asks_for_an_attribute_gets_the_models_answer() -> None:
    callback = Asked()
    Double(callback).call()
    assert callback.seen is False


@pytest.mark.parametrize("kind", [Looked, Got])
def test_a_model_that_code_reads_from_the_keywords_is_whole_for_it(kind: type[TrainerCallback]) -> None:
    callback = kind()
    double = Double(callback)
    double.call()
    assert double.num_times_whole == 1 and callback.seen == 7


@pytest.mark.parametrize("kind", [Hidden])
def test_a_model_that_was_not_asked_for_cannot_be_read(kind: type[TrainerCallback]) -> None:
    double = Double(kind())
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.on_step_end reads 'num_parameters'.*argument `model`"):
        double.call()
    assert double.num_times_whole == 0


@pytest.mark.parametrize("kind", [Looked, Got])
def test_a_model_that_lies_on_one_stage_can_be_read_in_any_way(kind: type[TrainerCallback]) -> None:
    callback = kind()
    Double(callback, num_stages=1).call()
    assert callback.seen == 7


def test_the_configuration_can_be_read_and_events_go_on_to_the_next_callback() -> None:
    first, last = Configured(), Configured()

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return TrainerControl(should_training_stop=True)

    double = Double(first, Stop(), last)
    control = double.handler.call_event("on_step_end", None, TrainerState(), TrainerControl())
    assert first.seen == last.seen == 24 and control.should_training_stop


def test_a_model_that_is_gathered_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    double = Double(Named())
    for _ in range(2):
        double.call()
    assert caplog.text.count("so the whole model is gathered on every rank each time") == 1


def test_a_model_cannot_be_whole_amid_a_step() -> None:
    with pytest.raises(ValueError, match="was called amid a step, where other stages do not come by, and Named reads"):
        Double(Named(), is_inside_step=True).call()


def test_trainers_own_handler_comes_back_with_what_was_added_meanwhile() -> None:
    own = CallbackHandler([Blind()], MODEL, *[None] * 3)
    trainer, double = SimpleNamespace(callback_handler=own), Double()
    double.layout = SimpleNamespace(pipeline_size=2)
    with running_callbacks(trainer, double):
        wrapped = trainer.callback_handler
        with running_callbacks(trainer, double):
            assert trainer.callback_handler is wrapped
        assert trainer.callback_handler is wrapped and isinstance(wrapped, StageCallbacks)
        wrapped.callbacks = [*wrapped.callbacks, Named()]
        wrapped.optimizer = "an optimizer"
    assert trainer.callback_handler is own and own.optimizer == "an optimizer"
    assert [type(callback) for callback in own.callbacks][-1] is Named
    assert double not in vars(own).values()


def test_a_model_on_one_stage_that_comes_to_lie_on_several_is_put_together_then() -> None:
    """A pipeline grows where layers are unfrozen, or as it is replayed."""
    named = Named()
    double = Double(named, num_stages=1)
    double.call()
    assert double.num_times_whole == 0
    double.is_in_parts = True
    double.call()
    assert double.num_times_whole == 1


class Ends:
    """What a training does at the end of a step."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def before_callbacks(self) -> None:
        self.done.append("before")

    def after_callbacks(self, control: TrainerControl) -> None:
        self.done.append("after")
        control.should_save = False


class Saving(TrainerCallback):
    def __init__(self, done: list[str]) -> None:
        self.done = done

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        self.done.append("callback")
        return TrainerControl(should_save=True)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_step_ends_after_the_last_callback_and_with_what_it_decided(num_stages: int) -> None:
    done: list[str] = []
    handler = StageCallbacks(CallbackHandler([], MODEL, *[None] * 3), Double(num_stages=num_stages), Ends(done))
    handler.add_callback(Saving(done))
    control = handler.call_event("on_step_end", None, TrainerState(), TrainerControl())
    assert done == ["before", "callback", "after"] and not control.should_save
    handler.call_event("on_step_begin", None, TrainerState(), TrainerControl())
    handler.call_event("on_epoch_end", None, TrainerState(), TrainerControl())
    assert done[3:] == ["after"]


class ReadsGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen = [parameter.grad for parameter in model.parameters()]


def test_gradients_that_other_stages_have_are_not_read() -> None:
    topology: Any = SimpleNamespace(gather=lambda value: [value])
    check_callbacks([Named()], topology)
    with pytest.raises(ValueError, match="on_pre_optimizer_step reads the model, of whose gradients each stage has"):
        check_callbacks([Named(), ReadsGradients()], topology)
