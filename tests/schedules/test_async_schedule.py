"""Windows of asynchronous 1F1B: their exact entries, their slices by step, and the proof that none can deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer.schedules.actions import ActionList, Op, ScheduleError
from hf_pipetransformer.schedules.asynchronous import (
    ASYNC_1F1B,
    micro_batches_ahead,
    step_actions,
    window_table,
)
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import find_schedule
from tests.schedules.test_schedules import one_communicator_a_pair, parse, some_counts, table_of, text
from tests.support.schedule_checker import check_on_nccl, check_table


IRREGULAR = ((2, 2, 1), (3, 0, 0, 1, 7, 1, 1, 0), (0, 0, 1, 4, 2), (9, 1, 1, 1), (0,))


def text_of_computations(actions: ActionList) -> str:
    return " ".join(str(action) for action in actions if action.op in (Op.FORWARD, Op.BACKWARD, Op.UPDATE))


def concatenated(placement: Placement, first_active_stage: int, rank: int, step_sizes: tuple[int, ...]) -> ActionList:
    """The action_lists of all steps with the numbers that their micro-batches and updates have in the window."""
    actions, first = [], 0
    for step, size in enumerate(step_sizes):
        before, after = step_sizes[:step], step_sizes[step + 1 :]
        for action in step_actions(placement, first_active_stage, rank, before, size, after):
            shift = step if action.op is Op.UPDATE else first
            actions.append(action._replace(micro_batch=action.micro_batch + shift))
        first += size
    return tuple(actions)


def test_each_stage_updates_itself_after_the_backward_of_each_micro_batch() -> None:
    assert [text_of_computations(actions) for actions in ASYNC_1F1B.table(2, 3)] == [
        "F0 F1 B0 U0 F2 B1 U1 B2 U2",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2",
    ]
    assert ASYNC_1F1B.table(2, 3) == window_table(Placement(2), 0, (1, 1, 1))
    assert [text(actions) for actions in ASYNC_1F1B.table(1, 2)] == ["F0 B0 U0 F1 B1 U1"]


def test_a_window_is_the_drawn_table() -> None:
    assert [text_of_computations(actions) for actions in window_table(Placement(2), 0, (2, 2))] == [
        "F0 F1 B0 F2 B1 U0 F3 B2 B3 U1",
        "F0 B0 F1 B1 U0 F2 B2 F3 B3 U1",
    ]
    assert [text_of_computations(actions) for actions in window_table(Placement(3), 1, (1, 1, 1, 1))] == [
        "F0 F1 F2 U0 F3 U1 U2 U3",
        "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3",
    ]


def test_an_update_follows_the_gradient_that_is_sent_and_the_receives_posted_ahead() -> None:
    assert [text(actions) for actions in window_table(Placement(2), 0, (1, 1, 1))] == [
        "F0 SF0 F1 SF1 RB0 B0 U0 F2 SF2 RB1 RB2 B1 U1 B2 U2",
        "RF0 F0 RF1 B0 SB0 U0 F1 RF2 B1 SB1 U1 F2 B2 SB2 U2",
    ]


def test_a_step_without_micro_batches_is_an_update_alone() -> None:
    action_lists = [text_of_computations(actions) for actions in window_table(Placement(2), 0, (0, 1, 0, 1, 0))]
    assert action_lists == ["U0 F0 F1 B0 U1 U2 B1 U3 U4", "U0 F0 B0 U1 U2 F1 B1 U3 U4"]
    assert [text(step_actions(Placement(2), 0, rank, (1,), 0, (1,))) for rank in (0, 1)] == ["U0", "U0"]


def test_the_steady_steps_of_a_window_are_one_row() -> None:
    action_lists = {step_actions(Placement(4), 0, 1, (1,) * t, 1, (1,) * (40 - t)) for t in range(4, 37)}
    assert [text(actions) for actions in action_lists] == ["F2 SF2 RB0 RF3 B0 SB0 U0"]


def test_without_its_updates_a_window_is_1f1b() -> None:
    table = window_table(Placement(4), 1, (3, 0, 2, 4))
    assert tuple(tuple(each for each in actions if each.op is not Op.UPDATE) for actions in table) == table_of(
        "1f1b", 4, 9, 1
    )


SIZES = st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 5]), min_size=1, max_size=14).map(tuple)


@settings(max_examples=60)
@given(pipeline_size=st.integers(1, 6), data=st.data(), step_sizes=SIZES)
def test_the_rows_of_the_steps_are_the_window(
    pipeline_size: int, data: st.DataObject, step_sizes: tuple[int, ...]
) -> None:
    placement, first_active = Placement(pipeline_size), data.draw(st.integers(0, pipeline_size - 1))
    table = window_table(placement, first_active, step_sizes)
    for rank in range(pipeline_size):
        assert concatenated(placement, first_active, rank, step_sizes) == table[rank]


@pytest.mark.parametrize("pipeline_size", range(1, 7))
def test_the_rows_of_long_windows_are_those_of_their_short_contexts(pipeline_size: int) -> None:
    placement = Placement(pipeline_size)
    for step_sizes in ((1,) * 20, (2,) * 9, (3,) * 7, (pipeline_size,) * 5, *IRREGULAR):
        for first_active in range(pipeline_size):
            table = window_table(placement, first_active, step_sizes)
            for rank in range(pipeline_size):
                assert concatenated(placement, first_active, rank, step_sizes) == table[rank]


def test_enough_micro_batches_around_a_step_decide_about_its_row() -> None:
    placement = Placement(4)
    around = placement.pipeline_size
    for rank in range(4):
        wanted = step_actions(placement, 0, rank, (1,) * around, 2, (1,) * around)
        assert wanted == step_actions(placement, 0, rank, (5, 1, 1, around), 2, (3 * around, 1))
        assert wanted != step_actions(placement, 0, rank, (1,) * around, 2, ()) or rank == 3


@pytest.mark.parametrize("pipeline_size", range(1, 7))
def test_a_row_names_no_micro_batches_further_ahead_than_it_says(pipeline_size: int) -> None:
    placement = Placement(pipeline_size)
    for rank in range(pipeline_size):
        found = set()
        for first_active in range(pipeline_size):
            for step, size in enumerate(sizes := (0, 1, 1, 3, 0, 2, 1, 1, 1, 5, 1, 1, 1, 1, 1)):
                actions = step_actions(placement, first_active, rank, sizes[:step], size, sizes[step + 1 :])
                micro_batches = [action.micro_batch for action in actions if action.op is not Op.UPDATE]
                assert min(micro_batches, default=0) >= 0
                found.add(max(micro_batches, default=size - 1) - size + 1)
        assert max(found) == micro_batches_ahead(pipeline_size, rank)


@pytest.mark.parametrize("pipeline_size", range(1, 9))
@some_counts
def test_every_window_ends_by_rendezvous_and_on_nccl(pipeline_size: int, counts: list[int]) -> None:
    for count in counts:
        check_table(ASYNC_1F1B.table(pipeline_size, count), count, step_sizes=(1,) * count)


@pytest.mark.parametrize("pipeline_size", range(1, 9))
@pytest.mark.parametrize("step_sizes", IRREGULAR)
def test_irregular_windows_with_frozen_stages_end_by_rendezvous_and_on_nccl(
    pipeline_size: int, step_sizes: tuple[int, ...]
) -> None:
    for first_active in range(pipeline_size):
        table = window_table(Placement(pipeline_size), first_active, step_sizes)
        check_table(table, sum(step_sizes), first_active_stage=first_active, step_sizes=step_sizes)


@pytest.mark.parametrize("pipeline_size", range(2, 9))
def test_windows_end_without_a_rehearsal_and_with_both_directions_on_one_communicator(pipeline_size: int) -> None:
    table = window_table(Placement(pipeline_size), 0, (1, 2, 0, 4, 1))
    check_on_nccl(table, is_rehearsed=False)
    check_on_nccl(table, communicator=one_communicator_a_pair)


@pytest.mark.parametrize(
    ("actions", "complaint"),
    [
        # The update of a step comes early, late, twice, or not at all.
        ("F0 U0 B0 F1 B1 U1", "has U0 where 0 micro-batches are done"),
        ("F0 B0 F1 U0 B1 U1", "has U0 where 1 micro-batches are done"),
        ("F0 B0 F1 B1 U0 U1", "has U0 where 2 micro-batches are done"),
        ("F0 B0 U0 F1 B1 U0", "twice"),
        ("F0 B0 U0 F1 B1", r"updates \[0\], expected one for each of 2 steps"),
        ("F0 B0 F1 B1", r"updates \[\], expected one"),
        # Updates in the wrong order, and one of a step that there is not.
        ("F0 B0 U1 F1 B1 U0", r"updates \[1, 0\]"),
        ("F0 B0 U0 F1 B1 U1 U2", "there are 2 steps"),
        # The micro-batch of the next step comes first.
        ("F0 F1 B1 U0 B0 U1", "has U0 where 1 micro-batches are done"),
    ],
)
def test_the_checker_rejects_misplaced_updates(actions: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        check_table(parse(actions), 2, step_sizes=(1, 1))


@pytest.mark.parametrize("frozen", ["F0 SF0 U0 F1 SF1 U1", "F0 SF0 F1 U0 SF1 F2 SF2"])
def test_the_checker_rejects_misplaced_updates_of_frozen_stages(frozen: str) -> None:
    table = parse(frozen, "RF0 F0 RF1 B0 U0 F1 B1 U1")
    with pytest.raises(ScheduleError, match=r"Stage 0 has U0 where 1|there are 2 micro-batches"):
        check_table(table, 2, first_active_stage=1, step_sizes=(1, 1))


def test_updates_in_a_synchronous_table_are_rejected() -> None:
    with pytest.raises(ScheduleError, match="has U0, but there are 0 steps"):
        check_table(parse("F0 B0 U0"), 1)


def test_what_is_in_flight_is_that_of_a_long_window() -> None:
    assert ASYNC_1F1B.in_flight(4, 1) == ASYNC_1F1B.in_flight(4, 9) == (4, 3, 2, 1)
    assert ASYNC_1F1B.in_flight(4, 1, 1, 2) == (0, 0, 2, 1)
    assert ASYNC_1F1B.peaks([5, 7], 2, 1) == (10, 7)


@pytest.mark.parametrize(("placement", "sizes"), [(Placement(2, 2), (1,)), (Placement(2), (1, -1))])
def test_windows_that_cannot_be_are_refused(placement: Placement, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one stage a rank and steps of 0 micro-batches or more"):
        window_table(placement, 0, sizes)


def test_it_is_found_by_its_name_and_is_the_only_asynchronous_one() -> None:
    assert find_schedule("async_1f1b") is ASYNC_1F1B
    assert ASYNC_1F1B.abilities.overlaps_steps
    assert not find_schedule("1f1b").abilities.overlaps_steps
