"""The batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Fetched:
    """An optimizer step whose batches have been read.

    Args:
        batches: of this replica.
        items: of each batch over all replicas.
        num_items: that a loss divides by; None where it takes none.
        is_short: the iterator had fewer batches than a step takes.
    """

    batches: list[Any] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    num_items: torch.Tensor | None = None
    is_short: bool = False

    def pairs(self) -> Iterator[tuple[Any, int]]:
        """Each batch and its items."""
        return zip(self.batches, self.items, strict=True)
