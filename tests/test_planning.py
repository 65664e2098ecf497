"""Partition, layout and the choice of K and M: pure functions, compared with brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_pipetransformer.autopipe.partition import partition
from hf_pipetransformer.autopipe.planner import (
    choose_num_microbatches,
    choose_num_stages,
    plan_layout,
    stage_boundaries,
)
from hf_pipetransformer.layout import Layout


COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def largest_stage(costs: list[int], boundaries: tuple[int, ...]) -> float:
    return max(sum(costs[start:end]) for start, end in pairwise(boundaries))


@given(COSTS, st.data())
def test_partition_is_as_good_as_brute_force(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    found = partition(costs, num_stages)
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    best = min(largest_stage(costs, (0, *cut, len(costs))) for cut in cuts)
    assert largest_stage(costs, found) == best


@given(COSTS, st.data())
def test_every_unit_is_in_exactly_one_stage(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    boundaries = partition(costs, num_stages)
    assert [unit for start, end in pairwise(boundaries) for unit in range(start, end)] == list(range(len(costs)))
    assert all(start < end for start, end in pairwise(boundaries))


def test_twelve_layers_in_eight_stages_are_nearly_even_with_sublayer_cuts() -> None:
    # ViT-Base by parameter sizes: attention 2.36 M, MLP 4.72 M.
    sublayers = [2.36, 4.72] * 12
    mean = sum(sublayers) / 8
    assert largest_stage(sublayers, partition(sublayers, 8)) / mean < 1.12
    layers = [7.08] * 12
    assert largest_stage(layers, partition(layers, 8)) / mean == pytest.approx(4 / 3)


@pytest.mark.parametrize(("costs", "num_stages"), [([1.0], 2), ([1.0, 2.0], 0), ([1.0, -1.0], 1)])
def test_impossible_partitions_are_refused(costs: list[float], num_stages: int) -> None:
    with pytest.raises(ValueError, match=r"Cannot cut|negative"):
        partition(costs, num_stages)


def test_boundaries_fall_on_allowed_cuts_only() -> None:
    # Two layers that may not be cut inside: units are embeddings, (1, 2), (3, 4), head.
    assert stage_boundaries([0, 1, 2, 1, 2, 1], [0, 1, 3, 5, 6], 2) == (0, 3, 6)
    with pytest.raises(ValueError, match="4 stages at most"):
        stage_boundaries([0, 1, 2, 1, 2, 1], [0, 1, 3, 5, 6], 5)


def test_the_smallest_pipeline_that_fits_is_chosen() -> None:
    sizes = {1: 100.0, 2: 55.0, 4: 30.0}
    assert choose_num_stages([4, 2, 1], sizes.__getitem__, device_bytes=200) == 1
    assert choose_num_stages([4, 2, 1], sizes.__getitem__, device_bytes=100) == 2, "10 % stay free"
    assert choose_num_stages([4, 2, 1], sizes.__getitem__, device_bytes=10) == 4, "nothing fits: the longest"


@pytest.mark.parametrize(
    ("num_stages", "batch", "expected"), [(1, 64, 1), (2, 64, 8), (2, 16, 4), (2, 4, 2), (4, 2, 2), (2, 1, 1)]
)
def test_number_of_micro_batches(num_stages: int, batch: int, expected: int) -> None:
    assert choose_num_microbatches(num_stages, batch) == expected


def test_layout_knows_its_units() -> None:
    layout = plan_layout([0, 1, 2, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6], 2, 2, 3, 4, "1f1b")
    assert layout.boundaries == (0, 3, 6)
    assert [layout.stage_of(unit) for unit in range(6)] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("boundaries", [(0, 6), (0, 3, 5), (0, 3, 3, 6), (1, 3, 6), (0, 4, 2, 6)])
def test_a_layout_that_does_not_cover_the_model_is_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not cut 6 units into 2"):
        Layout(2, 0, 2, 1, boundaries, 1, "1f1b")
