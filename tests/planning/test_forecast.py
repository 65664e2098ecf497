"""Predicted time of a run in which layers freeze, against cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_pipetransformer.planning.blocks import BlockCosts
from hf_pipetransformer.planning.costs import Overheads, Prediction
from hf_pipetransformer.planning.course import Span, spans_of
from hf_pipetransformer.planning.forecast import Forecast, likely_cause
from hf_pipetransformer.planning.layouts import PlanInputs
from hf_pipetransformer.planning.simulator import Timeline
from hf_pipetransformer.planning.storing import Storing
from hf_pipetransformer.schedules.layout import Layout
from tests.support.costs import block_costs


PER_EPOCH = 10
LAYOUT = Layout(
    num_layers=2, num_frozen_layers=0, num_stages=1, num_replicas=1, boundaries=(0, 6), num_microbatches=1,
    schedule="1f1b",
)  # fmt: skip


def costs_of(num_blocks: int) -> BlockCosts:
    """A second for each forward, two for a backward, one for that of a block whose input needs no gradient."""
    return block_costs(
        forward=(1.0,) * num_blocks, backward=(2.0,) * num_blocks, edge_backward=(1.0,) * num_blocks,
        parameters=(1,) * num_blocks, activation_bytes=(1.0,) * num_blocks,
    )  # fmt: skip


def inputs_of(overheads: Overheads, compression: str = "throughput") -> PlanInputs:
    return PlanInputs(
        costs_of(6), overheads, samples_per_device=1, compression=compression, cut_positions=tuple(range(7)),
        device_bytes=1e9, initial_largest_size=1e9,
    )  # fmt: skip


def forecast(storing: Storing | None = None) -> Forecast:
    return Forecast(LAYOUT, inputs_of(Overheads(per_step=0.5)), storing)


STORING = Storing((), read=0.0, write=2.0, mode="on", steps_per_epoch=PER_EPOCH)


def test_the_full_run_is_as_long_as_its_steps() -> None:
    # 6 forwards, 1 + 5 * 2 backwards, half a second beside them.
    assert forecast().full_seconds(20) == 20 * 17.5


def test_a_prefix_frozen_from_the_start_without_a_cache() -> None:
    # 6 forwards; backwards of three blocks, the first of which takes 1.
    assert forecast().seconds([Span(30, 1)]) == 30 * 11.5


def test_rows_are_written_in_the_first_epoch_and_read_after_it() -> None:
    # 2 seconds for a row in the first epoch, then 3 forwards.
    assert forecast(STORING).seconds([Span(36, 1)]) == 10 * 13.5 + 26 * 8.5
    assert forecast(STORING).seconds([Span(10, 0), Span(15, 1)]) == 10 * 17.5 + 10 * 13.5 + 5 * 8.5


@pytest.mark.parametrize(("read", "more"), [(6.0, 0.0), (8.0, 0.0), (9.5, 1.5)])
def test_rows_are_read_beside_a_device(read: float, more: float) -> None:
    """Above a layer 3 blocks, the head is one of them, compute 3 forwards and backwards of 1 + 2 + 2: 8 seconds."""
    storing = Storing((), read=read, write=6.0, is_apart=True, mode="on", steps_per_epoch=PER_EPOCH)
    found = forecast(storing).seconds([Span(36, 1)])
    # The row is written beside them, too.
    assert found == 10 * 11.5 + 26 * (8.5 + more)


def test_rows_of_fewer_layers_serve_while_those_of_more_are_written() -> None:
    # From the level 1 on: 3 forwards, the backward of the head (1), 2 for writing; then 1 + 1; half a second beside.
    expected = 10 * 13.5 + 10 * 8.5 + 10 * (3 + 1 + 2 + 0.5) + 5 * 2.5
    assert forecast(STORING).seconds([Span(20, 1), Span(15, 2)]) == expected


def test_half_an_epoch_of_writing_leaves_half_of_the_rows() -> None:
    # The next level is written in one epoch, in which half of the samples have rows of the level before.
    with_rows, without = 3 + 1 + 0.5 + 2, 6 + 1 + 0.5 + 2
    expected = 5 * 13.5 + 10 * (with_rows + without) / 2 + 5 * 2.5
    assert forecast(STORING).seconds([Span(5, 1), Span(15, 2)]) == expected


def test_moves_of_weights_take_time_and_new_numbers_do_not() -> None:
    start = replace(LAYOUT, num_stages=2, boundaries=(0, 3, 6))
    # One stage has room for all, so that the rule of the paper takes it.
    moved = Forecast(start, inputs_of(Overheads(reduction_per_byte=1.0), "memory"))
    # Three blocks with one parameter each and 12 bytes; then 4 bytes of gradient each over two replicas.
    assert moved.seconds([Span(1, 1)]) == 3 * 12 + 11 + 3 * 4
    assert moved.seconds([Span(2, 0)]) == moved.full_seconds(2)


def test_an_outlook_as_steps_in_a_row() -> None:
    assert spans_of([(0, 2), (4, 2), (6, 3), (9, 4)], 1, 9) == [Span(6, 2), Span(3, 3)]
    assert spans_of([], 1, 9) == [Span(9, 1)]


PREDICTED = Prediction(
    1.0,
    pipeline=0.8,
    reduction=0.1,
    optimizer=0.05,
    other=0.05,
    rank_seconds=(0.6, 0.5),
    timeline=Timeline((), 0.8, ()),
)
MEASURED = {
    "total": 1.0, "pipeline": 0.8, "forward": 0.2, "backward": 0.4, "reduction": 0.1, "optimizer": 0.05,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"forward": 0.9, "pipeline": 1.5, "total": 1.7}, "compute longer"),
        ({"pipeline": 1.8, "total": 2.0}, "transfers"),
        ({"reduction": 1.1, "total": 2.0}, "replicas"),
        ({"optimizer": 1.05, "total": 2.0}, "optimizer"),
        ({"total": 2.0}, "dataloader_num_workers"),
    ],
)
def test_the_part_of_a_step_with_the_largest_excess_is_the_likely_cause(changes: dict[str, float], cause: str) -> None:
    assert cause in likely_cause(PREDICTED, [MEASURED, {**MEASURED, **changes}])


def test_a_rank_that_waits_for_a_slow_one_is_not_the_cause() -> None:
    slow = {**MEASURED, "forward": 0.9, "pipeline": 1.5, "total": 1.7}
    waiting = {**MEASURED, "pipeline": 1.5, "total": 1.7}
    assert "compute longer" in likely_cause(PREDICTED, [waiting, slow])
