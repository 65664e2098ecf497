"""Choice of the few samples that the start-up checks run on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from types import new_class
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from hf_pipetransformer.data.batches import (
    batch_size,
    note_samples,
    num_rows,
    take_rows,
    take_samples,
)
from hf_pipetransformer.data.flattened import sequences_of
from hf_pipetransformer.data.loader import Request
from hf_pipetransformer.data.reading import is_stream
from hf_pipetransformer.data.rng import Generators, SharedRngState, generators_kept, random_state, same_states
from hf_pipetransformer.data.sampler import order_of_run
from hf_pipetransformer.startup.rows import check_rows


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments


NUM_PROBE_SAMPLES = 6


@dataclass(frozen=True)
class OwnBatches:
    """First batches from the run's sampler and collator. RNG states are restored, so the run repeats the same draws.

    Args:
        size: samples of one device's batch.
        order: returns the indices in the run's order; not called for a stream.
        sampler: source of `order`; its RNG state is restored as well.
        rows: number of rows of a sample in a batch.
        has_workers: True if processes of their own read the stream in the run.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    size: int
    order: Callable[[], Iterable[int]] = tuple
    sampler: Any = None
    rows: int = 1
    has_workers: bool = False

    def first(self, most: int) -> tuple[dict[str, Any], int]:
        """Return at most `most` samples of the first batch, and their number; none of an empty data set."""
        # A single sample would not show that the collator puts several into one row.
        size = 2 if self.size == 1 and self._flattens_pairs() else min(self.size, max(2, most))
        return self._collated(size)

    def read(self, num_samples: int) -> dict[str, Any]:
        """Return at most `num_samples` first samples as one batch."""
        return self._collated(num_samples)[0]

    def _collated(self, num_samples: int) -> tuple[dict[str, Any], int]:
        with self._samples() as samples:
            some = list(islice(samples, num_samples))
            return (dict(note_samples(self.collate(some), len(some), self.rows)) if some else {}), len(some)

    def _flattens_pairs(self) -> bool:
        """Return True if two samples make a flattened batch."""
        with suppress(Exception):  # A run of one sample a batch need not have samples that fit together.
            return sequences_of(self.read(2)) is not None
        return False

    @contextmanager
    def _samples(self) -> Iterator[Iterator[Any]]:
        if not is_stream(self.dataset):
            with generators_kept(self.dataset, self.collate, self.sampler):
                yield (self.dataset[index] for index in self.order())
            return
        # Workers read copies of the stream: it stays as it is in this process.
        source = _read_by_worker(self.dataset) if self.has_workers else self.dataset
        with peeking(source) as samples, generators_kept(self.collate):
            yield samples


@dataclass(frozen=True)
class UsersBatch:
    """First batch of a user's own loader."""

    batch: dict[str, Any]

    def first(self, most: int) -> tuple[dict[str, Any], int]:
        return self.batch, batch_size(self.batch)

    def read(self, num_samples: int) -> dict[str, Any]:
        return take_samples(self.batch, slice(0, num_samples))


FirstBatches = OwnBatches | UsersBatch


def probe_samples(
    batches: FirstBatches, main_input: str, count: Callable[[Mapping[str, Any]], int], most: int = NUM_PROBE_SAMPLES
) -> dict[str, Any]:
    """Return a few rows of the run's first batch; samples of different batches may not collate together.

    Args:
        count: returns the number of items of a batch that the loss averages over.

    Raises:
        ValueError: the data set is empty, or the rows of a batch do not belong to one sample each.
    """
    batch, size = batches.first(most)
    if not size:
        raise ValueError("The data set is empty: expected at least one sample.")
    check_rows(batch, size, main_input)
    found = batch if num_rows(batch) <= most else take_rows(batch, torch.arange(most))
    labels = found.get("labels")
    # Without any label a loss is nan, which says nothing of a model's stages.
    if isinstance(labels, torch.Tensor) and not count(found):
        found = {**found, "labels": torch.zeros_like(labels)}
    return found


def most_samples(args: PipeTransformerArguments, may_slice_head: bool = False) -> int:
    """Return how many samples the whole model can run in float32 without exceeding the memory of a training step.

    Args:
        may_slice_head: True if a step may hold the logits of a part of each sequence only.
    """
    # A step that recomputes never keeps the activations of all layers, as these runs do, and one whose head is sliced
    # never the logits of a sample.
    if args.pipeline_checkpoint != "never" or args.activation_checkpointing or may_slice_head:
        return 1
    size = args.train_samples_per_device
    # Float32 takes twice the memory of 16 bits.
    return max(1, min(NUM_PROBE_SAMPLES, size // 2 if args.bf16 or args.fp16 else size))


def first_batches(
    given: Request | Any, dataset_and_collator: Callable[[Request], tuple[Any, Any]], args: Any, rows: int
) -> FirstBatches:
    """Return the first batches of `given`, the arguments of Trainer's loader or a user's own loader.

    Draws from the global generators. Collective: call on every rank.

    Args:
        dataset_and_collator: returns what Trainer's loader for such arguments would have.
        rows: number of rows that a sample has in a batch.
    """
    if not isinstance(given, Request):
        return UsersBatch(_first_of(given, rows))
    dataset, collate = dataset_and_collator(given)
    # With `split_batches` an evaluation batch may have fewer samples than there are processes.
    size = max(1, args.global_batch_size(given.batch_size) // args.world_size)
    if is_stream(dataset):
        if given.is_training and hasattr(dataset, "set_epoch"):
            dataset.set_epoch(0)  # As the run does before it iterates.
        return OwnBatches(dataset, collate, size, rows=rows, has_workers=args.dataloader_num_workers > 0)
    sampler = given.sampler(dataset)
    order = partial(order_of_run, dataset, sampler, args, args.global_batch_size, SharedRngState(random_state()))
    return OwnBatches(dataset, collate, size, order, sampler, rows)


def _first_of(loader: Any, rows: int) -> dict[str, Any]:
    """Return the first batch of a user's loader. Every rank reads its own, since reading may be a collective."""
    dataset, has_workers = getattr(loader, "dataset", None), getattr(loader, "num_workers", 0)
    # A loader of an indexed data set begins anew by itself.
    if isinstance(loader, DataLoader) and not is_stream(dataset):
        reading: AbstractContextManager[Any] = nullcontext()
    else:
        reading = peeking(dataset if is_stream(dataset) and not has_workers else loader)
    with reading, generators_kept(loader if isinstance(reading, nullcontext) else None):
        batch = next(iter(loader), None)
    if batch is None:
        raise ValueError(f"The {type(loader).__name__} is empty: expected at least one batch.")
    getattr(loader, "end", lambda: None)()  # A loader prepared by accelerate would stay marked as active.
    return dict(note_samples(batch, None, rows))


# ---- streams ----


def _itself(sample: Any) -> Any:
    return sample


def _read_by_worker(stream: Any) -> DataLoader[Any]:
    # Torch's own default would turn arrays into tensors; a lambda cannot be sent to a spawned worker.
    return DataLoader(stream, batch_size=None, num_workers=1, collate_fn=_itself)


@contextmanager
def peeking(source: Any) -> Iterator[Iterator[Any]]:
    """Iterate `source` from its beginning inside the context, so that the run misses nothing of what was read.

    Raises:
        ValueError: `source` draws random numbers, and its beginning cannot be read twice.
    """
    # An earlier look at the same source, whose samples no run has taken yet, is continued.
    peeked = getattr(type(source), _PEEKED, None)
    if peeked is None:
        try:
            peeked = _Peeked(source)
        except TypeError:  # An object of a built-in class, such as a list.
            if iter(source) is source:
                raise ValueError(
                    f"The {type(source).__name__} can be iterated once only, and a run looks at its beginning before "
                    "it starts. Let `__iter__` begin anew each time."
                ) from None
            yield iter(source)
            return
    peeked.is_open = True
    try:
        yield iter(source)
    finally:
        peeked.is_open = False
        peeked.settle()


_PEEKED = "_peeked"


class _Peeked:
    """Samples read of an iterable before the run, which gets them first when it iterates, and then what follows.

    The iterable may keep its own position, so one iterator serves both. Its `__iter__` is overridden until then.

    What is drawn from the global generators would be drawn at other moments in a run: it has to read anew then, and a
    second reading shows that the iterable begins anew as well.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.is_open = True
        """True while `iter(source)` shows the beginning, as often as it is called."""
        self._taken: list[Any] = []
        self._rest: Iterator[Any] | None = None
        self._epoch = 0
        self._kind = type(source)
        self._generators = Generators([source])
        self._first = SharedRngState(random_state()), self._generators.states()
        self._states = SharedRngState(random_state()), self._generators.states()
        # Python looks up `__iter__` on the class, not on the object: the object gets a class of its own.
        kind: Any = new_class(self._kind.__name__, (self._kind,))
        setattr(kind, _PEEKED, self)
        kind.__iter__ = lambda _: self._shown() if self.is_open else self._given_back()
        if hasattr(source, "set_epoch"):
            kind.set_epoch = lambda _, epoch: self._set_epoch(epoch)
        source.__class__ = kind

    def _shown(self) -> Iterator[Any]:
        for index in count():
            if index == len(self._taken):
                more = self._read()
                if not more:
                    return
                # Kept for the run, which gets them again when it begins to iterate.
                self._taken += more
            yield _copied(self._taken[index])

    def _read(self) -> list[Any]:
        """Return the next item in a list, which is empty at the end."""
        shared, own = self._states
        with shared.drawing():
            self._generators.restore(own)
            if self._rest is None:
                self._rest = self._kind.__iter__(self.source)
            try:
                return [next(self._rest)]
            except StopIteration:
                return []
            finally:
                self._states = shared, self._generators.states()

    def _given_back(self) -> Iterator[Any]:
        # First, so that later epochs iterate the object by its own class.
        self._remove()
        if self._rest is None:
            return iter(self.source)
        self._generators.restore(self._states[1])
        return chain(self._taken, self._rest)

    def _set_epoch(self, epoch: int) -> None:
        """Call the iterable's own method, unless the beginning of this epoch was read already."""
        # To set the epoch again could begin it anew, while its first items have been taken.
        if self._rest is not None and epoch == self._epoch:
            return
        if self._rest is not None:
            self._remove()
        self._epoch = epoch
        self._kind.set_epoch(self.source, epoch)

    def _remove(self) -> None:
        self.source.__class__ = self._kind

    def settle(self) -> None:
        """Have the run read anew if the global generators were advanced, and check that it can."""
        (first, own), (last, _) = self._first, self._states
        if same_states(last.states, first.states):
            return
        self._remove()
        self._rest = None
        self._generators.restore(own)
        with first.drawing():
            again = list(islice(iter(self.source), len(self._taken)))
        # Again, as the second reading has advanced them too.
        self._generators.restore(own)
        if not _same(again, self._taken):
            raise ValueError(
                f"The {type(self.source).__name__} gives something else when its first {len(self._taken)} items are "
                "read again from the same random state, and a run reads them before it starts, to inspect the model. "
                "Let `__iter__` begin anew each time, seed its generators, or set dataloader_num_workers=0."
            )


def _copied(item: Any) -> Any:
    """Copy an item, which collators may change, as deep as it can be copied."""
    try:
        return copy.deepcopy(item)
    except Exception:  # An open file or a decoder in it, for instance.
        return copy.copy(item)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (torch.Tensor, np.ndarray)):
        # A nan is not equal to itself.
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a != a)).all())
    return a is b or bool(a == b) or (hasattr(a, "__dict__") and _same(vars(a), vars(b)))
