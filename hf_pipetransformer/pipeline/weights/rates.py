"""The learning rates of the updates that come next."""

from __future__ import annotations

from collections.abc import Callable
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
