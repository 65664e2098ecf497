"""Random numbers that a frozen part draws and does not use, such as those of layerdrop with probability 0."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


EXTREMES = (0.0, 1 - 2**-24)
"""The least and the largest number that `torch.rand` gives in float32."""


class Draws(TorchDispatchMode):
    """Count the single uniform numbers that the CPU's generator gives inside the context.

    Args:
        forced: what they are instead; None for what the generator gives.
    """

    def __init__(self, forced: float | None = None) -> None:
        super().__init__()
        self.number = 0
        self._forced = forced

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.rand.default or found.dim() or found.device.type != "cpu":
            return found
        self.number += 1
        return found if self._forced is None else torch.full_like(found, self._forced)


def draw(number: int) -> None:
    """Take as many single numbers from the generator as `Draws` counted."""
    for _ in range(number):
        torch.rand(())
