"""Learning rates of the updates to come, and errors of predictions on a sample of a stage's weights.

Embeddings that are predicted by rows are not sampled, under any kind: no forward sees most of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR


ComingRates = Callable[[int], list[list[float]]]
"""Gives per parameter group the learning rates of the next n updates."""


def coming_rates(
    scheduler: Any, optimizer: torch.optim.Optimizer, num_left: Callable[[], int] | None = None
) -> ComingRates:
    """Asks the schedule of a run where it can tell (a `LambdaLR`, as most of Trainer's are), else the rate stays.

    What a scheduler of another kind will do depends on what is measured until then. Behind the run's last update
    nothing moves, and a schedule is not asked: it may know no rate there.

    Args:
        scheduler: it is stepped after each update; None for none.
        optimizer: whose parameter groups are meant.
        num_left: updates until the end of the run; None for no end.
    """
    known: ComingRates = _Current(optimizer)
    if type(scheduler) is LambdaLR and len(scheduler.base_lrs) == len(optimizer.param_groups):
        known = _Scheduled(scheduler, optimizer)
    return known if num_left is None else _UntilEnd(known, num_left)


@dataclass(frozen=True)
class _UntilEnd:
    known: ComingRates
    num_left: Callable[[], int]

    def __call__(self, num_updates: int) -> list[list[float]]:
        count = min(num_updates, max(0, self.num_left()))
        return [rates + [0.0] * (num_updates - count) for rates in self.known(count)]


class _Scheduled:
    """Rates by a `LambdaLR`: the next one as the group has it, those after it by the schedule."""

    def __init__(self, scheduler: LambdaLR, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler = scheduler
        self.current = _Current(optimizer)
        self._base = [float(rate) for rate in scheduler.base_lrs]

    def __call__(self, num_updates: int) -> list[list[float]]:
        first, done = self.current(min(num_updates, 1)), self.scheduler.last_epoch
        return [
            rates + [base * factor(done + ahead) for ahead in range(1, num_updates)]
            for rates, base, factor in zip(first, self._base, self.scheduler.lr_lambdas, strict=True)
        ]


class _Current:
    """The rates that the groups have. One that is a tensor is read once after each change, not at each call."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._read: dict[int, tuple[torch.Tensor, int, float]] = {}

    def __call__(self, num_updates: int) -> list[list[float]]:
        return [[self._rate(i, group["lr"])] * num_updates for i, group in enumerate(self.optimizer.param_groups)]

    def _rate(self, index: int, rate: Any) -> float:
        if not isinstance(rate, torch.Tensor):
            return float(rate)
        tensor, version, value = self._read.get(index, (None, -1, 0.0))
        if tensor is not rate or version != rate._version:
            value = float(rate)
            self._read[index] = (rate, rate._version, value)
        return value


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
