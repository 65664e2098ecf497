"""Loaders for which rank 0 reads all samples: dispatched batches and streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_pipetransformer.comm.staging import pinned
from hf_pipetransformer.comm.topology import PipelineGroups
from hf_pipetransformer.comm.transfers import ObjectSender, recv_object
from hf_pipetransformer.data.batches import batch_size, take_samples
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.node_shares import Arrangement, replica_slice
from hf_pipetransformer.data.rng import SharedRngState, States, present_states, set_states


class DispatchingLoader(PipelineLoader):
    """Loader that yields this replica's part of every global batch, on every stage of its pipeline.

    Rank 0, which is stage 0 of replica 0 under every layout, reads and collates global batches like a single process,
    one batch ahead as accelerate does, and sends each replica its samples. Random draws of the data set and collator,
    from global generators or their own, therefore match a single process, and a transition does not change them.

    See `PipelineLoader` for the arguments; `loader` reads global batches.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        groups: PipelineGroups,
        placeholders: frozenset[str],
        timeout: float,
        total_batch_size: int,
        is_training: bool,
        shared: SharedRngState | None,
    ) -> None:
        super().__init__(loader, groups, placeholders, timeout, total_batch_size, is_training, shared)
        self.num_seen = 0
        """Number of samples of all replicas since the epoch began."""
        self._to_replicas = ObjectSender(timeout, "sending the other replicas their part of a batch")
        self._coming: Iterator[Any] = iter(())
        # Batches that were read ahead; None follows the last one of an epoch.
        self._ahead: deque[Any] = deque()
        # RNG states before each of the latest batches, oldest first.
        self._drawn_from: deque[States] = deque()
        self._size = 0
        self._last: int | None = None

    def follow(self, groups: PipelineGroups) -> None:
        self._flush()
        self.groups = groups

    def ahead(self) -> tuple[States, int] | None:
        """Return the RNG states from which a resumed run draws the batches read ahead again, and their number.

        After them it continues from the generators as they are now.
        """
        is_at_end = not self.num_ahead and (not self._ahead or self._ahead[0] is None)
        if is_at_end or not self._reads:
            return None
        # An exhausted iterator has no batch ahead, but the fetch that found its end may have drawn too: count it.
        count = self.num_ahead + max(1, len(self._ahead))
        return self._drawn_from[-count], count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begin()
        self._begin_epoch()
        self._last, self.num_seen = None, 0
        if self._reads:
            self._open()
        try:
            while self._last is None or self._next <= self._last:
                part = self._read_part() if self.groups.is_first else self._receive()
                if self.shared is not None:
                    self.shared.torch_state = part["torch"]
                self._size = part["size"]
                if part["is_none"]:
                    self._last = -1
                    break
                if part["is_last"]:
                    self._last, self._coming = self._next, iter(())
                self._next += 1
                self.num_seen += self._size
                self.end_of_dataloader = part["is_last"]
                yield pinned(part["batch"]) if self.pins_memory else part["batch"]
            self._flush()
        finally:
            self._coming = iter(())
            self._ahead.clear()
            self.end()

    @property
    def is_at_end(self) -> bool:
        return self._last is not None and self._next > self._last

    def _open(self) -> None:
        """Begin to read; skipping to the position of a resumed run leaves the RNG states as they were."""
        (saved, count), self._saved_ahead = self._saved_ahead or (None, 1), None
        present = self._states() if self._next else None
        with self._drawing():
            self._coming = self._at_next()
            if saved is not None:
                set_states(saved)
        for _ in range(count):
            self._ahead.append(self._fetch())
        if present is not None and self.shared is not None:
            self.shared.states = present
        elif present is not None:
            set_states(present)

    def _at_next(self) -> Iterator[Any]:
        """Return the loader's iterator, at the next batch."""
        self.batch_sampler.seek(self._next, 0, 1)
        self.batch_sampler.drawn.clear()
        if self.shared is None:
            return iter(self.loader)
        # The seed for its workers was already drawn on all ranks; do not advance the shared state again.
        with torch.random.fork_rng(devices=[]):
            return iter(self.loader)

    def _fetch(self) -> Any:
        self._drawn_from.append(self._states())
        while len(self._drawn_from) > self.num_under_way + len(self._ahead) + 1:
            self._drawn_from.popleft()
        with self._drawing():
            return next(self._coming, None)

    def _states(self) -> States:
        return present_states() if self.shared is None else self.shared.states

    @property
    def _reads(self) -> bool:
        return self.groups.is_first and self.groups.replica == 0

    def _batch_size(self) -> int:
        return self._size

    def _flush(self) -> None:
        self._sender.flush()
        self._to_replicas.flush()

    def _read_part(self) -> dict[str, Any]:
        """Return this replica's part on stage 0, and send the later stages of its pipeline theirs."""
        groups = self.groups
        if self._reads:
            part = self._dispatch()
        else:
            part = recv_object(0, groups.replica_control, "receiving this replica's part of a batch from rank 0")
        self._sender.flush(self.num_under_way)
        if groups.pipeline_size > 1:
            sent = {key: self._as_sent(key, value) for key, value in part["batch"].items()}
            self._sender.isend({**part, "batch": sent}, groups.pipeline_ranks[1:], groups.pipeline_control)
        return part

    def _dispatch(self) -> dict[str, Any]:
        whole, num_replicas = self._global_batch(), self.groups.num_replicas
        size, batch = whole["size"], whole["batch"]

        def part_of(replica: int) -> dict[str, Any]:
            where = replica_slice(size, replica, num_replicas)
            if num_replicas == 1 or (not self.is_training and size < num_replicas):
                return whole
            return {**whole, "batch": take_samples(batch, where) if where.start < where.stop else {}}

        self._to_replicas.flush()
        for replica in range(1, num_replicas):
            self._to_replicas.isend(
                part_of(replica), [self.groups.replica_ranks[replica]], self.groups.replica_control
            )
        return part_of(0)

    def _global_batch(self) -> dict[str, Any]:
        """Return the next global batch with its size, end-of-data flags and torch's RNG state."""
        batch = self._ahead.popleft()
        is_none = batch is None
        if not self._ahead:
            self._ahead.append(None if is_none else self._fetch())
        batch = {} if is_none else dict(batch)
        return {
            "batch": batch,
            "size": batch_size(batch),
            "is_none": is_none,
            "is_last": self._ahead[0] is None,
            "torch": None if self.shared is None else self.shared.torch_state,
        }


def is_stream(dataset: Any) -> bool:
    """Return True if samples can only be read one after the other."""
    return isinstance(dataset, (IterableDataset, datasets.IterableDataset))


class StreamLoader(DispatchingLoader):
    """Loader that yields this replica's part of every global batch of a stream, on every stage of its pipeline.

    See `PipelineLoader` for the arguments; `loader` reads global batches, and only rank 0 iterates it.
    """

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def sampler(self) -> Any:
        return self.loader.sampler

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def num_samples(self) -> int:
        """Unknown for a stream; 0."""
        return 0

    @property
    def num_done(self) -> int:
        return self.position * self.total_batch_size

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement()

    def order_state(self) -> torch.Tensor | None:
        return None

    def _begin_epoch(self) -> None:
        self._next, self._first = self._first, 0

    def _at_next(self) -> Iterator[Any]:
        coming = iter(self.loader)
        for _ in islice(coming, self._next):
            pass
        return coming
