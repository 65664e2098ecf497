"""Partition of a model's blocks into stages, and the paper's rule for shortening a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def compress_by_memory(
    current_size: int,
    largest_rank_size: Callable[[int], float],
    initial_largest: float,
    allowed: Sequence[int],
) -> int:
    """Halve the pipeline size K as long as no rank needs more memory than the fullest had at the start.

    PipeTransformer, Eq. 2 (`<=`; Algorithm 1, line 30, has `<`), with sizes as the measure of memory:
    `largest_rank_size(K)` is the size of the fullest rank, frozen layers weighted by their factor, and
    `initial_largest` that at the start of the run.
    """
    size = current_size
    while size % 2 == 0 and size // 2 in allowed and largest_rank_size(size // 2) <= initial_largest:
        size //= 2
    return size
