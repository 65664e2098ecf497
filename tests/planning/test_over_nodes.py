"""Pipelines over several nodes: which K there are, what their messages cost, and where that puts the cuts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.planning.blocks import BlockCosts, block_loads
from hf_pipetransformer.planning.costs import Overheads, predict_step
from hf_pipetransformer.planning.layouts import (
    PlanInputs,
    plan_layout,
    reachable_shapes,
)
from hf_pipetransformer.planning.search import search
from hf_pipetransformer.planning.simulator import Durations, simulate
from hf_pipetransformer.planning.storing import Storing
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import Placement, pipeline_sizes
from hf_pipetransformer.schedules.tables import find_schedule
from hf_pipetransformer.startup.planner import MeasuredCosts, RunPlanner
from tests.planning.test_planning import LONG, costs_of, layout_of, rules_for
from tests.support.costs import block_costs


@pytest.mark.parametrize(
    ("most", "node_size", "expected"),
    [
        (8, 4, [1, 2, 4, 8]),
        (8, 2, [1, 2, 4, 8]),
        (8, 8, [1, 2, 4, 8]),
        (4, 1, [1, 2, 4]),
        # Two nodes of three do not divide three nodes; half a node more than one is none of them.
        (9, 3, [1, 3, 9]),
        (12, 6, [1, 2, 3, 6, 12]),
        (12, 4, [1, 2, 4, 12]),
        # What follows a pipeline of one node.
        (4, 8, [1, 2, 4]),
        (1, 1, [1]),
    ],
)
def test_a_pipeline_divides_a_node_or_takes_whole_ones(most: int, node_size: int, expected: list[int]) -> None:
    assert pipeline_sizes(most, node_size) == expected


@given(st.integers(1, 6), st.integers(1, 6))
def test_no_pipeline_begins_or_ends_inside_a_node_that_it_spans(node_size: int, num_nodes: int) -> None:
    world_size = node_size * num_nodes
    sizes = pipeline_sizes(world_size, node_size)
    assert sizes[0] == 1 and sizes[-1] == world_size and node_size in sizes
    for size in sizes:
        nodes = [{rank // node_size for rank in range(first, first + size)} for first in range(0, world_size, size)]
        assert all(len(own) == max(1, size // node_size) for own in nodes)
        # A run goes on to such lengths only.
        assert set(pipeline_sizes(size, node_size)) <= set(sizes)


def test_a_run_over_nodes_of_six_never_has_four_stages() -> None:
    nodes = Overheads(node_size=6)
    assert reachable_shapes("1f1b", 1, pipeline_sizes(12, 6), 14) == [(1, 1), (2, 1), (3, 1), (6, 1), (12, 1)]
    inputs = PlanInputs(costs_of(12), nodes, 8, **rules_for(12))
    assert set(search(layout_of(12, 12, 12), 0, LONG, inputs).alternatives) == {1, 2, 3, 6, 12}
    on_one = replace(inputs, overheads=Overheads(node_size=12))
    assert set(search(layout_of(12, 12, 12), 0, LONG, on_one).alternatives) == {1, 2, 3, 4, 6, 12}


# Four stages on two nodes of two; two samples, one by one.
FLAT = block_costs((1.0,) * 8, (2.0,) * 8, (1.0,) * 8, (1,) * 8, (1.0,) * 8, boundary_bytes=(0.0, *(10.0,) * 7))
FOUR = Layout(3, 0, 4, 1, (0, 2, 4, 6, 8), 2, "gpipe")
NODES = Overheads(hop=1.0, node_size=2, node_hop=3.0, node_hop_per_byte=0.5)


def test_a_message_costs_what_its_boundary_does() -> None:
    # 3 + 10 bytes at a half, between the nodes.
    assert NODES.hops(FOUR, FLAT, 1) == (1.0, 8.0, 1.0)
    assert NODES.hops(FOUR, FLAT, 2) == (1.0, 13.0, 1.0)
    # On one node, and each on a node of its own.
    assert (
        replace(NODES, node_size=4).hops(FOUR, FLAT, 1) == replace(NODES, node_size=0).hops(FOUR, FLAT, 1) == (1,) * 3
    )
    assert replace(NODES, node_size=1).hops(FOUR, FLAT, 1) == (8.0,) * 3
    assert NODES.slowest_hop(FOUR, FLAT, 4) == 13.0
    assert NODES.slowest_hop(replace(FOUR, num_stages=1, boundaries=(0, 8)), FLAT, 2) == 1.0


def test_a_step_over_two_nodes_worked_by_hand() -> None:
    # All forwards go up, then all backwards come down, and each way crosses three boundaries. The second micro-batch
    # is behind the first by a stage: forwards take 2, backwards 4, and 3 on the first stage.
    up, down = 4 * 2 + (1 + 8 + 1) + 2, 3 * 4 + 3 + (1 + 8 + 1) + 4
    assert predict_step(FOUR, FLAT, NODES, 2).pipeline == up + down
    near = predict_step(FOUR, FLAT, replace(NODES, node_size=4), 2).pipeline
    assert predict_step(FOUR, FLAT, NODES, 2).pipeline - near == 2 * 7


def test_every_crossing_of_an_interleaved_pipeline_is_a_message_between_nodes() -> None:
    # Stages 1 and 2, 3 and 4, which is the way back to the first rank, and 5 and 6.
    places = Placement(4, 2)
    assert [lower for lower in range(7) if places.leaves_node(lower, 2)] == [1, 3, 5]
    # In a V the way back crosses in the middle only.
    assert [lower for lower in range(7) if Placement(4, 2, "v").leaves_node(lower, 2)] == [1, 5]


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3), st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6))
def test_hops_by_boundary_are_those_of_the_boundary(hops: list[int], schedule: str, num_microbatches: int) -> None:
    table = find_schedule(schedule).table(4, num_microbatches)
    ones = (1.0,) * 4
    found = simulate(table, Durations(ones, ones, hops=tuple(map(float, hops)))).end
    slowest = simulate(table, Durations(ones, ones, hop=float(max(hops)))).end
    fastest = simulate(table, Durations(ones, ones, hop=float(min(hops)))).end
    assert fastest <= found <= slowest
    # The first micro-batch passes every boundary twice.
    assert found >= 8 + 2 * sum(hops)


def narrow(at: int) -> BlockCosts:
    """Twelve layers whose activation is small before one block."""
    costs = costs_of(12)
    sizes = [100.0] * 26
    sizes[at] = 1.0
    return replace(costs, boundary_bytes=tuple(sizes))


def cuts_of(costs: BlockCosts, overheads: Overheads, **rules: Any) -> tuple[int, ...]:
    """Where eight samples, one by one, are cut on four stages."""
    current = replace(layout_of(12, 4, 4), num_microbatches=8, boundaries=(0, 1, 2, 3, 26))
    fixed = rules_for(12, num_microbatches=8, unfit=2) | rules
    return search(current, 0, LONG, PlanInputs(costs, overheads, 2, **fixed)).layout.boundaries


def test_a_slow_boundary_between_nodes_attracts_the_smallest_activation() -> None:
    even = cuts_of(costs_of(12), Overheads())
    middle = even[2]
    for at in (middle - 3, middle + 2):
        costs = narrow(at)
        slow = Overheads(node_size=2, node_hop_per_byte=1.0)
        found = cuts_of(costs, slow)
        assert found[2] == at != middle
        # That is what the simulation says of it, and stages on either side are as even as they can be.
        step = {cuts: predict_step(replace(layout_of(12, 4, 4), num_microbatches=8, boundaries=cuts), costs, slow, 8)
                for cuts in (found, even)}  # fmt: skip
        assert step[found].seconds < 0.98 * step[even].seconds
        # A fast network, one node, or a boundary inside a node does not move them.
        for near in (replace(slow, node_hop_per_byte=1e-4), replace(slow, node_size=4), Overheads(hop=3.0)):
            assert cuts_of(costs, near) == even
        # Neither does a measured time where cuts affect results.
        assert cuts_of(costs, slow, work=(1.0, *(1.0, 2.0) * 12, 1.0))[2] == middle


def test_a_cut_between_nodes_does_not_move_to_where_it_does_not_fit() -> None:
    even = cuts_of(costs_of(12), Overheads())
    at, slow = even[2] + 4, Overheads(node_size=2, node_hop_per_byte=1.0)
    costs = narrow(at)
    assert cuts_of(costs, slow)[2] == at
    # Activations of all micro-batches and states of all weights: the even stages alone fit.
    inputs = PlanInputs(costs, slow, 2, **rules_for(12))
    layout = replace(layout_of(12, 4, 4), num_microbatches=8, boundaries=even)
    rooms = [size for size in range(100, 4000, 10) if replace(
        inputs, device_bytes=float(size)).judge(layout).fits]  # fmt: skip
    assert cuts_of(costs, slow, device_bytes=float(rooms[0]))[2] != at


@settings(max_examples=10)
@given(
    st.sampled_from([(6, 2, 1), (4, 1, 1), (4, 2, 2), (3, 1, 2)]),
    st.lists(st.sampled_from([1.0, 50.0, 400.0]), min_size=18, max_size=18),
    st.sampled_from([1e-2, 1.0, 10.0]),
)
def test_cuts_between_any_nodes_only_ever_save_time(
    shape: tuple[int, int, int], sizes: list[float], per_byte: float
) -> None:
    size, node_size, num_chunks = shape
    schedule = "1f1b" if num_chunks == 1 else "interleaved_1f1b"
    costs = replace(costs_of(8), boundary_bytes=tuple(sizes))
    overheads = Overheads(node_size=node_size, node_hop=1.0, node_hop_per_byte=per_byte)
    loads, cuts = block_loads(costs, 0), tuple(range(19))
    even = plan_layout(loads, cuts, schedule, size, 1, 2 * size, num_chunks)
    inputs = PlanInputs(costs, overheads, 2, **rules_for(8))
    found = inputs.cut_at_nodes(even, loads)
    assert replace(found, boundaries=even.boundaries) == even
    before, after = inputs.predict(even).seconds, inputs.predict(found).seconds
    assert found == even or after <= 0.98 * before


def test_a_slow_network_keeps_a_pipeline_on_its_node() -> None:
    current, rules = layout_of(12, 4, 4), rules_for(12, unfit=1)
    reducing = {"reduction_per_byte": 0.4, "node_size": 2}
    found = {hop: search(current, 0, LONG, PlanInputs(costs_of(12), Overheads(**reducing, node_hop=hop), 2, **rules))
             for hop in (0.0, 100.0)}  # fmt: skip
    assert {hop: plan.layout.pipeline_size for hop, plan in found.items()} == {0.0: 4, 100.0: 2}


def test_pipelines_over_nodes_store_nothing_and_shorter_ones_do() -> None:
    for compression, is_elastic in (("throughput", True), ("memory", True), ("throughput", False)):
        for current, node_size in ((layout_of(12, 4, 4), 2), (layout_of(12, 2, 4), 2), (layout_of(12, 4, 4), 4)):
            rules = rules_for(12, compression=compression, elastic=is_elastic, initial_largest_size=1e9)
            inputs = PlanInputs(costs_of(12), Overheads(node_size=node_size), 8, **rules)
            found = search(current, 6, LONG, inputs, Storing((), 0.0, 0.0, 0.0, mode="on", steps_per_epoch=10)).layout
            assert found.cache_level == (6 if found.pipeline_size <= node_size else 0)
            assert is_elastic or found.pipeline_size == current.pipeline_size


class TwoNodes(SimpleNamespace):
    """A topology of two nodes of two ranks, without the others."""

    world_size, local_world_size, pipeline_sizes = 4, 2, pipeline_sizes(4, 2)

    def check_pipeline_size(self, size: int) -> None:
        assert size in self.pipeline_sizes


def test_the_first_layout_takes_a_second_node_only_if_one_is_too_small(tmp_path: Any) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=2)
    structure = SimpleNamespace(num_layers=12, cut_positions=lambda: range(27), media=None)
    probe = SimpleNamespace(structure=structure, media_share=0.0, block_flops=())
    costs = MeasuredCosts(narrow(15), Overheads(hop=3.0, node_size=2, node_hop_per_byte=1.0), 1)
    found = {}
    for device_bytes in (1e9, 1500.0, 1000.0):
        planner = RunPlanner(args, TwoNodes(), probe, costs, device_bytes, 0, has_dropout=False, unfit=0)  # type: ignore[arg-type]
        layout = planner.choose(0)
        found[layout.pipeline_size] = layout
        text = planner.describe(layout, "none", freezes=True)["expectation"]
        for words in (
            "Activation cache: off while pipelines span nodes.",
            # Two samples of a byte, at a byte a second.
            "Each pipeline spans 2 nodes: a message takes up to 2e+03 ms between them, 3e+03 ms inside one.",
        ):
            assert (words in text) == (layout.pipeline_size == 4)
    assert set(found) >= {1, 4}
    assert found[4].boundaries[2] == 15


def test_a_plan_of_rules_has_no_nodes_unless_told() -> None:
    assert not Overheads().spans_nodes(64)
    assert Overheads(node_size=2).spans_nodes(4) and not Overheads(node_size=4).spans_nodes(4)
