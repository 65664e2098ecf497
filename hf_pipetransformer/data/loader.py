"""Data loader of a pipeline, with the `DataLoader` interface that Trainer expects.

Only stage 0 of each pipeline reads samples; it sends the batches to the later stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from torch.utils.data import DataLoader

from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.comm.staging import pinned
from hf_pipetransformer.comm.topology import PipelineGroups
from hf_pipetransformer.comm.transfers import ObjectSender, recv_object
from hf_pipetransformer.data.augmentation import AugmentationSlots
from hf_pipetransformer.data.batches import detach_tags, pad_batch, sequence_length, without_hidden
from hf_pipetransformer.data.node_shares import Arrangement, NodeOrder, replica_slice
from hf_pipetransformer.data.rng import SharedRngState, States


@dataclass
class Request:
    """Arguments that Trainer made a loader with, kept so that a pipeline can build its own loader from them.

    Args:
        batch_size: samples of a batch per rank.
        sampler_fn: makes Trainer's sampler; None for a stream.
        key: name of an evaluation loader that may persist.
    """

    dataset: Any
    description: str
    batch_size: int
    sampler_fn: Callable[[Any], Any] | None = None
    is_training: bool = False
    key: str | None = None
    _made: list[Any] = field(default_factory=list, init=False)

    def sampler(self, dataset: Any) -> Any:
        """Return Trainer's sampler, made only once because making it may draw random numbers."""
        if not self._made:
            self._made.append(None if self.sampler_fn is None else self.sampler_fn(dataset))
        return self._made[0]


_REQUEST = "pipeline_request"


def note_request(loader: Any, request: Request) -> None:
    """Attach `request` to a loader that Trainer made."""
    vars(loader)[_REQUEST] = request


def request_of(loader: Any) -> Request | None:
    """Return the request that Trainer made a loader for; None for the user's own loader."""
    request: Request | None = getattr(loader, "__dict__", {}).get(_REQUEST)
    return request


@dataclass(frozen=True)
class CommonLength:
    """Rule for padding the batches of all replicas to one length; `main_input` names the token ids, `(batch, seq)`."""

    main_input: str
    pad_token_id: int


class RecordSource(Protocol):
    """Source of samples that need not be read from the data set: the activation cache."""

    def select(self, samples: list[int]) -> list[int]:
        """Return the members of `samples` that must be read from the data set."""

    def complete(
        self, samples: list[int], read: list[int], batch: dict[str, Any], agree: Callable[[int], int]
    ) -> dict[str, Any]:
        """Return the batch of all `samples`.

        Args:
            read: the members of `samples` that `batch` contains, in the order of its rows.
            agree: maps the padded length of this replica's batch to that of all replicas. Called once.
        """

    def prefetch(self, samples: list[int]) -> None:
        """Start to load `samples`, which come next."""


class PipelineLoader(DataLoaderStateMixin):
    """Loader that yields this replica's part of every global batch, on every stage of its pipeline.

    A replica without samples in a global batch gets an empty dict. Batches stay on the CPU. The class passes for a
    `DataLoader`: `isinstance` accepts it, and attributes that it lacks are looked up on the wrapped loader.

    Args:
        loader: a loader over `ReplicaBatchSampler`; only stage 0 iterates it.
        groups: this rank's pipeline; `follow` replaces it at a transition.
        placeholders: names of batch entries that only the embeddings read; later stages get a tensor of the same shape
            and dtype without storage behind it.
        timeout: seconds that a stage may wait for its batch.
        is_training: True if a replica may be left without samples.
        shared: RNG state from which torch's loader and samplers draw as in one process, while torch's global
            generators differ by rank; None leaves them to the global generators.
        common_length: makes the replicas pad to one length; None where the loss does not see padding.
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
        common_length: CommonLength | None = None,
    ) -> None:
        self.loader = loader
        self.groups = groups
        self.placeholders = placeholders
        self.total_batch_size = total_batch_size
        self.is_training = is_training
        self.common_length = common_length
        self.shared = shared
        self.gradient_state = GradientState()
        self._drop_last = False
        self._index = 0
        self._first = 0
        self._num_done: int | None = None
        self._arrangement: Arrangement | None = None
        self._origin = (0, 0)
        self._order_state: torch.Tensor | None = None
        self._saved_ahead: tuple[States, int] | None = None
        self._seed_state: torch.Tensor | None = None
        self._was_open = False
        self._next = 0
        self._batches: Iterator[Any] | None = None
        self._num_read = 0
        self._num_stale = 0
        self._num_epochs = 0
        self._sender = ObjectSender(timeout, "sending a batch to the later stages of this pipeline")
        self.num_under_way = 0
        """Batches that later stages may not have received yet when stage 0 reads the next one."""
        self.num_ahead = 0
        """Batches that were yielded but not trained on yet."""
        self.pins_memory = False
        """True if batches are yielded in pinned memory, ready for an asynchronous copy to a device."""
        self.records: RecordSource | None = None
        """Source of samples that need not be read from the data set."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return DataLoader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)  # Not set yet: looking it up on itself would recurse.
        return getattr(self.loader, name)

    @property
    def sampler(self) -> Any:
        """Order of the samples over all replicas."""
        return self.batch_sampler.sampler

    @property
    def collate(self) -> Any:
        return self.loader.collate_fn

    @property
    def samples(self) -> Any:
        """Data set that batches are collated from, indexed by samples or by items."""
        return self.loader.dataset

    @property
    def dataset(self) -> Any:
        """Data set as the user gave it."""
        return self.samples.dataset

    @property
    def batch_sampler(self) -> Any:
        return self.loader.batch_sampler

    @property
    def slots(self) -> AugmentationSlots | None:
        """AugmentationSlots of random samples whose activations are to be stored; None for all other data."""
        slots: AugmentationSlots | None = getattr(self.batch_sampler, "slots", None)
        return slots

    def read(self, samples: list[int]) -> Any:
        return self.collate(self.samples.__getitems__(samples))

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, over all replicas."""
        return len(self.sampler)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def samples_of_replicas(self) -> list[int]:
        """Return how many samples of the current global batch count for each replica; see `repeat_small`."""
        num_replicas, size = self.groups.num_replicas, self._batch_size()
        if size < num_replicas:
            return [size] + [0] * (num_replicas - 1)
        slices = [replica_slice(size, replica, num_replicas) for replica in range(num_replicas)]
        return [part.stop - part.start for part in slices]

    def _batch_size(self) -> int:
        first, num_done = self._origin
        return min(self.total_batch_size, self.num_samples - num_done - (self._index - first) * self.total_batch_size)

    @property
    def nodes(self) -> NodeOrder | None:
        """Assignment of samples to nodes in the epochs that this run begins; None if there is none."""
        found: NodeOrder | None = self.batch_sampler.nodes
        return found

    def keep_on(self, nodes: NodeOrder) -> None:
        """Arrange epochs that begin from now on so that each node always reads the same samples."""
        self.batch_sampler.nodes = nodes

    def take_from(self, records: RecordSource) -> None:
        """Take samples from `records` where it has them, starting with the next batch that is drawn."""
        self.records = records
        self.batch_sampler.select = records.select if self.groups.is_first else None

    def follow(self, groups: PipelineGroups) -> None:
        """Continue with the next global batch as a stage of another layout; workers that read ahead stay alive."""
        self._sender.flush()
        old, self.groups = self.groups, groups
        if self.records is not None:
            self.take_from(self.records)
        elif (groups.replica, groups.num_replicas, groups.is_first) == (old.replica, old.num_replicas, old.is_first):
            return
        if groups.is_first and self._batches is not None:
            # Batches that the workers have read ahead were cut for the old replicas: skip them.
            self._num_stale = self.batch_sampler.num_drawn - self._num_read
            self.batch_sampler.seek(self._next, groups.replica, groups.num_replicas)
        else:
            self._batches = None
            self._was_open = self._was_open and groups.is_first

    @property
    def is_at_end(self) -> bool:
        """True if a stream, whose length Trainer does not know, has no more batches in this epoch."""
        return False

    @property
    def num_read(self) -> int:
        """Global batches of this epoch that were yielded."""
        return self._next

    @property
    def position(self) -> int:
        """Global batches of this epoch that were trained on."""
        return self._next - self.num_ahead

    @property
    def num_done(self) -> int:
        """Samples of this epoch that were trained on, over all replicas."""
        first, num_done = self._origin
        return min(num_done + (self.position - first) * self.total_batch_size, self.num_samples)

    @property
    def arrangement(self) -> Arrangement:
        found: Arrangement = self.batch_sampler.arrangement
        return found

    def order_state(self) -> torch.Tensor | None:
        """Return the RNG state that `starting_at` needs besides the position; call between two batches."""
        state: torch.Tensor | None = self.batch_sampler.order_state(0 < self.position < len(self))
        return state

    def starting_at(
        self,
        num_batches: int,
        order_state: torch.Tensor | None = None,
        num_done: int | None = None,
        arrangement: Arrangement | None = None,
        ahead: tuple[States, int] | None = None,
    ) -> PipelineLoader:
        """Skip the first `num_batches` global batches of the next epoch, which an earlier run had consumed.

        Args:
            order_state: the earlier run's; None draws the order again. `arrangement` and `ahead` are the earlier run's
                too.
            num_done: samples that the earlier run had trained on, if its batch size differed: the remaining samples
                are then redistributed over the remaining batches.
        """
        self._first, self._order_state, self._saved_ahead = num_batches, order_state, ahead
        self._num_done, self._arrangement = num_done, arrangement
        # Persistent workers drew their seed in the first epoch.
        self._was_open = self.groups.is_first and (num_batches > 0 or self.loader.persistent_workers)
        self._num_epochs = max(self._num_epochs, 1)
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begin()
        self._begin_epoch()
        try:
            while self._next < len(self):
                self._index = self._next
                self.end_of_dataloader = self._index == len(self) - 1
                self._next += 1
                batch = self._read() if self.groups.is_first else self._receive()
                if self.end_of_dataloader:
                    # Callers stop at the last batch and leave this generator suspended; end the workers now.
                    self._batches = None
                yield pinned(batch) if self.pins_memory else batch
            self._sender.flush()
        finally:
            self._batches = None
            self.end()

    def ahead(self) -> tuple[States, int] | None:
        """Return the RNG states of the batches read ahead, and their number, for `starting_at`; None without any."""
        return None

    def _drawing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.shared is None else self.shared.drawing()

    def _begin_epoch(self) -> None:
        """Draw what torch's loader and sampler draw in one process, identically on all ranks."""
        with self._drawing():
            self._draw_seed()
            self._begin_order()
        self._next, self._first, self._order_state, self._num_done = self._first, 0, None, None
        self._arrangement = None

    def _begin_order(self) -> None:
        in_whole_batches = self._first * self.total_batch_size
        self._origin = (self._first, in_whole_batches if self._num_done is None else self._num_done)
        dealt_from = 0 if self._origin[1] == in_whole_batches else self._origin[1]
        self.batch_sampler.begin_epoch(dealt_from, self._arrangement)
        if self._order_state is not None:
            self.batch_sampler.draw_as_from(self._order_state, dealt_from, self._arrangement)
        if self.shared is not None or not self.groups.is_first:
            # A later stage may become stage 0 in the middle of the epoch and must then know the same order.
            self.batch_sampler.draw()

    def _draw_seed(self) -> None:
        """Draw the seed that torch's loader draws for its workers, unless an earlier epoch or run drew it."""
        drawn = self._first or (self.loader.persistent_workers and self._num_epochs)
        self._seed_state = None
        if self.shared is not None and not drawn:
            self._seed_state = torch.get_rng_state()
            torch.empty((), dtype=torch.int64).random_()
        self._num_epochs += 1

    def read_again(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the samples of an earlier `batch` as `rows` has them now. Call on every stage of a pipeline."""
        if not self.groups.is_first:
            return self._receive()
        _, tags = detach_tags(batch)
        if self.records is not None and tags is not None:
            rule = self.common_length
            same = None if rule is None else sequence_length(batch, rule.main_input)
            batch = self.records.complete(tags.samples.tolist(), [], {}, lambda own: own if same is None else same)
        self._sender.flush()
        self._send(batch)
        return batch

    def _read(self) -> dict[str, Any]:
        if self._batches is None:
            self.batch_sampler.seek(self._index, self.groups.replica, self.groups.num_replicas)
            self._num_read, self._num_stale = self.batch_sampler.num_drawn, 0
            self.batch_sampler.drawn.clear()
            self._batches = self._opened()
        for _ in range(self._num_stale + 1):
            batch = next(self._batches)
            self._num_read += 1
            drawn = self.batch_sampler.drawn.popleft() if self.batch_sampler.drawn else None
        self._num_stale = 0
        if self.records is not None and drawn is not None and drawn.is_single:
            batch = self.records.complete(drawn.samples, drawn.read, batch, self._agreed_length)
            self.records.prefetch(self.batch_sampler.upcoming())
        elif self.common_length is not None:
            batch = self._padded(batch, self.common_length)
        self._sender.flush(self.num_under_way)
        self._send(batch)
        return dict(batch)

    def _opened(self) -> Iterator[Any]:
        """Return the loader's iterator, whose creation draws a seed for its workers.

        With `shared`, the workers of replica 0 get the seed of a single process, those of other replicas different
        ones.
        """
        seed_state = self._seed_state if self.groups.replica == 0 else None
        if not self._was_open and seed_state is None:
            return iter(self.loader)
        self._was_open = False
        with torch.random.fork_rng(devices=[]):
            if seed_state is not None:
                torch.set_rng_state(seed_state)
            return iter(self.loader)

    def _padded(self, batch: Any, rule: CommonLength) -> dict[str, Any]:
        length = self._agreed_length(sequence_length(batch, rule.main_input))
        return pad_batch(batch, rule.main_input, length, rule.pad_token_id) if batch else {}

    def _agreed_length(self, length: int) -> int:
        """Return the longest padded length over the replicas if the loss sees padding, else `length`."""
        group = self.groups.replica_control
        if self.common_length is None or group is None:
            return length
        longest = torch.tensor([length])
        what = f"agreeing on a padded length with {self.groups.replicas}"
        guarded(lambda: dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group), what)
        return int(longest)

    def _send(self, batch: Any) -> None:
        if self.groups.pipeline_size > 1:
            sent = {key: self._as_sent(key, value) for key, value in without_hidden(batch).items()}
            self._sender.isend(sent, self.groups.pipeline_ranks[1:], self.groups.pipeline_control)

    def _as_sent(self, key: str, value: Any) -> Any:
        if key in self.placeholders and isinstance(value, torch.Tensor):
            return value.new_zeros(1).expand(value.shape)
        return value

    def _receive(self) -> dict[str, Any]:
        source = self.groups.pipeline_ranks[0]
        batch: dict[str, Any] = recv_object(
            source, self.groups.pipeline_control, f"receiving a batch from stage 0 (rank {source})"
        )
        return batch
