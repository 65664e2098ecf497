"""Batches: cutting them into samples, counting what a loss averages over, padding, joining, tags of stored samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


_SAMPLES, _NUM_LAYERS, _DIGESTS, _STAMP, _HIDDEN = (
    f"pipetransformer_{name}" for name in ("samples", "num_layers", "digests", "stamp", "hidden")
)


@dataclass(frozen=True)
class CacheTags:
    """The samples of a batch or micro-batch as the activation cache sees them.

    Args:
        samples: index of each sample in the data set, `(batch,)`, int64.
        num_layers: layers whose output is known for each sample, `(batch,)`, int64; 0: it starts from its input.
        digests: of each sample's input, `(batch,)`, int64; 0 where the sample was not read.
        stamp: number of the weights, as the cache counts them, that `num_layers` is about.
        hidden: the stored activations, `(batch, seq, hidden)`, on the stage that reads them; rows with 0 layers hold
            nothing. None on later stages, and if nothing is stored.
    """

    samples: torch.Tensor
    num_layers: torch.Tensor
    digests: torch.Tensor
    stamp: int
    hidden: torch.Tensor | None

    def attach(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with this in it, so that it is cut, padded and sent on with the batch."""
        stamps = torch.full_like(self.samples, self.stamp)
        own = {_SAMPLES: self.samples, _NUM_LAYERS: self.num_layers, _DIGESTS: self.digests, _STAMP: stamps}
        return {**batch, **own, **({} if self.hidden is None else {_HIDDEN: self.hidden})}


def detach_tags(batch: Mapping[str, Any]) -> tuple[dict[str, Any], CacheTags | None]:
    """A batch's inputs of the model, and its tags."""
    inputs = dict(batch)
    about = [inputs.pop(key, None) for key in (_SAMPLES, _NUM_LAYERS, _DIGESTS, _STAMP)]
    hidden = inputs.pop(_HIDDEN, None)
    if any(values is None for values in about):
        return inputs, None
    # Trainer puts whole batches on the device in evaluation; indices are for the files.
    samples, num_layers, digests, stamps = (values.cpu() for values in about)
    return inputs, CacheTags(samples, num_layers, digests, int(stamps[0]), hidden)


def without_hidden(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as the later stages need it: stored activations reach them through the pipeline."""
    return {key: value for key, value in batch.items() if key != _HIDDEN}


IGNORED_LABEL = -100
_UP_TO_THE_END = ("attention_mask",)
"""What a slice reads of all tokens up to its own end."""


def batch_size(inputs: Mapping[str, Any]) -> int:
    """Samples in a batch: the first dimension of its first tensor that has one; 0 for an empty batch."""
    return next((v.shape[0] for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim() > 0), 0)


def split_batch(inputs: Mapping[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Cut a batch along its first dimension into at most `num_microbatches` parts that differ by one sample at most.

    A batch with fewer samples than micro-batches gives one micro-batch a sample. What has no sample dimension goes to
    every micro-batch.
    """
    size = batch_size(inputs)
    if size == 0:
        return []
    count = min(num_microbatches, size)
    bounds = [size * i // count for i in range(count + 1)]
    return [take_samples(inputs, slice(bounds[i], bounds[i + 1])) for i in range(count)]


def take_samples(inputs: Mapping[str, Any], where: slice) -> dict[str, Any]:
    """The given samples of a batch."""
    size = batch_size(inputs)
    return {key: value[where] if _has_samples(value, size) else value for key, value in inputs.items()}


def with_shifted_labels(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch that says for each token which one follows: the last token of a slice predicts the next one's first."""
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or "shift_labels" in inputs:
        return dict(inputs)
    ended = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED_LABEL)
    return {**inputs, "shift_labels": ended}


def cut_tokens(inputs: Mapping[str, Any], bounds: Sequence[int]) -> list[dict[str, Any]]:
    """The slices of a batch whose sequences have `bounds[-1]` tokens; none without bounds.

    Tensors `(batch, seq, ...)` are cut, of an attention mask each slice gets all up to its end.

    Raises:
        ValueError: an attention mask is no `(batch, seq)`, or rows hold several texts, which models tell apart by
            their positions in whole rows only.
    """
    if not bounds:
        return []
    length = bounds[-1]
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() != 2:
        raise ValueError(
            f"Token slices need an attention_mask of shape (batch, seq), found {tuple(mask.shape)}: let the data "
            "collator give one, or set pipeline_schedule='1f1b'."
        )

    positions = inputs.get("position_ids")
    if mask is None and isinstance(positions, torch.Tensor) and bool((positions.diff() != 1).any()):
        raise ValueError(
            "Token slices need rows of one text each, found position_ids that begin again without an attention_mask: "
            "set pipeline_schedule='1f1b' for packed rows."
        )

    def part(name: str, value: Any, start: int, stop: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
            return value
        own = value[:, 0 if name in _UP_TO_THE_END else start : stop]
        # Losses flatten labels by `view`.
        return own.contiguous() if name in ("labels", "shift_labels") else own

    whole = with_shifted_labels(inputs)
    return [
        {name: part(name, value, start, stop) for name, value in whole.items()} for start, stop in pairwise(bounds)
    ]


def take_rows(inputs: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """The samples of a batch at the positions `rows`, `(n,)`, int64."""
    size = batch_size(inputs)

    def taken(value: Any) -> Any:
        if not _has_samples(value, size):
            return value
        if isinstance(value, torch.Tensor):
            return value[rows.to(value.device, non_blocking=True)]
        return [value[int(row)] for row in rows]

    return {key: taken(value) for key, value in inputs.items()}


def _has_samples(value: Any, size: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.shape[0] == size
    return isinstance(value, (list, tuple)) and len(value) == size


def count_items(inputs: Mapping[str, Any], shifts_labels: bool = False) -> int:
    """How many items the mean of the model's own loss runs over.

    Labels that are not ignored (-100) for class labels of samples or tokens, all elements for float targets, answers
    inside the sequence for question answering, samples where there are no labels.

    Args:
        inputs: a batch or micro-batch.
        shifts_labels: the loss predicts the next token, so position 0 is never a target.
    """
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        if labels is not None and shifts_labels:
            labels = labels[..., 1:]
    if isinstance(labels, torch.Tensor):
        return labels.numel() if labels.is_floating_point() else int((labels != IGNORED_LABEL).sum())
    positions, tokens = inputs.get("start_positions"), inputs.get("input_ids")
    if isinstance(positions, torch.Tensor) and isinstance(tokens, torch.Tensor):
        return int((positions < tokens.shape[1]).sum())
    return batch_size(inputs)


def join_outputs(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """The output of a batch from those of its micro-batches: tensors are concatenated, scalars weighted and summed."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            terms = [output * weight for output, weight in zip(outputs, weights, strict=True) if weight]
            return torch.stack(terms).sum() if terms else first * 0
        return torch.cat(list(outputs))
    if isinstance(first, Mapping):
        return type(first)(**{key: join_outputs([output[key] for output in outputs], weights) for key in first})
    if isinstance(first, (list, tuple)):
        return type(first)(join_outputs(parts, weights) for parts in zip(*outputs, strict=True))
    return first


def sequence_length(batch: Mapping[str, Any], main_input: str) -> int:
    """Padded length of a batch of text; 0 for an empty one."""
    value = batch.get(main_input)
    return value.shape[1] if isinstance(value, torch.Tensor) else 0


def fill_value(key: str, main_input: str, pad_token_id: int) -> int:
    """What fills an entry of a batch of text beyond a sample's tokens: a padding token, -100 for labels, else zero."""
    return pad_token_id if key == main_input else IGNORED_LABEL if key == "labels" else 0


def pad_batch(
    batch: Mapping[str, Any],
    main_input: str,
    length: int,
    pad_token_id: int,
    fills: Mapping[str, int | float] | None = None,
) -> dict[str, Any]:
    """Pad every `(batch, seq, ...)` tensor of a batch on the right to `(batch, length, ...)`.

    Tokens get the padding token, labels -100, everything else (masks, segment ids) zero: what a padding collator that
    saw the whole global batch would have given.
    """
    current = sequence_length(batch, main_input)
    if current == length:
        return dict(batch)

    def padded(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != current:
            return value
        fill = (fills or {}).get(key, fill_value(key, main_input, pad_token_id))
        return torch.cat([value, value.new_full((value.shape[0], length - current, *value.shape[2:]), fill)], dim=1)

    return {key: padded(key, value) for key, value in batch.items()}
