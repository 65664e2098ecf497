"""Reading of batches on the ranks with stage 0, and sending them to the later stages of their pipelines.

Every replica reads its own share of a global batch (`ReplicaReading`), or rank 0 reads whole batches and dispatches
the shares: `DispatchedReading` for data that draws at random, `StreamReading` for streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

import datasets
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from hf_pipetransformer.comm.transfers import ObjectSender, recv_object, reduced, sendable
from hf_pipetransformer.data.batches import (
    CacheTags,
    CommonLength,
    SampleBatch,
    detach_tags,
    pad_batch,
    sequence_length,
    take_samples,
    without_hidden,
)
from hf_pipetransformer.data.node_shares import replica_slice
from hf_pipetransformer.data.rng import (
    SharedRngState,
    States,
    drawing_from,
    draws_from_now_on,
    random_state,
    set_random_state,
)


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups
    from hf_pipetransformer.data.sampler import EpochOrder, Position, ReplicaBatch, ReplicaBatchSampler


class RecordSource(Protocol):
    """Source of what frozen layers compute of samples that were read: the activation cache."""

    def tagged(self, samples: list[int], batch: SampleBatch, before: CacheTags | None = None) -> SampleBatch:
        """Return a batch of the samples with these indices, with what is known of them.

        `before` is what was known when the batch was looked up earlier, in vain.
        """

    def prefetch(self, samples: list[int]) -> None:
        """Start to load what is known of `samples`, which come next."""


@sendable
@dataclass(frozen=True)
class Share:
    """A replica's share of a global batch.

    Args:
        batch: empty for a replica without samples.
        size: samples of the global batch, over all replicas.
        is_last: True if no batch follows in this epoch.
        is_none: True if there was no global batch, since the epoch had ended.
        rng_state: torch's RNG state after reading; None if each rank knows it.
    """

    batch: SampleBatch
    size: int
    is_last: bool
    is_none: bool = False
    rng_state: torch.Tensor | None = None


class PipelineLink:
    """Way of the batches from stage 0 of this rank's pipeline to the later stages, once to each node.

    The first rank of another node passes on what it receives to the others there.

    Args:
        groups: this rank's pipeline; a transition replaces it.
        placeholders: names of batch entries that only the embeddings read; later stages get a tensor of the same shape
            and dtype without storage behind it.
        timeout: seconds that a stage may wait for its batch.
    """

    def __init__(self, groups: PipelineGroups, placeholders: frozenset[str], timeout: float) -> None:
        self.groups = groups
        self.placeholders = placeholders
        self._sender = ObjectSender(timeout, "sending a batch to the later stages of this pipeline")

    def send(self, share: Share, num_under_way: int = 0) -> None:
        """Start to send, and wait until at most `num_under_way` earlier batches are in transit."""
        self._sender.flush(num_under_way)
        if self.groups.batch_peers:
            batch = without_hidden(share.batch).with_placeholders(self.placeholders)
            self._sender.isend(replace(share, batch=batch), self.groups.batch_peers, self.groups.pipeline_control)

    def receive(self, num_under_way: int = 0) -> Share:
        """Return the next batch; where it is passed on, at most `num_under_way` earlier ones are still in transit."""
        groups = self.groups
        first, source = groups.pipeline_ranks[0], groups.batch_source
        assert source is not None, "stage 0 reads"
        through = "" if source == first else f" through rank {source}"
        what = f"receiving a batch from stage 0 (rank {first}){through}"
        share: Share = recv_object(source, groups.pipeline_control, what)
        # Behind the receive, so that what was passed on travels while this stage waits for the next batch.
        self._sender.flush(num_under_way)
        if groups.batch_peers:
            self._sender.isend(share, groups.batch_peers, groups.pipeline_control)
        return share

    def flush(self) -> None:
        self._sender.flush()


@dataclass
class EpochReading:
    """Way of reading an epoch's batches with torch's loader; the base of those below.

    Args:
        reader: torch's loader; on later stages it only knows the order.
        shared: RNG state from which torch's loader and samplers draw as in one process, while torch's global
            generators differ by rank; None leaves them to the global generators.
    """

    reader: DataLoader[Any]
    link: PipelineLink
    shared: SharedRngState | None
    records: RecordSource | None = field(default=None, init=False)
    """Source of what is stored of samples."""
    begun: DispatchedReading | None = field(default=None, kw_only=True)
    """What has begun the first epoch, before the layout was known; None behind its first batch."""
    _seed_state: torch.Tensor | None = field(default=None, init=False)
    _was_seeded: bool = field(default=False, init=False)
    """True if the seed of the workers has been drawn."""
    _has_begun: bool = field(default=False, init=False)

    @property
    def sampler(self) -> ReplicaBatchSampler:
        sampler: Any = self.reader.batch_sampler
        return sampler

    @property
    def order(self) -> EpochOrder | None:
        """Order of the epoch; None for a stream."""
        return getattr(self.reader.batch_sampler, "order", None)

    def begin_epoch(self, start: Position | None) -> int | None:
        """Draw what torch's loader and sampler draw in one process, identically on all ranks.

        Return the index of the epoch's last batch; None if only reading shows which is the last. `start` is where an
        earlier run has left the epoch.
        """
        begun, self.begun = self.begun, None
        if begun is not None and start is None:
            # The order is drawn already, and the seed.
            self.begun, self._seed_state, self._has_begun = begun, begun._seed_state, True
            self._was_seeded = self.shared is None
            return len(self.sampler.order) - 1
        self._seed_state = None
        # Persistent workers drew their seed in the first epoch.
        has_workers = self.reader.persistent_workers and (self._has_begun or start is not None)
        self._has_begun = True
        with drawing_from(self.shared):
            if self.shared is not None and not (start and start.first) and not has_workers:
                # The seed that torch's loader draws for its workers.
                self._seed_state = torch.get_rng_state()
                torch.empty((), dtype=torch.int64).random_()
            order = self.sampler.order
            order.begin_epoch(start)
            if self.shared is not None or not self.link.groups.is_first:
                # A later stage may become stage 0 in the middle of the epoch and must then know the same order.
                order.batches()
        return len(order) - 1

    def next(self, index: int, num_under_way: int) -> Share:
        """Return this replica's share of global batch `index`; call on stage 0.

        `num_under_way` batches before it may have to be drawn again by a resumed run.
        """
        raise NotImplementedError

    def resume(self, _start: Position) -> None:
        """Note that the next epoch goes on from a checkpoint; call under the layout that it was saved under.

        The layout may change before the first batch is read, and so before `begin_epoch`.
        """

    def follow(self, old: PipelineGroups, index: int) -> None:
        """Continue with global batch `index` under the link's new groups, after `old` ones."""

    def flush(self) -> None:
        """Wait for what was sent to other replicas."""

    def ahead(self, _num_ahead: int) -> tuple[States, int] | None:
        """Return the RNG states from which a resumed run draws the batches read ahead again, and their number.

        After them it continues from the generators as they are now. None if it has to draw none again.
        """
        return None

    def close(self) -> None:
        """End the epoch and its workers."""


@dataclass
class ReplicaReading(EpochReading):
    """Reading on stage 0 of each replica, of its own share; workers may read ahead.

    `common_length` makes the replicas pad to one length; None where the loss does not see padding.
    """

    common_length: CommonLength | None = None
    is_first_uncut: bool = field(default=False, init=False)
    """True if the first batch was collated whole, and cannot be cut: each replica reads its share again."""
    _batches: Iterator[Any] | None = field(default=None, init=False)
    _num_stale: int = field(default=0, init=False)

    def resume(self, start: Position) -> None:
        # The earlier run has drawn the seed of these workers already, and its states were saved after that.
        self._was_seeded = self.link.groups.is_first and (start.first > 0 or self.reader.persistent_workers)

    def follow(self, old: PipelineGroups, index: int) -> None:
        """Continue with batch `index` as another replica; workers that read ahead stay alive."""
        groups = self.link.groups
        if (groups.replica, groups.num_replicas, groups.is_first) == (old.replica, old.num_replicas, old.is_first):
            return
        if groups.is_first and self._batches is not None:
            # Batches that the workers have read ahead were cut for the old replicas: skip them.
            self._num_stale = len(self.sampler.unread)
            self.sampler.seek(index, groups.replica, groups.num_replicas)
        else:
            self._batches = None
            self._was_seeded = self._was_seeded and groups.is_first

    def next(self, index: int, _num_under_way: int) -> Share:
        sampler = self.sampler
        batch, own = self._read(index)
        if self.common_length is not None:
            rule = self.common_length
            # A replica without samples takes part with length 0: the others wait for it in the all-reduce.
            length = self._agreed_length(sequence_length(batch, rule.main_input))
            if batch:
                batch = pad_batch(batch, rule.main_input, length, rule.pad_token_id, on_left=rule.on_left)
        if self.records is not None and own.is_single:
            batch = self.records.tagged(own.samples, SampleBatch.of(batch))
            self.records.prefetch(sampler.upcoming())
        is_last = index == len(sampler) - 1
        if is_last:
            # Callers stop at the last batch and leave the loader's generator suspended; end the workers now.
            self.close()
        return Share(SampleBatch.of(batch), len(sampler.order.batches()[index]), is_last)

    def _read(self, index: int) -> tuple[Any, ReplicaBatch]:
        """Return this replica's share of global batch `index` as it was read, and its samples."""
        sampler, groups = self.sampler, self.link.groups
        begun = self.begun
        if begun is not None and self.is_first_uncut:
            begun.has_first = False
            begun.close()
        if begun is not None and begun.has_first:
            return begun.part_of_first(groups), sampler.part_of(index, groups.replica, groups.num_replicas)
        if self._batches is None:
            sampler.seek(index, groups.replica, groups.num_replicas)
            sampler.unread.clear()
            self._num_stale = 0
            self._batches = self._opened()
        # The workers' batches come out in order, so the outdated ones have to be taken before the next.
        for _ in range(self._num_stale):
            next(self._batches)
            sampler.unread.popleft()
        self._num_stale = 0
        return next(self._batches), sampler.unread.popleft()

    def _opened(self) -> Iterator[Any]:
        """Return the reader's iterator, whose creation draws a seed for its workers.

        With `shared`, the workers of replica 0 get the seed of a single process, those of other replicas different
        ones.
        """
        seed_state = self._seed_state if self.link.groups.replica == 0 else None
        if not self._was_seeded and seed_state is None:
            return iter(self.reader)
        self._was_seeded = False
        with torch.random.fork_rng(devices=[]):
            if seed_state is not None:
                torch.set_rng_state(seed_state)
            return iter(self.reader)

    def _agreed_length(self, length: int) -> int:
        """Return the longest padded length over the replicas."""
        groups = self.link.groups
        if groups.replica_control is None:
            return length
        what = f"agreeing on a padded length with {groups.replicas}"
        return int(reduced(torch.tensor([length]), groups.replica_control, what, dist.ReduceOp.MAX))

    def again(self, batch: dict[str, Any]) -> SampleBatch:
        """Return an earlier `batch` with what `records` has of its samples now."""
        inputs, tags = detach_tags(batch)
        if self.records is None or tags is None:
            return inputs
        return self.records.tagged(tags.samples.tolist(), inputs, tags)

    def close(self) -> None:
        self._batches = None


@dataclass
class DispatchedReading(EpochReading):
    """Reading of global batches on rank 0, which is stage 0 of replica 0 under every layout.

    It reads and collates like a single process, one batch ahead as accelerate does, and sends each replica its
    samples. Random draws of the data set and collator, from global generators or their own, therefore match a single
    process, and a transition does not change them.

    Args:
        timeout: seconds that a replica may wait for its share.
        is_training: True if a replica may be left without samples.
    """

    timeout: float
    is_training: bool
    _coming: Iterator[Any] = field(default_factory=lambda: iter(()), init=False)
    _ahead: deque[Any] = field(default_factory=deque, init=False)
    """Batches that were read ahead; None follows the last one of an epoch."""
    _states_before: deque[States] = field(default_factory=deque, init=False)
    """RNG states before each of the latest batches, oldest first."""
    has_first: bool = field(default=False, init=False)
    """True on every rank while the first batch of the run is read, and no epoch has begun with it."""
    draws: bool = field(default=False, init=False)
    """True if reading the first batch drew random numbers; known to rank 0 alone."""

    def __post_init__(self) -> None:
        self._to_replicas = ObjectSender(self.timeout, "sending the other replicas their part of a batch")

    @property
    def _reads(self) -> bool:
        return self.link.groups.is_first and self.link.groups.replica == 0

    def begin_run(self, holders: Sequence[Any]) -> SampleBatch:
        """Begin the first epoch, and return its first batch on rank 0; the run then goes on from it.

        Collective: call on every rank. `holders` may have generators of their own, see `Generators`.
        """
        self._open(None, holders)
        self.has_first = True
        return SampleBatch.of(self._ahead[0] or {}) if self._ahead else SampleBatch()

    def alone(self) -> Iterator[Any]:
        """Yield the batches of the first epoch on one process, from its first one on."""
        while not (share := self._global_batch(0)).is_none:
            yield share.batch
            if share.is_last:
                break

    def part_of_first(self, groups: PipelineGroups) -> Any:
        """Return this replica's share of the first batch, which rank 0 has read. Call on stage 0 of each replica."""
        self.has_first = False
        if groups.replica:
            return self._received(groups).batch
        batch = SampleBatch.of(self._ahead.popleft())
        self.close()
        own = self._dealt(Share(batch, batch.size, False), groups)
        self._to_replicas.flush()
        return own.batch

    def _received(self, groups: PipelineGroups) -> Share:
        share: Share = recv_object(0, groups.replica_control, "receiving this replica's part of a batch from rank 0")
        return share

    def _dealt(self, whole: Share, groups: PipelineGroups) -> Share:
        """Return the first replica's share of a batch, and start to send the others theirs."""
        num_replicas = groups.num_replicas
        if num_replicas == 1:
            return whole
        repeats = not self.is_training and whole.size < num_replicas
        shares = [whole if repeats else _share_of(whole, replica, num_replicas) for replica in range(num_replicas)]
        # Waits for the shares of the batch before, so that one batch at most is in transit.
        self._to_replicas.flush()
        for share, rank in zip(shares[1:], groups.replica_ranks[1:], strict=True):
            self._to_replicas.isend(share, [rank], groups.replica_control)
        return shares[0]

    def begin_epoch(self, start: Position | None) -> int | None:
        has_first, self.has_first = self.has_first, False
        # The first epoch of the run has begun with its first batch.
        if has_first and start is None:
            return None
        self._open(start)
        # Each batch tells if it is the last one: of a stream, only reading on shows that.
        return None

    def _open(self, start: Position | None, holders: Sequence[Any] = ()) -> None:
        """Draw the order and begin to read; skipping to where a resumed run was leaves the RNG states as they were."""
        # Of a stream, rank 0 alone draws what torch's loader draws.
        if self.order is not None:
            super().begin_epoch(start)
        if not self._reads:
            return
        first, ahead = (start.first, start.ahead) if start is not None else (0, None)
        saved, count = ahead or (None, 1)
        self._states_before.clear()
        with drawing_from(self.shared):
            present = random_state()
            self._coming = self._at(first)
            if self.order is not None:
                self.order.batches()  # Before the states are noted from which a batch is drawn again.
            if saved is not None:
                set_random_state(*saved)
            has_drawn = draws_from_now_on(*holders)
            for _ in range(count):
                self._fetch()
            self.draws = has_drawn()
            if first:
                set_random_state(*present)

    def _at(self, index: int) -> Iterator[Any]:
        """Return the reader's iterator, at global batch `index`."""
        self._ahead.clear()
        # As the only replica, which gets global batches whole.
        self.sampler.seek(index, 0, 1)
        self.sampler.unread.clear()
        if self.shared is None:
            return iter(self.reader)
        # The seed for its workers was already drawn on all ranks; do not advance the shared state again.
        with torch.random.fork_rng(devices=[]):
            return iter(self.reader)

    def _fetch(self) -> None:
        # From this state a resumed run draws the batch again.
        self._states_before.append(random_state())
        self._ahead.append(next(self._coming, None))

    def next(self, _index: int, num_under_way: int) -> Share:
        groups = self.link.groups
        return self._dealt(self._global_batch(num_under_way), groups) if self._reads else self._received(groups)

    def _global_batch(self, num_under_way: int) -> Share:
        batch = self._ahead.popleft()
        if not self._ahead and batch is None:
            self._ahead.append(None)
        elif not self._ahead:
            with drawing_from(self.shared):
                self._fetch()
            # A resumed run draws again the batches under way and the one read ahead.
            while len(self._states_before) > num_under_way + 1:
                self._states_before.popleft()
        is_last = self._ahead[0] is None
        if is_last:
            # Callers stop at the last batch and leave the loader's generator suspended; end the workers now.
            self._coming = iter(())
        state = None if self.shared is None else self.shared.torch_state
        inputs = SampleBatch.of(batch or {})
        return Share(inputs, inputs.size, is_last, batch is None, state)

    def ahead(self, num_ahead: int) -> tuple[States, int] | None:
        is_at_end = not num_ahead and (not self._ahead or self._ahead[0] is None)
        if is_at_end or not self._reads:
            return None
        # An exhausted iterator has no batch ahead, but the fetch that found its end may have drawn too: count it.
        count = num_ahead + max(1, len(self._ahead))
        return self._states_before[-count], count

    def flush(self) -> None:
        self._to_replicas.flush()

    def close(self) -> None:
        self._coming = iter(())
        self._ahead.clear()


def _share_of(whole: Share, replica: int, num_replicas: int) -> Share:
    where = replica_slice(whole.size, replica, num_replicas)
    return replace(whole, batch=take_samples(whole.batch, where) if where.start < where.stop else SampleBatch())


def is_stream(dataset: Any) -> bool:
    """Return True if samples can only be read one after the other."""
    return isinstance(dataset, (IterableDataset, datasets.IterableDataset))


class StreamReading(DispatchedReading):
    """Reading of a stream."""

    def _at(self, index: int) -> Iterator[Any]:
        # A stream may keep its place: what was read of its first batch is not read again.
        begun, self._ahead = list(self._ahead), deque()
        coming = chain(begun, self._coming) if begun else iter(self.reader)
        # A stream has no index to seek: what an earlier run has had is read and dropped.
        for _ in islice(coming, index):
            pass
        return coming
