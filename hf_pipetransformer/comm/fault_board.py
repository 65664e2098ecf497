"""Board that tells all ranks the first cause of a fault."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psutil
import torch.distributed as dist


T = TypeVar("T")

_BEAT_SECONDS = 0.4
"""Interval between two heartbeats of a rank."""

_FIRST_HAND_SECONDS = 0.5
"""Time that a rank which only lost contact leaves the failed rank to report first."""

_SILENT_SECONDS = 3.5 * _BEAT_SECONDS
"""Time without a heartbeat after which a rank counts as stopped or gone."""

_SHORTEST_PATIENCE = 10 * _BEAT_SECONDS

_TOLD_SECONDS = 1.5
"""Time that a failed rank waits for the others to read the cause, because its process may host the store."""

_STORE_SECONDS = 4.2
"""Limit of all store calls of a report. With `_Watch.stop` added, a rank ends within five seconds of its error."""

_LEAVE_SECONDS = 4.0
"""Time that a rank has to leave by itself, once the cause is known, before its communicators are aborted."""

_ALL_ALIVE = (
    " (no process was lost: one runs code that the others do not, such as a callback, or is slower than "
    "pipeline_timeout, which you may raise)"
)
"""Words behind lost contact with a rank whose heartbeat goes on."""

_ENDED = b"ended"
"""Last heartbeat of a rank that left without a fault: others may still be at work."""

_DETAILS = "\0"
"""What stands between a cause and its details in the store."""


def _ignore(*_: Any) -> None:
    pass


class FaultBoard:
    """Board where the first rank that fails posts its cause. Collective: construct on every rank.

    A thread reads the board, because a host that waits for its device does not notice that another rank has failed.

    Args:
        record: takes down the first cause and its details if another rank posted it; called by that thread.
        abort: makes waits for other ranks end. Called by that thread, after `record`, on a rank that does not leave
            by itself.
        patience: seconds without a heartbeat after which a rank is lost, whatever the others do; infinite if only
            waits that fail are to find it.
    """

    _num_made = 0

    def __init__(
        self,
        rank: int,
        world_size: int,
        record: Callable[[str, str], None] = _ignore,
        abort: Callable[[], None] = _ignore,
        patience: float = math.inf,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.patience = max(patience, _SHORTEST_PATIENCE)
        self.record = record
        self.abort = abort
        self._watch: _Watch | None = None
        self._lost: list[int] = []
        # Numbered keys: a cause from an earlier trainer of this process, or already recovered from, must not be read.
        FaultBoard._num_made += 1
        self._number, self._num_begun = FaultBoard._num_made, 0
        # Three connections, because calls on one are serialized; made now, because a hanging store takes no new ones.
        self._stores: list[Any] = []
        self.details = ""
        """Traceback that the rank of the first cause posted with it; empty if it says no more than the cause."""
        if world_size > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._stores = [store.clone(), store.clone(), store.clone()]

    @property
    def _keys(self) -> str:
        return f"pipetransformer/{self._number}/{self._num_begun}"

    def begin(self, together: bool) -> None:
        """Start heartbeats and the watch, but only if all ranks begin this `together`.

        Otherwise a fault of this rank is not shared: ranks must agree on the keys where they look for a cause.
        """
        self._num_begun += together
        if together and self._stores and self._watch is None:
            self._watch = _Watch(self, self._keys, self._stores[1])
            self._watch.start()

    def end(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def report(self, cause: str, is_first_hand: bool, details: str = "") -> str:
        """Post `cause` and its `details` unless another rank was first; return the first cause.

        With `is_first_hand=False` (this rank only lost contact), first give the failed rank time to report, and look
        for ranks without a heartbeat.
        """
        own, watch, self.details = f"rank {self.rank}: {cause}", self._watch, details
        if watch is None:
            return own
        # Set before posting: the watch must not record this rank's own cause as that of another.
        watch.is_author = True
        answer = None
        # A store that hangs would only use up the time limit.
        if not watch.is_stuck:
            answer = _within(_STORE_SECONDS, lambda: self._post_own(self._stores[0], watch, own, is_first_hand))
        # The watch may have read the first cause before the store went.
        if answer is None and watch.cause is not None:
            answer, self.details = watch.cause, watch.details
        if answer is not None:
            return answer
        return own if is_first_hand else store_is_lost(own)

    def _post_own(self, store: Any, watch: _Watch, own: str, is_first_hand: bool) -> str:
        silent: list[int] = []
        if not is_first_hand:
            _wait(lambda: watch.cause is not None or store.check([watch.cause_key]), _FIRST_HAND_SECONDS)
            if not store.check([watch.cause_key]):
                silent = self._silent_ranks(store)
                own += "" if silent else _ALL_ALIVE
        return self._post(store, watch, own, silent)

    def _post(self, store: Any, watch: _Watch, own: str, silent: list[int]) -> str:
        details = self.details
        if silent:
            names = ", ".join(f"rank {rank}" for rank in silent)
            does = "does" if len(silent) == 1 else "do"
            own = (
                f"{names} {does} not answer: killed, as when memory runs out, hanging, or cut off from the network "
                f"({own})"
            )
            details = ""
            # They will never say that they have read the cause, so nobody waits for that.
            self._lost = silent
        # With "" as the expected value, the store sets the key only if it is missing, and returns what it then has.
        posted = store.compare_set(watch.cause_key, "", f"{own}{_DETAILS}{details}").decode()
        first, _, self.details = posted.partition(_DETAILS)
        store.set(f"{self._keys}/told/{self.rank}", "")
        others = [f"{self._keys}/told/{rank}" for rank in range(self.world_size) if rank not in self._lost]
        _wait(lambda: bool(store.check(others)), _TOLD_SECONDS)
        return str(first)

    def find_lost(self, why: str = "it was told to end") -> str | None:
        """Return the first cause, after a look for ranks that no longer answer; None if all do, or none is watched.

        For a thread of a process that has a reason to look, while the main thread may wait for another rank.
        """
        watch = self._watch
        if watch is None or watch.cause is not None:
            return None if watch is None else watch.cause
        store = self._stores[-1]

        def look() -> str | None:
            silent = self._silent_ranks(store)
            is_known = silent or store.check([watch.cause_key])
            return self._post(store, watch, f"rank {self.rank}: {why}", silent) if is_known else None

        return _within(_STORE_SECONDS, look)

    def _silent_ranks(self, store: Any) -> list[int]:
        """Return the ranks without a heartbeat during `_SILENT_SECONDS`; none if a cause is posted meanwhile."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        keys = {rank: f"{self._keys}/alive/{rank}" for rank in others}

        def signs() -> dict[int, bytes]:
            return {rank: store.get(key) if store.check([key]) else b"" for rank, key in keys.items()}

        before = signs()
        is_named = _wait(lambda: bool(store.check([f"{self._keys}/cause"])), _SILENT_SECONDS)
        if is_named:
            return []
        after = signs()
        # A rank that ended without a fault sends no heartbeats either, and is not lost.
        return [rank for rank in others if before[rank] == after[rank] != _ENDED]


class _Watch(threading.Thread):
    """Thread that waits for the first cause, and looks for one where heartbeats or the store's answers fail to come.

    Heartbeats have a thread of their own, because a call of the store may hang. Each rank watches the next one that
    has not ended; of lost ranks at least one is the next of a rank that is not. A heartbeat names its process: on one
    machine a killed rank is found at once, and a launcher which ends the others leaves them time to say so.
    """

    def __init__(self, board: FaultBoard, keys: str, store: Any) -> None:
        super().__init__(name="pipetransformer-faults", daemon=True)
        self.cause: str | None = None
        self.details = ""
        self.cause_key = f"{keys}/cause"
        self.is_author = False
        self._board = board
        self._keys = keys
        self._store = store
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="pipetransformer-heartbeat", daemon=True)
        self._last_answer = self._last_sign = time.monotonic()
        self._namespace = _pid_namespace()
        self._process = f"{os.getpid()} {self._namespace}"
        self._next, self._sign = board.rank, b""
        self._watch_next()

    @property
    def is_stuck(self) -> bool:
        return self._silence(self._last_answer) > _SILENT_SECONDS

    @staticmethod
    def _silence(since: float) -> float:
        return time.monotonic() - since

    def start(self) -> None:
        self._heart.start()
        super().start()

    def run(self) -> None:
        patience, is_found_here = self._board.patience, False
        while self.cause is None and not self._ended.wait(_BEAT_SECONDS):
            if self._silence(self._last_answer) > patience:
                self._learn(store_is_lost(f"rank {self._board.rank}: no answer for {patience:g} s"))
                is_found_here = True
            elif self._silence(self._last_sign) > patience:
                why = f"no heartbeat of rank {self._next} for {patience:g} s"
                is_found_here = self._board.find_lost(why) is not None
                # If nobody is lost after all, begin anew rather than look again at every beat.
                self._last_sign = time.monotonic()
            elif self._is_next_gone():
                self._board.find_lost(f"the process of rank {self._next} has ended")
        # A lost rank leaves nobody to wait for.
        if self.cause is not None and not self._ended.wait(0 if is_found_here else _LEAVE_SECONDS):
            self._board.abort()

    def _beat(self) -> None:
        beat = 0
        with suppress(RuntimeError):  # The store is gone, and gives no answer from now on.
            while self.cause is None and not self._ended.wait(_BEAT_SECONDS):
                # A number that grows, so that others see a new value without comparing clocks.
                beat += 1
                self._store.set(self._key_of(self._board.rank), f"{beat} {self._process}")
                is_posted = self._store.check([self.cause_key])
                self._look_at_next()
                # Behind the calls above, so that one which hangs counts as silence of the store.
                self._last_answer = time.monotonic()
                if is_posted:
                    self._learn(*self._store.get(self.cause_key).decode().split(_DETAILS, 1))
                    self._store.set(f"{self._keys}/told/{self._board.rank}", "")
            if self.cause is None:
                self._store.set(self._key_of(self._board.rank), _ENDED.decode())

    def _key_of(self, rank: int) -> str:
        return f"{self._keys}/alive/{rank}"

    def _look_at_next(self) -> None:
        key = self._key_of(self._next)
        sign = self._store.get(key) if self._store.check([key]) else b""
        if sign == _ENDED:
            self._watch_next()
        elif sign != self._sign or not sign:  # A rank that has not begun may be preparing its data.
            self._sign, self._last_sign = sign, time.monotonic()

    def _is_next_gone(self) -> bool:
        """Return True if the process of the watched rank has ended; False if it cannot be seen from here."""
        _beat, _, process = self._sign.decode().partition(" ")
        pid, _, namespace = process.partition(" ")
        return bool(namespace) and namespace == self._namespace and not is_alive(int(pid))

    def _watch_next(self) -> None:
        self._next = (self._next + 1) % self._board.world_size
        self._sign, self._last_sign = b"", time.monotonic()

    def _learn(self, cause: str, details: str = "") -> None:
        self.details = details
        if not self.is_author:
            # Before this rank says that it knows: then the failed rank ends, and a launcher may end this process
            # before its own error says so.
            self._board.record(cause, details)
        self.cause = cause

    def stop(self) -> None:
        """End the threads, or abandon them if they hang in a store call."""
        self._ended.set()
        for thread in (self, self._heart):
            thread.join(timeout=_BEAT_SECONDS)


def _pid_namespace() -> str:
    """Return what tells this process's PID namespace from all others, on any machine; empty if that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Return True if a process of this PID namespace is there, and has not ended without its parent having noticed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # Another user's process, about which nothing more is known.


def store_is_lost(own: str) -> str:
    """Return the cause on a rank that gets no answer of the store, which is gone or hangs together with its host."""
    # With torchrun the agent of the first node may host the store, otherwise rank 0 does.
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return f"{'The launcher' if is_agents else 'rank 0'}, which hosts the ranks' store, does not answer ({own})"


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of a call; None if it fails or takes longer (its thread is abandoned)."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(call())
        except RuntimeError:
            return

    # A hanging call of the store cannot be interrupted: as a daemon, its thread does not keep the process.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _wait(is_done: Callable[[], bool], seconds: float) -> bool:
    """Poll for at most `seconds`; return True if `is_done` became True."""
    end = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True
