"""The first cause of a failed run, known to every rank: a key in the rendezvous store."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from hf_pipetransformer.errors import PeerLostError


_KEY = "pipetransformer/first_fault"


class FaultBoard:
    """Where the first rank that fails says why, for the ranks that fail because of it.

    Args:
        rank: this rank.
        is_distributed: whether there are other ranks.
    """

    def __init__(self, rank: int, is_distributed: bool) -> None:
        self.rank = rank
        self._store: Any = None
        if is_distributed:
            store = dist.distributed_c10d._get_default_store()
            self._store = store.clone() if hasattr(store, "clone") else store

    def report(self, cause: str, is_first_hand: bool) -> str:
        """Post `cause` unless another rank was first; returns the first cause.

        A rank that only noticed another's silence (`is_first_hand=False`) first gives the one that failed a moment to
        speak for itself.
        """
        own = f"rank {self.rank}: {cause}"
        if self._store is None:
            return own
        try:
            if not is_first_hand:
                self._wait_for_first_hand(seconds=2.0)
            return str(self._store.compare_set(_KEY, "", own).decode())
        except RuntimeError:
            return own  # The store went down with its host; the own observation is all that is left.

    def _wait_for_first_hand(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._store.check([_KEY]):
            time.sleep(0.05)


def is_second_hand(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, (PeerLostError, dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection closed"))
