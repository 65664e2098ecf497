"""Callbacks that read a model while it is split over stages, and signals that make a run save and stop."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerCallback, TrainerControl
from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback

from hf_pipetransformer.comm.topology import Topology, check_agreement
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.splitters.script_code import text_of


if TYPE_CHECKING:
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.training.context import TrainingContext
    from hf_pipetransformer.training.pipeline_session import PipelineSession


class SavesOnSignal:
    """Replacement for Trainer's `JITCheckpointCallback` during one training on a pipeline.

    Trainer's callback saves as soon as a rank sees its signal. Other ranks may be at another step by then, and inside
    a step the data position does not match weights and optimizer. Here, Trainer's signal handler stays installed, but
    the ranks agree between two steps.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.context = context
        self._managers: list[tuple[JITCheckpointCallback, CheckpointManager]] = []
        for callback in context.trainer.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback) and callback.jit_manager is not None:
                self._managers.append((callback, callback.jit_manager))
                # Without a manager Trainer's callback does nothing at any event.
                callback.jit_manager = None
        self._saved_at = -1
        self._stops = False

    def after_step(self, control: TrainerControl) -> None:
        """Make Trainer save and stop now if any rank got a signal. Collective: call on every rank.

        Skips an evaluation, since the process may be killed at any moment, and a second save at the same step, since a
        checkpoint has no state while it is rewritten.
        """
        # Asking all ranks takes a collective in each step, so only runs that may get a signal do so.
        if not self.context.trainer.args.enable_jit_checkpoint:
            return
        step = self.context.trainer.state.global_step
        if not self._stops:
            has_come = any(manager.is_checkpoint_requested for _, manager in self._managers)
            # A scheduler may signal one rank, or all at different moments: they agree, and save at the same step.
            self._stops = any(self.context.topology.gather(has_come))
            if self._stops:
                for _, manager in self._managers:
                    manager.is_checkpoint_requested = False
                control.should_training_stop = control.should_save = True
                if self.context.topology.rank == 0:
                    announce(f"A signal asked to end the run: checkpoint-{step} is saved, then the training stops.")
        if self._stops:
            control.should_evaluate = False
            control.should_save = control.should_save and self._saved_at != step
        if control.should_save:
            self._saved_at = step

    def give_back(self) -> None:
        """Give the signal back to Trainer's own callback."""
        for callback, manager in self._managers:
            callback.jit_manager = manager
        self._managers = []


def check_callbacks(callbacks: list[TrainerCallback], topology: Topology) -> None:
    """Check that callbacks which read the model can have it. Collective: call on every rank.

    Raises:
        ValueError: they differ between ranks, or read it in an event that Trainer runs on rank 0 alone.
    """
    found = {}
    for callback in callbacks:
        events = [name for name in dir(TrainerCallback) if name.startswith("on_") and takes_model(callback, name)]
        if events:
            found[type(callback).__name__] = ", ".join(events)
    # All ranks put the model together for each of them: where one has none, the others would wait for it.
    check_agreement(topology, "callbacks that read the model", found)
    for name, names in found.items():
        if "on_push_begin" in names:
            raise ValueError(
                f"{name}.on_push_begin reads the model, which lies on several stages, and is called on rank 0 "
                "alone. Read what is pushed from the folder, or set pipeline_parallel_size=1."
            )
        if "on_pre_optimizer_step" in names:
            raise ValueError(
                f"{name}.on_pre_optimizer_step reads the model, of whose gradients each stage has its own alone. Set "
                "pipeline_parallel_size=1 for it, or leave out the argument `model`."
            )


@contextmanager
def running_callbacks(trainer: Trainer, pipeline: Pipeline, run: PipelineSession | None = None) -> Iterator[None]:
    """Run callbacks as `StageCallbacks` inside, unless a training under way does so; `run` is one that begins."""
    own = trainer.callback_handler
    if isinstance(own, StageCallbacks):
        yield
        return
    trainer.callback_handler = StageCallbacks(own, pipeline, run)
    try:
        yield
    finally:
        trainer.callback_handler = trainer.callback_handler.given_back()


class StageCallbacks(CallbackHandler):
    """Callback handler that passes callbacks with an argument `model` the whole model, on every rank.

    A training `run` ends its steps around the first and the last callback, also of those that are added meanwhile.
    """

    def __init__(self, handler: CallbackHandler, pipeline: Pipeline, run: PipelineSession | None) -> None:
        # With the same list of callbacks, so that one which is added or removed is so in both handlers.
        self.__dict__.update(handler.__dict__)
        self._handler = handler
        self._pipeline = pipeline
        self._run = run

    def given_back(self) -> CallbackHandler:
        """Return Trainer's handler, updated with everything that was set on this one."""
        handler = self._handler
        own = ("_handler", "_pipeline", "_run")
        handler.__dict__.update({name: value for name, value in vars(self).items() if name not in own})
        return handler

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._run is not None and event == "on_step_end":
            self._run.before_callbacks()
        control = self._call_users(event, args, state, control, **kwargs)
        if self._run is not None and event in ("on_step_end", "on_epoch_end"):
            self._run.after_callbacks(control)
        return control

    def _call_users(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if not self._pipeline.is_in_parts:
            return super().call_event(event, args, state, control, **kwargs)
        readers = [type(callback).__name__ for callback in self.callbacks if takes_model(callback, event)]
        if not readers:
            return self._call_each(event, args, state, control, **kwargs)
        if self._pipeline.is_inside_step:
            raise ValueError(
                f"{event} was called amid a step, where other stages do not come by, and {', '.join(readers)} reads "
                "the model there. Log between steps, or leave out the argument `model`."
            )
        if event not in self._pipeline.warned_events:
            self._pipeline.warned_events.add(event)
            if state.is_world_process_zero:
                logger.warning(
                    f"{', '.join(readers)}: {event} reads the model, so the whole model is gathered on every rank "
                    "each time. Leave out the argument `model` where it is not needed."
                )
        with self._pipeline.whole_model():
            return super().call_event(event, args, state, control, **kwargs)

    def _call_each(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Run the callbacks with a placeholder for the model, of which this rank has one stage."""
        for callback in self.callbacks:
            # A handler has one model for all its callbacks, so each gets its own: the placeholder names its reader.
            one = copy.copy(self)
            one.callbacks = [callback]
            # Those of transformers read no weights, and get the model itself.
            if _users_methods(callback, event):
                one.model = SpreadModel(self.model, f"{type(callback).__name__}.{event}")
            control = CallbackHandler.call_event(one, event, args, state, control, **kwargs)
        return control


class SpreadModel:
    """Placeholder for a split model, passed to a callback that did not ask for the whole one."""

    def __init__(self, model: Any, reader: str) -> None:
        self.config = getattr(model, "config", None)
        self._model, self._reader = model, reader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._model, name):
            raise AttributeError(name)  # hasattr() gives the model's own answer.
        raise ValueError(
            f"{self._reader} reads {name!r} of kwargs['model'], which lies on several stages. Give the method an "
            "argument `model`, then it gets the whole model; or read `trainer.model` within `trainer.whole_model()`."
        )


def takes_model(callback: TrainerCallback, event: str) -> bool:
    """Return True if a user's callback reads the model at an event; those of transformers read no weights.

    It does with an argument `model`, and with `kwargs["model"]` or `kwargs.get("model")` in its own code.
    """
    return any(_reads_model(method) for method in _users_methods(callback, event))


def _users_methods(callback: TrainerCallback, event: str) -> list[Any]:
    """Return a callback's methods for an event, without those of transformers' classes."""
    own = [kind for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] != "transformers"]
    return [vars(kind)[event] for kind in own if event in vars(kind)]


# Asked at each event for each callback.
@cache
def _reads_model(method: Any) -> bool:
    parameters = inspect.signature(method).parameters.values()
    if any(each.name == "model" for each in parameters):
        return True
    others = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD), None)
    # What decorators put around a method has code of its own.
    code = getattr(inspect.unwrap(method), "__code__", None)
    text = None if others is None or code is None else text_of(code)
    # Each rank has the config.
    read = rf"""\b{others}\s*(\[|\.\s*\w+\()\s*["']model["'][^\])]*[\])](?!\s*\.\s*config\b)"""
    return text is not None and re.search(read, text) is not None
