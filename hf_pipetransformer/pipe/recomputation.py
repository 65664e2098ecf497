"""Checkpointing of activations: a stage keeps its input, and is computed again when its backward comes near."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch.utils.checkpoint import checkpoint


MODES = ("always", "except_last", "never")

_IS_CHECKPOINTING: ContextVar[bool] = ContextVar("is_checkpointing", default=False)
_IS_RECOMPUTING: ContextVar[bool] = ContextVar("is_recomputing", default=False)


def is_checkpointing() -> bool:
    """Whether a forward is under way whose activations are dropped; it will run once more."""
    return _IS_CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Whether a forward is under way that has run before, for its backward."""
    return _IS_RECOMPUTING.get()


@contextmanager
def _is_set(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return _is_set(_IS_CHECKPOINTING), _is_set(_IS_RECOMPUTING)


def checkpointed(function: Callable[..., Any], *values: Any) -> Any:
    """What `function(*values)` returns; nothing but `values` is kept for its backward.

    Random numbers are those of the first time when it runs again.
    """
    return checkpoint(function, *values, use_reentrant=False, context_fn=_contexts)


def num_checkpointed(mode: str, num_micro_batches: int) -> int:
    """How many of the first micro-batches are checkpointed."""
    return {"always": num_micro_batches, "except_last": num_micro_batches - 1, "never": 0}[mode]
