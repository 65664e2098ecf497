"""Assignment of a global batch's parts to replicas, and of samples to nodes. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from hf_pipetransformer.schedules.json_values import Positive, Seed


_SEED_OF_OWNERS = 1_000_003


def replica_slice(num_samples: int, replica: int, num_replicas: int) -> slice:
    """Return the contiguous part of a global batch that belongs to `replica`.

    Replicas differ by at most one sample, and the first ones get the surplus; with fewer samples than replicas the
    last ones get none. Nothing is duplicated or dropped.
    """
    base, surplus = divmod(num_samples, num_replicas)
    start = replica * base + min(replica, surplus)
    return slice(start, start + base + (replica < surplus))


@dataclass(frozen=True)
class NodeOrder:
    """Arrangement of epochs in which each sample is always computed on the same node.

    A seeded permutation assigns every sample to a node for the whole run, in proportion to the nodes' devices. An
    epoch's order is drawn as without nodes. Each node then takes its own samples from it, in that order, and the
    global batches concatenate the nodes' parts. The last batch, which may be smaller, gets the remainder. The nodes'
    shares of it are also the same in every epoch, so each sample is drawn exactly once.

    Args:
        devices: number of devices of each node, in the order of the ranks.
        batch_size: samples of a full global batch, a multiple of the number of devices.
    """

    seed: Seed
    devices: tuple[Positive, ...]
    batch_size: Positive

    def __post_init__(self) -> None:
        num_devices = sum(self.devices)
        if min(self.devices, default=0) < 1 or self.batch_size < 1 or self.batch_size % num_devices:
            raise ValueError(
                f"Nodes of {self.devices} devices and batches of {self.batch_size} samples: expected at least one "
                "device on each node, and batches of equally many samples, at least one, for each device."
            )

    def bounds(self, num_samples: int) -> list[int]:
        """Return where the nodes' parts of a batch of `num_samples` begin, and where the last one ends.

        Rounded up, so a single sample belongs to the first node.
        """
        num_devices = sum(self.devices)
        return [-(-num_samples * first // num_devices) for first in accumulate(self.devices, initial=0)]

    def part(self, num_samples: int, replica: int, num_replicas: int) -> slice:
        """Return a replica's part of a batch: its share of the parts of the nodes that its ranks are on."""
        size, rank = sum(self.devices) // num_replicas, replica * sum(self.devices) // num_replicas
        firsts, bounds = list(accumulate(self.devices, initial=0)), self.bounds(num_samples)

        def start_at(rank: int) -> int:
            node = bisect_right(firsts, rank) - 1
            # One behind the last rank, where the part of the last replica ends.
            if node == len(self.devices):
                return bounds[node]
            # Replicas share the part of a node that holds whole ones only; else its devices do.
            unit = 1 if firsts[node] % size or self.devices[node] % size else size
            place, count = (rank - firsts[node]) // unit, self.devices[node] // unit
            return bounds[node] + replica_slice(bounds[node + 1] - bounds[node], place, count).start

        return slice(start_at(rank), start_at(rank + size))

    def counts(self, num_samples: int) -> list[int]:
        """Return how many of `num_samples` samples belong to each node."""
        # The last batch is rounded by itself, as `arranged` cuts it: a share of the whole could differ by one.
        num_full, rest = divmod(num_samples, self.batch_size)
        full, last = _widths(self.bounds(self.batch_size)), _widths(self.bounds(rest))
        return [num_full * each + left for each, left in zip(full, last, strict=True)]

    def owners(self, num_samples: int) -> torch.Tensor:
        """Return the node of each sample, `(num_samples,)`."""
        # The offset keeps this permutation different from any epoch's order.
        generator = torch.Generator().manual_seed(self.seed + _SEED_OF_OWNERS)
        permutation = torch.randperm(num_samples, generator=generator, device="cpu")
        nodes = torch.arange(len(self.devices)).repeat_interleave(torch.tensor(self.counts(num_samples)))
        return torch.empty_like(nodes).scatter_(0, permutation, nodes)

    def arranged(self, order: Sequence[int]) -> list[int]:
        """Rearrange an epoch's permutation of `0 .. n - 1`: batches cut from it give each node its own samples."""
        drawn = torch.tensor(order, dtype=torch.int64)
        owners, num_full = self.owners(len(order))[drawn], len(order) // self.batch_size
        full, last = [], []
        for node, width in enumerate(_widths(self.bounds(self.batch_size))):
            own = drawn[owners == node]
            full.append(own[: num_full * width].view(num_full, width))
            last.append(own[num_full * width :])
        # Row by row, each full batch takes its width of every node; the last batch has what is left of each.
        arranged: list[int] = torch.cat([torch.cat(full, dim=1).flatten(), *last]).tolist()
        return arranged


def _widths(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds)]
