"""Flattened batches: all samples end to end in one row, as collators without padding give, cut between sequences.

`position_ids` begin again with each sequence, by which models keep the sequences apart, so a row may be cut there.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from hf_pipetransformer.comm.transfers import sendable


CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_NUMBERS = "seq_idx"
MARKS = (*CUMULATIVE, *_LONGEST, _NUMBERS)
"""Batch entries that flattening collators may add to `position_ids`."""


@sendable
@dataclass(frozen=True)
class Sequences:
    """Sequences of a flattened batch, each a sample or, if samples are packed rows, a part of one.

    Args:
        bounds: token position at which each sequence begins, and the length of the row.
        num_samples: samples with tokens that the collator was given, at most one a sequence.
    """

    bounds: tuple[int, ...]
    num_samples: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.bounds)]

    def tokens(self, which: Sequence[int]) -> torch.Tensor:
        """Return the token positions of the sequences `which`, in this order."""
        return torch.cat([torch.arange(self.bounds[number], self.bounds[number + 1]) for number in which])

    def take(
        self, inputs: Mapping[str, Any], which: Sequence[int], num_samples: int | None = None
    ) -> tuple[dict[str, Any], Sequences]:
        """Return a flattened batch of the sequences `which` of `inputs`, in this order, and how they lie in it.

        `num_samples` of them are told as samples, all if it is None.
        """
        lengths, tokens = [self.lengths[number] for number in which], self.tokens(which)
        taken = Sequences((0, *accumulate(lengths)), len(which) if num_samples is None else num_samples)

        def part(name: str, value: Any) -> Any:
            # `new_tensor` keeps the dtype: flash attention takes these in int32 only.
            if value is not None and name in CUMULATIVE:
                return torch.as_tensor(value).new_tensor(taken.bounds)
            if value is not None and name in _LONGEST:
                return value.new_tensor(max(lengths)) if isinstance(value, torch.Tensor) else max(lengths)
            if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[:2] != (1, self.bounds[-1]):
                return value
            # Numbered from 0 again, as the collator would for these sequences alone.
            if name == _NUMBERS:
                return value.new_tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
            return value[:, tokens.to(value.device)]

        return {name: part(name, value) for name, value in inputs.items()}, taken


def find_sequences(batch: Mapping[str, Any], num_samples: int) -> Sequences | None:
    """Return the sequences of what a collator made of `num_samples` samples; None for one row a sample.

    Flattened are a row of several samples, and a row of one sample with an entry that marks its sequences. Without
    such an entry a single sample may be packed in the data set for a model that does not keep its texts apart.
    """
    positions, row = batch.get("position_ids"), batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(positions, torch.Tensor) or not isinstance(row, torch.Tensor):
        return None
    if positions.dim() != 2 or len(positions) != 1 or row.shape[:2] != positions.shape or not positions.numel():
        return None
    numbers = positions[0].cpu()
    # As in transformers' masks.
    starts = [0, *((numbers.diff() != 1).nonzero().flatten() + 1).tolist()]
    # Positions that begin with different numbers could continue each other in another order.
    begin_alike = len(numbers[starts].unique()) == 1
    is_marked = any(batch.get(name) is not None for name in MARKS)
    if not begin_alike or not (is_marked or (num_samples > 1 and len(starts) > 1)):
        return None
    return Sequences((*starts, len(numbers)), min(num_samples, len(starts)))


def assign_sequences(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Distribute sequences over at most `num_parts` parts of nearly equal token counts; none is empty.

    The longest sequence goes first, each to the part that has the fewest tokens. Contiguous parts are not as even: of
    16 sequences of 16 to 48 tokens in 4 parts, the largest part is 11 % above the mean at best, with this rule 2 %.
    A loss that is a mean over tokens does not depend on their order.
    """
    parts: list[list[int]] = [[] for _ in range(min(num_parts, len(lengths)))]
    fewest = [(0, number) for number in range(len(parts))]
    for sequence in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        num_tokens, part = fewest[0]
        heapq.heapreplace(fewest, (num_tokens + lengths[sequence], part))
        parts[part].append(sequence)
    return sorted(sorted(part) for part in parts)


def num_left_out(shapes: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Return by how many values the outputs of rows of `lengths` tokens are shorter: 0, or 1 for a next-token loss.

    Raises:
        ValueError: outputs of other shapes.
    """
    missing = lengths[0] - shapes[0][1] if len(shapes[0]) > 1 else -1
    if missing not in (0, 1) or [tuple(each[:2]) for each in shapes] != [(1, each - missing) for each in lengths]:
        raise ValueError(
            f"An output of {lengths[0]} tokens has shape {tuple(shapes[0])}: expected (1, tokens, ...), as "
            "samples that share a row are cut apart and joined again token by token. Let the model, or "
            "preprocess_logits_for_metrics, keep these dimensions, or use a collator that pads."
        )
    return missing
