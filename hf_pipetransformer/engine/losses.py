"""Detection of how micro-batch losses combine into the batch loss, and the overflow check of fp16 loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from hf_pipetransformer.data.batches import IGNORED_LABEL, labels_by_row, num_rows, take_rows


SAME_INPUTS_TOLERANCE = 1e-5
"""Relative difference up to which two losses of the same inputs count as equal."""
PARTS_TOLERANCE = 1e-4
"""Relative difference between a batch and its parts up to which it counts as rounding: kernels differ by shape."""
SMALLEST_SCALE = 1e-3
"""Floor of the denominator of a relative difference."""


class LossRule(Enum):
    """Rule that combines the losses of parts of a batch.

    MEAN: each part's loss is a mean over its items, weighted by its share of the items of the batch. SUM: the model
    divides by `num_items_in_batch`, so the losses of the parts add up.
    """

    MEAN = "mean"
    SUM = "sum"

    def weight(self, num_items: int, total_items: int) -> float:
        if self is LossRule.SUM:
            return 1.0
        # Weight 1 lets the nan of an empty batch through, as in Trainer; weight 0 would hide it.
        return num_items / total_items if total_items else 1.0


class LossScope(Enum):
    """Samples that one call of the loss sees."""

    PARTS = "parts"
    """Those of a micro-batch: the losses of micro-batches and replicas are added with the weights of a `LossRule`."""
    REPLICA = "replica"
    """Those of a replica, as with DDP: the mean over the replicas is that of their losses."""
    BATCH = "batch"
    """Those of all replicas, as on one process."""


@dataclass(frozen=True)
class FoundRule:
    """Result of `find_loss_rule`. `refusal` is the error message if the losses of parts do not give the batch loss.

    `rule` is meaningless if `is_finite` is False (the loss was nan or infinite), or if the `scope` is not `PARTS`.
    """

    rule: LossRule
    ignores_num_items: bool
    refusal: str | None = None
    is_finite: bool = True
    scope: LossScope = LossScope.PARTS


class LossDoesNotDecomposeError(ValueError):
    """The loss of a batch is neither the weighted mean nor the sum of the losses of its parts."""


Parts = Sequence[tuple[dict[str, Any], float]]
Measure = Callable[[Parts, int], torch.Tensor]
"""Function of (part, weight) pairs and `num_items_in_batch`. It returns a vector `(1 + n,)`: the weighted sum of the
losses of the parts, and the norm of the gradient of that sum for each of the n parameters."""

_REMEDY = (
    "Micro-batches and replicas need a loss that is a mean (or a sum divided by num_items_in_batch) over samples or "
    "label tokens. Use such a loss (of one with class weights the plain mean of cross_entropy(..., weight=w, "
    "reduction='none')), or one process with pipeline_parallel_num_microbatches=1."
)


def find_loss_rule(
    measure: Measure,
    inputs: Mapping[str, Any],
    count: Callable[[Mapping[str, Any]], int],
    is_split: bool = True,
) -> FoundRule:
    """Decide by experiment how the losses of parts combine, and verify it on several splits of a small batch.

    Doubling `num_items_in_batch` shows if the loss divides by it; duplicating samples shows if the loss is a mean or a
    sum over the batch. Neither test depends on which samples have labels. The result has a refusal if neither rule
    fits (a contrastive loss, for example), or if only a part of the loss is divided by `num_items_in_batch`.

    Args:
        measure: must compute in full precision.
        inputs: a small batch; its labels should differ, or class weights go unnoticed.
        count: returns the number of items (samples or label tokens) that the mean over a batch runs over.
        is_split: False if the run never splits a batch: then no split is verified.
    """
    size, total = num_rows(inputs), count(inputs)
    # Without items there is no loss that could tell the rules apart.
    if size == 0 or total == 0:
        return FoundRule(LossRule.MEAN, ignores_num_items=False)
    whole = measure([(dict(inputs), 1.0)], total)
    if not whole[0].isfinite():
        text = (
            f"The loss of {size} samples is {float(whole[0]):.7g} before the first step, so that nothing can be told "
            "of it. Expected a finite loss: look at the data, the labels (all -100, or not below num_labels?) and "
            "the weights."
        )
        return FoundRule(LossRule.MEAN, ignores_num_items=False, refusal=text, is_finite=False)
    told_more = measure([(dict(inputs), 1.0)], 2 * total)
    # Without a floor, below which a small loss would equal its half.
    ignores = _equal(told_more, whole, SAME_INPUTS_TOLERANCE, smallest=0.0)
    if not ignores and not _equal(2 * told_more, whole, SAME_INPUTS_TOLERANCE, smallest=0.0):
        text = (
            f"The loss is {float(whole[0]):.7g} with num_items_in_batch={total} and {float(told_more[0]):.7g} with "
            f"{2 * total}: a part of it is divided by num_items_in_batch and another is not. {_REMEDY}"
        )
        return FoundRule(LossRule.MEAN, ignores, refusal=text)
    # Samples without labels tell nothing, and the mean of a part without any is nan.
    with_items = [row for row in range(size) if count(take_rows(inputs, torch.tensor([row])))]
    if not with_items:
        return FoundRule(LossRule.MEAN, ignores)
    rule = _rule_of(measure, inputs, with_items, total)
    splits = _splits(inputs, with_items) if is_split else []
    refusals = [_refused_split(measure, inputs, count, rows, rule, whole) for rows in splits]
    # Under SUM no weight depends on the count.
    if splits and rule is LossRule.MEAN and not any(refusals):
        refusals.append(_refused_count(measure, inputs, count, with_items))
    return FoundRule(rule, ignores, next((text for text in refusals if text is not None), None))


def _equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float, smallest: float = SMALLEST_SCALE) -> bool:
    # Loss and gradient apart, because the larger one would hide the other.
    pairs = [(found[:1], expected[:1]), (found[1:], expected[1:])]
    return all(float((a - b).norm()) <= tolerance * max(float(b.norm()), smallest) for a, b in pairs)


def _rule_of(measure: Measure, inputs: Mapping[str, Any], rows: list[int], total: int) -> LossRule:
    # Half of the samples, because the whole batch twice might not fit in memory.
    half = torch.tensor(rows[: max(1, len(rows) // 2)])
    once, twice = (measure([(take_rows(inputs, half.repeat(times)), 1.0)], total) for times in (1, 2))
    # The nearer of the two: neither is met exactly by a loss that no rule fits, which the splits show.
    adds_up = (twice - 2 * once).norm() < (twice - once).norm()
    return LossRule.SUM if adds_up else LossRule.MEAN


def _splits(inputs: Mapping[str, Any], with_items: list[int]) -> list[list[list[int]]]:
    """Return two ways to split a batch, as lists of row numbers: parts with similar labels, and parts with mixed ones.

    Class weights break the rule only if the parts contain different classes.
    """
    size, labels, order = num_rows(inputs), labels_by_row(inputs), list(with_items)
    if labels is not None:
        order.sort(key=lambda row: _mean_label(labels[row]))
    splits = [_parts_of(order, 2), _parts_of(order[1:] + order[:1], 4)]
    for split in splits:
        # Parts without any label would have no mean, so samples without labels join others.
        split[-1].extend(row for row in range(size) if row not in with_items)
    return [split for split in splits if len(split) > 1]


def _parts_of(rows: list[int], part_size: int) -> list[list[int]]:
    """Cut rows into parts. A single leftover row joins the part before it: batch size 1 may be a special case."""
    if len(rows) < 4:
        return [[row] for row in rows]
    starts = list(range(0, len(rows) - 1, part_size))
    return [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


def _refused_count(
    measure: Measure, inputs: Mapping[str, Any], count: Callable[[Mapping[str, Any]], int], with_items: list[int]
) -> str | None:
    """Return an error message if the loss is a mean over other tokens than `count` counts, else None.

    With equally many labels in every sample a wrong count would go unnoticed, so half of the samples lose all labels
    but two.
    """
    labels = inputs.get("labels")
    if "shift_labels" in inputs or not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return None
    if labels.is_floating_point() or not (labels == IGNORED_LABEL).any():
        return None  # This loss may not accept ignored labels at all.
    few = with_items[: len(with_items) // 2]
    changed = {**inputs, "labels": labels.clone()}
    by_row = labels_by_row(changed)
    if by_row is None:
        return None
    for row in few:
        by_row[row][(by_row[row] != IGNORED_LABEL).nonzero().flatten()[2:]] = IGNORED_LABEL
    rest = [row for row in range(len(by_row)) if row not in few]
    whole = measure([(changed, 1.0)], count(changed))
    text = _refused_split(measure, changed, count, [few, rest], LossRule.MEAN, whole)
    return text and f"The mean of the loss runs over other labels than are counted for it. {text}"


def _mean_label(labels: torch.Tensor) -> float:
    kept = labels[labels != IGNORED_LABEL]
    return float(kept.double().mean()) if kept.numel() else 0.0


def _refused_split(
    measure: Measure,
    inputs: Mapping[str, Any],
    count: Callable[[Mapping[str, Any]], int],
    rows: list[list[int]],
    rule: LossRule,
    whole: torch.Tensor,
) -> str | None:
    parts = [take_rows(inputs, torch.tensor(part)) for part in rows]
    counts = [count(part) for part in parts]
    total = sum(counts)
    found = measure([(part, rule.weight(items, total)) for part, items in zip(parts, counts, strict=True)], total)
    if _equal(found, whole, PARTS_TOLERANCE):
        return None
    sizes = " and ".join(str(len(part)) for part in rows)
    return (
        f"The loss of {num_rows(inputs)} samples is {float(whole[0]):.7g}, its gradient's norm "
        f"{float(whole[1:].norm()):.7g}, but the {rule.value} over {counts} items in parts of {sizes} samples is "
        f"{float(found[0]):.7g}, with {float(found[1:].norm()):.7g}. {_REMEDY}"
    )


def agree_on_overflow(
    scaler: Any, optimizer: torch.optim.Optimizer, device: torch.device, largest: Callable[[torch.Tensor], None]
) -> None:
    """Unscale this rank's gradients, and skip the step on all ranks if any rank found an inf or nan.

    Each `GradScaler` sees only its own gradients, so without this some stages would step and others not. `optimizer`
    must not be accelerate's wrapper; `largest` all-reduces a CPU tensor in place with MAX over all ranks.
    Collective: call on every rank.
    """
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    flags = [flag.reshape(1).float() for flag in state["found_inf_per_device"].values()]
    # The only wait for the device: the ranks agree on the host, and the scaler reads the flag there.
    found = torch.stack(flags).amax(0).cpu() if flags else torch.zeros(1)
    largest(found)
    # `GradScaler` asserts that there is an entry, which a stage without gradients lacks. The entry stays on the CPU:
    # the scaler reads it there without another device synchronization.
    state["found_inf_per_device"] = {device: found.reshape(())}
