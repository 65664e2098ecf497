"""Partition of a model's blocks into stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cut `costs` into contiguous, non-empty stages whose most expensive one is as cheap as possible.

    Exact, by dynamic programming over the cuts: PipeTransformer section 3.2.1 (balanced partitioning), with the greedy
    rule of Algorithm 1 replaced by the optimum. Ties in the largest cost go to the smallest sum of squared stage
    costs, so the other stages are even as well.

    Args:
        costs: none below 0.
        num_stages: at most one for each of the costs.

    Returns:
        `num_stages + 1` increasing indices; stage `k` is `range(result[k], result[k + 1])`.
    """
    num_blocks = len(costs)
    assert 1 <= num_stages <= num_blocks
    total = [0.0, *accumulate(costs)]

    @cache
    def best(stages: int, end: int) -> tuple[float, float, tuple[int, ...]]:
        """Return the largest stage cost, the sum of squares and the boundaries of the first `end` blocks."""
        if stages == 1:
            return total[end], total[end] ** 2, (0, end)
        candidates = []
        # Each of the stages before has one block or more.
        for start in range(stages - 1, end):
            largest, squares, boundaries = best(stages - 1, start)
            cost = total[end] - total[start]
            candidates.append((max(largest, cost), squares + cost**2, (*boundaries, end)))
        # Ties of both costs go to the lowest cuts, so that there is one answer on every machine.
        return min(candidates)

    return best(num_stages, num_blocks)[2]
