"""The simulator: hand-worked timelines, and laws that hold whatever the durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_pipetransformer.planning.simulator import (
    Durations,
    Span,
    Timeline,
    draw,
    equal_durations,
    simulate,
    steady_seconds,
)
from hf_pipetransformer.schedules.actions import Action, Op, ScheduleError
from hf_pipetransformer.schedules.asynchronous import window_table
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import find_schedule
from tests.schedules.test_schedules import ONE_STAGE_A_RANK, table_of


def starts(timeline: Timeline, stage: int) -> dict[str, float]:
    return {str(span.action): span.start for span in timeline.spans if span.rank == stage}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 7, 32])
def test_equal_stages_end_when_the_formula_says(schedule: str, num_stages: int, num_microbatches: int) -> None:
    table = table_of(schedule, num_stages, num_microbatches)
    timeline = simulate(table, Durations((1.0,) * num_stages, (2.0,) * num_stages, 0.0))
    assert timeline.end == (num_microbatches + num_stages - 1) * 3
    assert timeline.busy == (num_microbatches * 3,) * num_stages
    assert timeline.bubble == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


def test_an_uneven_pipeline_worked_by_hand() -> None:
    timeline = simulate(table_of("gpipe", 2, 2), Durations(forward=(1, 2), backward=(2, 3), hop=1))
    assert starts(timeline, 0) == {"F0": 0, "F1": 1, "B1": 10, "B0": 13}
    assert starts(timeline, 1) == {"F0": 2, "F1": 4, "B1": 6, "B0": 9}
    assert timeline.end == 15
    assert timeline.busy == (6, 10)
    assert timeline.bubble == pytest.approx(1 - 16 / 30)
    assert timeline.spans[0] == Span(0, Action(Op.FORWARD, 0), 0, 1)

    timeline = simulate(table_of("1f1b", 2, 2), Durations(forward=(1, 2), backward=(2, 3), hop=1))
    assert starts(timeline, 0) == {"F0": 0, "F1": 1, "B0": 8, "B1": 13}
    assert starts(timeline, 1) == {"F0": 2, "B0": 4, "F1": 7, "B1": 9}
    assert timeline.end == 15


def test_a_frozen_stage_only_feeds_the_others() -> None:
    table = table_of("1f1b", 2, 2, first_active_stage=1)
    timeline = simulate(table, Durations(forward=(1, 2), backward=(99, 3), hop=1))
    assert starts(timeline, 0) == {"F0": 0, "F1": 1}
    assert starts(timeline, 1) == {"F0": 2, "B0": 4, "F1": 7, "B1": 9}
    assert timeline.end == 12
    assert timeline.busy == (2, 10)


def test_evaluation_is_forwards_alone() -> None:
    timeline = simulate(table_of("forward_only", 3, 4), Durations((1.0,) * 3, (9.0,) * 3, 0.5))
    assert timeline.end == 2 * (1 + 0.5) + 4


def test_nothing_takes_no_time() -> None:
    timeline = simulate(table_of("1f1b", 2, 2), Durations((0.0, 0.0), (0.0, 0.0), 0.0))
    assert timeline.end == 0 and timeline.bubble == 0
    assert draw(timeline, columns=13) == "rank 0 |....|\nrank 1 |....|"


def test_what_cannot_run_is_refused() -> None:
    forward, receive = Action(Op.FORWARD, 0), Action(Op.RECEIVE_FORWARD, 0)
    with pytest.raises(ScheduleError, match="wait for a message that nobody sends: {1: 'F0'}"):
        simulate(((forward,), (receive, forward)), Durations((1, 1), (1, 1)))


def test_the_drawing_shows_who_waits() -> None:
    timeline = simulate(table_of("1f1b", 2, 2), Durations((1, 1), (2, 2)))
    drawing = ["rank 0 |F0-F1-......B0====...B1====|", "rank 1 |...F0-B0====F1-B1====......|"]
    assert draw(timeline, columns=len(drawing[0])).splitlines() == drawing


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, int, int, Durations]:
    """Schedule, K, M, first active stage, durations in whole seconds, so that comparisons are exact."""
    num_stages = draw(st.integers(1, 5))
    seconds = st.tuples(*[st.integers(0, 20)] * num_stages)
    return (
        draw(st.sampled_from(ONE_STAGE_A_RANK)),
        num_stages,
        draw(st.integers(1, 9)),
        draw(st.integers(0, num_stages - 1)),
        Durations(draw(seconds), draw(seconds), draw(st.integers(0, 5))),
    )


@given(pipelines())
def test_no_pipeline_ends_before_its_busiest_stage_or_the_way_of_one_micro_batch(
    pipeline: tuple[str, int, int, int, Durations],
) -> None:
    schedule, num_stages, num_microbatches, first_active, durations = pipeline
    timeline = simulate(table_of(schedule, num_stages, num_microbatches, first_active), durations)
    hops = (num_stages - 1) + (num_stages - 1 - first_active)
    way = sum(durations.forward) + sum(durations.backward[first_active:]) + hops * durations.hop
    assert timeline.end >= max(timeline.busy)
    assert timeline.end >= way
    assert 0 <= timeline.bubble <= 1


@given(pipelines())
def test_every_computation_follows_its_inputs(pipeline: tuple[str, int, int, int, Durations]) -> None:
    schedule, num_stages, num_microbatches, first_active, durations = pipeline
    timeline = simulate(table_of(schedule, num_stages, num_microbatches, first_active), durations)
    span_of = {(span.rank, span.action): span for span in timeline.spans}
    for (stage, action), span in span_of.items():
        source = span_of.get((stage - 1 if action.op is Op.FORWARD else stage + 1, action))
        assert source is None or span.start >= source.end + durations.hop
    for stage in range(num_stages):
        own = [span for span in timeline.spans if span.rank == stage]
        assert all(a.end <= b.start for a, b in zip(own, own[1:], strict=False))
    assert len(span_of) == num_microbatches * (2 * num_stages - first_active)


@given(pipelines(), st.data())
def test_nothing_gets_faster_when_something_takes_longer(
    pipeline: tuple[str, int, int, int, Durations], data: st.DataObject
) -> None:
    schedule, num_stages, num_microbatches, first_active, durations = pipeline
    table = table_of(schedule, num_stages, num_microbatches, first_active)
    stage, extra = data.draw(st.integers(0, num_stages - 1)), data.draw(st.integers(1, 10))

    def slower(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return (*seconds[:stage], seconds[stage] + extra, *seconds[stage + 1 :])

    before = simulate(table, durations).end
    forward, backward, hop = durations.forward, durations.backward, durations.hop
    assert simulate(table, Durations(slower(forward), backward, hop)).end >= before
    assert simulate(table, Durations(forward, slower(backward), hop)).end >= before
    assert simulate(table, Durations(forward, backward, hop + extra)).end >= before


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("size", "num_microbatches"), [(1, 3), (2, 1), (4, 3), (4, 16)])
def test_equal_stages_wait_for_the_share_of_the_formula(name: str, size: int, num_microbatches: int) -> None:
    table = find_schedule(name).table(size, num_microbatches)
    found = simulate(table, equal_durations(Placement(size)))
    assert found.bubble == pytest.approx((size - 1) / (num_microbatches + size - 1))
    assert found.busy == pytest.approx([3 * num_microbatches] * size)


@pytest.mark.parametrize(("name", "num_chunks"), [("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zb_v", 2)])
def test_ranks_of_several_stages_compute_as_much_and_wait_less(name: str, num_chunks: int) -> None:
    schedule = find_schedule(name)
    placement = Placement(4, num_chunks, schedule.abilities.placement)
    found = simulate(schedule.table(4, 8, num_chunks), equal_durations(placement), placement)
    assert found.busy == pytest.approx([24] * 4)
    assert found.bubble < 3 / 11


# ---- windows without flushes ----


def test_a_window_worked_by_hand() -> None:
    durations = Durations(forward=(1, 2), backward=(2, 3), hop=1, update=(1, 4))
    timeline = simulate(window_table(Placement(2), 0, (1, 1)), durations)
    assert starts(timeline, 0) == {"F0": 0, "F1": 1, "B0": 8, "U0": 10, "B1": 17, "U1": 19}
    assert starts(timeline, 1) == {"F0": 2, "B0": 4, "U0": 7, "F1": 11, "B1": 13, "U1": 16}
    assert timeline.end == 20
    assert timeline.busy == (8, 18)


def test_updates_take_no_time_unless_it_is_said() -> None:
    timeline = simulate(window_table(Placement(2), 0, (1, 1)), Durations((1, 1), (2, 2)))
    assert timeline.end == 9 and timeline.busy == (6, 6)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("step_size", [1, 3, 32])
def test_a_step_of_a_long_window_takes_what_the_slowest_stage_does(size: int, step_size: int) -> None:
    forward, backward = tuple(range(1, size + 1)), tuple(range(2, size + 2))
    durations = Durations(forward, backward, update=(5,) * size)
    assert steady_seconds(Placement(size), 0, step_size, durations) == step_size * (2 * size + 1) + 5
    if size > 1:
        frozen = Durations((9 * size, *forward[1:]), backward, update=(0, *(5,) * (size - 1)))
        assert steady_seconds(Placement(size), 1, step_size, frozen) == step_size * 9 * size


def test_slow_messages_hold_up_two_neighbours_that_wait_for_each_other() -> None:
    # Two blocks a round: both stages' passes, and the two messages between them, of which an update hides one half.
    found = [steady_seconds(Placement(2), 0, 1, Durations((1, 1), (2, 2), hop)) for hop in (0.0, 0.5, 2.0)]
    assert found == [3.0, 3.5, 5.0]
    updating = Durations((1, 1), (2, 2), 0.5, update=(1, 1))
    assert steady_seconds(Placement(2), 0, 1, updating) == 4.0
