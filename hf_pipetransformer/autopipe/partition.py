"""Cutting a chain of units into stages of equal cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


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
