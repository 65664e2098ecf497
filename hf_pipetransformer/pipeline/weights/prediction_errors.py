"""How far the weights that forwards saw are from those at their backwards, on a sample of a stage's weights.

Embeddings that are predicted by rows are not sampled, under any kind: most of their rows no forward sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


MEASURED_EVERY = 8
"""Of the units whose weights change between forward and backward, each so manieth is measured."""

SAMPLED_WEIGHTS = 1 << 18
"""Of a stage, at most."""


@dataclass(frozen=True)
class PredictionErrors:
    """Means over the measured units.

    Args:
        num_units: that were measured.
        s: updates between forward and backward.
        error: `||W^ - W|| / ||W||`, W^ what the forward saw, W the stage's weights as its backward began.
        error_unpredicted: the same for the weights that were current in the forward.
    """

    num_units: int
    s: float
    error: float
    error_unpredicted: float


@dataclass(frozen=True)
class Sample:
    """Of a unit in flight: what was current in its forward, and what that saw."""

    s: int
    current: torch.Tensor
    seen: torch.Tensor


class ErrorMeter:
    """Sums up on the device; nothing is read from it before `take`."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._num_units = 0
        self._sum_of_s = 0
        self._sums: torch.Tensor | None = None

    def watch(self, values: Sequence[torch.Tensor]) -> None:
        """From now on these are the weights of the stage that are sampled."""
        self._values = list(values)
        self._stride = _stride([value.numel() for value in self._values])

    def is_due(self) -> bool:
        """Whether the next unit, one with updates ahead, is to be measured."""
        self._num_seen += 1
        return bool(self._values) and (self._num_seen - 1) % MEASURED_EVERY == 0

    def sample(self) -> torch.Tensor:
        """The same weights each time, as one vector."""
        parts = [value.reshape(-1)[:: self._stride] for value in self._values]
        return torch.cat([part.to(parts[0].device, torch.float32) for part in parts])

    def add(self, forward: Sample) -> None:
        """The backward of that unit begins."""
        now = self.sample()
        scale = torch.linalg.vector_norm(now).clamp_min(torch.finfo(now.dtype).tiny)
        errors = [torch.linalg.vector_norm(was - now) / scale for was in (forward.seen, forward.current)]
        found = torch.stack(errors)
        self._sums = found if self._sums is None else self._sums.add_(found)
        self._num_units += 1
        self._sum_of_s += forward.s

    def take(self) -> PredictionErrors | None:
        """The means since the last call."""
        if self._sums is None:
            return None
        count = self._num_units
        error, unpredicted = (self._sums / count).tolist()
        found = PredictionErrors(count, self._sum_of_s / count, error, unpredicted)
        self._sums, self._num_units, self._sum_of_s = None, 0, 0
        return found


def _stride(sizes: Sequence[int]) -> int:
    """Odd, as rows are even; what each tensor rounds up fits too."""
    total, room = sum(sizes), max(1, SAMPLED_WEIGHTS - len(sizes))
    return 1 if total <= SAMPLED_WEIGHTS else -(-total // room) | 1
