"""Which part of a global batch belongs to which replica, and which samples belong to which node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch


_SEED_OF_OWNERS = 1_000_003


def replica_slice(num_samples: int, replica: int, num_replicas: int) -> slice:
    """The contiguous part of a global batch of `num_samples` that belongs to `replica`.

    Replicas differ by at most one sample, the first ones get the surplus; with fewer samples than replicas the last
    replicas get none. Nothing is duplicated or dropped (design: Batches).
    """
    base, surplus = divmod(num_samples, num_replicas)
    start = replica * base + min(replica, surplus)
    return slice(start, start + base + (replica < surplus))


@dataclass(frozen=True)
class NodeOrder:
    """Arranges epochs so that a sample is computed on the same node in each.

    Every sample belongs to a node for the whole run, by a seeded permutation; a node has as large a share of the
    samples as of the devices. An epoch's order is drawn as without nodes. Then each node takes its own samples of it,
    in that order, and the nodes' parts, put side by side, are the global batches. The last batch, which may be
    smaller, holds what is left: the nodes' shares of it too are the same in every epoch, so that each sample is drawn
    exactly once.

    Args:
        seed: of the permutation.
        devices: of each node, in the order of the ranks.
        batch_size: samples of a full global batch, equally many a device.
    """

    seed: int
    devices: tuple[int, ...]
    batch_size: int

    def __post_init__(self) -> None:
        num_devices = sum(self.devices)
        if min(self.devices, default=0) < 1 or self.batch_size < 1 or self.batch_size % num_devices:
            raise ValueError(
                f"Nodes of {self.devices} devices and batches of {self.batch_size} samples: expected at least one "
                "device on each node, and batches of equally many samples, at least one, for each device."
            )

    def bounds(self, num_samples: int) -> list[int]:
        """Where the nodes' parts of a batch of `num_samples` begin, and where the last one ends.

        Rounded up, so that one sample is the first node's.
        """
        num_devices = sum(self.devices)
        return [-(-num_samples * first // num_devices) for first in accumulate(self.devices, initial=0)]

    def part(self, num_samples: int, replica: int, num_replicas: int) -> slice:
        """As `replica_slice`, inside the part of the node that the replica is on; no pipeline spans nodes."""
        size, rank = sum(self.devices) // num_replicas, replica * sum(self.devices) // num_replicas
        firsts = list(accumulate(self.devices, initial=0))
        node = max(index for index in range(len(self.devices)) if firsts[index] <= rank)
        start, stop = self.bounds(num_samples)[node : node + 2]
        own = replica_slice(stop - start, (rank - firsts[node]) // size, self.devices[node] // size)
        return slice(start + own.start, start + own.stop)

    def counts(self, num_samples: int) -> list[int]:
        """How many of `num_samples` samples belong to each node."""
        num_full, rest = divmod(num_samples, self.batch_size)
        full, last = _widths(self.bounds(self.batch_size)), _widths(self.bounds(rest))
        return [num_full * each + left for each, left in zip(full, last, strict=True)]

    def owners(self, num_samples: int) -> torch.Tensor:
        """`(num_samples,)`: the node that each sample belongs to."""
        # Another permutation than any epoch's order.
        generator = torch.Generator().manual_seed(self.seed + _SEED_OF_OWNERS)
        permutation = torch.randperm(num_samples, generator=generator, device="cpu")
        nodes = torch.arange(len(self.devices)).repeat_interleave(torch.tensor(self.counts(num_samples)))
        return torch.empty_like(nodes).scatter_(0, permutation, nodes)

    def arranged(self, order: Sequence[int]) -> list[int]:
        """An epoch's order, which holds each of `0 .. len(order) - 1` once, so that batches cut from it fit nodes."""
        drawn = torch.tensor(order, dtype=torch.int64)
        owners, num_full = self.owners(len(order))[drawn], len(order) // self.batch_size
        full, last = [], []
        for node, width in enumerate(_widths(self.bounds(self.batch_size))):
            own = drawn[owners == node]
            full.append(own[: num_full * width].view(num_full, width))
            last.append(own[num_full * width :])
        arranged: list[int] = torch.cat([torch.cat(full, dim=1).flatten(), *last]).tolist()
        return arranged

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**asdict(self), "devices": list(self.devices)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> NodeOrder:
        """The inverse of `as_json`."""
        return cls(saved["seed"], tuple(saved["devices"]), saved["batch_size"])


def _widths(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]


@dataclass(frozen=True)
class Arrangement:
    """What the order of an epoch hangs on, beside the numbers that are drawn for it.

    Args:
        group_size: samples of a batch as the underlying sampler knows it, if its order hangs on that (sorting by
            length).
        nodes: deals the samples to nodes; None leaves them in the sampler's order.
    """

    group_size: int | None = None
    nodes: NodeOrder | None = None

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"group_size": self.group_size, "nodes": None if self.nodes is None else self.nodes.as_json()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Arrangement:
        """The inverse of `as_json`; a checkpoint of an earlier release, or of Trainer, knows no nodes."""
        nodes = saved.get("nodes")
        return cls(saved.get("group_size"), None if nodes is None else NodeOrder.from_json(nodes))
