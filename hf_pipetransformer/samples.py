"""The few samples that a run looks at before it starts: those that tell the most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice, zip_longest
from typing import Any

import torch

from hf_pipetransformer.autodp.stream import is_stream
from hf_pipetransformer.batches import IGNORED_LABEL, batch_size, take_rows
from hf_pipetransformer.splitters.packing import check_not_packed


NUM_PROBE_SAMPLES = 6
NUM_SEARCHED_SAMPLES = 48
"""Samples among which labelled ones, and different labels, are looked for."""


Order = Callable[[], Iterable[int]]
"""Indices of a batch as the run itself takes it: what its collator can put together."""


def read_batch(dataset: Any, collate: Any, order: Order, num_samples: int) -> dict[str, Any]:
    """A batch of samples from all over the data set, of a stream its beginning."""
    if is_stream(dataset):
        return dict(collate(list(islice(dataset, num_samples))))
    indices = [i * len(dataset) // num_samples for i in range(num_samples)]
    return _collated(dataset, collate, indices, order, num_samples)[0]


def _collated(
    dataset: Any, collate: Any, indices: Iterable[int], order: Order, num_samples: int
) -> tuple[dict[str, Any], int]:
    """A batch of these samples, and how many it has; of the run's own where these cannot be put together.

    Samples of different lengths, say, that a sampler would never put into one batch.
    """
    samples = [dataset[i] for i in indices]
    try:
        return dict(collate(samples)), len(samples)
    except Exception as error:
        own = [dataset[i] for i in islice(order(), num_samples)]
        try:
            return dict(collate(own)), len(own)
        except Exception:
            raise error from None


def probe_samples(
    dataset: Any, collate: Any, order: Order, main_input: str, count: Callable[[Mapping[str, Any]], int]
) -> dict[str, Any]:
    """A tiny batch from all over the data set: sorted data would show one label only. Of a stream its beginning.

    If the first few samples have no labels, or all the same one, it is searched for others.

    Args:
        order: taken from where samples from all over the data set cannot be one batch.
        count: items of a batch that the mean of the loss runs over.

    Raises:
        ValueError: the data set is empty, or the batch is no batch of its samples.
    """
    batch: dict[str, Any] = {}
    rows: list[int] = []
    for num_samples in (NUM_PROBE_SAMPLES, NUM_SEARCHED_SAMPLES):
        batch, size = _spread_batch(dataset, collate, order, num_samples)
        check_not_packed(batch, size, main_input)
        rows, is_telling = _choose_rows(batch, count)
        if is_telling or size < num_samples:
            break
    return batch if len(rows) == batch_size(batch) else take_rows(batch, torch.tensor(rows))


def _spread_batch(dataset: Any, collate: Any, order: Order, num_samples: int) -> tuple[dict[str, Any], int]:
    """A batch from all over the data set, and how many samples it has."""
    if is_stream(dataset):
        if iter(dataset) is iter(dataset):
            raise ValueError(
                f"The {type(dataset).__name__} can be iterated once only, and a run looks at its first samples before "
                "it starts. Let `__iter__` begin anew each time."
            )
        samples = list(islice(dataset, num_samples))
        if samples:
            return dict(collate(samples)), len(samples)
    elif len(dataset):
        indices = [i * len(dataset) // num_samples for i in range(num_samples)]
        return _collated(dataset, collate, indices, order, num_samples)
    raise ValueError("The data set is empty: expected at least one sample.")


def _choose_rows(batch: Mapping[str, Any], count: Callable[[Mapping[str, Any]], int]) -> tuple[list[int], bool]:
    """Rows of a batch to probe with, labelled ones and of each label in turn; and whether they tell enough."""
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
    is_telling = len(in_turn) >= min(size, NUM_PROBE_SAMPLES) and (len(by_label) > 1 or None in by_label)
    return sorted([*in_turn, *without_items][:NUM_PROBE_SAMPLES]), is_telling


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
