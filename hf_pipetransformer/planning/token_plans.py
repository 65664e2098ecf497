"""Cuts of a batch into micro-batches and token slices, chosen by the measured cost of slices. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from hf_pipetransformer.planning.simulator import Durations, simulate
from hf_pipetransformer.planning.slice_costs import TokenCosts, plan_slices
from hf_pipetransformer.schedules import find_schedule
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
    """Cut of a batch.

    Args:
        num_microbatches: the number of batch slices M.
        lengths: tokens of each token slice, the same in every batch slice.
        seconds: predicted time on a pipeline of equal stages.
    """

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
    if find_schedule(layout.schedule).in_token_slices is None:
        return layout
    if fixed is not None or costs is None:
        return replace(layout, token_slices=fixed or ())
    count, size = layout.num_microbatches, layout.pipeline_size
    if is_free:
        count = choose_slices(costs, costs.length, samples, size, None, hop).num_microbatches
    return replace(layout, num_microbatches=count, token_slices=plan_buckets(costs, samples, size, count, hop))


def choose_slices(
    costs: TokenCosts, length: int, samples: int, pipeline_size: int, num_microbatches: int | None, hop: float = 0.0
) -> TokenPlan:
    """Return the batch slices and token slices with the least predicted time.

    The candidates for each M are the lengths of least time by Eq. 5 of TeraPipe and the whole sequence; a simulation
    of the schedule's own table decides between them.

    Args:
        costs: costs over all stages together.
        length: tokens of a sequence.
        samples: samples of a pipeline's batch.
        num_microbatches: M if it is fixed.
    """

    def rank(plan: TokenPlan) -> tuple[float, int, int]:
        is_whole = len(plan.lengths) == 1
        return plan.seconds * (WORTH if is_whole else 1.0), plan.num_microbatches, len(plan.lengths)

    return min(_possible(costs, length, samples, pipeline_size, num_microbatches, hop), key=rank)


def best_whole_and_cut(
    costs: TokenCosts, samples: int, pipeline_size: int, num_microbatches: int | None, hop: float = 0.0
) -> tuple[TokenPlan, TokenPlan | None]:
    """Return the fastest plan with whole sequences of the measured length, and the fastest other one, if any.

    See `choose_slices` for the arguments.
    """
    plans = _possible(costs, costs.length, samples, pipeline_size, num_microbatches, hop)
    whole = min((plan for plan in plans if len(plan.lengths) == 1), key=lambda plan: plan.seconds)
    cut = min((plan for plan in plans if len(plan.lengths) > 1), key=lambda plan: plan.seconds, default=None)
    return whole, cut


def _possible(
    costs: TokenCosts, length: int, samples: int, pipeline_size: int, num_microbatches: int | None, hop: float
) -> list[TokenPlan]:
    """Return two plans for each M: whole sequences, and the slices of least time."""
    wanted = {1, 2, 3, pipeline_size, 2 * pipeline_size, 4 * pipeline_size, samples}
    counts = [num_microbatches] if num_microbatches else sorted(count for count in wanted if count <= samples)
    plans = []
    for count in counts:
        size = -(-samples // count)
        sliced = _best_lengths(costs, length, size, count, pipeline_size, hop)
        for lengths in dict.fromkeys([(length,), sliced]):
            seconds = seconds_of_slices(costs, lengths, size, min(count, samples), pipeline_size, hop)
            plans.append(TokenPlan(count, lengths, seconds))
    return plans


def plan_buckets(
    costs: TokenCosts, samples: int, pipeline_size: int, num_microbatches: int, hop: float = 0.0
) -> Plans:
    """Return slices for each sequence length of `BUCKETS`, with the same batch slices; empty if none are cut."""
    lengths = sorted({max(1, round(share * costs.length)) for share in BUCKETS})
    plans = [choose_slices(costs, each, samples, pipeline_size, num_microbatches, hop).lengths for each in lengths]
    return tuple(plans) if any(len(plan) > 1 for plan in plans) else ()


def _best_lengths(
    costs: TokenCosts, length: int, size: int, count: int, pipeline_size: int, hop: float = 0.0
) -> tuple[int, ...]:
    granules = max(1, min(MOST_GRANULES, length // GRANULE))
    times = costs.times(size, length, granules, 1 / pipeline_size, hop)
    # All `count` batch slices are cut alike: their sum counts `count` times, K - 1 times the slowest only once.
    (_, found), *_ = plan_slices(times, 1 + (pipeline_size - 1) / count, 1).slices
    ends = [0]
    for granule in found:
        ends.append(ends[-1] + granule)
    return tuple(stop - start for start, stop in pairwise(round(length * end / granules) for end in ends))


def seconds_of_slices(
    costs: TokenCosts, lengths: tuple[int, ...], size: int, count: int, pipeline_size: int, hop: float = 0.0
) -> float:
    """Return the simulated seconds of the schedule for `count` batch slices of `size` sequences, all cut alike."""
    whole = costs.seconds(size, 0, sum(lengths)) / pipeline_size
    seconds = [whole * share for share in costs.shares(size, lengths)]
    table = find_schedule("token").table(pipeline_size, count, num_token_slices=len(lengths))
    forward, backward = ((part,) * pipeline_size for part in (FORWARD_SHARE, 1 - FORWARD_SHARE))
    return simulate(table, Durations(forward, backward, hop, factors=tuple(seconds * count))).end
