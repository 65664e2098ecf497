"""Where sequences are cut into slices of their tokens, which run one after the other. Pure.

TeraPipe (Li et al., ICML 2021), section 3.2: in a causal model a token reads none that follow it.
"""

from __future__ import annotations

from itertools import accumulate


Plans = tuple[tuple[int, ...], ...]
"""Lengths of slices, one entry for each length of sequences that was planned for, short to long."""


def slice_bounds(plans: Plans, length: int) -> tuple[int, ...]:
    """Where the slices of sequences of `length` tokens begin, and the end of the last.

    The lengths are those of the plan for the next longer sequences, or else of the last, in proportion.
    """
    if not plans or length < 1:
        return (0, length)
    lengths = next((plan for plan in plans if sum(plan) >= length), plans[-1])
    ends = (-(-length * end // sum(lengths)) for end in accumulate(lengths))
    return tuple(sorted({0, *ends}))
