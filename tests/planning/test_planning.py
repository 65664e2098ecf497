"""Costs, layout, and the choice of K, the cuts and M: pure functions, against figures worked by hand."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.planning.blocks import BlockCosts, block_backwards, block_loads, by_stage
from hf_pipetransformer.planning.costs import Overheads, predict_step
from hf_pipetransformer.planning.layouts import (
    Choice,
    PlanInputs,
    choose_num_chunks,
    choose_num_microbatches,
    evaluation_microbatches,
    largest_rank_size,
    plan_layout,
    reachable_shapes,
    stage_boundaries,
)
from hf_pipetransformer.planning.memory import MEMORY_RESERVE, MemoryRules, rank_memory
from hf_pipetransformer.planning.microbatches import MicrobatchTrial, calibrate, candidates
from hf_pipetransformer.planning.partition import partition
from hf_pipetransformer.planning.search import choose_by_memory, choose_by_throughput, first_layout, search
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import pipeline_sizes
from hf_pipetransformer.schedules.tables import find_schedule
from hf_pipetransformer.schedules.weight_kinds import find_weights
from hf_pipetransformer.startup.planner import MeasuredCosts, RunPlanner
from tests.support.costs import block_costs, with_weights


# One layer; blocks are embeddings, attention, MLP, head.
SMALL = block_costs(
    forward=(1, 2, 3, 1),
    backward=(9, 4, 6, 2),
    edge_backward=(1, 3, 5, 1),
    parameters=(10, 20, 30, 40),
    activation_bytes=(1, 2, 3, 4),
)
WHOLE = SimpleNamespace(num_layers=1, cut_positions=lambda: range(5), media=None)
"""The structure of the model that has these blocks."""
SMALL_LAYOUT = Layout(
    num_layers=1,
    num_frozen_layers=0,
    num_stages=2,
    num_replicas=2,
    boundaries=(0, 2, 4),
    num_microbatches=2,
    schedule="1f1b",
)


def rank_bytes(layout: Layout, *args: Any, **options: Any) -> list[float]:
    """All that each rank of a pipeline needs for training."""
    return [rank.total for rank in rank_memory(layout, *args, **options)]


def largest_stage(costs: list[float], boundaries: tuple[int, ...]) -> float:
    return max(sum(costs[start:end]) for start, end in pairwise(boundaries))


def test_twelve_layers_in_eight_stages_are_nearly_even_with_sublayer_cuts() -> None:
    # ViT-Base by parameter sizes: attention 2.36 M, MLP 4.72 M.
    sublayers = [2.36, 4.72] * 12
    mean = sum(sublayers) / 8
    assert largest_stage(sublayers, partition(sublayers, 8)) / mean < 1.12
    layers = [7.08] * 12
    assert largest_stage(layers, partition(layers, 8)) / mean == pytest.approx(4 / 3)


def test_boundaries_fall_on_allowed_cuts_only() -> None:
    # Two layers that may not be cut inside: blocks are embeddings, (1, 2), (3, 4), head.
    assert stage_boundaries([0, 1, 2, 1, 2, 1], [0, 1, 3, 5, 6], 2) == (0, 3, 6)
    with pytest.raises(ValueError, match="4 stages at most"):
        plan_layout([0, 1, 2, 1, 2, 1], [0, 1, 3, 5, 6], "1f1b", 5, 1, 1)


def test_the_smallest_pipeline_that_fits_is_chosen() -> None:
    sizes = {1: 100.0, 2: 55.0, 4: 30.0}

    def found(room: float) -> int:
        lay_out = functools.partial(layout_of, 12, world_size=4)
        return first_layout(sizes, lay_out, lambda each: sizes[each.pipeline_size] <= room).pipeline_size

    assert [found(room) for room in (200, 90, 10)] == [1, 2, 4], "where nothing fits, the longest"


@pytest.mark.parametrize(
    ("num_stages", "batch", "expected"), [(1, 64, 1), (2, 64, 8), (2, 16, 4), (2, 4, 2), (4, 2, 2), (2, 1, 1)]
)
def test_number_of_micro_batches(num_stages: int, batch: int, expected: int) -> None:
    assert choose_num_microbatches(num_stages, batch) == expected


def test_layout_knows_its_blocks() -> None:
    layout = plan_layout([0, 1, 2, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6], "1f1b", 2, 3, 4)
    assert layout.boundaries == (0, 3, 6)
    assert [layout.stage_of(block) for block in range(6)] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("boundaries", [(0, 6), (0, 3, 5), (0, 3, 3, 6), (1, 3, 6), (0, 4, 2, 6)])
def test_a_layout_that_does_not_cover_the_model_is_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not cut 6 blocks into 2"):
        Layout(2, 0, 2, 1, boundaries, 1, "1f1b")


def test_a_layout_knows_where_training_begins() -> None:
    layout = Layout(2, 0, 3, 1, (0, 2, 4, 6), 1, "1f1b")
    found = [replace(layout, num_frozen_layers=frozen) for frozen in range(3)]
    assert [each.first_active_block for each in found] == [0, 3, 5]
    assert [each.first_active_stage for each in found] == [0, 1, 2]


@pytest.mark.parametrize("num_frozen_layers", [-1, 3])
def test_more_frozen_layers_than_layers_are_refused(num_frozen_layers: int) -> None:
    with pytest.raises(ValueError, match="from 0 to the number of layers, 2, found"):
        Layout(2, num_frozen_layers, 1, 1, (0, 6), 1, "1f1b")


def test_frozen_blocks_cost_their_forward_and_the_first_active_one_needs_no_input_gradient() -> None:
    assert block_loads(SMALL, 0) == [2, 6, 9, 3]
    assert block_loads(SMALL, 1) == [1, 2, 3, 2]
    assert block_loads(SMALL.scaled(2, 2), 1) == [2, 4, 6, 4]
    assert SMALL.scaled(3, 1).forward == tuple(3 * seconds for seconds in SMALL.forward)
    assert SMALL.scaled(3, 1).backward == SMALL.backward
    assert SMALL.scaled(2, 2).parameters == SMALL.parameters


def test_a_step_worked_by_hand() -> None:
    overheads = Overheads(
        per_forward=1, per_backward=1, reduction_per_byte=0.5, optimizer_per_parameter=0.1, per_step=5
    )
    # Two samples a micro-batch: forwards 2 * (3, 4) + 1, backwards 2 * (1 + 4, 6 + 2) + 1.
    # Stage 0: F0 0-7, F1 7-14, B0 33-44, B1 59-70. Stage 1: F0 7-16, B0 16-33, F1 33-42, B1 42-59.
    found = predict_step(SMALL_LAYOUT, SMALL, overheads, samples_per_pipeline=4, accumulation=3)
    assert found.pipeline == 3 * 70
    assert found.rank_seconds == (3 * 2 * (7 + 11), 3 * 2 * (9 + 17))
    assert found.reduction == (30 + 40) * 4 * 0.5
    assert found.optimizer == pytest.approx(7)
    assert found.other == 5
    assert found.seconds == pytest.approx(210 + 140 + 7 + 5)


def test_collectives_of_a_step_take_their_latency() -> None:
    """Four steps of a ring over three ranks, two over two; the batch goes to the second of two nodes."""
    layout = replace(SMALL_LAYOUT, num_stages=3, boundaries=(0, 1, 2, 4), num_replicas=2)
    overheads = Overheads(ring_step=3.0, sums_norms=True, node_size=2, node_hop=7.0, per_step=5.0)
    bare = replace(overheads, ring_step=0.0)
    found, without = (predict_step(layout, SMALL, each, samples_per_pipeline=3) for each in (overheads, bare))
    assert found.optimizer - without.optimizer == 4 * 3
    assert found.reduction - without.reduction == 2 * 3
    assert found.other == 5 + 7
    one_stage = replace(layout, num_stages=1, boundaries=(0, 4))
    assert predict_step(one_stage, SMALL, overheads, samples_per_pipeline=3).optimizer == 0
    kept = predict_step(layout, SMALL, replace(overheads, sums_norms=False), samples_per_pipeline=3)
    assert kept.optimizer == without.optimizer


def test_latencies_are_no_part_of_what_measured_steps_are_scaled_to() -> None:
    """So that a layout with fewer ranks in its collectives is predicted to take less."""
    layout = replace(SMALL_LAYOUT, num_replicas=2)
    true = Overheads(ring_step=3.0, sums_norms=True, node_size=1, node_hop=7.0, per_step=5.0,
                     optimizer_per_parameter=0.5, reduction_per_byte=0.25)  # fmt: skip
    step = predict_step(layout, SMALL, true, samples_per_pipeline=4)
    # The second stage has the most parameters, and so the longest update and reduction.
    report = {"samples": 4, "forward": 0.0, "backward": 0.0, "pipeline": step.pipeline, "total": step.seconds,
              "reduction": step.reduction, "optimizer": step.optimizer}  # fmt: skip
    planned = replace(true, optimizer_per_parameter=0.0, reduction_per_byte=0.0, per_step=0.0)
    _, found = calibrate(SMALL, planned, layout, [report] * 4)
    for name in ("optimizer_per_parameter", "reduction_per_byte", "per_step"):
        assert getattr(found, name) == pytest.approx(getattr(true, name)), name


def test_a_step_with_a_reference_runs_all_micro_batches_forward_first() -> None:
    overheads = Overheads(per_forward=1, per_backward=1, has_reference=True)
    # Stage 0: F0 0-7, F1 7-14. Stage 1: F0 7-16, F1 16-25. Then the passes of the training, 70 seconds as above.
    found = predict_step(SMALL_LAYOUT, SMALL, overheads, samples_per_pipeline=4, accumulation=3)
    assert found.pipeline == 3 * (25 + 70)
    assert found.rank_seconds == (3 * 2 * (7 + 7 + 11), 3 * 2 * (9 + 9 + 17))
    # Its forwards are among those that a run measures.
    reports = [{"samples": 4, "forward": 2 * (4 * 7.0 + 2 * 1), "backward": 4 * 13.0 + 2 * 1, "total": 0,
                "pipeline": 0, "reduction": 0, "optimizer": 0}]  # fmt: skip
    alone = replace(SMALL_LAYOUT, num_stages=1, num_replicas=1, boundaries=(0, 4))
    costs, kept = calibrate(SMALL, overheads, alone, reports)
    assert costs == SMALL and kept.has_reference
    assert (kept.per_forward, kept.per_backward) == (1, 1)


def test_what_a_pass_takes_besides_its_blocks_stays_when_there_are_fewer_passes() -> None:
    """Calibrated on two stages and many micro-batches, twice as slow as planned, for one stage and one pass."""
    planned = Overheads(per_forward=1.0, per_backward=2.0)
    true_costs, true = SMALL.scaled(2, 2), Overheads(per_forward=2.0, per_backward=4.0)
    many = replace(SMALL_LAYOUT, num_microbatches=4, num_replicas=1)
    passes = 3 * 4  # Three batches of four micro-batches of one sample.
    reports = [
        {"samples": passes, "forward": passes * (forward + 2.0), "backward": passes * (backward + 4.0), "total": 0.0,
         "pipeline": 0.0, "reduction": 0.0, "optimizer": 0.0}
        for forward, backward in zip(by_stage(many, true_costs.forward),
                                     by_stage(many, block_backwards(true_costs, 0)), strict=True)
    ]  # fmt: skip
    one = replace(many, num_stages=1, boundaries=(0, 4), num_microbatches=1)
    found = predict_step(one, *calibrate(SMALL, planned, many, reports, accumulation=3), samples_per_pipeline=4)
    assert found.pipeline == pytest.approx(predict_step(one, true_costs, true, samples_per_pipeline=4).pipeline)


def test_a_pass_is_no_shorter_than_its_launches() -> None:
    """Also one of blocks without products, such as embeddings; what is frozen or stored launches nothing."""
    one = replace(SMALL_LAYOUT, num_stages=1, num_replicas=1, num_microbatches=1, boundaries=(0, 4))
    costs = replace(SMALL, forward=(0, 2, 3, 1), launch=((5.0, 9.0), (1.0, 2.0), (4.0, 5.0), (1.0, 1.0)))
    found = predict_step(one, costs, Overheads(per_forward=0.5, per_backward=0.25), samples_per_pipeline=1)
    assert found.pipeline == (5 + 2 + 4 + 1) + 0.5 + (9 + 4 + 6 + 2) + 0.25
    stored = replace(one, num_frozen_layers=1, cache_level=1)
    assert predict_step(stored, costs, Overheads(), samples_per_pipeline=1).pipeline == 1 + 1


def test_the_two_parts_of_a_backward_launch_together_what_a_whole_one_does() -> None:
    one = replace(SMALL_LAYOUT, num_stages=1, num_replicas=1, num_microbatches=2, boundaries=(0, 4))
    launches = ((5.0, 9.0), (1e3, 2e3), (4e3, 5e3), (1e3, 1e3))
    costs = replace(SMALL, launch=launches)
    whole, split = (
        predict_step(replace(one, schedule=name), costs, Overheads(per_backward=0.25), 2).pipeline
        for name in ("1f1b", "zb_h1")
    )
    assert whole == split


def test_a_reduction_may_run_beside_the_backward_of_the_last_micro_batch() -> None:
    # On the second stage, which has more parameters, that backward takes 17; see above.
    beside = Overheads(per_forward=1, per_backward=1, reduction_per_byte=0.5, hidden_reduction=1)
    assert predict_step(SMALL_LAYOUT, SMALL, beside, samples_per_pipeline=4).reduction == (30 + 40) * 4 * 0.5 - 17
    fast = replace(beside, reduction_per_byte=0.01)
    assert predict_step(SMALL_LAYOUT, SMALL, fast, samples_per_pipeline=4).reduction == 0


def test_a_step_with_a_frozen_stage_worked_by_hand() -> None:
    overheads = Overheads(hop=2, per_forward=1, per_backward=1, reduction_per_byte=0.5)
    layout = replace(SMALL_LAYOUT, num_frozen_layers=1, num_replicas=4)
    # The MLP on stage 1 is frozen too. Stage 1: F0 9-18, B0 18-21, F1 21-30, B1 30-33.
    found = predict_step(layout, SMALL, overheads, samples_per_pipeline=4)
    assert found.pipeline == 33
    assert found.rank_seconds == (2 * 7, 2 * (9 + 3))
    assert found.reduction == 40 * 4 * 0.5 * (2 * 3 / 4)


def test_one_replica_reduces_nothing_and_a_micro_batch_has_at_least_one_sample() -> None:
    layout = replace(SMALL_LAYOUT, num_replicas=1, num_microbatches=8)
    found = predict_step(layout, SMALL, Overheads(reduction_per_byte=1.0), samples_per_pipeline=1)
    assert found.reduction == 0
    assert found.seconds == sum(block_loads(SMALL, 0))


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "num_frozen_layers", "expected"),
    [
        # 16 bytes of weight, gradient and moments, and 4 of the flat buffer in which replicas sum the gradients.
        ("1f1b", 4, 0, [30 * 20 + 3 * 2, 70 * 20 + 7]),
        # One micro-batch: when the upper block's gradient is made, the lower block's activations are still there; the
        # buffer takes it at once.
        ("1f1b", 1, 0, [30 * 16 + 20 * 4 + 1 * 4, 70 * 16 + 40 * 4 + 3 * 4]),
        # All gradients are there once the first of four backwards has freed its activations.
        ("gpipe", 4, 0, [30 * 20 + 3 * 3, 70 * 20 + 7 * 3]),
        ("1f1b", 4, 1, [30 * 4, 30 * 4 + 40 * 20 + 4]),
    ],
)
def test_bytes_of_a_rank_worked_by_hand(
    schedule: str, num_microbatches: int, num_frozen_layers: int, expected: list[float]
) -> None:
    layout = replace(
        SMALL_LAYOUT, schedule=schedule, num_microbatches=num_microbatches, num_frozen_layers=num_frozen_layers
    )
    assert rank_bytes(layout, SMALL, samples_per_pipeline=4) == expected
    alone = replace(layout, num_replicas=1)
    weightless = with_weights(SMALL, (0, 0, 0, 0))
    assert rank_bytes(alone, weightless, 8) == [2 * each for each in rank_bytes(alone, weightless, 4)]


def test_what_a_block_needs_for_a_moment_counts_where_it_is_most() -> None:
    costs = replace(with_weights(SMALL, (0, 0, 0, 100)), working_bytes=(0, 0, 0, 50))
    alone = replace(SMALL_LAYOUT, num_stages=1, num_replicas=1, boundaries=(0, 4), num_microbatches=1)
    # At the head's loss all activations are there and no gradients; then its gradients and the others' activations.
    assert rank_bytes(alone, costs, 1) == [100 * 12 + max(10 + 50, 6 + 400)]
    assert rank_bytes(alone, replace(costs, working_bytes=(0, 0, 0, 500)), 1) == [100 * 12 + 10 + 500]
    assert rank_bytes(replace(alone, num_microbatches=2), costs, 2) == [100 * 12 + 400 + 10 + 50]
    split = replace(alone, num_stages=2, boundaries=(0, 2, 4), schedule="zb_h1", num_microbatches=2)
    assert rank_bytes(split, costs, 2)[0] == 2 * 3


def test_only_replicas_need_buffers_to_sum_gradients_in() -> None:
    one, two = (
        rank_bytes(replace(SMALL_LAYOUT, num_replicas=count), SMALL, samples_per_pipeline=4) for count in (1, 2)
    )
    assert [b - a for a, b in zip(one, two, strict=True)] == [30 * 4, 70 * 4]


@pytest.mark.parametrize(
    ("boundaries", "num_frozen_layers", "num_replicas", "expected"),
    [
        # A tied word embedding of 8 elements: the head's stage holds a copy and its gradient, the first stage all.
        ((0, 2, 4), 0, 1, [0, 8 * 8]),
        # Its gradient is summed by itself, over all stages that use it: not in the buffers of the replicas.
        ((0, 2, 4), 0, 2, [-8 * 4, 8 * 8]),
        # The whole model on one stage has one copy.
        ((0, 4), 0, 2, [0]),
        # What is frozen has no gradient.
        ((0, 2, 4), 1, 1, [0, 8 * 4]),
    ],
)
def test_stages_that_share_a_parameter_hold_a_copy_each(
    boundaries: tuple[int, ...], num_frozen_layers: int, num_replicas: int, expected: list[int]
) -> None:
    layout = replace(
        SMALL_LAYOUT,
        num_stages=len(boundaries) - 1,
        num_replicas=num_replicas,
        boundaries=boundaries,
        num_frozen_layers=num_frozen_layers,
    )
    tied = replace(SMALL, shared=(((0, 3), 8),))
    found = zip(rank_bytes(layout, tied, 4), rank_bytes(layout, SMALL, 4), strict=True)
    assert [with_copy - without for with_copy, without in found] == expected


@pytest.mark.parametrize(
    ("current", "initial_largest", "allowed", "expected"),
    [
        (8, 20, [1, 2, 4, 8], 2),  # Eq. 2 holds with equality.
        (8, 19.9, [1, 2, 4, 8], 4),
        (8, 9.9, [1, 2, 4, 8], 8),
        (8, 99, [1, 2, 4, 8], 1),
        (8, 99, [2, 4, 8], 2),
        (8, 99, [1, 2, 8], 8),
        (6, 99, [1, 2, 3, 6], 3),
        (1, 99, [1], 1),
    ],
)
def test_compression_by_memory(current: int, initial_largest: float, allowed: list[int], expected: int) -> None:
    """Eight blocks of 5 elements: their largest rank has 10 of four, 15 of three, 20 of two, 40 alone."""
    boundaries = {k: tuple(-(-8 * stage // k) for stage in range(k + 1)) for k in allowed}
    options = [Choice(Layout(3, 0, k, 1, boundaries[k], 1, "1f1b")) for k in allowed]
    costs, rules = replace(costs_of(3), parameters=(5,) * 8), rules_for(3, initial_largest_size=initial_largest)
    found = choose_by_memory(options, PlanInputs(costs, Overheads(), 8, **rules))
    assert max(allowed) == current and found.layout.pipeline_size == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({1: (3.0, True), 2: (2.0, True), 4: (2.5, True)}, 2),
        ({1: (3.0, True), 2: (2.0, False), 4: (2.5, True)}, 4),
        ({1: (2.02, True), 2: (2.01, True), 4: (2.0, True)}, 1),
        ({1: (2.03, True), 2: (2.01, True), 4: (2.0, True)}, 2),
        ({1: (1.0, False), 2: (2.0, False)}, 2),
    ],
)
def test_the_fastest_that_fits_is_chosen(found: dict[int, tuple[float, bool]], expected: int) -> None:
    boundaries = {1: (0, 6), 2: (0, 3, 6), 4: (0, 2, 3, 4, 6)}
    options = [Choice(Layout(2, 0, k, 1, boundaries[k], 1, "1f1b"), *found[k]) for k in found]
    assert choose_by_throughput(options).layout.num_stages == expected


@pytest.mark.parametrize(
    ("num_stages", "samples", "expected"),
    [(4, 64, [24, 16, 12, 8, 4]), (4, 14, [14, 12, 8, 4]), (4, 3, [3]), (1, 64, [6, 4, 3, 2, 1])],
)
def test_numbers_of_micro_batches_to_try(num_stages: int, samples: int, expected: list[int]) -> None:
    assert candidates(num_stages, samples) == expected


def test_a_trial_keeps_the_fastest_step_after_the_warm_up() -> None:
    trial = MicrobatchTrial([8, 4], steps_each=3)
    assert trial.best() == 8, "nothing measured yet"
    used = []
    for seconds, tokens in [(0.1, 100), (4.0, 100), (3.0, 50), (9.0, 0), (9.0, 100), (3.0, 100), (5.0, 100)]:
        assert not trial.is_done
        used.append(trial.current())
        trial.record(seconds, tokens)
    assert used == [8, 8, 8, 4, 4, 4, 4], "a step without tokens is not counted"
    assert trial.is_done
    assert trial.least == {8: 0.04, 4: 0.03}
    assert trial.best() == trial.current() == 4
    trial.record(0.001, 100)
    assert trial.least == {8: 0.04, 4: 0.03}, "what comes after the trial does not count"


def costs_of(num_layers: int) -> BlockCosts:
    """Attention 1 and MLP 2, backwards twice forwards; cheap ends."""
    return block_costs(
        forward=(0.1, *(1.0, 2.0) * num_layers, 0.1),
        backward=(0.1, *(2.0, 4.0) * num_layers, 0.2),
        edge_backward=(0.1, *(1.0, 2.0) * num_layers, 0.1),
        parameters=(6, *(4, 8) * num_layers, 6),
        activation_bytes=(1.0,) * (2 * num_layers + 2),
    )


def layout_of(num_layers: int, num_stages: int, world_size: int) -> Layout:
    loads = block_loads(costs_of(num_layers), 0)
    cuts = range(2 * num_layers + 3)
    return plan_layout(loads, cuts, "1f1b", num_stages, world_size // num_stages, 4)


LONG = 1000
"""So many steps that moving weights does not count."""


def rules_for(num_layers: int, **changes: Any) -> dict[str, Any]:
    """Rules of a plan, fields of `PlanInputs`."""
    cuts = tuple(range(2 * num_layers + 3))
    return {"compression": "throughput", "cut_positions": cuts, "device_bytes": 1e9, **changes}


def plan(
    current: Layout,
    num_frozen_layers: int,
    rules: dict[str, Any],
    overheads: Overheads | None = None,
    samples: int = 8,
) -> Choice:
    inputs = PlanInputs(costs_of(current.num_layers), overheads or Overheads(), samples, **rules)
    return search(current, num_frozen_layers, LONG, inputs)


def test_the_fullest_rank_counts_frozen_blocks_by_their_factor() -> None:
    parameters = costs_of(2).parameters
    two, one = Layout(2, 0, 2, 1, (0, 3, 6), 1, "1f1b"), Layout(2, 1, 1, 1, (0, 6), 1, "1f1b")
    assert largest_rank_size(parameters, two) == 18
    assert largest_rank_size(parameters, replace(two, num_frozen_layers=1)) == 18
    assert largest_rank_size(parameters, one) == pytest.approx(18 / 6 + 18)
    assert largest_rank_size(parameters, replace(one, num_frozen_layers=2), frozen_factor=0.5) == 15 + 6
    in_a_v = Layout(2, 0, 4, 1, (0, 2, 3, 4, 6), 1, "1f1b", num_chunks=2, placement="v")
    assert largest_rank_size(parameters, in_a_v) == 10 + 14


def test_a_run_that_is_not_elastic_only_freezes() -> None:
    current = layout_of(12, 4, 8)
    found = plan(current, 6, rules_for(12, elastic=False))
    assert found.layout == replace(current, num_frozen_layers=6)
    assert found.alternatives == {4: predict_step(found.layout, costs_of(12), Overheads(), 32).seconds}


def test_no_pipeline_is_fastest_where_it_fits() -> None:
    found = plan(layout_of(12, 8, 8), 4, rules_for(12))
    assert (found.layout.num_stages, found.layout.num_replicas) == (1, 8)
    assert (found.layout.num_frozen_layers, found.layout.num_microbatches) == (4, 1)
    assert sorted(found.alternatives) == [1, 2, 4, 8]
    assert found.alternatives[1] == min(found.alternatives.values())


def test_what_does_not_fit_with_the_reserve_is_not_chosen() -> None:
    current, costs = layout_of(12, 8, 8), costs_of(12)
    whole = max(rank_bytes(plan(current, 6, rules_for(12)).layout, costs, 8))
    assert plan(current, 6, rules_for(12, device_bytes=whole / (1 - MEMORY_RESERVE) + 1)).layout.num_stages == 1
    assert plan(current, 6, rules_for(12, device_bytes=whole)).layout.num_stages == 2
    assert plan(current, 6, rules_for(12, device_bytes=0)).layout.num_stages == 8, "nothing fits: the longest"


def test_an_expensive_reduction_keeps_the_pipeline_long() -> None:
    found = plan(layout_of(12, 8, 8), 0, rules_for(12), Overheads(reduction_per_byte=1e3))
    assert (found.layout.num_stages, found.layout.num_replicas) == (8, 1)


@pytest.mark.parametrize(("num_frozen_layers", "expected"), [(1, 2), (2, 1)])
def test_compression_by_memory_follows_equation_2(num_frozen_layers: int, expected: int) -> None:
    # One stage holds 18 / 6 + 30 = 33 with F=1 and 30 / 6 + 18 = 23 with F=2; at the start the larger held 26.
    current = Layout(3, 0, 2, 1, (0, 4, 8), 2, "1f1b")
    initial = largest_rank_size(costs_of(3).parameters, current)
    assert initial == 26
    found = plan(current, num_frozen_layers, rules_for(3, compression="memory", initial_largest_size=initial))
    assert (found.layout.num_stages, found.layout.num_replicas) == (expected, 2 // expected)


@pytest.mark.parametrize("compression", ["memory", "throughput"])
def test_lengths_that_ran_out_of_memory_are_not_tried_again(compression: str) -> None:
    rules = rules_for(12, compression=compression, initial_largest_size=1e9)
    current = layout_of(12, 8, 8)
    found = [plan(current, 4, rules | {"unfit": max(unfit, default=0)}) for unfit in [(), (1,), (1, 2), (1, 2, 4, 8)]]
    assert [each.layout.num_stages for each in found] == [1, 2, 4, 8]
    assert sorted(found[1].alternatives) == [2, 4, 8]


@pytest.mark.parametrize("compression", ["memory", "throughput"])
def test_there_are_no_more_stages_than_active_blocks(compression: str) -> None:
    rules = rules_for(2, compression=compression, device_bytes=0)
    current = layout_of(2, 4, 4)
    assert [plan(current, frozen, rules).layout.num_stages for frozen in range(3)] == [4, 2, 1]


def test_cuts_stay_on_allowed_positions() -> None:
    # Layers that may not be cut inside: 3 layers, embeddings and head are 5 pieces.
    rules = rules_for(3, cut_positions=(0, 1, 3, 5, 7, 8), unfit=1)
    found = plan(Layout(3, 0, 2, 1, (0, 5, 8), 2, "1f1b"), 1, rules)
    assert set(found.layout.boundaries) <= {0, 1, 3, 5, 7, 8}


def test_frozen_blocks_are_spread_over_stages_at_the_cost_of_their_forward() -> None:
    # Blocks 0..22 cost 33.1 forwards; the last layer and the head cost 2 + 6 + 0.3.
    found = plan(layout_of(12, 2, 2), 11, rules_for(12, unfit=1))
    start = found.layout.boundaries[1]
    assert start < found.layout.first_active_block
    assert found.layout.first_active_stage == 1
    loads = block_loads(costs_of(12), 11)
    assert abs(sum(loads[:start]) - sum(loads[start:])) <= 2


@pytest.mark.parametrize(("shift", "is_kept"), [(0, True), (1, True), (20, False)])
def test_nothing_moves_for_a_gain_below_two_percent(shift: int, is_kept: bool) -> None:
    best = layout_of(50, 2, 2)
    current = replace(best, boundaries=(0, best.boundaries[1] + shift, best.num_blocks))
    found = plan(current, 0, rules_for(50, unfit=1))
    assert found.layout.boundaries == (current if is_kept else best).boundaries
    assert found.alternatives == {2: predict_step(found.layout, costs_of(50), Overheads(), 16).seconds}


@pytest.mark.parametrize(("device_bytes", "boundaries"), [(1e9, (0, 3, 6)), (1000, (0, 4, 6))])
def test_cuts_that_fit_are_not_given_up_for_even_ones_that_do_not(
    device_bytes: float, boundaries: tuple[int, ...]
) -> None:
    # All parameters lie in the last layer: even cuts put its 1600 bytes on one stage.
    costs = with_weights(costs_of(2), (0, 0, 0, 50, 50, 0))
    rules = rules_for(2, device_bytes=device_bytes, unfit=1)
    current = Layout(2, 0, 2, 1, (0, 4, 6), 4, "1f1b")
    assert search(current, 0, LONG, PlanInputs(costs, Overheads(), 8, **rules)).layout.boundaries == boundaries


def test_the_number_of_micro_batches_is_the_users_then_the_measured_then_a_rule_of_thumb() -> None:
    current, unfit = layout_of(12, 4, 4), 2
    rules = rules_for(12, unfit=unfit, known_microbatches={(4, 1): 12, (4, 2): 7})
    assert plan(current, 2, rules | {"num_microbatches": 5}).layout.num_microbatches == 5
    assert plan(current, 2, rules).layout.num_microbatches == 12
    assert plan(current, 2, rules | {"known_microbatches": {}}).layout.num_microbatches == 8


def test_what_ran_out_of_memory_is_remembered_for_its_stages_of_a_rank(tmp_path: Path) -> None:
    probe = SimpleNamespace(structure=SimpleNamespace(num_layers=4, media=None))
    found = [
        RunPlanner(
            PipeTransformerArguments(
                output_dir=str(tmp_path), use_cpu=True, pipeline_schedule="interleaved_1f1b", pipeline_chunks=chunks
            ),
            *(SimpleNamespace(), probe, SimpleNamespace(), 1e9, 0),
            has_dropout=False,
            unfit=0,
        ).conditions
        for chunks in (None, 2, 3)
    ]
    assert found[0] == found[1] != found[2]


# ---- several stages a rank ----


@pytest.mark.parametrize(
    ("schedule", "wanted", "pipeline_size", "most_stages", "expected"),
    [
        ("interleaved_1f1b", 2, 4, 12, 2),
        ("interleaved_1f1b", 4, 4, 12, 3),
        ("interleaved_1f1b", 4, 4, 8, 2),
        # Not two stages for each of four ranks.
        ("interleaved_1f1b", 2, 4, 7, 0),
        ("zb_v", 2, 4, 7, 0),
        # One rank has one stage.
        ("zb_v", 2, 1, 7, 1),
        ("1f1b", 1, 4, 4, 1),
        ("1f1b", 1, 4, 3, 0),
    ],
)
def test_ranks_have_fewer_stages_where_there_cannot_be_so_many(
    schedule: str, wanted: int, pipeline_size: int, most_stages: int, expected: int
) -> None:
    assert choose_num_chunks(schedule, wanted, pipeline_size, most_stages) == expected


IN_A_V = replace(SMALL_LAYOUT, num_stages=4, boundaries=(0, 1, 2, 3, 4), schedule="zb_v", num_chunks=2, placement="v")


def test_a_rank_needs_what_its_stages_need() -> None:
    # Rank 0 holds embeddings and head, rank 1 attention and MLP. Two samples a micro-batch.
    # All gradients are there once W0 has freed its activations, and those of the other micro-batch still are.
    first, second = 50 * 20 + 2 * 1, 50 * 20 + 2 * 2
    assert rank_bytes(IN_A_V, SMALL, samples_per_pipeline=4) == [first, second]
    tied = replace(SMALL, shared=(((0, 3), 8),))
    # Two stages of one rank share all of the embeddings: the head makes their gradient before anything is freed there.
    assert rank_bytes(IN_A_V, tied, 4) == [50 * 20 + 2 * 2, second]


def test_parts_of_a_split_backward_take_as_long_as_the_whole() -> None:
    overheads = Overheads(reduction_per_byte=0.5)
    found, plain = (
        predict_step(replace(SMALL_LAYOUT, schedule=name), SMALL, overheads, 4) for name in ("zb_h1", "1f1b")
    )
    assert found.rank_seconds == pytest.approx(plain.rank_seconds)
    assert found.pipeline < plain.pipeline
    assert found.reduction == plain.reduction == (30 + 40) * 4 * 0.5


@pytest.mark.parametrize(("schedule", "num_chunks"), [("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2)])
def test_schedules_with_smaller_bubbles_are_predicted_to_be_faster(schedule: str, num_chunks: int) -> None:
    costs, loads, cuts = costs_of(24), block_loads(costs_of(24), 0), range(51)
    plain, found = (
        predict_step(plan_layout(loads, cuts, name, 4, 1, 8, v), costs, Overheads(), 32).pipeline
        for name, v in (("1f1b", 1), (schedule, num_chunks))
    )
    assert found < 0.93 * plain


def chunked(schedule: str, num_layers: int, pipeline_size: int, num_chunks: int, world_size: int) -> Layout:
    cuts, replicas = range(2 * num_layers + 3), world_size // pipeline_size
    loads = block_loads(costs_of(num_layers), 0)
    return plan_layout(loads, cuts, schedule, pipeline_size, replicas, 4, num_chunks)


@pytest.mark.parametrize(
    ("schedule", "wanted", "num_frozen_layers", "unfit", "expected"),
    [
        ("interleaved_1f1b", 2, 0, (), {1: 1, 2: 2, 4: 2}),
        ("interleaved_1f1b", 3, 0, (1,), {2: 3, 4: 3}),
        # 9 blocks are active, then 7: four ranks have two stages each, then they are not considered.
        ("interleaved_1f1b", 3, 2, (), {1: 1, 2: 3, 4: 2}),
        ("interleaved_1f1b", 3, 3, (), {1: 1, 2: 3}),
        ("zb_v", 2, 3, (1,), {2: 2}),
        # 3 blocks are left.
        ("zb_v", 2, 5, (), {1: 1}),
        # Only what runs is known to fit.
        ("zb_v", 2, 5, (1,), {4: 2}),
    ],
)
def test_lengths_are_planned_with_the_stages_that_the_active_blocks_allow(
    schedule: str, wanted: int, num_frozen_layers: int, unfit: tuple[int, ...], expected: dict[int, int]
) -> None:
    current = chunked(schedule, 6, 4, 2, 8)
    rules = rules_for(6, num_chunks=wanted, unfit=max(unfit, default=0))
    found = search(current, num_frozen_layers, LONG, PlanInputs(costs_of(6), Overheads(), 8, **rules))
    assert sorted(found.alternatives) == sorted(expected)
    layout = found.layout
    assert layout.num_chunks == expected[layout.pipeline_size]
    assert (layout.schedule, layout.placement) == (schedule, find_schedule(schedule).abilities.placement)
    assert layout.pipeline_size * layout.num_replicas == 8


@pytest.mark.parametrize("compression", ["memory", "throughput"])
@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)])
def test_a_layout_that_fits_is_not_left_for_one_that_does_not(
    schedule: str, num_chunks: int, compression: str
) -> None:
    # Eight ranks hold all that fits, and soon there are fewer active blocks than stages.
    current, costs = chunked(schedule, 7, 8, num_chunks, 8), costs_of(7)
    budget = max(rank_bytes(current, costs, 64))
    initial = largest_rank_size(costs.parameters, current)
    device_bytes = budget / (1 - MEMORY_RESERVE) + 1
    rules = rules_for(7, compression=compression, device_bytes=device_bytes, initial_largest_size=initial)
    rules = rules | {"num_chunks": num_chunks}
    num_kept = 0
    for num_frozen_layers in range(7):
        found = search(current, num_frozen_layers, LONG, PlanInputs(costs, Overheads(), 8, **rules))
        assert max(rank_bytes(found.layout, costs, 8 * found.layout.pipeline_size)) <= budget
        size = found.layout.pipeline_size
        assert found.alternatives[size] == predict_step(found.layout, costs, Overheads(), 8 * size).seconds
        if found.layout.num_stages > current.num_blocks - found.layout.first_active_block:
            assert found.layout == replace(current, num_frozen_layers=num_frozen_layers)
            num_kept += 1
    assert num_kept


@pytest.mark.parametrize(
    ("schedule", "wanted", "expected"),
    [
        ("1f1b", 1, [(1, 1), (2, 1), (4, 1)]),
        ("zb_v", 2, [(1, 1), (2, 2), (4, 2)]),
        # 14 blocks in all: three stages on each of four ranks at most.
        ("interleaved_1f1b", 4, [(1, 1), (2, 2), (2, 3), (2, 4), (4, 2), (4, 3)]),
    ],
)
def test_every_layout_that_may_follow_is_known_in_advance(
    schedule: str, wanted: int, expected: list[tuple[int, int]]
) -> None:
    assert reachable_shapes(schedule, wanted, pipeline_sizes(4, 4), 14) == expected
    current = chunked(schedule, 6, 4, min(wanted, 3), 8)
    for num_frozen_layers, unfit in product(range(7), [(), (1,), (1, 2)]):
        rules = rules_for(6, num_chunks=wanted, unfit=max(unfit, default=0))
        found = search(current, num_frozen_layers, LONG, PlanInputs(costs_of(6), Overheads(), 8, **rules))
        assert found.layout.shape in expected


# ---- stages that update themselves ----

ASYNC = replace(SMALL_LAYOUT, schedule="async_1f1b", num_microbatches=1, num_replicas=1)


def test_an_asynchronous_step_takes_what_the_slowest_stage_does_with_its_update() -> None:
    overheads = Overheads(
        per_forward=1, per_backward=1, reduction_per_byte=0.5, optimizer_per_parameter=0.1, per_step=5
    )
    # A sample a batch: stage 0 takes 3 + 5 + 2, stage 1 takes 4 + 8 + 2 and has the longer update.
    found = predict_step(ASYNC, SMALL, overheads, samples_per_pipeline=1)
    assert found.pipeline == pytest.approx(4 + 8 + 2 + 70 * 0.1)
    assert (found.reduction, found.optimizer, found.other) == (0, 0, 5)
    assert found.seconds == found.pipeline + 5
    assert found.rank_seconds == (10, 14)
    # An update a step, whatever its batches and their parts; each stage sums its own gradients.
    found = predict_step(replace(ASYNC, num_replicas=2), SMALL, overheads, samples_per_pipeline=2, accumulation=4)
    assert found.pipeline == pytest.approx(4 * (2 * 12 + 2) + 70 * 0.1 + 70 * 4 * 0.5)
    assert found.rank_seconds == (4 * (2 * 8 + 2), 4 * (2 * 12 + 2))


def test_a_frozen_stage_of_an_asynchronous_pipeline_only_runs_forwards() -> None:
    found = predict_step(replace(ASYNC, num_frozen_layers=1), SMALL, Overheads(per_forward=1, per_backward=1), 1)
    assert found.rank_seconds == (4, 4 + 1 + 2)
    assert found.seconds == 7


def test_cuts_of_an_asynchronous_pipeline_even_out_the_updates_too() -> None:
    """A stage with a large embedding, which every step updates, gets fewer layers."""
    blocks = 10
    costs = block_costs(
        forward=(1.0,) * blocks, backward=(2.0,) * blocks, edge_backward=(2.0,) * blocks,
        parameters=(600, *(10,) * (blocks - 1)), activation_bytes=(1.0,) * blocks,
    )  # fmt: skip
    loads = [block_loads(costs, 0, update_per_parameter=update) for update in (0.0, 0.01)]
    assert loads[0] == [3.0] * blocks
    assert loads[1] == pytest.approx([9.0] + [3.1] * (blocks - 1))
    cuts = [stage_boundaries(each, range(blocks + 1), 2) for each in loads]
    assert cuts == [(0, 5, 10), (0, 4, 10)]
    assert block_loads(costs, 1, update_per_parameter=0.01)[:3] == [1.0] * 3


class Alone(SimpleNamespace):
    """A topology of four ranks on one machine, without the others."""

    world_size = local_world_size = 4

    def decide(self, call: Callable[[], Any]) -> Any:
        return call()

    def check_pipeline_size(self, size: int) -> None:
        assert self.world_size % size == 0


def layouts_by_clock(folder: Path, slow: slice, has_dropout: bool, **options: Any) -> list[Layout]:
    """The layouts of a run of 12 layers with 0, 2 and 4 of them frozen, on a machine where some blocks are slow."""
    args = PipeTransformerArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=8, pipeline_parallel_size=4, **options
    )
    costs, (first, last) = costs_of(12), (slow.start, slow.stop)
    factors = [50.0 if first <= block < last else 1.0 for block in range(26)]
    timed = replace(
        costs,
        **{
            name: tuple(map(operator.mul, getattr(costs, name), factors))
            for name in ("forward", "backward", "edge_backward")
        },
    )
    flops = (0.0, *(8.0, 16.0) * 12, 1.0)
    structure = SimpleNamespace(num_layers=12, cut_positions=lambda: range(27), media=None)
    probe = SimpleNamespace(structure=structure, media_share=0.0, block_flops=flops)
    # Where the first layers are slow, so is the network, and no pipeline shrinks for the clock's sake.
    overheads = Overheads(hop=0.1 / (1 + first), reduction_per_byte=100.0 / (1 + first) ** 2, per_step=float(last))
    planner = RunPlanner(
        *(args, Alone(), probe, MeasuredCosts(timed, overheads, 1), 1e9, 0), has_dropout=has_dropout, unfit=0
    )
    found = [planner.layout()]
    inputs = planner.inputs(found[0])
    for num_frozen in (2, 4):
        change = search(found[-1], num_frozen, LONG, inputs)
        found.append(change.layout)
    return found


@pytest.mark.parametrize(
    ("options", "has_dropout", "hangs_on_clocks"),
    [
        ({"pipeline_schedule": "async_1f1b"}, False, False),
        ({"pipeline_schedule": "async_1f1b"}, True, False),
        ({"pipeline_schedule": "async_1f1b", "pipeline_compression": "memory"}, False, False),
        ({"pipeline_schedule": "async_1f1b", "elastic": False}, False, False),
        ({"full_determinism": True}, False, False),
        ({"pipeline_compression": "memory"}, True, False),
        ({"pipeline_compression": "memory"}, False, True),
        ({}, False, True),
    ],
)
def test_no_clock_chooses_a_layout_that_changes_numbers(
    tmp_path: Path, options: dict[str, Any], has_dropout: bool, hangs_on_clocks: bool
) -> None:
    """The same model on machines that time its layers wildly differently, at the start and when layers freeze."""
    head, middle, bottom = (
        layouts_by_clock(tmp_path, slow, has_dropout, **options) for slow in (slice(20, 26), slice(8, 14), slice(0, 5))
    )
    if hangs_on_clocks:
        assert head[0].boundaries != middle[0].boundaries != bottom[0].boundaries
        assert head[1] != bottom[1]
    else:
        assert head == middle == bottom
        # Not because nothing follows the work: each stage has some of it.
        assert head[0].boundaries[1] in range(5, 9)


def test_a_stage_with_a_large_embedding_gets_fewer_layers_by_work_too(tmp_path: Path) -> None:
    """Nothing else is known of what an update takes where clocks say nothing."""
    args = PipeTransformerArguments(
        str(tmp_path), use_cpu=True, per_device_train_batch_size=1, pipeline_schedule="async_1f1b",
        pipeline_parallel_size=2,
    )  # fmt: skip
    structure = SimpleNamespace(num_layers=4, cut_positions=lambda: range(11), media=None)
    probe = SimpleNamespace(structure=structure, media_share=0.0, block_flops=(0.0, *(2e6,) * 8, 0.0))
    found = []
    for elements in (10, 100_000):
        costs = replace(costs_of(4), parameters=(elements, *(10,) * 9))
        planner = RunPlanner(args, Alone(), probe, MeasuredCosts(costs, Overheads(), 1), 1e9, 0, True, 0, num_probed=2)
        found.append(planner.layout().boundaries)
    assert found == [(0, 5, 10), (0, 3, 10)]


def test_one_rank_is_not_asynchronous() -> None:
    alone = replace(ASYNC, num_stages=1, boundaries=(0, 4))
    overheads = Overheads(optimizer_per_parameter=0.1)
    found, plain = (
        predict_step(each, SMALL, overheads, samples_per_pipeline=3)
        for each in (alone, replace(alone, schedule="1f1b"))
    )
    assert not alone.abilities.overlaps_steps and ASYNC.abilities.overlaps_steps
    assert found == plain
    assert rank_bytes(alone, SMALL, 4, weights="stashing") == rank_bytes(alone, SMALL, 4)


@pytest.mark.parametrize(
    ("weights", "accumulation", "expected"),
    [("vanilla", 1, 0), ("pipeoptim", 1, 1), ("stashing", 1, 3), ("stashing", 3, 1)],
)
def test_versions_of_the_weights_take_memory(weights: str, accumulation: int, expected: int) -> None:
    layout = replace(ASYNC, num_stages=4, boundaries=(0, 1, 2, 3, 4))
    found = rank_bytes(layout, SMALL, 2, accumulation=accumulation, weights=weights)
    # Of the batches of two samples K - k are in flight.
    assert found[0] == 10 * 16 + 4 * 2 * 1 + expected * 10 * 4
    assert found[3] == 40 * 16 + 1 * 2 * 4
    frozen = rank_bytes(replace(layout, num_frozen_layers=1), SMALL, 2, weights=weights)
    assert frozen[0] == 10 * 4


@pytest.mark.parametrize(
    ("weights", "optim", "beside", "states"),
    [
        ("xpipe", "adamw_torch_fused", 0, 2), ("xpipe", "sgd", 2, 1), ("xpipe", "adafactor", 2, 0),
        ("pipeoptim", "adamw_torch", 0, 2), ("pipeoptim", "sgd", 1, 1), ("spectrain", "adafactor", 1, 0),
        ("stashing", "adafactor", 0, 0),
    ],
)  # fmt: skip
def test_what_predictions_keep_of_their_own_takes_memory(weights: str, optim: str, beside: int, states: int) -> None:
    layout, names = replace(ASYNC, num_stages=4, boundaries=(0, 1, 2, 3, 4)), (optim, "adamw_torch")
    found, with_adam = (rank_bytes(layout, SMALL, 2, 1, weights, MemoryRules(each)) for each in names)
    assert found[0] - with_adam[0] == (beside + states - 2) * 10 * 4
    frozen = replace(layout, num_frozen_layers=1)
    assert [rank_bytes(frozen, SMALL, 2, 1, weights, MemoryRules(each))[0] for each in names] == [10 * 4] * 2


@pytest.mark.parametrize(
    ("optim", "of_float32", "of_bfloat16"),
    [
        # Bytes per element of weight, gradient and state. States in 8 bits have a float32 scale for 256 elements.
        ("adamw_torch", 16, 8), ("adamw_torch_fused", 16, 8), ("sgd", 12, 6), ("adafactor", 8, 4),
        ("adamw_bnb_8bit", 10 + 1 / 32, 6 + 1 / 32), ("paged_lion_8bit", 9 + 1 / 64, 5 + 1 / 64),
        ("adamw_torch_4bit", 9 + 1 / 32, 5 + 1 / 32), ("paged_adamw_32bit", 16, 12), ("lion_32bit", 12, 8),
    ],
)  # fmt: skip
def test_state_of_the_optimizer_counts_in_its_own_dtype(optim: str, of_float32: float, of_bfloat16: float) -> None:
    alone = replace(SMALL_LAYOUT, num_stages=1, boundaries=(0, 4), num_replicas=1)
    weights_alone = replace(SMALL, activation_bytes=(0,) * 4)
    half = replace(weights_alone, trained_bytes=(20, 40, 60, 80))
    memory = MemoryRules(optim)
    assert rank_bytes(alone, weights_alone, 1, memory=memory) == [pytest.approx(100 * of_float32)]
    assert rank_bytes(alone, half, 1, memory=memory) == [pytest.approx(100 * of_bfloat16)]
    # Replicas sum gradients in buffers of their dtype.
    two = replace(alone, num_replicas=2)
    # Those of a single backward move there block by block.
    assert rank_bytes(two, half, 1, memory=memory) == [pytest.approx(100 * of_bfloat16 + 40 * 2)]


def test_autocast_adds_a_copy_of_the_weights_in_16_bits() -> None:
    mixed = MemoryRules(casts=True)
    pairs = zip(rank_bytes(SMALL_LAYOUT, SMALL, 4, memory=mixed), rank_bytes(SMALL_LAYOUT, SMALL, 4), strict=True)
    assert [found - without for found, without in pairs] == [30 * 2, 70 * 2]
    half = replace(SMALL, trained_bytes=(20, 40, 60, 80))
    assert rank_bytes(SMALL_LAYOUT, half, 4, memory=mixed) == rank_bytes(SMALL_LAYOUT, half, 4)
    frozen = replace(SMALL_LAYOUT, num_frozen_layers=1)
    pairs = zip(rank_bytes(frozen, SMALL, 4, memory=mixed), rank_bytes(frozen, SMALL, 4), strict=True)
    assert [found - without for found, without in pairs] == [0, 40 * 2], "nothing keeps casts of frozen layers"


def test_float32_sums_of_gradients_take_memory_for_weights_of_half_precision() -> None:
    mixed = replace(SMALL, trained_bytes=(40, 80, 60, 80))
    pairs = zip(
        *(rank_bytes(SMALL_LAYOUT, mixed, 4, memory=MemoryRules(sums=is_on)) for is_on in (True, False)), strict=True
    )
    assert [found - without for found, without in pairs] == [0, 70 * 4]


@pytest.mark.parametrize(
    ("schedule", "recompute", "expected"),
    [
        # One sample a micro-batch, half a byte at each boundary. Embeddings keep 1 and the head 4, of which 4 are in
        # flight; besides, one micro-batch of what is recomputed.
        ("gpipe", "never", [4 * 3, 4 * 7]),
        ("gpipe", "layers", [4 * (1 + 0.5) + 2, 4 * (4 + 0.5) + 3]),
        ("gpipe", "always", [3, 4 * 0.5 + 7]),
        ("gpipe", "except_last", [2 * 3, 4 * 0.5 + 2 * 7]),
        ("1f1b", "layers", [2 * (1 + 0.5) + 2, 7]),
        ("1f1b", "always", [3, 7]),
    ],
)
def test_recomputation_takes_memory_for_what_it_keeps(schedule: str, recompute: str, expected: list[float]) -> None:
    costs = replace(with_weights(SMALL, (0,) * 4), boundary_bytes=(0, 0.5, 0.5, 0.5))
    layout = replace(SMALL_LAYOUT, schedule=schedule, num_microbatches=4, num_replicas=1)
    assert rank_bytes(layout, costs, 4, memory=MemoryRules(recompute=recompute)) == expected


@pytest.mark.parametrize(
    ("table", "changes", "expected"),
    [
        # A third forward beside the activations of the second and all gradients: 40 bytes of block 0, 80 of block 1.
        ((0.0, 0.0), {}, 2 * 300 + 120),
        # At the fourth, 8 bytes of block 0 and for each of two backwards an eighth of the 32 of the table.
        ((32.0, 8.0), {}, 2 * 300 + 80 + 8 + 2 * 4),
        # With more samples than rows the table's gradient is there early.
        ((32.0, 3.0), {}, 2 * 300 + 120),
        ((32.0, 8.0), {"accumulation": 2}, 2 * 300 + 120),
    ],
)
def test_the_gradient_of_a_table_comes_after_the_activations(
    table: tuple[float, float], changes: dict[str, int], expected: float
) -> None:
    costs = replace(SMALL, activation_bytes=(100, 200, 0, 0), table=table)
    layout = replace(SMALL_LAYOUT, num_microbatches=4, num_replicas=1)
    first = rank_memory(layout, costs, 4, **changes)[0]
    assert first.activations + first.gradients == expected
    whole = Layout(1, 0, 1, 1, (0, 4), 4, "1f1b")
    alone = [rank_bytes(whole, each, 4) for each in (costs, replace(costs, table=(0.0, 0.0)))]
    assert alone[0] == alone[1], "a stage with the head keeps nothing back"


def test_a_head_that_sees_all_replicas_needs_room_for_all() -> None:
    """Its output for the whole batch lies beside what layers keep of every micro-batch."""
    costs = replace(with_weights(SMALL, (0,) * 4), activation_bytes=(0, 0, 30, 100), working_bytes=(0, 0, 0, 50))
    layout = replace(SMALL_LAYOUT, schedule="gpipe", num_replicas=2)

    def activations(loss_sees: str, at: Layout = layout, slices: int = 1) -> float:
        rules = MemoryRules(loss_sees=loss_sees, head_slices=slices)
        return rank_memory(at, costs, 2, memory=rules)[-1].activations

    # Two micro-batches of a sample each.
    assert activations("parts") == 2 * (30 + 100) + 50
    assert activations("replica") == 2 * (30 + 100) + 2 * 50
    assert activations("batch") == 2 * (30 + 2 * 100) + 2 * 2 * 50
    assert activations("batch", replace(layout, num_replicas=1)) == activations("replica")
    # A head in slices keeps one of them; one that sees the whole batch is not sliced.
    assert activations("parts", slices=5) == 2 * (30 + 100 / 5) + 50 / 5
    assert activations("batch", slices=5) == activations("batch")


def test_a_table_beside_few_activations_is_counted_at_the_end() -> None:
    costs = replace(SMALL, activation_bytes=(0, 0, 0, 0), table=(32.0, 8.0))
    first = rank_memory(replace(SMALL_LAYOUT, num_microbatches=4, num_replicas=1), costs, 4)[0]
    assert first.gradients == 120 + 4 * 4


def test_weights_of_half_precision_take_half_the_memory() -> None:
    frozen = replace(with_weights(SMALL, SMALL.parameters, (10, 20, 30, 0)), activation_bytes=(0,) * 4)
    half = replace(frozen, trained_bytes=(0, 0, 0, 160), kept_bytes=(20, 40, 60, 0))
    tied = ((0, 3), 8)
    found, whole = (
        rank_bytes(replace(SMALL_LAYOUT, num_replicas=1), replace(costs, kept_shared=(tied,)), 1)
        for costs in (half, frozen)
    )
    # The last stage has a copy of what it shares.
    assert whole == [30 * 4, 30 * 4 + 40 * 16 + 8 * 4]
    assert found == [30 * 2, 30 * 2 + 40 * 16 + 8 * 2]


@pytest.mark.parametrize(
    ("pipeline_size", "accumulation", "weights", "expected"),
    [
        (4, 1, "pipeoptim", 1),
        (4, 1, "double_buffer", 3),
        (4, 2, "double_buffer", 2),
        (4, 3, "double_buffer", 1),
        (2, 1, "double_buffer", 1),
        (1, 1, "double_buffer", 1),
        # As many as there are samples.
        (8, 1, "double_buffer", 6),
    ],
)
def test_batches_stay_whole_where_nothing_waits(
    pipeline_size: int, accumulation: int, weights: str, expected: int
) -> None:
    assert choose_num_microbatches(pipeline_size, 6, find_weights(weights), accumulation) == expected


def test_evaluation_has_a_pipeline_to_fill_where_training_fills_it_with_steps() -> None:
    assert evaluation_microbatches(ASYNC, 64) == 8
    assert evaluation_microbatches(replace(ASYNC, num_microbatches=9), 64) == 9
    assert evaluation_microbatches(ASYNC, 1) == 1
    assert evaluation_microbatches(SMALL_LAYOUT, 64) == 2
    assert evaluation_microbatches(replace(ASYNC, num_stages=1, boundaries=(0, 4)), 64) == 1


def test_a_shorter_asynchronous_pipeline_gets_the_micro_batches_that_its_weights_take() -> None:
    current = replace(layout_of(12, 4, 4), schedule="async_1f1b", num_microbatches=3)
    found = [
        plan(current, 2, rules_for(12, unfit=max(unfit, default=0), weights="double_buffer")).layout
        for unfit in ((1, 2), (1,), ())
    ]
    assert [(each.pipeline_size, each.num_microbatches) for each in found] == [(4, 3), (2, 1), (1, 1)]
    assert [each.abilities.overlaps_steps for each in found] == [True, True, False]


@pytest.mark.parametrize(
    ("options", "num_frozen_layers", "expected"),
    [
        (
            {},
            0,
            "first trained one 3 updates at most .* with pipeline_weights='pipeoptim' a forward sees .* backward, ",
        ),
        ({"gradient_accumulation_steps": 2}, 0, "one 2 updates at most"),
        ({"gradient_accumulation_steps": 3}, 0, "one 1 update at most"),
        ({"pipeline_weights": "stashing"}, 0, "'stashing' a backward sees the weights that its forward saw.$"),
        ({"pipeline_parallel_num_microbatches": "measured"}, 0, "M=1 by rule: no other number leaves less to wait"),
        # Three of four stages are frozen.
        ({}, 1, "one 0 updates at most"),
    ],
)
def test_the_first_line_says_what_asynchronous_means(
    tmp_path: Path, options: dict[str, object], num_frozen_layers: int, expected: str
) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, pipeline_schedule="async_1f1b", **options)
    probe, measured = (
        SimpleNamespace(structure=WHOLE, media_share=0.0, block_flops=()),
        SimpleNamespace(blocks=SMALL, overheads=Overheads(), num_samples=1),
    )
    planner = RunPlanner(args, SimpleNamespace(), probe, measured, 1e9, 0, has_dropout=True, unfit=0)
    layout = replace(ASYNC, num_stages=4, boundaries=(0, 1, 2, 3, 4), num_frozen_layers=num_frozen_layers)
    found = planner.describe(layout, "none", freezes=False)["expectation"]
    assert "no bubble between drains, for each of 4 stages" in found and "dropout" not in found
    assert re.search(expected, found)
    assert not planner.measures_microbatches


@pytest.mark.parametrize(
    ("num_frozen_layers", "num_frozen_by_user", "expected"),
    [
        (0, 0, "Nothing freezes: same results as Trainer."),
        (1, 1, "Nothing freezes: same results as Trainer."),
        (1, 0, "Nothing more freezes, 1 of 1 layers stay frozen."),
    ],
)
def test_the_first_line_says_what_is_frozen_without_a_policy(
    tmp_path: Path, num_frozen_layers: int, num_frozen_by_user: int, expected: str
) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True)
    probe = SimpleNamespace(structure=WHOLE, media_share=0.0, block_flops=())
    measured = SimpleNamespace(blocks=SMALL, overheads=Overheads(), num_samples=1)
    planner = RunPlanner(args, SimpleNamespace(), probe, measured, 1e9, num_frozen_by_user, has_dropout=True, unfit=0)
    layout = replace(ASYNC, schedule="1f1b", num_frozen_layers=num_frozen_layers)
    assert planner.describe(layout, "none", freezes=False)["expectation"].startswith(expected)


def test_more_stages_than_the_model_can_be_cut_into_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size=4 under zb_v needs 8 stages.*6 stages at most"):
        chunked("zb_v", 2, 4, 2, 4)
