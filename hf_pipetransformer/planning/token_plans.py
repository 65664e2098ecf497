"""Cuts of a batch into micro-batches and token slices, chosen by the measured cost of slices. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hf_pipetransformer.planning.simulator import Durations, simulate
from hf_pipetransformer.planning.slice_costs import TokenCosts, plan_slices
from hf_pipetransformer.schedules import Schedule, find_schedule


if TYPE_CHECKING:
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.schedules.placement import Plans


GRANULE = 8
"""Tokens per granule, the block that slices are made of (TeraPipe, section 4); more where `MOST_GRANULES` limits it.
"""
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
            size = -(-samples // count)
            # One plan where the best cut is the whole sequence.
            for lengths in dict.fromkeys([(length,), self._best_lengths(length, size, count)]):
                plans.append(TokenPlan(count, lengths, self.seconds(lengths, size, min(count, samples))))
        return plans

    def _best_lengths(self, length: int, size: int, count: int) -> tuple[int, ...]:
        granules = max(1, min(MOST_GRANULES, length // GRANULE))
        times = self.costs.times(size, length, granules, 1 / self.pipeline_size, self.hop)
        # All `count` batch slices are cut alike: their sum counts `count` times, K - 1 times the slowest only once.
        (_, found), *_ = plan_slices(times, 1 + (self.pipeline_size - 1) / count, 1).slices
        ends = accumulate(found, initial=0)
        return tuple(stop - start for start, stop in pairwise(round(length * end / granules) for end in ends))
