"""How a collator pads: found from a few batches, then expected of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from hf_pipetransformer.autocache.probe import Batch, Probe, UnfitError
from hf_pipetransformer.autocache.samples import real_lengths


MULTIPLES = (1, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class PaddingRule:
    """Padded length of a batch from the real lengths of its samples.

    Args:
        kind: "none": there is no token dimension (images); "fixed": always `size`; "multiple": the longest, rounded
            up to a multiple of `size` (1 is the longest itself).
        size: see `kind`.
    """

    kind: Literal["none", "fixed", "multiple"]
    size: int = 1

    def length(self, longest: int) -> int:
        """Padded length of a batch whose longest sample has `longest` real tokens; 0 without a token dimension."""
        if self.kind == "none":
            return 0
        if self.kind == "fixed":
            # No collator cuts: a sample that is longer than the rule keeps its length.
            return max(self.size, longest)
        return -(-longest // self.size) * self.size


def find_padding(probe: Probe, batches: list[Batch]) -> PaddingRule:
    """The rule that explains every batch."""
    found = [_observed(batch, probe.main_input) for batch in batches]
    found += _shortened(probe, batches)
    lengths = {padded for _, padded in found}
    if len(lengths) == 1 and any(longest < padded for longest, padded in found):
        return PaddingRule("fixed", lengths.pop())
    for multiple in MULTIPLES:
        rule = PaddingRule("multiple", multiple)
        if all(rule.length(longest) == padded for longest, padded in found):
            return rule
    examples = ", ".join(f"{longest} to {padded}" for longest, padded in sorted(set(found))[:4])
    raise UnfitError(
        f"padding that follows no known rule (longest sample to length of the batch: {examples})",
        f"pad to one length, to the longest sample, or to a multiple of {', '.join(map(str, MULTIPLES[1:]))}",
    )


def _observed(batch: Batch, main_input: str) -> tuple[int, int]:
    """Longest real length and padded length."""
    return int(real_lengths(batch, main_input).max()), batch[main_input].shape[1]


def _shortened(probe: Probe, batches: list[Batch]) -> list[tuple[int, int]]:
    """How the collator pads the beginning of a sample.

    Samples of similar lengths fit several rules. This tells more, where it is the collator that pads and not the data
    set.
    """
    rows = probe.rows(probe.indices)
    sizes = [
        _size(row[probe.main_input]) if isinstance(row, Mapping) and probe.main_input in row else 0 for row in rows
    ]
    if sizes != real_lengths(batches[0], probe.main_input).tolist():
        return []
    size, row = max(sizes), rows[sizes.index(max(sizes))]
    found = []
    for length in sorted({1, 2, size // 2, size - 1} & set(range(1, size))):
        try:
            batch = probe.collate(
                [{key: value[:length] if _size(value) == size else value for key, value in row.items()}]
            )
            found.append(_observed(probe.checked(batch, 1), probe.main_input))
        # A collator need not take what the data set never gives.
        except Exception:
            return []
    return found


def _size(value: Any) -> int:
    """Length of a list or array; 0 for anything else."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else 0
    return len(value) if isinstance(value, (list, tuple)) else 0
