"""What the loss gains from layers against what they cost: the policy, the seconds that it weighs by, who asks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.autocache.decision import CacheCosts
from hf_pipetransformer.autocache.passes import Pass, passes_ahead
from hf_pipetransformer.autocache.planner import CachePlanner, StorageSpeed
from hf_pipetransformer.autopipe.costs import Overheads, predict_step
from hf_pipetransformer.autopipe.inputs import PlanInputs
from hf_pipetransformer.autopipe.rest_of_run import seconds_left
from hf_pipetransformer.decisions import Decisions
from hf_pipetransformer.freeze.outlook import outlook
from hf_pipetransformer.freeze.policies import (
    MEASUREMENTS,
    DecisionClock,
    FreezePolicy,
    FreezeSignal,
    Saliency,
    decide,
    make_clock,
    make_policy,
)
from hf_pipetransformer.layout import Layout
from tests.test_planning import costs_of, layout_of, rules_for


L = 4
NORMS = (1.0, 2.0, 3.0, 4.0, 5.0)
"""Of four layers and the head: squares 1, 4, 9, 16, 25, so that 55, 54, 50, 41 and 25 are left."""
Values = tuple[float, ...]


def signal(norms: Values, seconds: Values, num_frozen: int = 0, learning_rate: float = 0.1) -> FreezeSignal:
    values = {"gradient_norms": norms, "predicted_seconds": seconds}
    return FreezeSignal(1, 10, L, num_frozen, float(num_frozen), **values, learning_rate=learning_rate)


# ---- the policy


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # 5.5, 5.4, 5.6, 5.1, 5: two layers fewer are worth it.
        ((10.0, 10.0, 50 / 5.6, 41 / 5.1, 5.0), 2),
        # Time that shrinks as the gains do: of equals the one that freezes least.
        ((55.0, 54.0, 50.0, 41.0, 25.0), 0),
        # A layer that costs nothing stays, as it gains something.
        ((10.0,) * 5, 0),
        # What may not be frozen has no seconds.
        ((10.0, 9.0, 8.0, 0.0, 0.0), 2),
        ((10.0, 9.0, 8.0, 1.0, 0.0), 3),
        ((math.nan,) * 5, 0),
        ((), 0),
    ],
)
def test_the_most_gain_for_a_second_freezes(seconds: Values, expected: int) -> None:
    assert Saliency().num_wanted(signal(NORMS, seconds)) == expected


def test_layers_that_are_frozen_do_not_count() -> None:
    policy = Saliency()
    assert policy.num_wanted(signal((9.0, 9.0, *NORMS[2:]), (0.0, 0.0, 10.0, 8.0, 6.0), num_frozen=2)) == 3
    assert policy.state()["gains"][:2] == [0.0, 0.0]


def test_gains_are_smoothed_over_intervals() -> None:
    policy = Saliency()
    seconds = (10.0, 9.9, 9.8, 9.7, 9.6)
    assert policy.num_wanted(signal(NORMS, seconds)) == 0
    policy.num_wanted(signal(tuple(2 * norm for norm in NORMS), seconds, learning_rate=0.01))
    assert policy.state()["gains"] == pytest.approx([0.5 * 0.1 * n**2 + 0.5 * 0.01 * 4 * n**2 for n in NORMS])


@pytest.mark.parametrize("bad", [(), (math.nan,) * 5, (math.inf, 1.0, 1.0, 1.0, 1.0), (1e200,) * 5])
def test_an_interval_without_finite_gradients_decides_and_changes_nothing(bad: Values) -> None:
    policy = Saliency()
    seconds = (10.0, 1.0, 1.0, 1.0, 1.0)
    for _ in range(2):
        before = policy.state()
        assert policy.num_wanted(signal(bad, seconds)) == 0
        assert policy.state() == before
        policy.num_wanted(signal(NORMS, (10.0, 10.0, 10.0, 10.0, 10.0)))


def test_without_a_learning_rate_nothing_freezes() -> None:
    seconds = (10.0, 1.0, 1.0, 1.0, 1.0)
    assert Saliency().num_wanted(signal(NORMS, seconds, learning_rate=0.0)) == 0


positive = st.floats(1e-3, 1e3)
vectors = st.tuples(*[positive] * (L + 1))


@given(vectors, vectors, st.integers(0, L), st.integers(0, L + 1))
def test_no_other_number_of_layers_gains_more_for_a_second(
    norms: Values, seconds: Values, num_frozen: int, min_active: int
) -> None:
    seconds = tuple(value if num_frozen <= f <= L - min_active else 0.0 for f, value in enumerate(seconds))
    found = decide(Saliency(), signal(norms, seconds, num_frozen), min_active).num_frozen
    gains = [sum(norm**2 for norm in norms[f:]) for f in range(L + 1)]
    assert num_frozen <= found <= max(L - min_active, num_frozen)
    if seconds[num_frozen]:
        rates = [gains[f] / seconds[f] for f in range(L + 1) if seconds[f]]
        assert gains[found] / seconds[found] == pytest.approx(max(rates))


@given(vectors, vectors, st.floats(1e-6, 1.0))
def test_a_factor_of_all_gains_or_of_all_seconds_changes_nothing(norms: Values, seconds: Values, rate: float) -> None:
    gains = [sum(norm**2 for norm in norms[f:]) for f in range(L + 1)]
    first = Saliency().num_wanted(signal(norms, seconds))
    second = Saliency().num_wanted(signal(norms, tuple(4 * value for value in seconds), learning_rate=rate))
    assert gains[int(first)] / seconds[int(first)] == pytest.approx(gains[int(second)] / seconds[int(second)])


@given(st.lists(st.tuples(vectors, vectors), min_size=1, max_size=5), st.integers(0, 4))
def test_it_goes_on_from_its_state(intervals: list[tuple[Values, Values]], resumes_at: int) -> None:
    whole, resumed = Saliency(), Saliency()
    for index, (norms, seconds) in enumerate(intervals):
        if index == resumes_at:
            state = json.loads(json.dumps(resumed.state()))
            resumed = Saliency()
            resumed.load_state(state)
        assert whole.num_wanted(signal(norms, seconds)) == resumed.num_wanted(signal(norms, seconds))
        assert whole.state() == resumed.state()


def test_it_says_why_and_what_may_come() -> None:
    policy, clock = make_policy("saliency", 1 / 3, "inclusive", None), make_clock("10", 0.5, 10, 40)
    assert outlook(policy, clock, L, 0, 1) == [(20, 3), (30, 3)]
    assert policy.describe() == "saliency"
    for seconds, text in (
        ((10.0, 1.0, 1.0, 1.0, 1.0), "the other layers have 98% of the expected gain, in 10% of the seconds"),
        ((10.0,) * 5, "no layer gives less for its seconds than those above it"),
        ((), "no gradient, no learning rate or no predicted time to weigh"),
    ):
        found = decide(Saliency(), signal(NORMS, seconds), 0).signal
        policy.num_wanted(found)
        assert policy.explain(found) == f"saliency: {text}"


# ---- the rest of a run

# Seconds: a stored row takes 0.5 to read and 3 to write, a sample 1.
COSTS = CacheCosts(prefix=(1.0, 3.0, 5.0), input=1.0, read=0.5, write=3.0)


@pytest.mark.parametrize(
    ("level", "stored", "share", "fits", "steps", "expected"),
    [
        # Nothing is stored, before and after.
        (0, 0, 0.0, 1.0, 30, [Pass(30)]),
        # The first pass of ten steps writes, the others read and need no sample.
        (2, 0, 0.0, 1.0, 30, [Pass(10, row_seconds=3.0), Pass(20, 2, 1.0, -0.5)]),
        # Half fits.
        (2, 0, 0.0, 0.5, 30, [Pass(10, row_seconds=1.5), Pass(20, 2, 0.5, -0.25)]),
        # Everything is stored a layer below: read and written again.
        (2, 1, 1.0, 1.0, 30, [Pass(10, 1, 1.0, 3.0), Pass(20, 2, 1.0, 0.0)]),
        # Everything is stored here already.
        (2, 2, 1.0, 1.0, 30, [Pass(10, 2, 1.0, 0.0), Pass(20, 2, 1.0, 0.0)]),
        # Half is: the other half is computed and written.
        (2, 2, 0.5, 1.0, 30, [Pass(10, 2, 0.5, 1.5), Pass(20, 2, 1.0, -0.25)]),
        # Less than a pass is left, or rows are given up.
        (2, 0, 0.0, 1.0, 4, [Pass(4, row_seconds=3.0)]),
        (0, 2, 1.0, 1.0, 30, [Pass(30, row_seconds=0.5)]),
    ],
)
def test_the_passes_of_a_run_by_hand(
    level: int, stored: int, share: float, fits: float, steps: int, expected: list[Pass]
) -> None:
    assert list(passes_ahead(COSTS, level, stored, share, fits, steps, 10)) == expected


def test_the_rest_of_a_run_by_hand() -> None:
    """One of two layers frozen, a sample takes 11.4 s, 8.3 s with its row; 8 samples a step, and 5 s beside them."""
    layout = replace(layout_of(2, 1, 1), num_frozen_layers=1)
    seconds = {"costs": costs_of(2), "overheads": Overheads(per_step=5.0), "samples_per_device": 8}
    computed, read = 8 * 11.4 + 5, 8 * 8.3 + 5
    assert seconds_left(layout, [Pass(30)], **seconds) == pytest.approx(30 * computed)
    passes = [Pass(10, row_seconds=0.25), Pass(20, 1, 0.75, -0.125)]
    expected = 10 * (computed + 2) + 20 * (0.75 * read + 0.25 * computed - 1)
    assert seconds_left(layout, passes, **seconds) == pytest.approx(expected)
    # Reading can save no more than a step takes beside its computation.
    assert seconds_left(layout, [Pass(1, row_seconds=-7.0)], **seconds) == pytest.approx(8 * 11.4)


# ---- who asks, and what is told


class Asks(FreezePolicy):
    """Keeps what it is shown."""

    def __init__(self, *needs: str, wants: int = 0) -> None:
        self.needs, self.wants, self.seen = frozenset(needs), wants, list[FreezeSignal]()

    def num_wanted(self, signal: FreezeSignal) -> float:
        self.seen.append(signal)
        return self.wants


def planner(written: list[Any], mode: str = "auto") -> CachePlanner:
    """Rows cost next to nothing, an epoch has ten steps."""

    def write(kind: str, **fields: Any) -> None:
        written.append((kind, fields))

    return CachePlanner(mode, 0.0, lambda: StorageSpeed(0.01, 0.02), 1.0, 10, write)


def decisions_of(folder: Path, policy: FreezePolicy, layout: Layout, cache: CachePlanner | None) -> Decisions:
    args = PipeTransformerArguments(output_dir=str(folder), use_cpu=True, report_to="none", freeze_min_active_layers=1)
    inputs = PlanInputs(costs_of(L), Overheads(per_step=1.0), rules_for(L, device_bytes=1e12), samples_per_device=8)
    clock, frozen = DecisionClock(10, 0, 40), layout.num_frozen_layers
    return Decisions(policy, clock, args, inputs, frozen, layout.num_stages, {}, lambda *_, **__: None, cache)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_the_seconds_are_those_of_the_layouts_and_stores_that_would_follow(tmp_path: Path, num_stages: int) -> None:
    layout, written = layout_of(L, num_stages, num_stages), list[Any]()
    policy = Asks("predicted_seconds")
    decisions = decisions_of(tmp_path, policy, layout, planner(written))
    answer = decisions.freeze(20, layout, [], {}, {}, learning_rate=0.25)
    (seen,) = policy.seen
    assert answer["change"] is None
    assert seen.learning_rate == 0.25
    assert written == [], "nothing was decided about the cache"
    assert seen.predicted_seconds[L] == 0, "one layer must stay active"
    costs, overheads = costs_of(L), Overheads(per_step=1.0)
    expected = 20 * predict_step(layout, costs, overheads, 8 * num_stages).seconds
    assert seen.predicted_seconds[0] == pytest.approx(expected)
    for num_frozen in range(1, L):
        plan = decisions._plan(num_frozen, layout, 20, {})
        assert plan.layout.cache_level == num_frozen, "one more epoch reads"
        samples = 8 * plan.layout.pipeline_size
        first = predict_step(replace(plan.layout, cache_level=0), costs, overheads, samples).seconds + samples * 0.02
        second = plan.prediction.seconds + samples * 0.01
        assert seen.predicted_seconds[num_frozen] == pytest.approx(10 * (first + second))
    assert list(seen.predicted_seconds[:L]) == sorted(seen.predicted_seconds[:L], reverse=True)


def test_what_has_come_about_is_predicted_as_it_was_foreseen(tmp_path: Path) -> None:
    """Frozen at step 20, the same seconds are left but for what the store holds."""
    before, policy = layout_of(L, 1, 1), Asks("predicted_seconds", wants=2)
    decisions = decisions_of(tmp_path, policy, before, planner([]))
    decisions.freeze(20, before, [], {}, {})
    after = replace(before, num_frozen_layers=2, cache_level=2)
    decisions.freeze(20, after, [], {}, {})
    foreseen, found = policy.seen
    assert found.predicted_seconds[:2] == (0.0, 0.0)
    assert found.predicted_seconds[2] == pytest.approx(foreseen.predicted_seconds[2])


def test_seconds_are_predicted_for_who_asks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_args: Any) -> Any:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(Decisions, "_predicted_seconds", forbidden)
    layout = layout_of(L, 1, 1)
    for name in MEASUREMENTS:
        policy = Asks(name)
        decisions = decisions_of(tmp_path, policy, layout, None)
        if name == "predicted_seconds":
            with pytest.raises(AssertionError, match="nobody asked"):
                decisions.freeze(20, layout, [], {}, {})
        else:
            decisions.freeze(20, layout, [], {}, {})
            assert policy.seen[0].predicted_seconds == ()


def test_a_run_that_no_clock_may_change_has_no_policy_that_goes_by_one(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "use_cpu": True, "freeze_policy": "saliency"}
    assert PipeTransformerArguments(**options).freeze_policy == "saliency"
    with pytest.raises(ValueError, match=r"saliency.* with full_determinism=True: it decides by measured times"):
        PipeTransformerArguments(**options, full_determinism=True)
