"""Data loader of a pipeline, which Trainer iterates, and the request that it is made from.

`PipelineLoader` knows the position in the data, an `EpochReading` reads samples on the ranks with stage 0, and a
`PipelineLink` sends the batches to the later stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from torch.utils.data import DataLoader
from transformers.trainer_utils import has_length

from hf_pipetransformer.comm.staging import pinned
from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.data.node_shares import NodeOrder, replica_slice
from hf_pipetransformer.data.reading import EpochReading, RecordSource, ReplicaReading, Share
from hf_pipetransformer.data.sampler import Position


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups


@dataclass
class Request:
    """Arguments that Trainer made a loader with, kept so that a pipeline can build its own loader from them.

    Args:
        batch_size: samples of a batch per rank.
        sampler_fn: makes Trainer's sampler; None for a stream.
        key: name of an evaluation loader that may persist.
        reads_all: True to read all samples, whatever `dataloader_drop_last` says.
    """

    dataset: Any
    description: str
    batch_size: int
    sampler_fn: Callable[[Any], Any] | None = None
    is_training: bool = False
    key: str | None = None
    reads_all: bool = False
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


_SLOW_WORKER = (
    "(A worker of the data loader hangs, or takes longer for a batch. Look at what the data set and the collator wait "
    "for, or raise pipeline_timeout, for an evaluation ddp_timeout.)"
)


def _versions(batch: Mapping[str, Any]) -> list[int]:
    return [value._version for value in batch.values() if isinstance(value, torch.Tensor)]


class PipelineLoader(DataLoader[Any], DataLoaderStateMixin):
    """Loader that yields this replica's share of every global batch, on every stage of its pipeline.

    A replica without samples in a global batch gets an empty dict. Batches stay on the CPU.

    Args:
        dataset: as the user gave it.
        total_batch_size: samples of a global batch.
        pins_memory: yield batches in pinned memory, ready for an asynchronous copy to a device.
    """

    dataset: Any
    sampler: Any

    def __init__(self, dataset: Any, reading: EpochReading, total_batch_size: int, pins_memory: bool = False) -> None:
        # Trainer and accelerate would be content with less, but callbacks and scripts may check for a DataLoader and
        # read its attributes. They find those of the one that reads, which is inside `reading`.
        order = reading.order
        self.__dict__.update(vars(reading.reader))
        self.__dict__.update(dataset=dataset, sampler=reading.reader.sampler if order is None else order.sampler)
        self.reading = reading
        self.link = reading.link
        self.order = order
        """Order of the samples; None for a stream."""
        # accelerate's mixin reads it: the last batch is whole then, and has no remainder to be cut to.
        self._drop_last = order is not None and getattr(order.global_batches, "drop_last", False)
        self.is_stream = order is None
        self.total_batch_size = total_batch_size
        self.pins_memory = pins_memory
        # accelerate's `begin` and `end` enter this loader there and take it out again.
        self.gradient_state = GradientState()
        self.present = SampleBatch()
        """Batch that was yielded last."""
        self._notes_yielded = False
        self._yielded: deque[tuple[SampleBatch, list[int]]] = deque()
        """Batches that were yielded and not asked for by `is_as_yielded`, with the versions of their tensors."""
        self.size = 0
        """Samples of the current batch, over all replicas."""
        self.num_seen = 0
        """Samples of all replicas since the epoch began."""
        self.num_under_way = 0
        """Batches that later stages may not have received yet when stage 0 reads the next one."""
        self.num_ahead = 0
        """Batches that were yielded but not trained on yet."""
        self._offset = 0
        """Samples that an earlier run did of this epoch beyond those of the batches before the next one."""
        self._start: Position | None = None
        """Where an earlier run has left the next epoch; None if it has not begun it."""
        self._next = 0
        """Index of the next global batch."""
        self._last: int | None = None
        """Index of the epoch's last one; None if not known yet."""

    def __iter__(self) -> Iterator[SampleBatch]:  # type: ignore[override]
        self.begin()
        # Where an earlier run had stopped is for one epoch; those after it begin at their first batch.
        start, self._start = self._start, None
        self._last = self.reading.begin_epoch(start)
        self._next, done = (0, 0) if start is None else (start.first, start.samples)
        self._offset = done - self._next * self.total_batch_size
        self.size = self.num_seen = 0
        self._yielded.clear()
        try:
            while not self.is_at_end:
                share = self._next_share()
                self.size = share.size
                self.num_seen += share.size
                if share.is_last:
                    self._last = self._next
                # The epoch had ended before this batch, such as one that is resumed at its end.
                if share.is_none:
                    self._last = self._next - 1
                    break
                self._next += 1
                # Set before the batch is handed out: accelerate asks for it while the batch is trained on.
                self.end_of_dataloader = share.is_last
                self.present = share.batch.changed(pinned) if self.pins_memory else share.batch
                if self._notes_yielded:
                    self._yielded.append((self.present, _versions(self.present)))
                yield self.present
            # Not in `finally`: after an error the receivers may be gone, and this would wait for them until its time
            # limit.
            self.link.flush()
            self.reading.flush()
        finally:
            self.reading.close()
            self.end()

    def _next_share(self) -> Share:
        if self.link.groups.is_first:
            try:
                share = self.reading.next(self._next, self.num_under_way)
            except RuntimeError as error:
                # torch raises a plain RuntimeError, of which only the text tells.
                if str(error).startswith("DataLoader timed out"):
                    error.add_note(_SLOW_WORKER)
                raise
            self.link.send(share, self.num_under_way)
        else:
            share = self.link.receive(self.num_under_way)
        self.reading.begun = None  # The first batch is over, also on the stages that have not read it.
        # Only rank 0 has drawn while it read; its state is what a single process would have now.
        if self.reading.shared is not None and share.rng_state is not None:
            self.reading.shared.torch_state = share.rng_state
        return share

    def set_epoch(self, epoch: int) -> None:
        for drawing in (self.sampler, self.dataset):
            if hasattr(drawing, "set_epoch"):
                drawing.set_epoch(epoch)

    def samples_of_replicas(self) -> list[int]:
        """Return how many samples of the current global batch count for each replica; see `repeat_small`."""
        num_replicas, size = self.link.groups.num_replicas, self.size
        # In an evaluation every replica has all of so small a batch, and one copy counts.
        if size < num_replicas:
            return [size] + [0] * (num_replicas - 1)
        slices = [replica_slice(size, replica, num_replicas) for replica in range(num_replicas)]
        return [each.stop - each.start for each in slices]

    # ---- position ----

    @property
    def is_at_end(self) -> bool:
        """True if this epoch has no more batches."""
        return self._last is not None and self._next > self._last

    def position(self, epoch: int) -> Position:
        """Return the position of a run in this epoch, without what was read ahead; call between two batches."""
        order, is_known, num_batches = self.order, has_length(self), self._next - self.num_ahead
        samples = num_batches * self.total_batch_size + self._offset
        length = 0 if order is None else len(order.sampler)
        # The end of an epoch is the beginning of the next one, but not while batches that were read ahead are not
        # trained.
        is_over = not self.num_ahead and (self.is_at_end or (is_known and num_batches >= len(self)))
        return Position(
            epoch=epoch + is_over,
            # The last batch may be smaller than the others.
            samples=0 if is_over else min(samples, length or samples),
            global_batch=self.total_batch_size,
            num_samples=length if is_known else None,
            group_size=None if order is None else order.group_size,
            nodes=None if order is None else order.epochs_nodes,
            first=num_batches,
            order_state=None if order is None else order.rng_state(0 < num_batches < len(self)),
            ahead=self.reading.ahead(self.num_ahead),
        )

    def starting_at(self, start: Position) -> PipelineLoader:
        """Begin the next epoch where an earlier run had left it."""
        self._start = start
        self.reading.resume(start)
        return self

    def follow(self, groups: PipelineGroups) -> None:
        """Continue with the next global batch as a stage of another layout."""
        # Before the groups change: what is on its way goes to stages of the old ones.
        self.link.flush()
        self.reading.flush()
        old, self.link.groups = self.link.groups, groups
        self.reading.follow(old, self._next)

    # ---- the activation cache ----

    @property
    def records(self) -> RecordSource | None:
        return self.reading.records

    def take_from(self, records: RecordSource, is_asked: bool = False) -> None:
        """Look samples up in `records` from the next batch on; with `is_asked` for one that asks `is_as_yielded`."""
        self.reading.records, self._notes_yielded = records, is_asked

    def is_as_yielded(self, batch: Mapping[str, Any]) -> bool:
        """Return True if a batch is the next that was yielded, and nothing was written into it since."""
        while self._yielded:
            given, versions = self._yielded.popleft()
            if given.keys() == batch.keys() and all(batch[name] is value for name, value in given.items()):
                return versions == _versions(given)
        return False

    def look_up_again(self, batch: dict[str, Any]) -> SampleBatch:
        """Return an earlier `batch` with what `records` has of it now. Call on every stage of a pipeline."""
        if not self.link.groups.is_first:
            return self.link.receive().batch
        assert isinstance(self.reading, ReplicaReading)
        # The size and the end are of no use here: the position in the epoch stays.
        share = Share(self.reading.again(batch), 0, False)
        self.link.send(share)
        return share.batch

    @property
    def nodes(self) -> NodeOrder | None:
        """Assignment of samples to nodes in the epochs that this run begins; None if there is none."""
        return None if self.order is None else self.order.nodes

    def keep_on(self, nodes: NodeOrder) -> None:
        """Arrange epochs that begin from now on so that each node always reads the same samples."""
        assert self.order is not None
        self.order.nodes = nodes
