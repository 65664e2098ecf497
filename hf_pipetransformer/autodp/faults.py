"""The first cause of a failed run, known to every rank: a key in the rendezvous store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hf_pipetransformer.errors import PeerLostError


_CAUSE = "pipetransformer/first_fault"
_TOLD = "pipetransformer/ranks_that_know"
_FIRST_HAND_SECONDS = 0.5
_HOST_SECONDS = 1.5


class FaultBoard:
    """Where the first rank that fails says why, for the ranks that fail because of it.

    Args:
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store: Any = None
        if world_size > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()

    def report(self, cause: str, is_first_hand: bool) -> str:
        """Post `cause` unless another rank was first; returns the first cause.

        A rank that only noticed another's silence (`is_first_hand=False`) first gives the one that failed a moment to
        speak for itself. Rank 0, whose process may be the one that holds the board, stays until the others have read.
        """
        own = f"rank {self.rank}: {cause}"
        if self._store is None:
            return own
        try:
            if not is_first_hand:
                self._wait(lambda: self._store.check([_CAUSE]), _FIRST_HAND_SECONDS)
            first = str(self._store.compare_set(_CAUSE, "", own).decode())
            self._store.add(_TOLD, 1)
            if self.rank == 0:
                self._wait(lambda: self._store.add(_TOLD, 0) >= self.world_size, _HOST_SECONDS)
            return first
        except RuntimeError:
            return own  # The store went down with its host; the own observation is all that is left.

    @staticmethod
    def _wait(is_done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not is_done():
            time.sleep(0.05)


def is_second_hand(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, (PeerLostError, dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection closed"))
