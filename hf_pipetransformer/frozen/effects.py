"""Side effects of a forward: random numbers that it draws, and communication with other processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


EXTREMES = (0.0, 1 - 2**-24)
"""The least and the largest number that `torch.rand` gives in float32."""


class Draws(TorchDispatchMode):
    """Count the single uniform numbers that the CPU's generator gives inside the context.

    Such draws are those of layerdrop, which are made with probability 0, too.

    Args:
        forced: what they are instead; None for what the generator gives.
    """

    def __init__(self, forced: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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


class Alone(TorchDispatchMode):
    """Refuse communication inside the context: processes that try a model do not do so in step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"the forward or the loss communicates with other processes ({func})")
        return func(*args, **(kwargs or {}))
