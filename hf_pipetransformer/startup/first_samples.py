"""The samples that a run looks at before it starts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from typing import Any, Protocol

import torch
from transformers import Trainer

from hf_pipetransformer import trainer_compat as host
from hf_pipetransformer.data.batches import IGNORED_LABEL, batch_size, take_rows, take_samples
from hf_pipetransformer.data.dispatching import is_stream
from hf_pipetransformer.data.loader import Request
from hf_pipetransformer.data.rng import SharedDraws, generators_kept, present_states
from hf_pipetransformer.data.sampler import order_of_run
from hf_pipetransformer.options.arguments import PipeTransformerArguments


_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")
_MARKS_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What flattening collators add, beside `position_ids`, to say where samples begin."""

_REMEDY = (
    "Expected one row a sample: use a collator that pads, such as DataCollatorWithPadding, in place of "
    "DataCollatorWithFlattening; or pack the data set itself, into rows with position_ids that begin again with each "
    "text."
)


def check_not_packed(inputs: Mapping[str, Any], num_samples: int, main_input: str | None = None) -> None:
    """Refuse a batch in which a row is not one sample of the data set, whatever that is.

    Args:
        inputs: a collated batch.
        num_samples: how many samples were collated into it.
        main_input: name of the model's main input; None looks for the usual names.

    Raises:
        ValueError: the collator put several samples into one row, or rows and samples differ in number.
    """
    marks = [name for name in _MARKS_OF_PACKING if inputs.get(name) is not None]
    if marks:
        raise ValueError(
            f"The collator concatenates samples: {num_samples} samples gave a batch with {', '.join(marks)}. {_REMEDY}"
        )
    positions = inputs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.dim() == 2 and len(positions) != num_samples:
        row = _first_restart(positions, inputs.get("attention_mask"))
        if row is not None:
            raise ValueError(
                f"Several samples stand in row {row} of a batch: its position_ids begin again, "
                f"{positions[row].tolist()[:32]}. {_REMEDY}"
            )
    names = [main_input] if main_input is not None else _MAIN_INPUTS
    for name in names:
        value = inputs.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) != num_samples:
            raise ValueError(
                f"{num_samples} samples gave a batch whose {name!r} has shape {tuple(value.shape)}, "
                f"{len(value)} rows. Micro-batches and replicas take whole samples, a row each. {_REMEDY}"
            )


def _first_restart(positions: torch.Tensor, attention_mask: Any) -> int | None:
    """The first row whose positions, `(batch, seq)`, fall and rise again; None if there is none.

    Padding repeats one position, so it falls at most once, or is masked.
    """
    is_real = torch.ones_like(positions, dtype=torch.bool)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == positions.shape:
        is_real = attention_mask.bool()
    for row, (values, real) in enumerate(zip(positions, is_real, strict=True)):
        steps = values[real].diff()
        falls = (steps < 0).nonzero()
        if len(falls) and bool((steps[int(falls[0]) :] > 0).any()):
            return row
    return None


NUM_PROBE_SAMPLES = 6
NUM_SEARCHED_SAMPLES = 48
"""Samples among which labelled ones, and different labels, are looked for."""


class FirstBatches(Protocol):
    """The batches that a run begins with."""

    def collated(self) -> Generator[tuple[dict[str, Any], int]]:
        """One after the other, and how many samples are in each."""

    def read(self, num_samples: int) -> dict[str, Any]:
        """The first samples, at most so many, in one batch."""


@dataclass(frozen=True)
class OwnBatches:
    """As the run's own sampler and collator make them; what they draw is drawn again by the run.

    Args:
        dataset: samples by index, or a stream.
        collate: samples to a batch.
        size: samples of a batch of one device.
        order: indices in the order of the run; not asked for of a stream.
        sampler: that the order comes from.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    size: int
    order: Callable[[], Iterable[int]] = tuple
    sampler: Any = None

    def collated(self) -> Generator[tuple[dict[str, Any], int]]:
        """See `FirstBatches`."""
        with generators_kept(self.dataset, self.collate, self.sampler):
            samples = self._samples()
            while rows := list(islice(samples, min(self.size, NUM_SEARCHED_SAMPLES))):
                yield dict(self.collate(rows)), len(rows)

    def read(self, num_samples: int) -> dict[str, Any]:
        """See `FirstBatches`."""
        with generators_kept(self.dataset, self.collate, self.sampler):
            return dict(self.collate(list(islice(self._samples(), num_samples))))

    def _samples(self) -> Iterator[Any]:
        if not is_stream(self.dataset):
            return (self.dataset[index] for index in self.order())
        if iter(self.dataset) is iter(self.dataset):
            raise ValueError(
                f"The {type(self.dataset).__name__} can be iterated once only, and a run looks at its first samples "
                "before it starts. Let `__iter__` begin anew each time."
            )
        return iter(self.dataset)


@dataclass(frozen=True)
class UsersBatch:
    """The first batch of a loader of the user's own."""

    batch: dict[str, Any]

    def collated(self) -> Generator[tuple[dict[str, Any], int]]:
        """See `FirstBatches`."""
        yield self.batch, batch_size(self.batch)

    def read(self, num_samples: int) -> dict[str, Any]:
        """See `FirstBatches`."""
        return take_samples(self.batch, slice(0, num_samples))


def probe_samples(
    batches: FirstBatches, main_input: str, count: Callable[[Mapping[str, Any]], int], most: int = NUM_PROBE_SAMPLES
) -> dict[str, Any]:
    """A few samples of one of the batches that the run begins with: no others are sure to fit into one batch.

    It is the first in which samples have labels, and different ones, or if there is none soon, what comes closest.

    Args:
        batches: that the run begins with.
        main_input: name of the input that the embeddings read.
        count: items of a batch that the mean of the loss runs over.
        most: samples of it that are taken.

    Raises:
        ValueError: the data set is empty, or a batch is no batch of its samples.
    """
    num_seen, best, found = 0, (-1, -1), None
    with closing(batches.collated()) as collated:
        for batch, size in collated:
            check_not_packed(batch, size, main_input)
            rows, num_labels, num_labelled = _choose_rows(batch, count, most)
            if (min(num_labels, 2), num_labelled) > best:
                best, found = (min(num_labels, 2), num_labelled), (batch, rows)
            num_seen, wanted = num_seen + size, min(size, most)
            if num_seen >= NUM_SEARCHED_SAMPLES or best >= (min(2, wanted), wanted):
                break
    if found is None:
        raise ValueError("The data set is empty: expected at least one sample.")
    batch, rows = found
    return batch if len(rows) == batch_size(batch) else take_rows(batch, torch.tensor(rows))


def _choose_rows(
    batch: Mapping[str, Any], count: Callable[[Mapping[str, Any]], int], most: int
) -> tuple[list[int], int, int]:
    """Rows of a batch to probe with, labelled ones and of each label in turn; how many labels and labelled rows.

    Labels that are no classes count as different.
    """
    size = batch_size(batch)
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
    """The class of a sample, or the classes of its tokens; None if its labels are no classes."""
    labels = sample.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    return tuple(labels[labels != IGNORED_LABEL].unique().tolist())


def with_two_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    """A batch in which class labels differ: where all are the same, every second sample gets another one.

    Only then does it show whether a loss weighs its classes.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return inputs
    classes = labels[labels != IGNORED_LABEL].unique().tolist()
    if len(classes) > 1 or labels.dtype is torch.bool:
        return inputs
    known = classes[0] if classes else 0
    changed = labels.clone() if classes else torch.full_like(labels, known)
    # Every loss over classes knows the first two.
    other = known - 1 if known else 1
    changed[1::2] = torch.where(changed[1::2] == IGNORED_LABEL, IGNORED_LABEL, other)
    return {**inputs, "labels": changed}


def most_samples(args: PipeTransformerArguments) -> int:
    """How many samples the whole model may be run with, in full precision: a step of the run takes more memory."""
    if args.pipeline_checkpoint != "never" or args.activation_checkpointing:
        return 1
    size = args.train_samples_per_device
    return max(1, min(NUM_PROBE_SAMPLES, size // 2 if args.bf16 or args.fp16 else size))


def first_batches(trainer: Trainer, given: Request | Any) -> FirstBatches:
    """Those of a loader. A collective call; it draws from the global generators.

    Args:
        trainer: of the options, the columns and the collator.
        given: what Trainer's loader was asked for, or a loader of the user's own.
    """
    if not isinstance(given, Request):
        return UsersBatch(_first_of(given))
    dataset, collate = host.dataset_and_collator(trainer, given.dataset, given.description)
    size = trainer.args.global_batch_size(given.batch_size) // trainer.args.world_size
    if is_stream(dataset):
        return OwnBatches(dataset, collate, size)
    sampler = given.sampler(dataset)
    order = partial(order_of_run, dataset, sampler, trainer.args, SharedDraws(present_states()))
    return OwnBatches(dataset, collate, size, order, sampler)


def _first_of(loader: Any) -> dict[str, Any]:
    """The first batch of a user's loader. Each rank reads its own, as the ranks may do it together."""
    if iter(loader) is iter(loader):
        raise ValueError(
            f"The {type(loader).__name__} can be iterated once only, and a run looks at its first batch before it "
            "starts. Let `__iter__` begin anew each time."
        )
    with generators_kept(loader):
        batch = next(iter(loader), None)
    if batch is None:
        raise ValueError(f"The {type(loader).__name__} is empty: expected at least one batch.")
    getattr(loader, "end", lambda: None)()  # What accelerate made believes that it is still being read.
    return dict(batch)
