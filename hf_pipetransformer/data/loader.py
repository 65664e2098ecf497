"""The loader of a pipeline, and what Trainer asks a loader for."""

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
from hf_pipetransformer.comm.transfers import Outbox, take
from hf_pipetransformer.data.augmentation import Views
from hf_pipetransformer.data.batches import detach_tags, pad_batch, sequence_length, without_hidden
from hf_pipetransformer.data.node_shares import Arrangement, NodeOrder, replica_slice
from hf_pipetransformer.data.rng import SharedDraws, States


@dataclass
class Request:
    """What Trainer was asked for when it made a loader: a pipeline can make its own from it.

    Args:
        dataset: as the user gave it.
        description: what it is for, in a word.
        batch_size: samples of a batch by rank.
        sampler_fn: makes Trainer's sampler; None for a stream.
        is_training: what the loader is for.
        key: name of an evaluation's loader that may persist.
    """

    dataset: Any
    description: str
    batch_size: int
    sampler_fn: Callable[[Any], Any] | None = None
    is_training: bool = False
    key: str | None = None
    _made: list[Any] = field(default_factory=list, init=False)

    def sampler(self, dataset: Any) -> Any:
        """Trainer's sampler, made once: making it may draw random numbers."""
        if not self._made:
            self._made.append(None if self.sampler_fn is None else self.sampler_fn(dataset))
        return self._made[0]


_REQUEST = "pipeline_request"


def note_request(loader: Any, request: Request) -> None:
    """A loader of Trainer's own was made for `request`."""
    vars(loader)[_REQUEST] = request


def request_of(loader: Any) -> Request | None:
    """What a loader of Trainer's own was made for; None for one of the user's."""
    request: Request | None = getattr(loader, "__dict__", {}).get(_REQUEST)
    return request


@dataclass(frozen=True)
class CommonLength:
    """How replicas pad to one length.

    Args:
        main_input: the token ids, `(batch, seq)`.
        pad_token_id: what fills them.
    """

    main_input: str
    pad_token_id: int


class RowSource(Protocol):
    """Where samples come from that need not be read from the data set: the activation cache."""

    def select(self, samples: list[int]) -> list[int]:
        """Those of `samples` that must be read."""

    def complete(
        self, samples: list[int], read: list[int], batch: dict[str, Any], agree: Callable[[int], int]
    ) -> dict[str, Any]:
        """The batch of all `samples`.

        Args:
            samples: indices in the data set.
            read: those of them that `batch` holds, in this order.
            batch: as collated; empty for none.
            agree: the padded length of this replica's batch to that of all replicas. Called once.
        """

    def prefetch(self, samples: list[int]) -> None:
        """These come next."""


class PipelineLoader(DataLoaderStateMixin):
    """Yields this replica's part of every global batch, on every stage of its pipeline.

    A replica without samples in a global batch gets an empty dict. Batches stay on the CPU. To whom it may concern it
    is a `DataLoader`: what it does not know itself, the loader that it reads from does.

    Args:
        loader: a loader over `ReplicaBatchSampler`; only stage 0 iterates it.
        groups: this rank's pipeline; a transition changes it (`follow`).
        placeholders: names of batch entries that only the embeddings read; later stages get a tensor of the same
            shape and dtype without memory behind it.
        timeout: seconds that a stage may wait for its batch.
        total_batch_size: samples in a full global batch.
        is_training: whether a replica may be left without samples.
        shared: in place of the global generators, torch's of which differs from rank to rank in training: what torch's
            loader and samplers draw is drawn from it, as in one process.
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
        shared: SharedDraws | None,
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
        self._outbox = Outbox(timeout, "sending a batch to the later stages of this pipeline")
        self.num_under_way = 0
        """Batches that later stages may not have taken when the first one reads the next."""
        self.num_ahead = 0
        """Batches that were handed out and are not trained with yet."""
        self.pins_memory = False
        """Whether batches are handed out in pinned memory, on their way to a device."""
        self.rows: RowSource | None = None
        """Where samples come from that need not be read from the data set."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return DataLoader

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)  # Before it is set.
        return getattr(self.loader, name)

    @property
    def sampler(self) -> Any:
        """The order of the samples of all replicas."""
        return self.batch_sampler.sampler

    @property
    def collate(self) -> Any:
        """Samples to a batch."""
        return self.loader.collate_fn

    @property
    def samples(self) -> Any:
        """What batches are collated from, by samples or items."""
        return self.loader.dataset

    @property
    def dataset(self) -> Any:
        """The data set, as its user gave it."""
        return self.samples.dataset

    @property
    def batch_sampler(self) -> Any:
        return self.loader.batch_sampler

    @property
    def views(self) -> Views | None:
        """Of samples that are random, where their activations shall be stored."""
        views: Views | None = getattr(self.batch_sampler, "views", None)
        return views

    def read(self, samples: list[int]) -> Any:
        """The batch of these samples, or items, as this loader reads it."""
        return self.collate(self.samples.__getitems__(samples))

    @property
    def num_samples(self) -> int:
        """Of an epoch, over all replicas."""
        return len(self.sampler)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`."""
        self.batch_sampler.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def samples_of_replicas(self) -> list[int]:
        """Samples of the current global batch that count for each replica; see `ReplicaBatchSampler.repeat_small`."""
        num_replicas, size = self.groups.num_replicas, self._batch_size()
        if size < num_replicas:
            return [size] + [0] * (num_replicas - 1)
        slices = [replica_slice(size, replica, num_replicas) for replica in range(num_replicas)]
        return [part.stop - part.start for part in slices]

    def _batch_size(self) -> int:
        """Samples of the current global batch."""
        first, num_done = self._origin
        return min(self.total_batch_size, self.num_samples - num_done - (self._index - first) * self.total_batch_size)

    @property
    def nodes(self) -> NodeOrder | None:
        """How the samples of this run's own epochs are dealt to nodes; None where they are not."""
        found: NodeOrder | None = self.batch_sampler.nodes
        return found

    def keep_on(self, nodes: NodeOrder) -> None:
        """Epochs that begin from now on are arranged so that each node reads samples of its own."""
        self.batch_sampler.nodes = nodes

    def take_from(self, rows: RowSource) -> None:
        """From the next batch that is drawn on, samples come from `rows` where it has them."""
        self.rows = rows
        self.batch_sampler.select = rows.select if self.groups.is_first else None

    def follow(self, groups: PipelineGroups) -> None:
        """Go on, with the next global batch, as a stage of another layout. Workers that read ahead stay alive."""
        self._outbox.flush()
        old, self.groups = self.groups, groups
        if self.rows is not None:
            self.take_from(self.rows)
        elif (groups.replica, groups.num_replicas, groups.is_first) == (old.replica, old.num_replicas, old.is_first):
            return
        if groups.is_first and self._batches is not None:
            # What the workers have read ahead was cut for the old replicas.
            self._num_stale = self.batch_sampler.num_drawn - self._num_read
            self.batch_sampler.seek(self._next, groups.replica, groups.num_replicas)
        else:
            self._batches = None
            self._was_open = self._was_open and groups.is_first

    @property
    def is_at_end(self) -> bool:
        """Whether a stream has nothing more to give in this epoch, of which Trainer does not know the length."""
        return False

    @property
    def num_read(self) -> int:
        """Global batches of this epoch that were handed out."""
        return self._next

    @property
    def position(self) -> int:
        """Global batches of this epoch that were trained with."""
        return self._next - self.num_ahead

    @property
    def num_done(self) -> int:
        """Samples of this epoch that were trained with, over all replicas."""
        first, num_done = self._origin
        return min(num_done + (self.position - first) * self.total_batch_size, self.num_samples)

    @property
    def arrangement(self) -> Arrangement:
        """See `ReplicaBatchSampler.arrangement`."""
        found: Arrangement = self.batch_sampler.arrangement
        return found

    def order_state(self) -> torch.Tensor | None:
        """What `starting_at` needs beside the position, between two batches: see `ReplicaBatchSampler.order_state`."""
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
        """Skip this many global batches of the next epoch that is read: where a resumed run goes on.

        Args:
            num_batches: how many the earlier run had read.
            order_state: its `order_state` then; None draws the order anew.
            num_done: samples that it had been trained with, if its batches were of another size: the others are dealt
                anew, to the batches that are left.
            arrangement: its `arrangement`, if it had begun that epoch.
            ahead: its `ahead`.
        """
        self._first, self._order_state, self._saved_ahead = num_batches, order_state, ahead
        self._num_done, self._arrangement = num_done, arrangement
        # Workers that persist had drawn their seed in the first epoch.
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
                    # Nobody asks for more: this generator stays suspended here, and workers must not live as long.
                    self._batches = None
                yield pinned(batch) if self.pins_memory else batch
            self._outbox.flush()
        finally:
            self._batches = None
            self.end()

    def ahead(self) -> tuple[States, int] | None:
        """What the batches that were read ahead were drawn from, and how many, for `starting_at`; None without."""
        return None

    def _drawing(self) -> AbstractContextManager[None]:
        """What is drawn from the global generators inside is what one process draws."""
        return nullcontext() if self.shared is None else self.shared.drawing()

    def _begin_epoch(self) -> None:
        """Draw what torch's loader and sampler draw in one process, alike on all ranks, and find the place."""
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
            # A later stage may take over the reading in the middle of the epoch; it must know the same order then.
            self.batch_sampler.draw()

    def _draw_seed(self) -> None:
        """What torch's loader draws for its workers when it is iterated: once, if they persist.

        A run that goes on in the middle of an epoch had drawn it.
        """
        drawn = self._first or (self.loader.persistent_workers and self._num_epochs)
        self._seed_state = None
        if self.shared is not None and not drawn:
            self._seed_state = torch.get_rng_state()
            torch.empty((), dtype=torch.int64).random_()
        self._num_epochs += 1

    def read_again(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The samples of `batch`, which was handed out, as `rows` has them now. All stages of a pipeline call it."""
        if not self.groups.is_first:
            return self._receive()
        _, tags = detach_tags(batch)
        if self.rows is not None and tags is not None:
            rule = self.common_length
            same = None if rule is None else sequence_length(batch, rule.main_input)
            batch = self.rows.complete(tags.samples.tolist(), [], {}, lambda own: own if same is None else same)
        self._outbox.flush()
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
        if self.rows is not None and drawn is not None and drawn.is_single:
            batch = self.rows.complete(drawn.samples, drawn.read, batch, self._agreed_length)
            self.rows.prefetch(self.batch_sampler.upcoming())
        elif self.common_length is not None:
            batch = self._padded(batch, self.common_length)
        self._outbox.flush(self.num_under_way)
        self._send(batch)
        return dict(batch)

    def _opened(self) -> Iterator[Any]:
        """The loader's iterator. It draws a seed for its workers; a resumed run's was drawn when the epoch began.

        The first replica's workers are those of one process, the others' draw from seeds of their own.
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
        """The longest padded length over the replicas, where the loss sees padding; else this replica's own."""
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
            self._outbox.send(sent, self.groups.pipeline_ranks[1:], self.groups.pipeline_control)

    def _as_sent(self, key: str, value: Any) -> Any:
        if key in self.placeholders and isinstance(value, torch.Tensor):
            return value.new_zeros(1).expand(value.shape)
        return value

    def _receive(self) -> dict[str, Any]:
        source = self.groups.pipeline_ranks[0]
        batch: dict[str, Any] = take(
            source, self.groups.pipeline_control, f"receiving a batch from stage 0 (rank {source})"
        )
        return batch
