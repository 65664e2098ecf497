"""Token slices: their measured costs, TeraPipe's dynamic program over the length, and cuts chosen by it. Pure.

TeraPipe (Li et al., ICML 2021), sections 3.3 and 3.4, Eq. 5: a pipeline of K stages takes the sum of its slices' times
plus K - 1 times the slowest one. Under a bound on the slowest slice, the best sum is a shortest path. The bounds worth
trying are the times of slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_pipetransformer.planning.simulator import Durations, simulate
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import Plans
from hf_pipetransformer.schedules.schedule import Schedule
from hf_pipetransformer.schedules.tables import find_schedule


Times = NDArray[np.float64]
"""Seconds of forward and backward on one stage, `(granules, granules)`.

`times[x - 1, c]` is the time of a slice of `x` granules of tokens after a context of `c` granules. Entries with
`x + c` beyond the sequence are never read.
"""


def plan_slices(times: Times, num_stages: float, tolerance: float = 1e-3) -> tuple[int, ...]:
    """Return the granules of the slices of a sequence with the least time by Eq. 5.

    The least sum under a bound on the slowest slice only falls as the bound rises. The search therefore skips an
    interval of bounds when the sum at its upper end, combined with the bound at its lower end, does not beat the best
    plan so far. It also skips bounds between the slowest slice of a solution and the bound it was found for: they have
    the same solution.

    Args:
        num_stages: K; may be fractional.
        tolerance: allowed relative excess over the least time.
    """
    search = _Search(times, num_stages, tolerance)
    search.look(0, len(search.bounds) - 1, 0.0)
    return search.found


class _Search:
    """Branch and bound over the bounds on the slowest slice."""

    def __init__(self, times: Times, num_stages: float, tolerance: float) -> None:
        self.num_stages, self.tolerance = num_stages, tolerance
        length = len(times)
        # By the end of a slice, not by its context, so that one row has all slices that the program compares at a
        # step.
        self.by_end = np.full((length + 1, length), np.inf)
        for end in range(1, length + 1):
            starts = np.arange(end)
            self.by_end[end][:end] = times[end - starts - 1, starts]
        self.bounds = np.unique(self.by_end[np.isfinite(self.by_end)])
        self.found: tuple[int, ...] = ()
        self.seconds = np.inf

    def look(self, low: int, high: int, least: float) -> None:
        """Try the bounds with indices `low` to `high`, both included; none allows a sum below `least`."""
        if low > high or self._cannot_improve(low, least):
            return
        lengths, least, slowest = self._solve(float(self.bounds[high]))
        seconds = least + (self.num_stages - 1) * slowest
        if seconds < self.seconds:
            self.found, self.seconds = lengths, seconds
        high = int(np.searchsorted(self.bounds, slowest)) - 1
        if low > high or self._cannot_improve(low, least):
            return
        middle = (low + high) // 2
        self.look(low, middle, least)
        self.look(middle + 1, high, least)

    def _cannot_improve(self, low: int, least: float) -> bool:
        # A plan that no lower bound has shown has a slice as slow as the lowest bound of the interval.
        return bool(least + (self.num_stages - 1) * self.bounds[low] >= (1 - self.tolerance) * self.seconds)

    def _solve(self, bound: float) -> tuple[tuple[int, ...], float, float]:
        """Return the slices with the least sum under a bound, that sum, and the slowest; infinite if none."""
        length = len(self.by_end) - 1
        # Least sums for the first granules, and where the last slice of each begins.
        sums, begins = np.zeros(length + 1), np.zeros(length + 1, np.int64)
        for end in range(1, length + 1):
            own = self.by_end[end, :end]
            totals = np.where(own <= bound, own + sums[:end], np.inf)
            begins[end] = totals.argmin()
            sums[end] = totals[begins[end]]
        if not np.isfinite(sums[-1]):
            return (), np.inf, bound
        lengths, slowest, end = list[int](), 0.0, length
        while end:
            begin = int(begins[end])
            lengths.append(end - begin)
            slowest = max(slowest, float(self.by_end[end, begin]))
            end = begin
        return tuple(reversed(lengths)), float(sums[-1]), slowest


@dataclass(frozen=True)
class SliceTime:
    """Measured seconds of forward and backward of a slice: `tokens` of each sequence after `context` tokens."""

    sequences: int
    context: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class TokenCosts:
    """Fitted seconds of forward and backward of a slice over all stages, for context length L and slice length x:

        launch + sequences (sequence + context L + token x + attention (2 L x + x^2))

    TeraPipe (Li et al., ICML 2021), section 3.3, fits `a0 + a1 x + a2 L + a3 x L` for the cost of L tokens of context;
    this form also includes the attention of a slice to itself. `length` is the number of tokens of the measured
    sequences, `error` the largest relative error of the fit.
    """

    launch: float
    sequence: float
    context: float
    token: float
    attention: float
    length: int
    error: float = 0.0

    def seconds(self, sequences: float, context: Any, tokens: Any) -> Any:
        """Return the seconds of a slice; of many, if `context` and `tokens` are arrays."""
        # A causal slice attends to L x earlier pairs and to half of x^2 of its own; both are doubled here.
        pairs = 2 * context * tokens + tokens**2
        each = self.sequence + self.context * context + self.token * tokens + self.attention * pairs
        return self.launch + sequences * each

    def shares(self, sequences: float, lengths: Sequence[int]) -> list[float]:
        """Return each slice's time as a share of the time of whole sequences."""
        whole = self.seconds(sequences, 0, sum(lengths))
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        return [self.seconds(sequences, start, own) / whole for start, own in zip(starts, lengths, strict=True)]

    def times(self, sequences: float, length: int, granules: int, share: float, hop: float = 0.0) -> Times:
        """Return the times `(granules, granules)` that `plan_slices` takes, for sequences of `length` tokens.

        A stage takes a `share` of the model's time, and `hop` seconds for each slice besides.
        """
        sizes = length / granules
        tokens, context = np.meshgrid(np.arange(1, granules + 1) * sizes, np.arange(granules) * sizes, indexing="ij")
        times: Times = hop + share * self.seconds(sequences, context, tokens)
        return times


def fit_token_costs(times: Sequence[SliceTime]) -> TokenCosts:
    """Fit the costs to measurements: least squares of relative errors, without negative coefficients."""
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
    # Relative errors: a short slice weighs as much as a long one, which takes many times as long.
    rates = _non_negative(columns / seconds[:, None])
    found = columns @ rates
    launch, sequence, context, token, attention = rates.tolist()
    error = float(np.max(np.abs(found / seconds - 1)))
    length = int(np.max(contexts + tokens))
    return TokenCosts(launch, sequence, context, token, attention, length, error)


def _non_negative(columns: np.ndarray) -> np.ndarray:
    """Solve least squares for ones without negative coefficients, by trying all sets of the few columns."""
    num_columns, best, found = columns.shape[1], np.inf, np.zeros(columns.shape[1])
    for chosen in range(1, 2**num_columns):
        used = [column for column in range(num_columns) if chosen >> column & 1]
        rates, *_ = np.linalg.lstsq(columns[:, used], np.ones(len(columns)), rcond=None)
        rest = float(np.sum((columns[:, used] @ rates - 1) ** 2))
        # A set comes before its supersets: one that fits better by rounding alone does not replace it.
        if (rates >= 0).all() and rest < best - 1e-12:
            best, found = rest, np.zeros(num_columns)
            found[used] = rates
    return found


# ---- cuts of a batch ----

GRANULE = 8
"""Tokens per granule, the block that slices are made of (TeraPipe, section 4); more where `MOST_GRANULES` limits it.
"""
# Times are granules x granules, and the program goes through them under each bound.
MOST_GRANULES = 64
BUCKETS = (0.25, 0.5, 1.0, 2.0)
"""Sequence lengths to plan for, as shares of the measured length."""
WORTH = 0.97
"""Slices must take less than this share of the time of whole sequences: the cost model errs by some percent."""
FORWARD_SHARE = 1 / 3
"""Share of a slice's time spent in the forward: a backward takes twice a forward."""


@dataclass(frozen=True)
class TokenPlan:
    """Cut of a batch into M batch slices, with the tokens of each token slice and the predicted seconds."""

    num_microbatches: int
    lengths: tuple[int, ...]
    seconds: float


def cut_layout(
    layout: Layout, fixed: Plans | None, costs: TokenCosts | None, samples: int, is_free: bool, hop: float
) -> Layout:
    """Add token slices to a layout whose schedule cuts sequences; return other layouts unchanged.

    Args:
        fixed: the token slices if the user set them.
        costs: None keeps sequences whole unless `fixed` is set.
        samples: samples of a pipeline's batch.
        is_free: True if the number of micro-batches M may be chosen too.
    """
    if not layout.abilities.cuts_tokens:
        return layout
    if fixed is not None or costs is None:
        return replace(layout, token_slices=fixed or ())
    planner = SlicePlanner(find_schedule(layout.schedule), costs, samples, layout.pipeline_size, hop)
    count = planner.choose(costs.length).num_microbatches if is_free else layout.num_microbatches
    return replace(layout, num_microbatches=count, token_slices=planner.buckets(count))


@dataclass(frozen=True)
class SlicePlanner:
    """Search for the micro-batches and token slices of a batch with the least predicted time.

    The candidates for each M are the lengths of least time by Eq. 5 of TeraPipe and the whole sequence; a simulation
    of the schedule's own table decides between them. M is free where `num_microbatches` is None.

    Args:
        costs: costs over all stages together.
        samples: samples of a pipeline's batch.
    """

    schedule: Schedule
    costs: TokenCosts
    samples: int
    pipeline_size: int
    hop: float = 0.0

    def choose(self, length: int, num_microbatches: int | None = None) -> TokenPlan:
        """Return the plan for sequences of `length` tokens."""

        def rank(plan: TokenPlan) -> tuple[float, int, int]:
            is_whole = len(plan.lengths) == 1
            # Of equal times the plan with fewer parts wins: each part has launches of its own.
            return plan.seconds * (WORTH if is_whole else 1.0), plan.num_microbatches, len(plan.lengths)

        return min(self._possible(length, num_microbatches), key=rank)

    def best_whole_and_cut(self, num_microbatches: int | None) -> tuple[TokenPlan, TokenPlan | None]:
        """Return the fastest plan with whole sequences of the measured length, and the fastest other one, if any."""
        plans = self._possible(self.costs.length, num_microbatches)
        whole = min((plan for plan in plans if len(plan.lengths) == 1), key=lambda plan: plan.seconds)
        cut = min((plan for plan in plans if len(plan.lengths) > 1), key=lambda plan: plan.seconds, default=None)
        return whole, cut

    def buckets(self, num_microbatches: int) -> Plans:
        """Return slices for each length of `BUCKETS`, with the same batch slices; empty if none are cut."""
        lengths = sorted({max(1, round(share * self.costs.length)) for share in BUCKETS})
        plans = [self.choose(length, num_microbatches).lengths for length in lengths]
        return tuple(plans) if any(len(plan) > 1 for plan in plans) else ()

    def seconds(self, lengths: tuple[int, ...], size: int, count: int) -> float:
        """Return the simulated seconds of `count` batch slices of `size` sequences, all cut into these lengths."""
        whole = self.costs.seconds(size, 0, sum(lengths)) / self.pipeline_size
        seconds = [whole * share for share in self.costs.shares(size, lengths)]
        table = self.schedule.table(self.pipeline_size, count, num_token_slices=len(lengths))
        forward, backward = ((part,) * self.pipeline_size for part in (FORWARD_SHARE, 1 - FORWARD_SHARE))
        return simulate(table, Durations(forward, backward, self.hop, factors=tuple(seconds * count))).end

    def _possible(self, length: int, num_microbatches: int | None) -> list[TokenPlan]:
        """Return two plans for each M: whole sequences, and the slices of least time."""
        samples, k = self.samples, self.pipeline_size
        wanted = {1, 2, 3, k, 2 * k, 4 * k, samples}
        counts = [num_microbatches] if num_microbatches else sorted(count for count in wanted if count <= samples)
        plans = []
        for count in counts:
            # The largest batch slice, which the others wait for.
            size = -(-samples // count)
            # One plan where the best cut is the whole sequence.
            for lengths in dict.fromkeys([(length,), self._best_lengths(length, size, count)]):
                plans.append(TokenPlan(count, lengths, self.seconds(lengths, size, min(count, samples))))
        return plans

    def _best_lengths(self, length: int, size: int, count: int) -> tuple[int, ...]:
        granules = max(1, min(MOST_GRANULES, length // GRANULE))
        times = self.costs.times(size, length, granules, 1 / self.pipeline_size, self.hop)
        # All `count` batch slices are cut alike: their sum counts `count` times, K - 1 times the slowest only once.
        ends = accumulate(plan_slices(times, 1 + (self.pipeline_size - 1) / count), initial=0)
        return tuple(stop - start for start, stop in pairwise(round(length * end / granules) for end in ends))
