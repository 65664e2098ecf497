"""How the loss of a batch follows from the losses of its parts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from hf_pipetransformer.batches import batch_size, take_samples


class LossRule(Enum):
    """MEAN: each part counts its share of the items. SUM: parts are already divided by all items and add up."""

    MEAN = "mean"
    SUM = "sum"

    def weight(self, num_items: int, total_items: int) -> float:
        """What a part's loss counts in the loss of the batch."""
        if self is LossRule.SUM:
            return 1.0
        # A batch without items has the mean of nothing, nan, as in Trainer; so have its parts.
        return num_items / total_items if total_items else 1.0


class LossDoesNotDecomposeError(ValueError):
    """The loss of a batch is neither the weighted mean nor the sum of the losses of its parts."""


def find_loss_rule(
    loss_of: Callable[[dict[str, Any], int], float],
    inputs: Mapping[str, Any],
    count: Callable[[Mapping[str, Any]], int],
    tolerance: float,
) -> LossRule:
    """Compare the loss of a whole batch with those of an uneven split in two.

    Args:
        loss_of: loss of some inputs, given the number of items of the whole batch.
        inputs: a tiny batch.
        count: items of a batch that the model's mean runs over.
        tolerance: relative difference that still counts as equal.

    Raises:
        LossDoesNotDecomposeError: neither rule holds (a loss that compares samples with each other, say).
    """
    size = batch_size(inputs)
    if size < 2:
        return LossRule.MEAN
    cut = max(1, 2 * size // 3)
    parts = [take_samples(inputs, slice(0, cut)), take_samples(inputs, slice(cut, size))]
    counts = [count(part) for part in parts]
    total = sum(counts)
    if total == 0:
        return LossRule.MEAN
    whole = loss_of(dict(inputs), total)
    losses = [loss_of(part, total) if items else 0.0 for part, items in zip(parts, counts, strict=True)]
    mean = sum(loss * LossRule.MEAN.weight(items, total) for loss, items in zip(losses, counts, strict=True))
    bound = tolerance * max(abs(whole), 1e-3)
    if abs(mean - whole) <= bound:
        return LossRule.MEAN
    if abs(sum(losses) - whole) <= bound:
        return LossRule.SUM
    raise LossDoesNotDecomposeError(
        f"The loss of {size} samples is {whole:.7g}, but its parts of {cut} and {size - cut} samples give "
        f"{losses[0]:.7g} and {losses[1]:.7g}, whose mean over {counts} items is {mean:.7g}. "
        "Micro-batches and replicas need a loss that is a mean (or a sum divided by "
        "num_items_in_batch) over samples or label tokens. Use such a loss, or one process with "
        "pipeline_parallel_num_microbatches=1."
    )
