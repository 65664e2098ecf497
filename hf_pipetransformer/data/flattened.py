"""Flattened batches: all samples end to end in one row, as collators without padding give, cut between sequences.

`position_ids` begin again with each sequence, by which models keep the sequences apart, so a row may be cut there. A
batch that was found to be flattened carries its `Sequences` as an entry to where it is cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch


SEQUENCES = "pipetransformer_sequences"
"""Name of the batch entry, JSON values, that says where the sequences of a flattened batch begin."""

CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_NUMBERS = "seq_idx"
MARKS = (*CUMULATIVE, *_LONGEST, _NUMBERS)
"""Batch entries that flattening collators may add to `position_ids`."""


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

    def attach(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {**batch, SEQUENCES: {"bounds": list(self.bounds), "num_samples": self.num_samples}}

    def tokens(self, which: Sequence[int]) -> torch.Tensor:
        """Return the token positions of the sequences `which`, in this order."""
        return torch.cat([torch.arange(self.bounds[number], self.bounds[number + 1]) for number in which])


def sequences_of(batch: Mapping[str, Any]) -> Sequences | None:
    """Return the sequences of a flattened batch; None for a batch of one row a sample."""
    entry = batch.get(SEQUENCES)
    return None if entry is None else Sequences(tuple(entry["bounds"]), entry["num_samples"])


def find_sequences(batch: Mapping[str, Any], num_samples: int) -> Mapping[str, Any]:
    """Return what a collator made of `num_samples` samples, with its `Sequences` if it is flattened.

    Flattened are a row of several samples, and a row of one sample with an entry that marks its sequences. Without
    such an entry a single sample may be packed in the data set for a model that does not keep its texts apart.
    """
    positions, row = batch.get("position_ids"), batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(positions, torch.Tensor) or not isinstance(row, torch.Tensor):
        return batch
    if positions.dim() != 2 or len(positions) != 1 or row.shape[:2] != positions.shape or not positions.numel():
        return batch
    numbers = positions[0].cpu()
    # As in transformers' masks.
    starts = [0, *((numbers.diff() != 1).nonzero().flatten() + 1).tolist()]
    # Positions that begin with different numbers could continue each other in another order.
    begin_alike = len(numbers[starts].unique()) == 1
    is_marked = any(batch.get(name) is not None for name in MARKS)
    if not begin_alike or not (is_marked or (num_samples > 1 and len(starts) > 1)):
        return batch
    return Sequences((*starts, len(numbers)), min(num_samples, len(starts))).attach(batch)


def take_sequences(batch: Mapping[str, Any], which: Sequence[int], num_samples: int | None = None) -> dict[str, Any]:
    """Return a flattened batch of the sequences `which` of another one, in this order.

    `num_samples` of them are told as samples, all if it is None.
    """
    own = sequences_of(batch)
    assert own is not None, "the batch is flattened"
    lengths, tokens = [own.lengths[number] for number in which], own.tokens(which)
    taken = Sequences((0, *accumulate(lengths)), len(which) if num_samples is None else num_samples)

    def part(name: str, value: Any) -> Any:
        # `new_tensor` keeps the dtype: flash attention takes these in int32 only.
        if value is not None and name in CUMULATIVE:
            return torch.as_tensor(value).new_tensor(taken.bounds)
        if value is not None and name in _LONGEST:
            return value.new_tensor(max(lengths)) if isinstance(value, torch.Tensor) else max(lengths)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[:2] != (1, own.bounds[-1]):
            return value
        # Numbered from 0 again, as the collator would for these sequences alone.
        if name == _NUMBERS:
            return value.new_tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
        return value[:, tokens.to(value.device)]

    return taken.attach({name: part(name, value) for name, value in batch.items() if name != SEQUENCES})


def first_tokens(batch: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return the first tokens of a flattened batch, whose last sequence may end early."""
    own = sequences_of(batch)
    assert own is not None, "the batch is flattened"
    bounds = (*(start for start in own.bounds if start < num_tokens), num_tokens)
    cut = Sequences((*bounds, own.bounds[-1]) if num_tokens < own.bounds[-1] else bounds, own.num_samples)
    return take_sequences(cut.attach(batch), range(len(bounds) - 1))


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


def join_tokens(sequences: Sequences, parts: Sequence[Sequence[int]], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join outputs `(1, tokens, ...)` of the parts that sequences were distributed over to those of the whole row.

    Outputs `(1, tokens - 1, ...)` are those of a next-token loss, which is zero where the next token is of another
    sequence.

    Raises:
        ValueError: outputs of other shapes.
    """
    places = [sequences.tokens(part) for part in parts]
    missing = num_left_out([output.shape for output in outputs], [len(each) for each in places])
    # What each part lacks is the value of its last token, which is zero in the whole row; the row lacks its last one.
    full = [torch.cat([each, each.new_zeros(1, missing, *each.shape[2:])], dim=1) for each in outputs]
    order = torch.cat(places).argsort()[: sequences.bounds[-1] - missing]
    return torch.cat(full, dim=1)[:, order.to(full[0].device)]


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
