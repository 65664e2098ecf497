"""Lengths of token slices, and their costs: TeraPipe's dynamic programme over length and batch. Pure.

TeraPipe (Li et al., ICML 2021), sections 3.3 and 3.4: a pipeline of K stages takes the sum of its slices' times plus
K - 1 times the slowest one (Eq. 5). For a bound on the slowest slice the best sum is a shortest path; the bounds worth
trying are times of slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

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


@dataclass(frozen=True)
class SliceTime:
    """One measurement.

    Args:
        sequences: of the batch slice.
        context: tokens of each sequence before the slice.
        tokens: of each sequence in the slice.
        seconds: of forward and backward.
    """

    sequences: int
    context: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class TokenCosts:
    """`launch + sequences (sequence + context L + token x + attention (2 L x + x^2))` seconds, all stages together.

    TeraPipe (Li et al., ICML 2021), section 3.3, takes `a0 + a1 x + a2 L + a3 x L` for what L tokens of context add;
    this form knows that a slice attends to itself too.

    Args:
        launch: of any slice.
        sequence: of each sequence.
        context: of a token of context.
        token: of a token of the slice.
        attention: of a pair of tokens.
        length: tokens of the sequences that were measured.
        error: largest relative difference to what was measured.
    """

    launch: float
    sequence: float
    context: float
    token: float
    attention: float
    length: int
    error: float = 0.0

    def seconds(self, sequences: float, context: float, tokens: float) -> float:
        """Of forward and backward of a slice."""
        pairs = 2 * context * tokens + tokens**2
        each = self.sequence + self.context * context + self.token * tokens + self.attention * pairs
        return self.launch + sequences * each

    def shares(self, sequences: float, lengths: Sequence[int]) -> list[float]:
        """What each slice of whole sequences takes of their time."""
        whole = self.seconds(sequences, 0, sum(lengths))
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        return [self.seconds(sequences, start, own) / whole for start, own in zip(starts, lengths, strict=True)]

    def times(self, sequences: float, length: int, granules: int, share: float, hop: float = 0.0) -> Times:
        """As `plan_slices` takes them, `(1, granules, granules)`, for batch slices of so many sequences.

        Args:
            sequences: of a batch slice.
            length: tokens of a sequence.
            granules: parts that slices are made of.
            share: of the model's time that a stage takes.
            hop: seconds that a slice costs a stage beside its computation.
        """
        sizes = length / granules
        tokens, context = np.meshgrid(np.arange(1, granules + 1) * sizes, np.arange(granules) * sizes, indexing="ij")
        pairs = 2 * context * tokens + tokens**2
        each = self.sequence + self.context * context + self.token * tokens + self.attention * pairs
        times: Times = (hop + share * (self.launch + sequences * each))[None]
        return times

    def as_event(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def fit_token_costs(times: Sequence[SliceTime]) -> TokenCosts:
    """The costs that come nearest to what was measured, none below zero; relative errors count.

    Raises:
        ValueError: nothing was measured.
    """
    if not times:
        raise ValueError("Costs of slices need measurements, found none.")
    sequences, contexts, tokens, seconds = np.array([astuple(each) for each in times], np.float64).T
    columns = np.stack(
        [
            np.ones_like(seconds),
            sequences,
            sequences * contexts,
            sequences * tokens,
            sequences * (2 * contexts * tokens + tokens**2),
        ],
        axis=1,
    )
    rates = _non_negative(columns / seconds[:, None])
    found = columns @ rates
    launch, sequence, context, token, attention = rates.tolist()
    error = float(np.max(np.abs(found / seconds - 1)))
    length = int(np.max(contexts + tokens))
    return TokenCosts(launch, sequence, context, token, attention, length, error)


def _non_negative(columns: np.ndarray) -> np.ndarray:
    """Least squares for ones, without negative coefficients: the best over all sets of columns; there are few."""
    num_columns, best, found = columns.shape[1], np.inf, np.zeros(columns.shape[1])
    for chosen in range(1, 2**num_columns):
        used = [column for column in range(num_columns) if chosen >> column & 1]
        rates, *_ = np.linalg.lstsq(columns[:, used], np.ones(len(columns)), rcond=None)
        rest = float(np.sum((columns[:, used] @ rates - 1) ** 2))
        if (rates >= 0).all() and rest < best - 1e-12:
            best, found = rest, np.zeros(num_columns)
            found[used] = rates
    return found
