"""Callbacks that read the model, while it is spread over the stages of a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from transformers.trainer_callback import CallbackHandler, TrainerCallback


class WholeModelCallbacks(CallbackHandler):
    """Trainer's handler; a callback that reads the model finds all of it, on every rank.

    Args:
        handler: Trainer's, taken over as it is.
        whole: makes the model whole inside; told which callbacks ask for it at which event.
    """

    def __init__(
        self, handler: CallbackHandler, whole: Callable[[str, list[str]], AbstractContextManager[None]]
    ) -> None:
        self.__dict__.update(handler.__dict__)
        self._whole = whole

    def readers(self) -> dict[str, str]:
        """The callbacks that read the model, each with the events at which it does."""
        found = {}
        for callback in self.callbacks:
            events = [name for name in dir(TrainerCallback) if name.startswith("on_") and reads_model(callback, name)]
            if events:
                found[type(callback).__name__] = ", ".join(events)
        return found

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        readers = [type(callback).__name__ for callback in self.callbacks if reads_model(callback, event)]
        if not readers:
            return super().call_event(event, args, state, control, **kwargs)
        with self._whole(event, readers):
            return super().call_event(event, args, state, control, **kwargs)


def reads_model(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback asks for the model at an event: it names `model` as an argument or as a key of `kwargs`.

    Those of transformers read no weights.
    """
    own = [kind for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] != "transformers"]
    return any(_names_model(vars(kind)[event]) for kind in own if event in vars(kind))


def _names_model(method: Any) -> bool:
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None:
        return False
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "model" in arguments or "model" in code.co_consts
