"""Few rows that hold every pair of levels of many factors: a pairwise covering array. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations


__all__ = ["Pair", "allowed_pairs", "covering_array", "pairs_of", "rows_with_every_level"]

Level = tuple[str, str]
"""A factor and one of its levels."""

Pair = frozenset[Level]
"""Two levels of different factors."""

Row = dict[str, str]
"""One level of every factor."""

# Rows tried for each row that is kept: the more, the fewer are kept.
NUM_TRIED = 5


def covering_array(factors: Mapping[str, Sequence[str]], forbidden: Collection[Pair] = ()) -> list[Row]:
    """Rows in which every allowed pair of levels occurs and no forbidden one does.

    Greedy, after Cohen et al., *The AETG System* (1997): each new row starts from a pair that no row has yet, and
    every further factor takes the level that adds most new pairs; levels are drawn back where a factor would be left
    with none. The same arguments give the same rows. Where levels gain alike, the first one of a factor is taken:
    make it the cheapest.

    Args:
        factors: each with its levels, no two of a factor alike.
        forbidden: pairs that exclude each other.

    Raises:
        ValueError: a pair is forbidden that does not exist, or one is allowed that no whole row can hold.
    """
    known = set(_all_pairs(factors))
    unknown = [pair for pair in forbidden if pair not in known]
    if unknown:
        raise ValueError(f"These forbidden pairs are no pairs of levels: {sorted(map(sorted, unknown))}.")
    space = _Space(factors, forbidden)
    rows = []
    while starts := space.uncovered_pairs(NUM_TRIED):
        tried = [_started(space, start) for start in starts]
        best = max(tried, key=space.gain)
        space.cover(best)
        rows.append(dict(space.levels[index] for index in best))
    return rows


def allowed_pairs(factors: Mapping[str, Sequence[str]], forbidden: Collection[Pair] = ()) -> list[Pair]:
    """All pairs of levels of different factors but the forbidden ones, in the order of the factors."""
    refused = set(forbidden)
    return [pair for pair in _all_pairs(factors) if pair not in refused]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """The pairs of levels of one row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def rows_with_every_level(rows: Sequence[Row]) -> list[Row]:
    """Few of `rows`, in their order, in which every level occurs that occurs in any of them."""
    left = {level for row in rows for level in row.items()}
    chosen = []
    while left:
        best = max(range(len(rows)), key=lambda index: len(left & set(rows[index].items())))
        left -= set(rows[best].items())
        chosen.append(best)
    return [rows[index] for index in sorted(chosen)]


def _all_pairs(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    return [
        frozenset([(first, one), (second, other)])
        for first, second in combinations(factors, 2)
        for one in factors[first]
        for other in factors[second]
    ]


def _started(space: _Space, start: tuple[int, int]) -> list[int]:
    row = space.completed(list(start))
    if row is None:
        pair = [space.levels[index] for index in start]
        raise ValueError(f"No row can hold the pair {pair}: what is left of a factor is forbidden with it. Forbid it.")
    return row


class _Space:
    """Levels as bits of whole numbers: sets of them are compared in one operation."""

    def __init__(self, factors: Mapping[str, Sequence[str]], forbidden: Collection[Pair]) -> None:
        self.levels = [(factor, level) for factor, levels in factors.items() for level in levels]
        index = {level: position for position, level in enumerate(self.levels)}
        self.factor_of = [list(factors).index(factor) for factor, _ in self.levels]
        self.members = [[index[factor, level] for level in levels] for factor, levels in factors.items()]
        self.compatible = [self._bits_of_others(position) for position in range(len(self.levels))]
        for pair in forbidden:
            one, other = (index[level] for level in pair)
            self.compatible[one] &= ~(1 << other)
            self.compatible[other] &= ~(1 << one)
        self.uncovered = list(self.compatible)

    def _bits_of_others(self, position: int) -> int:
        own = self.factor_of[position]
        return sum(1 << other for other, factor in enumerate(self.factor_of) if factor != own)

    def uncovered_pairs(self, most: int) -> list[tuple[int, int]]:
        """Up to `most` pairs that no row has yet."""
        found = []
        for one, others in enumerate(self.uncovered):
            for other in range(one + 1, len(self.levels)):
                if others >> other & 1:
                    found.append((one, other))
                    if len(found) == most:
                        return found
        return found

    def gain(self, row: Sequence[int]) -> int:
        """Pairs of `row` that no row has yet."""
        bits = sum(1 << level for level in row)
        return sum((self.uncovered[level] & bits).bit_count() for level in row) // 2

    def cover(self, row: Sequence[int]) -> None:
        bits = sum(1 << level for level in row)
        for level in row:
            self.uncovered[level] &= ~bits

    def completed(self, row: list[int]) -> list[int] | None:
        """`row` with a level of every factor, in the order of the factors; None if there is none."""
        taken = {self.factor_of[level] for level in row}
        if len(taken) == len(self.members):
            return sorted(row)
        open_factors = {
            factor: [level for level in levels if all(self.compatible[level] >> other & 1 for other in row)]
            for factor, levels in enumerate(self.members)
            if factor not in taken
        }
        bits = sum(1 << level for level in row)

        def gain(level: int) -> tuple[int, int]:
            """New pairs that a level forms with this row, and with any row."""
            uncovered = self.uncovered[level]
            return (uncovered & bits).bit_count(), uncovered.bit_count()

        # A factor with a single level left, or none, before all others; else the one that can gain most.
        forced = [factor for factor, levels in open_factors.items() if len(levels) < 2]
        factor = forced[0] if forced else max(open_factors, key=lambda factor: max(map(gain, open_factors[factor])))
        for level in sorted(open_factors[factor], key=gain, reverse=True):
            whole = self.completed([*row, level])
            if whole is not None:
                return whole
        return None
