"""Where what is stashed waits until it is popped."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import Tensor

from hf_pipetransformer.pipe.setting import Setting
from hf_pipetransformer.pipe.skip.namespace import Key


class SkipExchange:
    """The skip tensors that a piece of the model gets, makes and leaves.

    Args:
        popped: what earlier pieces stashed for this one. It is not changed, so that the piece can run again with it.

    Attributes:
        left: what was stashed here and not popped here.
    """

    def __init__(self, popped: Mapping[Key, Tensor | None] | None = None) -> None:
        self._received = dict(popped or {})
        self.left: dict[Key, Tensor | None] = {}

    def stash(self, key: Key, value: Tensor | None) -> None:
        """Keep `value` for its pop. What still waits under `key` is of a forward that failed, and is dropped."""
        self.left[key] = value

    def pop(self, key: Key) -> Tensor | None:
        """Take what was stashed under `key`; it is kept no longer.

        Raises:
            RuntimeError: nothing is there.
        """
        for kept in (self.left, self._received):
            if key in kept:
                return kept.pop(key)
        namespace, name = key
        where = f"No skip tensor {name!r} is stashed" + (f" in {namespace}" if namespace is not None else "")
        there = ", ".join(sorted({repr(other) for _, other in (*self.left, *self._received)})) or "none"
        raise RuntimeError(
            f"{where}; stashed are: {there}. Expected a module that stashes it to have run before the one that pops "
            "it, once for each pop and in the same namespace. verify_skippables() looks at a whole model."
        )


class _PlainExchange(threading.local):
    """What modules outside of a pipeline use, one a thread: the model may run on several at once."""

    def __init__(self) -> None:
        self.exchange = SkipExchange()


_CURRENT: ContextVar[SkipExchange | None] = ContextVar("skip_exchange", default=None)
_PLAIN = _PlainExchange()


def current_exchange() -> SkipExchange:
    """The one that modules which run now use."""
    return _CURRENT.get() or _PLAIN.exchange


def exchanging(exchange: SkipExchange) -> AbstractContextManager[SkipExchange]:
    """Modules that run inside stash to `exchange` and pop from it."""
    return Setting[SkipExchange | None](_CURRENT, exchange)  # type: ignore[return-value]
