"""The covering array holds every allowed pair of levels, and no forbidden one."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.covering import allowed_pairs, covering_array, pairs_of, rows_with_every_level


SHAPES = st.lists(st.integers(1, 5), min_size=2, max_size=7)


def factors_of(sizes: list[int]) -> dict[str, list[str]]:
    return {f"factor{index}": [f"level{level}" for level in range(size)] for index, size in enumerate(sizes)}


@given(SHAPES)
@settings(max_examples=25)
def test_every_pair_is_covered_by_whole_rows(sizes: list[int]):
    factors = factors_of(sizes)
    rows = covering_array(factors)
    assert set().union(*map(pairs_of, rows)) == set(allowed_pairs(factors))
    for row in rows:
        assert list(row) == list(factors)


@given(SHAPES, st.data())
@settings(max_examples=50)
def test_no_row_holds_a_forbidden_pair(sizes: list[int], data: st.DataObject):
    # The last level of each factor is forbidden with nothing, so that every other pair can be completed.
    factors = factors_of([size + 1 for size in sizes])
    lasts = {(factor, levels[-1]) for factor, levels in factors.items()}
    candidates = [pair for pair in allowed_pairs(factors) if not pair & lasts]
    forbidden = data.draw(st.sets(st.sampled_from(candidates)))
    rows = covering_array(factors, forbidden)
    assert set().union(*map(pairs_of, rows)) == set(allowed_pairs(factors, forbidden))
    assert not forbidden & set().union(*map(pairs_of, rows))


def test_there_are_far_fewer_rows_than_combinations():
    factors = factors_of([2] * 10 + [4] * 10)
    assert 16 <= len(covering_array(factors)) <= 32


def test_the_same_factors_give_the_same_rows():
    factors = factors_of([3, 4, 2, 5])
    forbidden = [frozenset([("factor0", "level1"), ("factor3", "level2")])]
    assert covering_array(factors, forbidden) == covering_array(factors, list(reversed(forbidden)))


def test_a_pair_that_no_row_can_hold_is_named():
    factors = factors_of([2, 2, 2])
    forbidden = [
        frozenset([("factor0", "level1"), ("factor2", "level0")]),
        frozenset([("factor1", "level1"), ("factor2", "level1")]),
    ]
    with pytest.raises(ValueError, match=r"No row can hold the pair .*factor0.*level1.*factor1.*level1"):
        covering_array(factors, forbidden)


def test_a_forbidden_pair_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="factor0.*no such level"):
        covering_array(factors_of([2, 2]), [frozenset([("factor0", "no such level"), ("factor1", "level0")])])


def test_a_choice_of_rows_holds_every_level():
    factors = factors_of([2, 3, 4, 4, 2])
    rows = covering_array(factors)
    chosen = rows_with_every_level(rows)
    assert {level for row in chosen for level in row.items()} == {
        (factor, level) for factor, levels in factors.items() for level in levels
    }
    assert len(chosen) < len(rows) / 2
    assert all(row in rows for row in chosen)


def test_pairs_of_a_row():
    row = {"a": "1", "b": "2", "c": "3"}
    assert pairs_of(row) == {frozenset(pair) for pair in combinations(row.items(), 2)}
