"""Which samples of a global batch a replica draws. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Sampler


def replica_slice(num_samples: int, replica: int, num_replicas: int) -> slice:
    """The contiguous part of a global batch of `num_samples` that belongs to `replica`.

    Replicas differ by at most one sample, the first ones get the surplus; with fewer samples than replicas the last
    replicas get none. Nothing is duplicated or dropped (design: Batches).
    """
    base, surplus = divmod(num_samples, num_replicas)
    start = replica * base + min(replica, surplus)
    return slice(start, start + base + (replica < surplus))


class ReplicaBatchSampler(Sampler[list[int]]):
    """Cuts the batches of a global batch sampler into the part of one replica.

    Which samples form step `t` is decided by `global_batches` alone, never by the number of replicas.

    Args:
        global_batches: yields lists of sample indices, one list per global batch.
        replica: index of this replica.
        num_replicas: R.
        repeat_small: for evaluation. A global batch smaller than R goes whole to every replica, so that each has
            something of the right shape to gather (only replica 0's copy is counted). For training False: a replica
            may then get an empty list.
    """

    def __init__(
        self, global_batches: Iterable[list[int]], replica: int, num_replicas: int, repeat_small: bool = False
    ) -> None:
        self.global_batches = global_batches
        self.replica = replica
        self.num_replicas = num_replicas
        self.repeat_small = repeat_small

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.global_batches:
            if self.repeat_small and len(indices) < self.num_replicas:
                yield indices
            else:
                yield indices[replica_slice(len(indices), self.replica, self.num_replicas)]

    def __len__(self) -> int:
        assert isinstance(self.global_batches, Sized)
        return len(self.global_batches)

    def set_epoch(self, epoch: int) -> None:
        """Reseed the order for `epoch`, where the underlying sampler knows epochs."""
        sampler: Any = getattr(self.global_batches, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
