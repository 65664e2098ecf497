"""Cutting the blocks of a model into stages, and the paper's rule for fewer stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hf_pipetransformer.schedules.layout import Layout


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cut `costs` into `num_stages` contiguous, non-empty stages, the most expensive one as cheap as possible.

    Exact, by dynamic programming over the cuts; PipeTransformer section 3.2.1 (balanced partitioning), with the greedy
    rule of Algorithm 1 replaced by the optimum. Among cuts of the same largest cost the one with the smallest sum of
    squared stage costs wins, so that the other stages are even as well.

    Args:
        costs: cost of each unit, any unit of measure, not negative.
        num_stages: at most `len(costs)`.

    Returns:
        `num_stages + 1` increasing indices; stage `k` is `range(result[k], result[k + 1])`.

    Raises:
        ValueError: more stages than units, no stage, or a negative cost.
    """
    num_units = len(costs)
    if not 1 <= num_stages <= num_units:
        raise ValueError(f"Cannot cut {num_units} units into {num_stages} stages: expected 1 to {num_units} stages.")
    if min(costs) < 0:
        raise ValueError(f"Costs must not be negative, found {min(costs)}.")
    total = [0.0, *accumulate(costs)]

    # best[j] = (largest stage cost, sum of squares, boundaries) for the first j units in the stages placed so far.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [
        None if end == 0 else (total[end], total[end] ** 2, (0, end)) for end in range(num_units + 1)
    ]
    for stage in range(1, num_stages):
        placed: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (num_units + 1)
        for end in range(stage + 1, num_units + 1):
            candidates = []
            for start in range(stage, end):
                head = best[start]
                if head is not None:
                    cost = total[end] - total[start]
                    candidates.append((max(head[0], cost), head[1] + cost**2, (*head[2], end)))
            placed[end] = min(candidates) if candidates else None
        best = placed
    result = best[num_units]
    assert result is not None, "every chain of at least num_stages units has a cut"
    return result[2]


TIE = 0.01
"""Predicted times closer than this share of the least are equal: fewer ranks then leave less to go wrong."""


@dataclass(frozen=True)
class Candidate:
    """A layout that could come next.

    Args:
        layout: the layout.
        predicted_seconds: of one optimizer step.
        fits: whether what its fullest rank holds fits a device.
    """

    layout: Layout
    predicted_seconds: float
    fits: bool


def compress_by_memory(
    current_size: int,
    largest_rank_size: Callable[[int], float],
    initial_largest: float,
    allowed: Sequence[int],
) -> int:
    """Halve the pipeline as long as no rank gets more than the fullest had at the start.

    PipeTransformer, Eq. 2 (`<=`; Algorithm 1, line 30, has `<`), with sizes as the measure of memory.

    Args:
        current_size: K.
        largest_rank_size: size of what the fullest rank holds for a K, frozen layers counted by their factor.
        initial_largest: the same at the start of the run, in the same unit.
        allowed: lengths that the pipeline may have.

    Returns:
        The new K; `current_size` if it stays.
    """
    size = current_size
    while size % 2 == 0 and size // 2 in allowed and largest_rank_size(size // 2) <= initial_largest:
        size //= 2
    return size


def choose_by_throughput(candidates: Sequence[Candidate]) -> Candidate:
    """The fitting candidate with the least predicted seconds; among equals (`TIE`) the shortest pipeline.

    If none fits, the longest pipeline: it needs the least memory.

    Raises:
        ValueError: no candidates.
    """
    if not candidates:
        raise ValueError("There is no layout to choose from: expected at least one candidate.")
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return max(candidates, key=lambda candidate: candidate.layout.pipeline_size)
    limit = (1 + TIE) * min(candidate.predicted_seconds for candidate in fitting)
    equals = [candidate for candidate in fitting if candidate.predicted_seconds <= limit]
    return min(equals, key=lambda candidate: (candidate.layout.pipeline_size, candidate.predicted_seconds))
