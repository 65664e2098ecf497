"""How long the slices of sequences should be: TeraPipe's dynamic programme, over both dimensions. Pure.

TeraPipe (Li et al., ICML 2021), sections 3.3 and 3.4: a pipeline of K stages needs the sum of its slices' times and
K - 1 times that of the slowest (Eq. 5). For a bound on the slowest slice the best sum is a shortest path; the bounds
worth trying are times of slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


Times = NDArray[np.float64]
"""Seconds of forward and backward, `(batch sizes, granules, granules)`: `times[b - 1, x - 1, c]` is that of a slice of
`x` granules of tokens of `b` sequences, after a context of `c` granules on one stage. Entries with `x + c` beyond the
sequence are never read."""


@dataclass(frozen=True)
class SlicePlan:
    """Slices of a batch.

    Args:
        slices: of each batch slice its number of sequences, and the lengths of its token slices in granules.
        seconds: that the pipeline is expected to take, by Eq. 5.
    """

    slices: tuple[tuple[int, tuple[int, ...]], ...]
    seconds: float


def pipeline_seconds(slice_times: list[float], num_stages: float) -> float:
    """Eq. 5: the sum of the slices' times and K - 1 times the longest."""
    return sum(slice_times) + (num_stages - 1) * max(slice_times)


def plan_slices(times: Times, num_stages: float, batch_size: int, tolerance: float = 1e-3) -> SlicePlan:
    """The best slices of a batch: those with the least time by Eq. 5.

    The least sum under a bound on the slowest slice only falls as the bound rises. An interval of bounds is therefore
    left out when the sum at its upper end, with the bound at its lower end, is no better than what was found; and
    bounds between the slowest slice of a solution and the bound that it was found for have the same solution.

    Args:
        times: for batch sizes from 1 on.
        num_stages: K; what is above 1 is how often the slowest slice counts beside the sum.
        batch_size: sequences of the batch.
        tolerance: the plan's time is at most this share above the least; 0 for the least itself.

    Raises:
        ValueError: there is nothing to slice.
    """
    if min(batch_size, num_stages, *times.shape) < 1 or times.shape[1] != times.shape[2]:
        raise ValueError(
            f"Slices of a batch of {batch_size} on {num_stages} stages need times of shape (batch sizes, granules, "
            f"granules), found {times.shape}."
        )
    search = _Search(times, num_stages, batch_size, tolerance)
    search.look(0, len(search.bounds) - 1, 0.0)
    return search.found


class _Search:
    """Branch and bound over the bounds on the slowest slice."""

    def __init__(self, times: Times, num_stages: float, batch_size: int, tolerance: float) -> None:
        self.num_stages, self.batch_size, self.tolerance = num_stages, batch_size, tolerance
        num_sizes, length, _ = times.shape
        self.by_end = np.full((length + 1, num_sizes, length), np.inf)
        for end in range(1, length + 1):
            starts = np.arange(end)
            self.by_end[end][:, :end] = times[:, end - starts - 1, starts]
        self.bounds = np.unique(self.by_end[np.isfinite(self.by_end)])
        self.found = SlicePlan((), np.inf)

    def look(self, low: int, high: int, least: float) -> None:
        """Try the bounds from `low` to `high`, both included, as far as they may be better than what is known.

        Args:
            least: no bound among them allows a smaller sum.
        """
        if low > high or self._cannot_improve(low, least):
            return
        plan, least, slowest = self._solve(float(self.bounds[high]))
        if plan.seconds < self.found.seconds:
            self.found = plan
        high = int(np.searchsorted(self.bounds, slowest)) - 1
        if low > high or self._cannot_improve(low, least):
            return
        middle = (low + high) // 2
        self.look(low, middle, least)
        self.look(middle + 1, high, least)

    def _cannot_improve(self, low: int, least: float) -> bool:
        return bool(least + (self.num_stages - 1) * self.bounds[low] >= (1 - self.tolerance) * self.found.seconds)

    def _solve(self, bound: float) -> tuple[SlicePlan, float, float]:
        """The plan with the least sum under a bound, that sum, and its slowest slice; infinite where there is none."""
        sums, begins = self._over_tokens(bound)
        of_batches, lasts = self._over_batch(sums[-1])
        least = float(of_batches[-1])
        if not np.isfinite(least):
            return SlicePlan((), np.inf), np.inf, bound
        slices, slowest, left = [], 0.0, self.batch_size
        while left:
            size = int(lasts[left])
            lengths, end = [], len(sums) - 1
            while end:
                begin = int(begins[end, size - 1])
                lengths.append(end - begin)
                slowest = max(slowest, float(self.by_end[end, size - 1, begin]))
                end = begin
            slices.append((size, tuple(reversed(lengths))))
            left -= size
        return SlicePlan(tuple(slices), least + (self.num_stages - 1) * slowest), least, slowest

    def _over_tokens(self, bound: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Least sums for the first granules, `(granules + 1, batch sizes)`, and where their last slices begin."""
        length_and_one, num_sizes, _ = self.by_end.shape
        sums = np.zeros((length_and_one, num_sizes))
        begins = np.zeros((length_and_one, num_sizes), np.int64)
        for end in range(1, length_and_one):
            own = self.by_end[end, :, :end]
            totals = np.where(own <= bound, own + sums[:end].T, np.inf)
            begins[end] = totals.argmin(axis=1)
            sums[end] = totals[np.arange(num_sizes), begins[end]]
        return sums, begins

    def _over_batch(self, of_sizes: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Least sums for so many sequences, `(batch_size + 1,)`, and the size of their last batch slice."""
        sums, lasts = np.zeros(self.batch_size + 1), np.zeros(self.batch_size + 1, np.int64)
        for count in range(1, self.batch_size + 1):
            sizes = np.arange(1, min(count, len(of_sizes)) + 1)
            totals = of_sizes[sizes - 1] + sums[count - sizes]
            lasts[count] = sizes[totals.argmin()]
            sums[count] = totals.min()
        return sums, lasts
