"""Schedules with several stages a rank or a split backward: exact tables, proofs, memory and bubble."""

from __future__ import annotations

import pytest

from hf_pipetransformer.planning.simulator import Durations, simulate
from hf_pipetransformer.schedules.abilities import SCHEDULE_NAMES
from hf_pipetransformer.schedules.actions import ScheduleError, Table
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.schedule import Schedule
from hf_pipetransformer.schedules.tables import FORWARD_ONLY, find_schedule
from tests.engine.test_engine import make_micro_batches, make_programs
from tests.schedules.test_schedules import ONE_STAGE_A_RANK, parse, text
from tests.support.added_schedules import BREADTH_FIRST, GPIPE_IN_ORDER
from tests.support.one_process import make_engines, run_table
from tests.support.schedule_checker import check_on_nccl, check_table


INTERLEAVED, ZB_H1, ZB_V = map(find_schedule, ("interleaved_1f1b", "zb_h1", "zb_v"))
KINDS = [(INTERLEAVED, 2), (INTERLEAVED, 3), (INTERLEAVED, 4), (ZB_H1, 1), (ZB_V, 2)]


def test_every_schedule_has_its_proofs() -> None:
    """Token slices are cut from the tables of others, and asynchronous windows are in test_async_schedule.py."""
    proved = {*ONE_STAGE_A_RANK, *(schedule.name for schedule, _ in KINDS), "token", "async_1f1b"}
    assert proved == set(SCHEDULE_NAMES), "add it to ONE_STAGE_A_RANK of test_schedules.py or to KINDS of this file"


def named(value: object) -> str:
    return value.name if isinstance(value, Schedule) else str(value)


def computations(table: Table) -> list[str]:
    return [text(actions, computation_only=True) for actions in table]


def test_interleaved_1f1b_is_the_drawn_table() -> None:
    assert computations(INTERLEAVED.table(2, 2, 2)) == [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]


def test_interleaved_1f1b_makes_groups_larger_where_k_does_not_divide_m() -> None:
    assert computations(INTERLEAVED.table(2, 3, 2)) == [
        "F0 F1 F2 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0 B1 B2",
        "F0 F1 F2 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 B0 B1 B2",
    ]


def test_zb_h1_is_the_drawn_table() -> None:
    assert computations(ZB_H1.table(3, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_zb_v_is_the_drawn_table_and_sends_nothing_where_the_v_turns() -> None:
    table = ZB_V.table(2, 3, 2)
    assert computations(table) == [
        "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0 W0 F2.1 I2.1 W2.1 I1 W1 I2 W2",
        "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 I1 I2.1 I2 W1 W2.1 W2",
    ]
    sent = [
        {f"{action.op.value}.{action.chunk}" for action in actions if action.op.value[0] in "SR"} for actions in table
    ]
    assert sent == [{"SF.0", "RB.0", "RF.1", "SB.1"}, {"RF.0", "SB.0", "SF.1", "RB.1"}]


@pytest.mark.parametrize(("schedule", "num_chunks"), KINDS[:1] + KINDS[-2:], ids=named)
def test_frozen_stages_run_forwards_only(schedule: Schedule, num_chunks: int) -> None:
    placement = Placement(4, num_chunks, schedule.abilities.placement)
    for first_active_stage in range(placement.num_stages):
        for rank, actions in enumerate(schedule.table(4, 6, num_chunks, first_active_stage)):
            for chunk, stage in enumerate(placement.stages_of(rank)):
                ops = {action.op.value for action in actions if action.chunk == chunk}
                assert bool(ops & {"B", "I", "W", "RB", "SB"}) == (stage >= first_active_stage)
                assert ("SB" in ops) <= (stage > first_active_stage)


def prove(schedule: Schedule, num_chunks: int, pipeline_size: int, num_microbatches: int) -> None:
    """All frozen prefixes: nothing waits for ever, nothing is left out."""
    placement = Placement(pipeline_size, num_chunks, schedule.abilities.placement)
    for first_active_stage in range(placement.num_stages):
        table = schedule.table(pipeline_size, num_microbatches, num_chunks, first_active_stage)
        check_table(table, num_microbatches, True, first_active_stage, placement)


@pytest.mark.parametrize(("schedule", "num_chunks"), KINDS, ids=named)
def test_tables_end_with_any_number_of_microbatches_and_frozen_stages(schedule: Schedule, num_chunks: int) -> None:
    for pipeline_size in (2, 3, 4):
        for num_microbatches in (1, 2, 3, 5, 8):
            prove(schedule, num_chunks, pipeline_size, num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline_size", range(2, 9))
@pytest.mark.parametrize(("schedule", "num_chunks"), KINDS, ids=named)
def test_every_table_ends(schedule: Schedule, num_chunks: int, pipeline_size: int) -> None:
    for num_microbatches in range(1, 49):
        prove(schedule, num_chunks, pipeline_size, num_microbatches)


@pytest.mark.parametrize(("schedule", "num_chunks"), [(GPIPE_IN_ORDER, 1), (BREADTH_FIRST, 2)], ids=named)
def test_a_schedule_is_added_by_one_file(schedule: Schedule, num_chunks: int) -> None:
    prove(schedule, num_chunks, 3, 4)
    programs, batches = make_programs(3 * num_chunks), make_micro_batches(4)
    engines = make_engines(Placement(3, num_chunks), lambda stage: programs[stage])
    results = run_table(schedule.table(3, 4, num_chunks), engines, [batches] * 3)
    assert sum(map(float, results)) == pytest.approx(programs[-1].factor * programs[-1].gradient)
    assert schedule.in_flight(3, 4, num_chunks) == (4,) * 3 * num_chunks


@pytest.mark.parametrize(("kind", "num_chunks"), [("loop", 2), ("loop", 4), ("v", 2)])
def test_evaluation_ends_with_several_stages_a_rank(kind: str, num_chunks: int) -> None:
    for pipeline_size in (2, 4, 7):
        placement = Placement(pipeline_size, num_chunks, kind)
        for num_microbatches in (1, 4, 11):
            table = FORWARD_ONLY[kind].table(pipeline_size, num_microbatches, num_chunks)
            check_table(table, num_microbatches, has_backward=False, placement=placement)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_h1", "zb_v"])
def test_one_rank_has_one_stage_and_splits_nothing(name: str) -> None:
    assert computations(find_schedule(name).table(1, 2)) == ["F0 B0 F1 B1"]


@pytest.mark.parametrize(("schedule", "num_chunks"), [(INTERLEAVED, 1), (ZB_H1, 2), (ZB_V, 3)], ids=named)
def test_chunks_that_a_schedule_does_not_know_are_refused(schedule: Schedule, num_chunks: int) -> None:
    with pytest.raises(ValueError, match=f"{schedule.name} takes .* stages? a rank on .* found {num_chunks}"):
        schedule.table(2, 4, num_chunks)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 8, 13, 16])
@pytest.mark.parametrize("pipeline_size", [2, 3, 4, 8])
def test_zero_bubble_holds_no_more_than_1f1b_does_at_most(pipeline_size: int, num_microbatches: int) -> None:
    most = max(find_schedule("1f1b").in_flight(pipeline_size, num_microbatches))
    assert max(ZB_H1.in_flight(pipeline_size, num_microbatches)) <= most
    halves = [0.5] * 2 * pipeline_size
    assert max(ZB_V.peaks(halves, pipeline_size, num_microbatches, 2)) <= most


def test_in_flight_counts_each_stage_until_its_weights_have_their_gradients() -> None:
    assert ZB_H1.in_flight(3, 6) == (3, 3, 3)
    assert ZB_H1.in_flight(3, 6, first_active_stage=1) == (0, 2, 2)
    assert find_schedule("1f1b").in_flight(3, 6) == (3, 2, 1)
    assert find_schedule("gpipe").in_flight(3, 6) == (6, 6, 6)
    assert INTERLEAVED.in_flight(2, 4, 2) == (4, 3, 2, 1)
    assert INTERLEAVED.peaks([1, 1, 1, 1], 2, 4, 2) == (5, 3)
    assert INTERLEAVED.peaks([9, 9, 1, 1], 2, 4, 2, first_active_stage=2) == (2, 1)


@pytest.mark.parametrize("pipeline_size", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_the_bubble_is_that_of_the_papers(pipeline_size: int, rounds: int) -> None:
    """What a rank holds takes 1 for a forward, 1 for gradients of inputs and 1 for those of weights."""
    k, m = pipeline_size, rounds * pipeline_size
    bubbles = {
        (find_schedule("1f1b"), 1): 3 * (k - 1),
        **{(INTERLEAVED, v): 3 * (k - 1) / v for v in (2, 4)},
        (ZB_H1, 1): k - 1,
        (ZB_V, 2): (k - 1) / 2,
    }
    for (schedule, v), bubble in bubbles.items():
        one, two = (1 / v,) * (k * v), (2 / v,) * (k * v)
        placement, durations = Placement(k, v, schedule.abilities.placement), Durations(one, two, 0.0, one, one)
        timeline = simulate(schedule.table(k, m, v), durations, placement)
        assert timeline.end == pytest.approx(3 * m + bubble), schedule.name
        assert timeline.busy == pytest.approx((3 * m,) * k)


V = Placement(2, 2, "v")
GOOD = (
    "F0 SF0 RF0.1 F0.1 I0.1 SB0.1 RB0 W0.1 I0 W0",
    "RF0 F0 F0.1 SF0.1 RB0.1 I0.1 I0 SB0 W0 W0.1",
)


def test_the_checker_takes_a_good_v() -> None:
    check_table(parse(*GOOD), 1, placement=V)


@pytest.mark.parametrize(
    ("found", "planted", "complaint"),
    [
        ("W0.1 I0 W0", "W0.1 I0", "Stage 0 does not run micro-batch 0"),
        ("I0 W0", "W0 I0", "Stage 0 runs W0 before I0"),
        ("W0.1 I0 W0", "W0.1 B0 I0 W0", "Stage 0 does not run micro-batch 0"),
        # Where the V turns: in the wrong order, or sent.
        ("RF0 F0 F0.1 SF0.1", "F0.1 RF0 F0 SF0.1", "Deadlock"),
        ("RF0 F0 F0.1", "RF0 F0 SF0 F0.1", "there is no stage 2 on another rank"),
        ("SB0.1 RB0 W0.1 I0 W0", "RB0 W0.1 I0 W0", "Deadlock"),
        ("I0.1 SB0.1", "SB0.1 I0.1", "SB0 before I0"),
        ("F0 SF0", "F0 F0.2 SF0", "it holds 2 stages"),
    ],
)
def test_the_checker_rejects_planted_bad_chunks(found: str, planted: str, complaint: str) -> None:
    action_lists = [actions.replace(found, planted) for actions in GOOD]
    assert action_lists != list(GOOD)
    with pytest.raises(ScheduleError, match=complaint):
        check_table(parse(*action_lists), 1, placement=V)


def test_messages_of_two_stages_on_one_way_are_sent_and_received_in_one_order() -> None:
    """Links from one rank to another share a communicator, which tells messages apart only by their order."""
    table = parse(
        "F0 SF0 F1 RF0.1 F0.1 SF0.1 SF1 RF1.1 F1.1 SF1.1",
        "RF0 F0 SF0 RF1 RF0.1 F1 SF1 F0.1 RF1.1 F1.1",
    )
    placement = Placement(2, 2)
    check_on_nccl(table, communicator=lambda link: link, placement=placement)
    with pytest.raises(ScheduleError, match="Deadlock under the rules of NCCL: rank 0 is at SF0"):
        check_on_nccl(table, placement=placement)


def test_a_message_takes_its_time_between_ranks_only() -> None:
    one = (1.0,) * 4
    timeline = simulate(parse(*GOOD), Durations(one, one, 0.5, one, one), V)
    starts = {(span.rank, str(span.action)): span.start for span in timeline.spans}
    assert (starts[0, "F0"], starts[1, "F0"]) == (0, 1.5)
    assert (starts[1, "F0.1"], starts[0, "F0.1"]) == (2.5, 4)
    assert (starts[0, "I0.1"], starts[1, "I0.1"], starts[1, "I0"], starts[0, "I0"]) == (5, 6.5, 7.5, 9)
    assert timeline.busy == (6, 6)
