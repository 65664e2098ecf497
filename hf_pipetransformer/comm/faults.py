"""The first cause of a failed run, known to every rank: a key in the rendezvous store, watched by a thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hf_pipetransformer.comm.errors import PeerLostError


T = TypeVar("T")

_BEAT_SECONDS = 0.4
"""Between two signs of life of a rank."""

_FIRST_HAND_SECONDS = 0.5
"""A rank that only noticed another's silence lets the one that failed speak first."""

_SILENT_SECONDS = 3.5 * _BEAT_SECONDS
"""A rank without a sign of life for so long is stopped or gone."""

_TOLD_SECONDS = 1.5
"""How long a rank that failed stays until the others know: its process may hold the store."""

_STORE_SECONDS = 4.2
"""All that telling and asking may take: with the end of the watch less than the five seconds of Law 7."""

logger = logging.getLogger("hf_pipetransformer")


class FaultBoard:
    """Where the first rank that fails says why, for the ranks that fail because of it.

    Made by all ranks together.

    Args:
        rank: this rank.
        world_size: number of ranks.
    """

    _num_made = 0

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._watch: _Watch | None = None
        # What an earlier trainer of this process failed of is no cause of ours, nor what this one went on after.
        FaultBoard._num_made += 1
        self._number, self._num_begun = FaultBoard._num_made, 0
        # A call on a shared connection waits for the one before; and a store that stands still takes no new one.
        self._stores: list[Any] = []
        if world_size > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._stores = [store.clone(), store.clone()]

    @property
    def _keys(self) -> str:
        return f"pipetransformer/{self._number}/{self._num_begun}"

    def begin(self, together: bool) -> None:
        """From now on this rank gives signs of life, and learns of others' faults at once.

        Args:
            together: all ranks begin this. What only some do may fail on these alone, and nobody is told: the ranks
                have to agree on where they look for a cause.
        """
        self._num_begun += together
        if together and self._stores and self._watch is None:
            self._watch = _Watch(self.rank, self._keys, self._stores[1])
            self._watch.start()

    def end(self) -> None:
        """The opposite."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def report(self, cause: str, is_first_hand: bool) -> str:
        """Post `cause` unless another rank was first; returns the first cause.

        A rank that only noticed another's silence (`is_first_hand=False`) first gives the one that failed a moment to
        speak for itself, and looks for ranks that give no sign of life.
        """
        own, watch = f"rank {self.rank}: {cause}", self._watch
        if watch is None:
            return own
        watch.is_author = True
        answer = None
        if not watch.is_stuck:
            answer = _within(_STORE_SECONDS, lambda: self._post(self._stores[0], watch, own, is_first_hand))
        answer = answer or watch.cause
        if answer is not None:
            return answer
        # The store went down or stands still with its host.
        return own if is_first_hand else f"{_host_of_store()} does not answer ({own})"

    def _post(self, store: Any, watch: _Watch, own: str, is_first_hand: bool) -> str:
        silent: list[int] = []
        if not is_first_hand:
            _wait(lambda: watch.cause is not None or store.check([watch.cause_key]), _FIRST_HAND_SECONDS)
            if not store.check([watch.cause_key]):
                silent = self._silent_ranks(store)
        if silent:
            names = ", ".join(f"rank {rank}" for rank in silent)
            own = f"{names} {'does' if len(silent) == 1 else 'do'} not answer ({own})"
        first = str(store.compare_set(watch.cause_key, "", own).decode())
        store.set(f"{self._keys}/told/{self.rank}", "")
        others = [f"{self._keys}/told/{rank}" for rank in range(self.world_size) if rank not in silent]
        _wait(lambda: bool(store.check(others)), _TOLD_SECONDS)
        return first

    def _silent_ranks(self, store: Any) -> list[int]:
        """The ranks that give no sign of life for a while, unless another rank names a cause meanwhile."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        keys = {rank: f"{self._keys}/alive/{rank}" for rank in others}

        def signs() -> dict[int, bytes]:
            return {rank: store.get(key) if store.check([key]) else b"" for rank, key in keys.items()}

        before = signs()
        is_named = _wait(lambda: bool(store.check([f"{self._keys}/cause"])), _SILENT_SECONDS)
        if is_named:
            return []
        after = signs()
        return [rank for rank in others if before[rank] == after[rank]]


class _Watch(threading.Thread):
    """Says that this rank lives, and remembers the first cause while the store is there to tell it.

    Args:
        rank: this rank.
        keys: prefix of the keys.
        store: over a connection of its own.
    """

    def __init__(self, rank: int, keys: str, store: Any) -> None:
        super().__init__(name="pipetransformer-faults", daemon=True)
        self.cause: str | None = None
        self.cause_key = f"{keys}/cause"
        self.is_author = False
        self._rank = rank
        self._keys = keys
        self._store = store
        self._ended = threading.Event()
        self._last_answer = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether the store has not answered for a while."""
        return time.monotonic() - self._last_answer > _SILENT_SECONDS

    def run(self) -> None:
        beat = 0
        try:
            while not self._ended.wait(_BEAT_SECONDS):
                beat += 1
                self._store.set(f"{self._keys}/alive/{self._rank}", str(beat))
                is_posted = self._store.check([self.cause_key])
                self._last_answer = time.monotonic()
                if self.cause is None and is_posted:
                    self.cause = str(self._store.get(self.cause_key).decode())
                    if not self.is_author:
                        # A launcher may end this process before its own error says so.
                        logger.error(f"The run ends on rank {self._rank}. First cause: {self.cause}")
                    self._store.set(f"{self._keys}/told/{self._rank}", "")
        except RuntimeError:
            pass  # The store is gone; whoever needs it will notice.

    def stop(self) -> None:
        """End the thread; one that hangs in a store that stands still is left behind."""
        self._ended.set()
        self.join(timeout=_BEAT_SECONDS)


def is_second_hand(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, (PeerLostError, dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection closed"))


def _host_of_store() -> str:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        return "The launcher, which hosts the ranks' store,"
    return "rank 0, which hosts the ranks' store,"


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """What a call gives; None if it takes longer than `seconds`, or the store is gone. Its thread is left behind."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(call())
        except RuntimeError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _wait(is_done: Callable[[], bool], seconds: float) -> bool:
    """Whether something is done within `seconds`."""
    end = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True
