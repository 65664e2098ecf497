"""How the loss of a batch follows from those of its parts, and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from hf_pipetransformer.data.batches import IGNORED_LABEL, batch_size, take_rows


SAME_INPUTS_TOLERANCE = 1e-5
"""Relative difference of two losses of the same inputs that still counts as equal."""
PARTS_TOLERANCE = 1e-4
"""Relative difference between a batch and its parts that still counts as rounding: kernels differ by shape."""
SMALLEST_SCALE = 1e-3
"""Losses and gradients below it are compared as if they were as large as it."""


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


@dataclass(frozen=True)
class FoundRule:
    """What is known of a loss.

    Args:
        rule: how losses of parts add up.
        ignores_num_items: whether the loss ignores `num_items_in_batch`.
        refusal: why the loss of a batch is not made of the losses of its parts; None if it is.
        is_finite: whether there was a loss to tell anything of.
    """

    rule: LossRule
    ignores_num_items: bool
    refusal: str | None = None
    is_finite: bool = True


class LossDoesNotDecomposeError(ValueError):
    """The loss of a batch is neither the weighted mean nor the sum of the losses of its parts."""


Parts = Sequence[tuple[dict[str, Any], float]]
Measure = Callable[[Parts, int], torch.Tensor]
"""The weighted sum of the losses of some parts, given the number of items to divide by, as a vector, `(1 + n,)`: the
loss and the norms of its gradient by parameter."""

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
    """Decide how losses add up, and check on several splits of a batch that they do.

    Whether the loss divides by the items that it is told shows when it is told twice as many; whether it is a mean or
    a sum over the batch shows when samples are there twice. Neither depends on which samples have labels.

    Args:
        measure: computes loss and gradient in full precision.
        inputs: a tiny batch, with different labels where there are any.
        count: items of a batch that the model's mean runs over.
        is_split: whether the run computes batches in parts; else no split is tried.

    Returns:
        The rule; with a refusal if none holds (a loss that compares samples with each other, say), or if only a part
        of the loss is divided by `num_items_in_batch`.
    """
    size, total = batch_size(inputs), count(inputs)
    if size == 0 or total == 0:
        return FoundRule(LossRule.MEAN, ignores_num_items=False)
    whole = measure([(dict(inputs), 1.0)], total)
    if not whole[0].isfinite():
        text = (
            f"The loss of {size} samples is {float(whole[0]):.7g} before the first step, so that nothing can be told "
            "of it. Expected a finite loss: look at the data, the labels and the weights."
        )
        return FoundRule(LossRule.MEAN, ignores_num_items=False, refusal=text, is_finite=False)
    told_more = measure([(dict(inputs), 1.0)], 2 * total)
    ignores = _equal(told_more, whole, SAME_INPUTS_TOLERANCE, smallest=0.0)
    if not ignores and not _equal(2 * told_more, whole, SAME_INPUTS_TOLERANCE, smallest=0.0):
        text = (
            f"The loss is {float(whole[0]):.7g} with num_items_in_batch={total} and {float(told_more[0]):.7g} with "
            f"{2 * total}: a part of it is divided by num_items_in_batch and another is not. {_REMEDY}"
        )
        return FoundRule(LossRule.MEAN, ignores, refusal=text)
    with_items = [row for row in range(size) if count(take_rows(inputs, torch.tensor([row])))]
    if not with_items:
        return FoundRule(LossRule.MEAN, ignores)
    rule = _rule_of(measure, inputs, with_items, total)
    splits = _splits(inputs, with_items) if is_split else []
    refusals = [_refused_split(measure, inputs, count, rows, rule, whole) for rows in splits]
    if splits and rule is LossRule.MEAN and not any(refusals):
        refusals.append(_refused_count(measure, inputs, count, with_items))
    return FoundRule(rule, ignores, next((text for text in refusals if text is not None), None))


def _equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float, smallest: float = SMALLEST_SCALE) -> bool:
    """Whether loss and norms of gradients differ by no more than a share of what they are."""
    pairs = [(found[:1], expected[:1]), (found[1:], expected[1:])]
    return all(float((a - b).norm()) <= tolerance * max(float(b.norm()), smallest) for a, b in pairs)


def _rule_of(measure: Measure, inputs: Mapping[str, Any], rows: list[int], total: int) -> LossRule:
    """What half of the samples give once and twice; more of them twice might not fit into memory."""
    half = torch.tensor(rows[: max(1, len(rows) // 2)])
    once, twice = (measure([(take_rows(inputs, half.repeat(times)), 1.0)], total) for times in (1, 2))
    adds_up = (twice - 2 * once).norm() < (twice - once).norm()
    return LossRule.SUM if adds_up else LossRule.MEAN


def _splits(inputs: Mapping[str, Any], with_items: list[int]) -> list[list[list[int]]]:
    """Splits of a batch into parts with items, as row numbers: equal labels lie together in one, mixed in the other.

    Weights of classes show where the parts hold different classes.
    """
    size, labels, order = batch_size(inputs), inputs.get("labels"), list(with_items)
    if isinstance(labels, torch.Tensor) and labels.dim() > 0 and len(labels) == size:
        order.sort(key=lambda row: _mean_label(labels[row]))
    splits = [_parts_of(order, 2), _parts_of(order[1:] + order[:1], 4)]
    for split in splits:
        split[-1].extend(row for row in range(size) if row not in with_items)
    return [split for split in splits if len(split) > 1]


def _parts_of(rows: list[int], part_size: int) -> list[list[int]]:
    """Rows in parts; a last one alone joins the part before it, if it can: single samples are a case of their own."""
    if len(rows) < 4:
        return [[row] for row in rows]
    starts = list(range(0, len(rows) - 1, part_size))
    return [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


def _refused_count(
    measure: Measure, inputs: Mapping[str, Any], count: Callable[[Mapping[str, Any]], int], with_items: list[int]
) -> str | None:
    """What is wrong with a mean over tokens if it runs over others than are counted: over the first of a text, say.

    Samples with as many labels each have the same weights either way, so half of them lose all but two.
    """
    labels = inputs.get("labels")
    if "shift_labels" in inputs or not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        return None
    if labels.is_floating_point() or not (labels == IGNORED_LABEL).any():
        return None  # Where no label is ever ignored a loss may not take such labels.
    few = with_items[: len(with_items) // 2]
    kept = labels.clone()
    for row in few:
        kept[row, (kept[row] != IGNORED_LABEL).nonzero().flatten()[2:]] = IGNORED_LABEL
    changed = {**inputs, "labels": kept}
    rest = [row for row in range(len(labels)) if row not in few]
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
    """What is wrong with the loss if the parts of a split do not give that of the whole batch."""
    parts = [take_rows(inputs, torch.tensor(part)) for part in rows]
    counts = [count(part) for part in parts]
    total = sum(counts)
    found = measure([(part, rule.weight(items, total)) for part, items in zip(parts, counts, strict=True)], total)
    if _equal(found, whole, PARTS_TOLERANCE):
        return None
    sizes = " and ".join(str(len(part)) for part in rows)
    return (
        f"The loss of {batch_size(inputs)} samples is {float(whole[0]):.7g}, its gradient's norm "
        f"{float(whole[1:].norm()):.7g}, but the {rule.value} over {counts} items in parts of {sizes} samples is "
        f"{float(found[0]):.7g}, with {float(found[1:].norm()):.7g}. {_REMEDY}"
    )


def agree_on_overflow(
    scaler: Any, optimizer: torch.optim.Optimizer, device: torch.device, largest: Callable[[torch.Tensor], None]
) -> None:
    """Unscale this rank's gradients and make its scaler skip the step if any rank found an infinite one.

    Without it the stages would drift apart: each `GradScaler` looks at its own gradients only.

    Args:
        scaler: this rank's `torch.amp.GradScaler`.
        optimizer: this rank's optimizer, not wrapped.
        device: where this rank computes.
        largest: replaces a CPU tensor by its maximum over all ranks, in place.
    """
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    flags = [flag.reshape(1).float() for flag in state["found_inf_per_device"].values()]
    found = torch.stack(flags).amax(0).cpu() if flags else torch.zeros(1)
    largest(found)
    # A stage without gradients has no entry of its own; the scaler insists on one. It stays on the host, where the
    # scaler reads it once more.
    state["found_inf_per_device"] = {device: found.reshape(())}
