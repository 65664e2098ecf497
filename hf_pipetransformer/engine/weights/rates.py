"""Coming learning rates, and prediction errors measured on a sample of a stage's weights.

The sample leaves out embeddings that may be predicted by row, because no forward sees most of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR


ComingRates = Callable[[int], list[list[float]]]
"""Function of n that returns, for each parameter group, the learning rates of the next n updates."""


def coming_rates(
    scheduler: Any, optimizer: torch.optim.Optimizer, num_left: Callable[[], int] | None = None
) -> ComingRates:
    """Return a function that looks up coming learning rates in the scheduler, which is stepped after each update.

    That works for a `LambdaLR`, which most of Trainer's schedulers are. Others, such as `ReduceLROnPlateau`, cannot be
    evaluated in advance, so the current rate is assumed to stay. Rates after the run's last update are 0; `num_left`
    returns the number of updates until then.
    """
    current = _Current(optimizer)
    is_scheduled = type(scheduler) is LambdaLR and len(scheduler.base_lrs) == len(optimizer.param_groups)
    base = [float(rate) for rate in scheduler.base_lrs] if is_scheduled else []

    def coming(num_updates: int) -> list[list[float]]:
        # A user's lambda may fail for steps after the last one, so it is not called for them.
        count = num_updates if num_left is None else min(num_updates, max(0, num_left()))
        if is_scheduled:
            # The next rate is that of the parameter group, later ones follow from the lambdas.
            done, groups = scheduler.last_epoch, zip(base, scheduler.lr_lambdas, strict=True)
            later = [[rate * factor(done + ahead) for ahead in range(1, count)] for rate, factor in groups]
            rates = [one + rest for one, rest in zip(current(min(count, 1)), later, strict=True)]
        else:
            rates = current(count)
        return [each + [0.0] * (num_updates - count) for each in rates]

    return coming


class _Current:
    """Current rates of the parameter groups. Tensor rates are read only after a change, to avoid synchronizing."""

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
"""Interval of measured micro-batches, counting those with an update between their forward and backward."""

SAMPLED_WEIGHTS = 1 << 18
"""Maximum number of sampled weights of a stage."""


@dataclass(frozen=True)
class PredictionErrors:
    """Mean prediction errors over some micro-batches, with on average `s` updates from forward to backward.

    `error` is `||W^ - W|| / ||W||`, with W^ the weights that the forward used and W those when the backward began;
    `error_unpredicted` is the same with W^ the current weights at the time of the forward.
    """

    num_micro_batches: int
    s: float
    error: float
    error_unpredicted: float


@dataclass(frozen=True)
class Sample:
    """Weight samples from the forward of a micro-batch: the current weights, and those that the forward used."""

    s: int
    current: torch.Tensor
    seen: torch.Tensor


class ErrorMeter:
    """Accumulator of prediction errors, on the device; only `take` synchronizes with it."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._num_micro_batches = 0
        self._sum_of_s = 0
        self._sums: torch.Tensor | None = None

    def watch(self, values: Sequence[torch.Tensor]) -> None:
        self._values = list(values)
        self._stride = _stride([value.numel() for value in self._values])

    def is_due(self) -> bool:
        """Count a micro-batch that has updates before its backward; return True if it is to be measured."""
        self._num_seen += 1
        return bool(self._values) and (self._num_seen - 1) % MEASURED_EVERY == 0

    def sample(self) -> torch.Tensor:
        """Return the sampled weights as one float32 vector: the same elements each time."""
        parts = [value.reshape(-1)[:: self._stride] for value in self._values]
        return torch.cat([part.to(parts[0].device, torch.float32) for part in parts])

    def add(self, forward: Sample) -> None:
        """Add the errors of a micro-batch whose backward is about to begin."""
        now = self.sample()
        # Weights that are all zero give an error of 0 rather than nan.
        scale = torch.linalg.vector_norm(now).clamp_min(torch.finfo(now.dtype).tiny)
        errors = [torch.linalg.vector_norm(was - now) / scale for was in (forward.seen, forward.current)]
        found = torch.stack(errors)
        self._sums = found if self._sums is None else self._sums.add_(found)
        self._num_micro_batches += 1
        self._sum_of_s += forward.s

    def take(self) -> PredictionErrors | None:
        """Return the means since the last call; None if nothing was measured."""
        if self._sums is None:
            return None
        count = self._num_micro_batches
        error, unpredicted = (self._sums / count).tolist()
        found = PredictionErrors(count, self._sum_of_s / count, error, unpredicted)
        self._sums, self._num_micro_batches, self._sum_of_s = None, 0, 0
        return found


def _stride(sizes: Sequence[int]) -> int:
    """Return the sampling stride, odd so that it does not pick the same columns of even-sized rows."""
    # Each tensor may round its count up by one; `room` leaves space for that.
    total, room = sum(sizes), max(1, SAMPLED_WEIGHTS - len(sizes))
    return 1 if total <= SAMPLED_WEIGHTS else -(-total // room) | 1
