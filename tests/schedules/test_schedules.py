"""Schedule tables: their exact entries, and the proof that none can deadlock."""

from __future__ import annotations

import re

import pytest

from hf_pipetransformer.schedules.abilities import ABILITIES, SCHEDULE_NAMES
from hf_pipetransformer.schedules.actions import COMPUTATIONS, Action, ActionList, Op, ScheduleError, Table
from hf_pipetransformer.schedules.tables import FORWARD_ONLY, find_schedule
from tests.support.schedule_checker import LinkKey, check_first_uses, check_on_nccl, check_table


ONE_STAGE_A_RANK = ("gpipe", "1f1b")
"""The schedules of this file; `test_chunked_schedules.py` has those with several stages a rank or a split backward."""


def text(actions: ActionList, computation_only: bool = False) -> str:
    chosen = [action for action in actions if not computation_only or action.op in COMPUTATIONS]
    return " ".join(map(str, chosen))


def table_of(schedule: str, num_stages: int, num_microbatches: int, first_active_stage: int = 0) -> Table:
    """The table of a named schedule, or of evaluation, with one stage a rank."""
    found = FORWARD_ONLY["loop"] if schedule == "forward_only" else find_schedule(schedule)
    return found.table(num_stages, num_microbatches, first_active_stage=first_active_stage)


def parse(*action_lists: str) -> Table:
    """Rows such as `"F0 SF0 RB0 B0 F0.1"` as a table."""
    words = re.compile(r"([A-Z]+)(\d+)\.?(\d*)")
    return tuple(
        tuple(Action(Op(op), int(i), int(chunk or 0)) for op, i, chunk in words.findall(actions))
        for actions in action_lists
    )


def test_gpipe_is_all_forwards_then_all_backwards_reversed() -> None:
    assert [text(actions, computation_only=True) for actions in table_of("gpipe", 2, 3)] == ["F0 F1 F2 B2 B1 B0"] * 2


def test_1f1b_is_the_drawn_table() -> None:
    action_lists = [text(actions, computation_only=True) for actions in table_of("1f1b", 4, 4)]
    assert action_lists == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


AHEAD_OF_SENDS = (
    "F0 RB0 SF0 F1 SF1 B0 RB1 F2 RB2 SF2 B1 B2",
    "RF0 F0 RF1 B0 SB0 F1 RF2 B1 SB1 F2 B2 SB2",
)
"""1F1B with each receive before the send that precedes it, which only streams of their own let pass."""


def test_1f1b_posts_receives_a_computation_ahead_and_after_the_sends_before() -> None:
    assert [text(actions) for actions in table_of("1f1b", 2, 3)] == [
        "F0 SF0 F1 SF1 RB0 B0 F2 SF2 RB1 RB2 B1 B2",
        "RF0 F0 RF1 B0 SB0 F1 RF2 B1 SB1 F2 B2 SB2",
    ]


def test_frozen_stages_run_forwards_only_and_no_gradient_enters_them() -> None:
    table = table_of("1f1b", 3, 3, first_active_stage=1)
    assert [text(actions) for actions in table] == [
        "F0 SF0 F1 SF1 F2 SF2",
        "RF0 RF1 F0 SF0 F1 SF1 RB0 RF2 B0 F2 SF2 RB1 RB2 B1 B2",
        "RF0 F0 RF1 B0 SB0 F1 RF2 B1 SB1 F2 B2 SB2",
    ]
    assert [text(actions) for actions in table_of("gpipe", 3, 2, first_active_stage=2)] == [
        "F0 SF0 F1 SF1",
        "RF0 RF1 F0 SF0 F1 SF1",
        "RF0 RF1 F0 F1 B1 B0",
    ]


@pytest.mark.parametrize("schedule", ONE_STAGE_A_RANK)
def test_active_stages_compute_as_if_nothing_were_frozen(schedule: str) -> None:
    whole, frozen = table_of(schedule, 4, 6), table_of(schedule, 4, 6, first_active_stage=2)
    for stage in (2, 3):
        assert text(frozen[stage], computation_only=True) == text(whole[stage], computation_only=True)


def test_evaluation_does_not_depend_on_what_is_frozen() -> None:
    assert table_of("forward_only", 4, 6, first_active_stage=2) == table_of("forward_only", 4, 6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_1f1b_never_holds_more_micro_batches_than_stages_that_follow(schedule: str) -> None:
    num_stages, num_microbatches = 4, 12
    for stage, actions in enumerate(table_of(schedule, num_stages, num_microbatches)):
        held = most = 0
        for action in actions:
            held += {Op.FORWARD: 1, Op.BACKWARD: -1}.get(action.op, 0)
            most = max(most, held)
        assert most == (num_stages - stage if schedule == "1f1b" else num_microbatches)


COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 48)
"""Numbers of micro-batches that the tests of every change take; the slow ones take the others."""

some_counts = pytest.mark.parametrize(
    "counts",
    [
        pytest.param(COUNTS, id="some"),
        pytest.param(sorted({*range(1, 49)} - {*COUNTS}), id="others", marks=pytest.mark.slow),
    ],
)


@pytest.mark.parametrize("schedule", [*ONE_STAGE_A_RANK, "forward_only"])
@pytest.mark.parametrize("num_stages", range(1, 9))
@some_counts
def test_every_table_ends_by_rendezvous_and_on_nccl(schedule: str, num_stages: int, counts: list[int]) -> None:
    for num_microbatches in counts:
        table = table_of(schedule, num_stages, num_microbatches)
        check_table(table, num_microbatches, has_backward=schedule != "forward_only")


@pytest.mark.parametrize("schedule", ONE_STAGE_A_RANK)
@pytest.mark.parametrize(("num_stages", "first_active_stage"), [(k, a) for k in range(2, 9) for a in range(1, k)])
@some_counts
def test_every_table_with_frozen_stages_ends_by_rendezvous_and_on_nccl(
    schedule: str, num_stages: int, first_active_stage: int, counts: list[int]
) -> None:
    for num_microbatches in counts:
        table = table_of(schedule, num_stages, num_microbatches, first_active_stage)
        check_table(table, num_microbatches, first_active_stage=first_active_stage)


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        # Both sides send before either has posted its receive: the classic 1F1B deadlock.
        (parse("F0 SF0 F1 SF1 RB0 B0 RB1 B1", "RF0 F0 B0 SB0 RF1 F1 B1 SB1"), "Deadlock"),
        # A stage waits for what its neighbour sends only later.
        (parse("F0 RB0 B0 SF0", "RF0 F0 B0 SB0"), "Deadlock"),
        # Messages of one direction in different orders.
        (parse("F0 SF0 F1 SF1 RB0 RB1 B0 B1", "RF1 RF0 F0 F1 B0 SB0 B1 SB1"), "where rank 1 expects"),
        # A receive that nobody sends to.
        (parse("F0 RB0 SF0 B0", "RF0 RF0 F0 B0 SB0"), "twice"),
        (parse("F0 RB0 SF0 B0 RB1", "RF0 F0 B0 SB0"), "there are 1 micro-batches"),
        # Work left out, or done in the wrong order.
        (parse("F0 SF0", "RF0 F0"), "does not run micro-batch 0"),
        (parse("B0 F0"), "B0 before F0"),
        (parse("SF0 F0 RB0 B0", "RF0 F0 B0 SB0"), "SF0 before F0"),
        # A neighbour that does not exist.
        (parse("F0 B0 SB0"), "there is no stage -1"),
        # The data was sent, but the receive was never posted.
        (parse("F0 RB0 SF0 B0", "F0 B0 SB0"), "Deadlock"),
    ],
)
def test_the_checker_rejects_planted_bad_tables(table: Table, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        check_table(
            table, max(action.micro_batch for actions in table for action in actions if action.op is Op.FORWARD) + 1
        )


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        # A gradient is sent to the frozen stage, which waits for it or not.
        (parse("F0 RB0 SF0", "RF0 F0 B0 SB0"), "stages below 1 are frozen"),
        (parse("F0 SF0", "RF0 F0 B0 SB0"), "stages below 1 are frozen"),
        # The frozen stage waits for a gradient that never comes.
        (parse("F0 SF0 RB0", "RF0 F0 B0"), "stages below 1 are frozen"),
        # The frozen stage runs a backward, or the active one none.
        (parse("F0 RB0 SF0 B0", "RF0 F0 B0 SB0"), "does not run micro-batch 0"),
        (parse("F0 SF0", "RF0 F0"), "does not run micro-batch 0"),
        # The frozen stage keeps its activation.
        (parse("F0", "RF0 F0 B0"), "Deadlock"),
    ],
)
def test_the_checker_rejects_gradients_in_frozen_stages(table: Table, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        check_table(table, 1, first_active_stage=1)


@pytest.mark.parametrize("first_active_stage", [-1, 2])
def test_an_active_stage_that_does_not_exist_is_refused(first_active_stage: int) -> None:
    with pytest.raises(ValueError, match="one of the 2 stages, 0 to 1"):
        table_of("1f1b", 2, 2, first_active_stage)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_microbatches"), [("zigzag", 2, 2), ("gpipe", 0, 2), ("gpipe", 2, 0)]
)
def test_nonsense_is_refused(name: str, num_stages: int, num_microbatches: int) -> None:
    with pytest.raises(ValueError, match=r"Unknown schedule|at least one rank and one micro-batch"):
        table_of(name, num_stages, num_microbatches)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule_has_its_facts_from_the_one_table_of_them(name: str) -> None:
    assert find_schedule(name).name == name
    assert find_schedule(name).abilities is ABILITIES[name]


def one_communicator_a_pair(link: LinkKey) -> int:
    """Both directions between two stages on one stream."""
    return link[0]


@pytest.mark.parametrize("schedule", ONE_STAGE_A_RANK)
@pytest.mark.parametrize("num_stages", range(2, 9))
@some_counts
def test_tables_end_without_a_rehearsal_and_with_both_directions_on_one_communicator(
    schedule: str, num_stages: int, counts: list[int]
) -> None:
    for num_microbatches in counts:
        table = table_of(schedule, num_stages, num_microbatches)
        check_on_nccl(table, is_rehearsed=False)
        check_on_nccl(table, communicator=one_communicator_a_pair)


@pytest.mark.parametrize("schedule", ONE_STAGE_A_RANK)
@pytest.mark.parametrize("first_active_stage", [0, 1, 3])
def test_receives_are_posted_a_computation_ahead_at_most(schedule: str, first_active_stage: int) -> None:
    needed_by = {Op.RECEIVE_FORWARD: Op.FORWARD, Op.RECEIVE_BACKWARD: Op.BACKWARD}
    for actions in table_of(schedule, 4, 12, first_active_stage):
        computed = [action for action in actions if action.op in COMPUTATIONS]
        for position, action in enumerate(actions):
            if action.op in needed_by:
                done = sum(each.op in COMPUTATIONS for each in actions[:position])
                assert computed.index(action._replace(op=needed_by[action.op])) - done <= 1


def test_receives_ahead_of_sends_need_a_rehearsal_and_streams_and_queues_of_their_own() -> None:
    table = parse(*AHEAD_OF_SENDS)
    check_on_nccl(table)
    with pytest.raises(ScheduleError, match="rank 0 is at RB0, the first use of its link, until rank 1"):
        check_on_nccl(table, is_rehearsed=False)
    with pytest.raises(ScheduleError, match="rank 0 is at SF0 behind RB0 and waits for rank"):
        check_on_nccl(table, communicator=one_communicator_a_pair)
    with pytest.raises(ScheduleError, match="one hardware queue: rank 0 at RB0, rank 1 at RF0"):
        check_table(table, 3)


def test_evaluation_ends_on_nccl_whatever_was_used_before() -> None:
    for num_stages in range(2, 9):
        check_on_nccl(table_of("forward_only", num_stages, 7), is_rehearsed=False)


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        # Both sides send before either has posted its receive.
        (
            parse("F0 SF0 F1 SF1 RB0 B0 RB1 B1", "RF0 F0 B0 SB0 RF1 F1 B1 SB1"),
            "rank 0 is at SF1 and waits for",
        ),
        # What the neighbour sends later.
        (parse("F0 RB0 B0 SF0", "RF0 F0 B0 SB0"), "rank 1 is at F0 and waits for RF0"),
        # Messages of one direction in different orders: without tags the wrong one would arrive.
        (parse("F0 SF0 F1 SF1 RB0 RB1 B0 B1", "RF1 RF0 F0 F1 B0 SB0 B1 SB1"), "where rank 1 expects micro-batch 1"),
        (parse("F0 F1 RB1 RB0 SF0 SF1 B0 B1", "RF0 RF1 F0 F1 B0 SB0 B1 SB1"), "where rank 0 expects micro-batch 1"),
        # A receive that was never posted, and one that nobody answers.
        (parse("F0 RB0 SF0 B0", "F0 B0 SB0"), "waits for RF0, which was never posted"),
        (parse("F0 SF0 RB0", "RF0 F0 B0"), "nobody answers"),
        (parse("F0 B0 SB0"), "there is no stage -1"),
    ],
)
def test_tables_that_hang_on_nccl_are_rejected(table: Table, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        check_on_nccl(table)


@pytest.mark.parametrize(
    ("action_lists", "complaint"),
    [
        ([[(0, "forward"), (0, "backward")], [(0, "backward"), (0, "forward")]], "rank 0 at .*forward.*, rank 1 at"),
        ([[(0, "forward")], []], "rank 0 at"),
        # Each waits for the next one.
        ([[(0, "forward")], [(1, "forward"), (0, "forward")], [(2, "forward"), (1, "forward")], []], "rank 2 at"),
    ],
)
def test_first_uses_that_wait_for_each_other_are_rejected(action_lists: list[list[LinkKey]], complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        check_first_uses(action_lists)
