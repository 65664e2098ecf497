"""The summary at the end of a training adds up what its steps took."""

from __future__ import annotations

from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.training.metrics import Summary


TWO_STAGES = Layout(4, 0, num_stages=2, num_replicas=1, boundaries=(0, 5, 10), num_microbatches=4, schedule="1f1b")
TWO_REPLICAS = Layout(4, 2, 1, num_replicas=2, boundaries=(0, 10), num_microbatches=1, schedule="1f1b", cache_level=2)


def noted(*steps: tuple[Layout, float], predicted: float | None = None) -> Summary:
    summary = Summary()
    for index, (layout, seconds) in enumerate(steps):
        has_moved = index > 0 and layout is not steps[index - 1][0]
        summary.predicted = predicted if has_moved else None
        summary.add_step(layout, seconds)
    return summary


def test_steps_are_counted_by_layout_and_what_freezing_saved_is_told() -> None:
    before = [(TWO_STAGES, 0.5), (TWO_STAGES, 0.25), (TWO_STAGES, 0.5)]
    summary = noted(*before, (TWO_REPLICAS, 0.125), (TWO_REPLICAS, 0.25), predicted=0.2)
    summary.add_reads(0, 0, 0)
    summary.add_reads(30, 10, 4096)
    assert [len(stretch.seconds) for stretch in summary.stretches] == [3, 2]
    assert summary.saved_seconds() == 2 * 0.5 - 0.375
    assert summary.in_words().splitlines() == [
        "5 steps in 1.6 s:",
        "  3 steps of 500 ms with 0 of 4 layers frozen, 2 stages x 1 replica",
        "  2 steps of 250 ms (predicted: 200 ms) with 2 of 4 layers frozen, 2 of them cached, 1 stage x 2 replicas",
        "  Cache: 30 of 40 reads were hits (75%).",
        "  0.6 s less than 5 steps of 500 ms, as before the first change.",
    ]


def test_a_run_that_lost_time_by_freezing_says_so() -> None:
    summary = noted((TWO_STAGES, 0.25), (TWO_REPLICAS, 0.5))
    assert summary.in_words().splitlines()[1:] == [
        "  1 step of 250 ms with 0 of 4 layers frozen, 2 stages x 1 replica",
        "  1 step of 500 ms with 2 of 4 layers frozen, 2 of them cached, 1 stage x 2 replicas",
        "  0.2 s more than 2 steps of 250 ms, as before the first change.",
    ]


def test_a_run_that_freezes_nothing_has_saved_nothing() -> None:
    summary = noted((TWO_STAGES, 0.5))
    assert summary.saved_seconds() is None
    assert len(summary.in_words().splitlines()) == 2


def test_a_run_without_steps_has_nothing_to_say() -> None:
    assert Summary().in_words() == ""
