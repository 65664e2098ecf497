"""Overrides that step aside where a run needs no pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any


def left_to_trainer(overrides: type) -> type:
    """Have each method of a class give way to the one below it while `self.pipeline_run` is left to Trainer.

    Before a run exists, in Trainer's own constructor, no method gives way.
    """
    for name, method in list(vars(overrides).items()):
        if isinstance(method, FunctionType):
            setattr(overrides, name, _giving_way(overrides, name, method))
    return overrides


def _giving_way(overrides: type, name: str, method: FunctionType) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = vars(self).get("pipeline_run")
        if run is not None and run.is_left_to_trainer:
            return getattr(super(overrides, self), name)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return call
