"""Callbacks that read the model while it is in parts, and signals that ask a run to save and stop."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerCallback
from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback

from hf_pipetransformer.comm.topology import Topology, check_agreement
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.runtime.pipeline import Pipeline


class SavesOnSignal:
    """Takes the place of Trainer's callback in one training of a pipeline.

    Trainer's own saves wherever a rank finds that its signal has come: other ranks may be at another step by then, and
    amid a step the order of the samples is not at the place that weights and optimizer are at. Its handler of the
    signal stays; here the ranks ask each other between two steps.

    Args:
        trainer: whose callback is set aside until `give_back`.
        topology: the ranks.
    """

    def __init__(self, trainer: Trainer, topology: Topology) -> None:
        self.trainer = trainer
        self.topology = topology
        self._managers: list[tuple[JITCheckpointCallback, CheckpointManager]] = []
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback) and callback.jit_manager is not None:
                self._managers.append((callback, callback.jit_manager))
                callback.jit_manager = None
        self._saved_at = -1
        self._stops = False

    def after_step(self) -> None:
        """Let Trainer save now, and stop, if a signal has come to any rank. A collective call.

        What is due besides is left out: the process may be ended at any moment, and a checkpoint that is written again
        has no state until it is whole.
        """
        if not self.trainer.args.enable_jit_checkpoint:
            return
        control, step = self.trainer.control, self.trainer.state.global_step
        if not self._stops:
            has_come = any(manager.is_checkpoint_requested for _, manager in self._managers)
            self._stops = any(self.topology.gather(has_come))
            if self._stops:
                for _, manager in self._managers:
                    manager.is_checkpoint_requested = False
                control.should_training_stop = control.should_save = True
                if self.topology.rank == 0:
                    announce(f"A signal asked to end the run: checkpoint-{step} is saved, then the training stops.")
        if self._stops:
            control.should_evaluate = False
            control.should_save = control.should_save and self._saved_at != step
        if control.should_save:
            self._saved_at = step

    def give_back(self) -> None:
        """The callback is Trainer's own again; also after an error."""
        for callback, manager in self._managers:
            callback.jit_manager = manager
        self._managers = []


def check_callbacks(callbacks: list[TrainerCallback], topology: Topology) -> None:
    """Whether the callbacks that read the model can have it. A collective call.

    Raises:
        ValueError: they are not the same on every rank, or read it where Trainer calls rank 0 alone.
    """
    found = {}
    for callback in callbacks:
        events = [name for name in dir(TrainerCallback) if name.startswith("on_") and takes_model(callback, name)]
        if events:
            found[type(callback).__name__] = ", ".join(events)
    check_agreement(topology, "callbacks that read the model", found)
    for name, names in found.items():
        if "on_push_begin" in names:
            raise ValueError(
                f"{name}.on_push_begin reads the model, which lies on several stages, and is called on rank 0 "
                "alone. Read what is pushed from the folder, or set pipeline_parallel_size=1."
            )


def give_whole_model(trainer: Trainer, pipeline: Pipeline, longest: int = 1) -> None:
    """From now on callbacks that take the model find it whole, also while it lies on several stages.

    Args:
        trainer: that calls them.
        pipeline: that the model lies on.
        longest: the longest K that it may grow to.
    """
    handler = trainer.callback_handler
    if max(pipeline.layout.pipeline_size, longest) > 1 and not isinstance(handler, WholeModelCallbacks):
        trainer.callback_handler = WholeModelCallbacks(handler, pipeline)


def give_handler_back(trainer: Trainer) -> None:
    """The opposite: the handler is Trainer's own again."""
    if isinstance(trainer.callback_handler, WholeModelCallbacks):
        trainer.callback_handler = trainer.callback_handler.given_back()


@contextmanager
def giving_whole_model(trainer: Trainer, pipeline: Pipeline) -> Iterator[None]:
    """Callbacks that take the model find it whole inside; in a training they do so anyway."""
    own = trainer.callback_handler
    give_whole_model(trainer, pipeline)
    try:
        yield
    finally:
        if trainer.callback_handler is not own:
            give_handler_back(trainer)


class WholeModelCallbacks(CallbackHandler):
    """Trainer's handler; a callback that takes `model` as an argument finds all of it, on every rank.

    Args:
        handler: Trainer's own, taken over as it is.
        pipeline: that the model lies on.
    """

    def __init__(self, handler: CallbackHandler, pipeline: Pipeline) -> None:
        self.__dict__.update(handler.__dict__)
        self._handler = handler
        self._pipeline = pipeline

    def given_back(self) -> CallbackHandler:
        """Trainer's own, with all that was set on this one."""
        handler = self._handler
        own = ("_handler", "_pipeline")
        handler.__dict__.update({name: value for name, value in vars(self).items() if name not in own})
        return handler

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
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
                    f"{', '.join(readers)}: {event} reads the model, so all of it is put together on every rank each "
                    "time. Leave out the argument `model` where it is not needed."
                )
        with self._pipeline.whole_model():
            return super().call_event(event, args, state, control, **kwargs)

    def _call_each(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Trainer's loop over the callbacks; none of the user's gets at the model, of which a stage is here alone."""
        for callback in self.callbacks:
            one = copy.copy(self)
            one.callbacks = [callback]
            if _users_methods(callback, event):
                one.model = SpreadModel(self.model, f"{type(callback).__name__}.{event}")
            control = CallbackHandler.call_event(one, event, args, state, control, **kwargs)
        return control


class SpreadModel:
    """In place of a model that lies on several stages, for a callback that did not ask for it whole.

    Args:
        model: of which its configuration can be read.
        reader: for the error's text.
    """

    def __init__(self, model: Any, reader: str) -> None:
        self.config = getattr(model, "config", None)
        self._model, self._reader = model, reader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._model, name):
            raise AttributeError(name)  # Whoever asks whether there is such a thing gets the model's answer.
        raise ValueError(
            f"{self._reader} reads {name!r} of kwargs['model'], which lies on several stages. Give the method an "
            "argument `model`, then it gets the whole model; or read `trainer.model` within `trainer.whole_model()`."
        )


def takes_model(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback asks for the model at an event: its method, or one that it extends, has an argument `model`.

    Those of transformers read no weights.
    """
    return any("model" in _argument_names(method) for method in _users_methods(callback, event))


def _users_methods(callback: TrainerCallback, event: str) -> list[Any]:
    """The methods for an event of a callback's classes, those of transformers left out."""
    own = [kind for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] != "transformers"]
    return [vars(kind)[event] for kind in own if event in vars(kind)]


@cache
def _argument_names(method: Any) -> frozenset[str]:
    return frozenset(inspect.signature(method).parameters)
