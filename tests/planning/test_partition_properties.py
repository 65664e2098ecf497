"""Laws of every way to cut a chain, over random chains: nothing lost, nothing empty, the optimum is the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from hf_pipetransformer.planning.blocks import block_loads
from hf_pipetransformer.planning.layouts import stage_boundaries
from hf_pipetransformer.planning.partition import partition
from tests.support.costs import block_costs


SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=9)


def largest_stage(costs: Sequence[float], boundaries: Sequence[int]) -> float:
    return max(sum(costs[start:end]) for start, end in pairwise(boundaries))


def blocks_in_order(boundaries: Sequence[int]) -> list[int]:
    assert all(start < end for start, end in pairwise(boundaries))
    return [block for start, end in pairwise(boundaries) for block in range(start, end)]


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Block costs, allowed cut positions, and a number of stages that they allow."""
    costs = draw(SIZES)
    inner = draw(st.sets(st.integers(1, len(costs) - 1))) if len(costs) > 1 else set()
    cuts = [0, *sorted(inner), len(costs)]
    return costs, cuts, draw(st.integers(1, len(cuts) - 1))


@given(SIZES, st.data())
def test_partition_is_as_good_as_brute_force(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    found = partition(costs, num_stages)
    ways = ((0, *cut, len(costs)) for cut in combinations(range(1, len(costs)), num_stages - 1))
    assert blocks_in_order(found) == list(range(len(costs)))
    assert largest_stage(costs, found) == min(largest_stage(costs, way) for way in ways)


@given(chains())
def test_boundaries_on_allowed_cuts_are_as_good_as_brute_force(chain: tuple[list[int], list[int], int]) -> None:
    costs, cuts, num_stages = chain
    found = stage_boundaries(costs, cuts, num_stages)
    assert blocks_in_order(found) == list(range(len(costs)))
    assert set(found) <= set(cuts)
    ways = ((0, *chosen, len(costs)) for chosen in combinations(cuts[1:-1], num_stages - 1))
    assert largest_stage(costs, found) == min(largest_stage(costs, way) for way in ways)


@given(st.integers(1, 6), st.data())
def test_freezing_one_more_layer_never_makes_a_block_more_expensive(num_layers: int, data: st.DataObject) -> None:
    num_blocks = 2 * num_layers + 2
    seconds = st.lists(st.integers(0, 20), min_size=num_blocks, max_size=num_blocks).map(tuple)
    forward, backward = data.draw(seconds), data.draw(seconds)
    edge = tuple(data.draw(st.integers(0, whole)) for whole in backward)
    costs = block_costs(forward, backward, edge, (1,) * num_blocks, (1.0,) * num_blocks)
    loads = [block_loads(costs, frozen) for frozen in range(num_layers + 1)]
    for before, after in pairwise(loads):
        assert all(late <= early for early, late in zip(before, after, strict=True))
    assert loads[0][0] == forward[0] + edge[0]
