"""A loader for data sets without indices: rank 0 reads, and gives every pipeline its part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_pipetransformer import checkpoint
from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.loader import PipelineLoader, SkipEmpty, worker_options
from hf_pipetransformer.autodp.sampler import replica_slice
from hf_pipetransformer.autodp.topology import PipelineGroups
from hf_pipetransformer.autodp.wire import Outbox, take
from hf_pipetransformer.batches import batch_size, take_samples


_CPU = torch.device("cpu")


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had one after the other."""
    return isinstance(dataset, (IterableDataset, datasets.IterableDataset))


class StreamLoader(PipelineLoader):
    """Yields this replica's part of every global batch of a stream, on every stage of its pipeline.

    Rank 0, which is stage 0 of replica 0 under every layout, reads and collates global batches as one process would,
    one batch ahead so that the last one is known, and sends each replica its samples. So nothing is read twice,
    what a collator draws from torch, numpy or Python is what it draws in one process, and a transition needs no place
    in the stream.

    Args:
        loader: over global batches; only rank 0 iterates it.
        groups: this rank's pipeline; a transition changes it (`follow`).
        placeholders: see `PipelineLoader`.
        timeout: seconds that a stage may wait for its batch.
        total_batch_size: samples in a full global batch.
        repeat_small: for evaluation, see `ReplicaBatchSampler`.
        shared: see `PipelineLoader`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        groups: PipelineGroups,
        placeholders: frozenset[str],
        timeout: float,
        total_batch_size: int,
        repeat_small: bool,
        shared: torch.Generator | None,
    ) -> None:
        super().__init__(loader, groups, placeholders, timeout, total_batch_size, 0, None, shared)
        self.repeat_small = repeat_small
        self.num_seen = 0
        """Samples of all replicas since the epoch began."""
        self._to_replicas = Outbox(timeout, "sending the other replicas their part of a batch")
        self._coming: Iterator[Any] = iter(())
        self._ahead: Any = None
        self._size = 0
        self._last: int | None = None

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def follow(self, groups: PipelineGroups) -> None:
        self._flush()
        self.groups = groups

    @property
    def num_done(self) -> int:
        return self._next * self.total_batch_size

    @property
    def group_size(self) -> int | None:
        return None

    def order_state(self) -> torch.Tensor | None:
        return None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begin()
        self._next, self._first, self._last, self.num_seen = self._first, 0, None, 0
        if self._reads:
            self._open()
        else:
            self._draw_seed()
        try:
            while self._last is None or self._next <= self._last:
                part = self._read_part() if self.groups.is_first else self._receive()
                self._size = part["size"]
                if not self._size:
                    self._last = -1
                    break  # The stream was empty.
                if part["is_last"]:
                    self._last, self._coming = self._next, iter(())
                self._next += 1
                self.num_seen += self._size
                self.end_of_dataloader = part["is_last"]
                yield part["batch"]
            self._flush()
        finally:
            self._coming, self._ahead = iter(()), None
            self.end()

    @property
    def is_at_end(self) -> bool:
        return self._last is not None and self._next > self._last

    def _open(self) -> None:
        """Begin to read. A run that goes on within an epoch had drawn what is drawn to come to its place."""
        states = checkpoint.random_state(_CPU) if self._next else None
        shared = self.shared.get_state() if self.shared is not None and self._next else None
        with self._drawing():
            self._coming = islice(iter(self.loader), self._next, None)
        self._ahead = self._fetch()
        if states is not None:
            checkpoint.set_random_state(*states, _CPU)
        if shared is not None and self.shared is not None:
            self.shared.set_state(shared)

    def _fetch(self) -> Any:
        with self._drawing():
            return next(self._coming, None)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """What is drawn from torch inside is drawn from `shared`, if there is one."""
        if self.shared is None:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.shared.get_state())
            yield
            self.shared.set_state(torch.get_rng_state())

    @property
    def _reads(self) -> bool:
        return self.groups.is_first and self.groups.replica == 0

    def _batch_size(self) -> int:
        return self._size

    def _flush(self) -> None:
        self._outbox.flush()
        self._to_replicas.flush()

    def _read_part(self) -> dict[str, Any]:
        """This replica's part, for stage 0; the later stages of its pipeline get theirs."""
        groups = self.groups
        if self._reads:
            part = self._dispatch()
        else:
            # Replica 0's stage 0 is rank 0 under every layout.
            part = take(0, groups.replica_control, "receiving this replica's part of a batch from rank 0")
        self._outbox.flush()
        if groups.pipeline_size > 1:
            sent = {key: self._as_sent(key, value) for key, value in part["batch"].items()}
            self._outbox.send({**part, "batch": sent}, groups.pipeline_ranks[1:], groups.pipeline_control)
        return part

    def _dispatch(self) -> dict[str, Any]:
        whole, num_replicas = self._global_batch(), self.groups.num_replicas
        size, batch = whole["size"], whole["batch"]

        def part_of(replica: int) -> dict[str, Any]:
            where = replica_slice(size, replica, num_replicas)
            if self.repeat_small and size < num_replicas:
                return whole
            return {**whole, "batch": take_samples(batch, where) if where.start < where.stop else {}}

        self._to_replicas.flush()
        for replica in range(1, num_replicas):
            self._to_replicas.send(part_of(replica), [self.groups.replica_ranks[replica]], self.groups.replica_control)
        return part_of(0)

    def _global_batch(self) -> dict[str, Any]:
        """The next global batch, its size, and whether it is the last; the size is 0 if there is none."""
        batch = {} if self._ahead is None else dict(self._ahead)
        self._ahead = self._fetch()
        return {"batch": batch, "size": batch_size(batch), "is_last": self._ahead is None}


def make_stream_loader(
    dataset: Any,
    collate: Any,
    global_batch_size: int,
    args: PipeTransformerArguments,
    groups: PipelineGroups,
    placeholders: frozenset[str],
    is_training: bool,
    shared: torch.Generator | None = None,
) -> StreamLoader:
    """The loader of a data set that can only be iterated; see `make_pipeline_loader` for the arguments."""
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=global_batch_size, collate_fn=SkipEmpty(collate), **worker_options(args)
    )
    return StreamLoader(
        loader,
        groups,
        placeholders,
        args.pipeline_timeout,
        global_batch_size,
        not is_training,
        shared,
    )
