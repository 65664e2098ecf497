"""Choice of the few samples that the start-up checks run on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import torch
from transformers import Trainer

from hf_pipetransformer import trainer_compat, trl_compat
from hf_pipetransformer.data.batches import (
    IGNORED_LABEL,
    batch_size,
    note_samples,
    num_rows,
    take_rows,
    take_samples,
)
from hf_pipetransformer.data.flattened import sequences_of
from hf_pipetransformer.data.loader import Request
from hf_pipetransformer.data.reading import is_stream
from hf_pipetransformer.data.rng import SharedRngState, generators_kept, random_state
from hf_pipetransformer.data.sampler import order_of_run
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.startup.rows import check_rows


NUM_PROBE_SAMPLES = 6
NUM_SEARCHED_SAMPLES = 48
"""Number of samples that are searched for labeled ones with different labels."""


@dataclass(frozen=True)
class OwnBatches:
    """First batches from the run's sampler and collator. RNG states are restored, so the run repeats the same draws.

    Args:
        size: samples of one device's batch.
        order: returns the indices in the run's order; not called for a stream.
        sampler: source of `order`; its RNG state is restored as well.
        rows: number of rows of a sample in a batch.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    size: int
    order: Callable[[], Iterable[int]] = tuple
    sampler: Any = None
    rows: int = 1

    def collated(self) -> Generator[tuple[dict[str, Any], int]]:
        """Yield collated batches, each with its number of samples."""
        size = 2 if self.size == 1 and self._flattens_pairs() else self.size
        with generators_kept(self.dataset, self.collate, self.sampler):
            samples = self._samples()
            while some := list(islice(samples, min(size, NUM_SEARCHED_SAMPLES))):
                yield dict(note_samples(self.collate(some), len(some), self.rows)), len(some)

    def read(self, num_samples: int) -> dict[str, Any]:
        """Return at most `num_samples` first samples as one batch."""
        with generators_kept(self.dataset, self.collate, self.sampler):
            some = list(islice(self._samples(), num_samples))
            return dict(note_samples(self.collate(some), len(some), self.rows))

    def _flattens_pairs(self) -> bool:
        """Return True if two samples make a flattened batch; a single one would not show that a run's batches are."""
        with suppress(Exception):  # A run of one sample a batch need not have samples that fit together.
            return sequences_of(self.read(2)) is not None
        return False

    def _samples(self) -> Iterator[Any]:
        if not is_stream(self.dataset):
            return (self.dataset[index] for index in self.order())
        _check_restarts(self.dataset, "samples")
        return iter(self.dataset)


@dataclass(frozen=True)
class UsersBatch:
    """First batch of a user's own loader."""

    batch: dict[str, Any]

    def collated(self) -> Generator[tuple[dict[str, Any], int]]:
        yield self.batch, batch_size(self.batch)

    def read(self, num_samples: int) -> dict[str, Any]:
        return take_samples(self.batch, slice(0, num_samples))


FirstBatches = OwnBatches | UsersBatch


def probe_samples(
    batches: FirstBatches, main_input: str, count: Callable[[Mapping[str, Any]], int], most: int = NUM_PROBE_SAMPLES
) -> dict[str, Any]:
    """Return a few samples of one of the run's first batches; samples of different batches may not collate together.

    Takes the first batch with labeled samples of different labels or, if none comes soon, the closest to that.

    Args:
        count: returns the number of items of a batch that the loss averages over.

    Raises:
        ValueError: the data set is empty, or the rows of a batch do not belong to one sample each.
    """
    num_seen, best, found = 0, (-1, -1), None
    with closing(batches.collated()) as collated:
        for batch, size in collated:
            check_rows(batch, size, main_input)
            rows, num_labels, num_labelled = _choose_rows(batch, count, most)
            if (min(num_labels, 2), num_labelled) > best:
                best, found = (min(num_labels, 2), num_labelled), (batch, rows)
            num_seen, wanted = num_seen + size, min(size, most)
            if num_seen >= NUM_SEARCHED_SAMPLES or best >= (min(2, wanted), wanted):
                break
    if found is None:
        raise ValueError("The data set is empty: expected at least one sample.")
    batch, rows = found
    return batch if len(rows) == num_rows(batch) else take_rows(batch, torch.tensor(rows))


def _choose_rows(
    batch: Mapping[str, Any], count: Callable[[Mapping[str, Any]], int], most: int
) -> tuple[list[int], int, int]:
    """Return rows to probe with, the number of different labels, and the number of labeled rows among those returned.

    Prefers labeled rows and cycles over their labels. Labels that are not classes count as all different.
    """
    size = num_rows(batch)
    by_label: dict[Any, list[int]] = {}
    without_items = []
    for row in range(size):
        sample = take_rows(batch, torch.tensor([row]))
        if count(sample):
            by_label.setdefault(_label_of(sample), []).append(row)
        else:
            without_items.append(row)
    in_turn = [row for group in zip_longest(*by_label.values()) for row in group if row is not None]
    num_labels = size if None in by_label else len(by_label)
    return sorted([*in_turn, *without_items][:most]), num_labels, min(len(in_turn), most)


def _label_of(sample: Mapping[str, Any]) -> Any:
    """Return the class of a sample, or the set of its tokens' classes; None if its labels are not classes."""
    labels = sample.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    return tuple(labels[labels != IGNORED_LABEL].unique().tolist())


def most_samples(args: PipeTransformerArguments) -> int:
    """Return how many samples the whole model can run in float32 without exceeding the memory of a training step."""
    if args.pipeline_checkpoint != "never" or args.activation_checkpointing:
        return 1
    size = args.train_samples_per_device
    return max(1, min(NUM_PROBE_SAMPLES, size // 2 if args.bf16 or args.fp16 else size))


def first_batches(trainer: Trainer, given: Request | Any) -> FirstBatches:
    """Return the first batches of `given`, the arguments of Trainer's loader or a user's own loader.

    Draws from the global generators. Collective: call on every rank.
    """
    if not isinstance(given, Request):
        return UsersBatch(_first_of(given, trl_compat.rows_of_sample(trainer)))
    dataset, collate = trainer_compat.dataset_and_collator(trainer, given.dataset, given.description)
    rows = trl_compat.rows_of_sample(trainer)
    # With `split_batches` an evaluation batch may have fewer samples than there are processes.
    size = max(1, trainer.args.global_batch_size(given.batch_size) // trainer.args.world_size)
    if is_stream(dataset):
        return OwnBatches(dataset, collate, size, rows=rows)
    sampler = given.sampler(dataset)
    order = partial(order_of_run, dataset, sampler, trainer.args, SharedRngState(random_state()))
    return OwnBatches(dataset, collate, size, order, sampler, rows)


def _first_of(loader: Any, rows: int) -> dict[str, Any]:
    """Return the first batch of a user's loader. Every rank reads its own, since reading may be a collective."""
    _check_restarts(loader, "batch")
    with generators_kept(loader):
        batch = next(iter(loader), None)
    if batch is None:
        raise ValueError(f"The {type(loader).__name__} is empty: expected at least one batch.")
    getattr(loader, "end", lambda: None)()  # A loader prepared by accelerate would stay marked as active.
    return dict(note_samples(batch, None, rows))


def _check_restarts(source: Any, looked_at: str) -> None:
    if iter(source) is iter(source):
        raise ValueError(
            f"The {type(source).__name__} can be iterated once only, and a run looks at its first {looked_at} before "
            "it starts. Let `__iter__` begin anew each time."
        )
