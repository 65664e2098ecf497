"""Cutting a chain of units into stages of equal cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import pvariance


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cut `costs` into `num_stages` contiguous, non-empty stages, the most expensive one as cheap as possible.

    Exact, by dynamic programming over the cuts; PipeTransformer section 3.2.1 (balanced partitioning), with the greedy
    rule of Algorithm 1 replaced by the optimum. Among cuts of the same largest cost the one with the smallest sum of
    squared stage costs wins, so that the other stages are even as well.

    Args:
        costs: cost of each unit, any unit of measure, not negative.
        num_stages: K, at most `len(costs)`.

    Returns:
        `num_stages + 1` increasing indices; stage `k` is `range(result[k], result[k + 1])`.

    Raises:
        ValueError: more stages than units, no stage, or a negative cost.
    """
    num_units = len(costs)
    _check_can_cut(costs, num_stages)
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


def greedy_partition(
    sizes: Sequence[float], num_stages: int, frozen_size: float = 0.0, frozen_factor: float = 1 / 6
) -> tuple[int, ...]:
    """Cut `sizes` into stages by the greedy rule of PipeTransformer, Algorithm 1 (`load_balance`).

    A stage takes sublayers as long as its load stays below `mean + var`: the size that is left over the stages that
    are left, and the variance of the sizes that are left over the same number. Adding a variance to a mean only makes
    sense in one unit of measure; the paper's figures are in millions of parameters.

    Where the pseudo-code cannot be followed to the letter:

    - Line 19 subtracts `frozen_size * (1 - frozen_factor)` from every stage and nothing adds `frozen_size`. Here
      stage 0, which holds the frozen part, begins with `frozen_size * frozen_factor`; the others begin with nothing.
      As in the pseudo-code, the size that is left counts active sublayers only.
    - `BS` and `BL` are indexed by sublayer or not at all. Here they are the stage's.
    - A stage may end up empty, and sublayers may be left over. Here every stage takes at least one and leaves at least
      one for each stage that follows, and the last stage takes the rest.

    Args:
        sizes: size of each active sublayer, in millions of parameters, not negative.
        num_stages: K, at most `len(sizes)`.
        frozen_size: size of the frozen part, in the same unit.
        frozen_factor: share of the memory of an active layer that a frozen one takes (lambda_frozen).

    Returns:
        `num_stages + 1` increasing indices; stage `k` is `range(result[k], result[k + 1])`.

    Raises:
        ValueError: more stages than sublayers, no stage, or a negative size.
    """
    _check_can_cut(sizes, num_stages)
    boundaries = [0]
    for stages_left in range(num_stages, 1, -1):
        start = boundaries[-1]
        limit = (sum(sizes[start:]) + pvariance(sizes[start:])) / stages_left
        load = sizes[start] + (frozen_size * frozen_factor if start == 0 else 0.0)
        end = start + 1
        while end <= len(sizes) - stages_left and load + sizes[end] < limit:
            load += sizes[end]
            end += 1
        boundaries.append(end)
    return (*boundaries, len(sizes))


def _check_can_cut(costs: Sequence[float], num_stages: int) -> None:
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"Cannot cut {len(costs)} units into {num_stages} stages: expected 1 to {len(costs)} stages.")
    if min(costs) < 0:
        raise ValueError(f"Costs must not be negative, found {min(costs)}.")
