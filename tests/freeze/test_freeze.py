"""Freeze policies against Eq. 1 worked out by hand, the clock that asks them, the monitor that feeds them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_pipetransformer.freeze.policies import (
    Auto,
    Fixed,
    GradientNorm,
    NoFreezing,
    Schedule,
    describe_outlook,
    freezing_of,
    make_policy,
    outlook,
)
from hf_pipetransformer.freeze.policy import (
    MOST_ASKED,
    DecisionClock,
    FreezePolicy,
    FreezeSignal,
    GradientNormMonitor,
    check_policy,
    decide,
    make_clock,
)
from hf_pipetransformer.options.arguments import FREEZE_POLICIES
from hf_pipetransformer.options.combinations import POLICIES_READING
from hf_pipetransformer.options.reading import parse_freeze_at
from tests.support.settled_policy import Settled


L = 12


def policy_of(name: str, freeze_at: str | None = None) -> FreezePolicy:
    """Return the policy that options select."""
    args: Any = SimpleNamespace(freeze_policy=name, freeze_alpha=1 / 3, freeze_rule="inclusive", freeze_at=freeze_at)
    return make_policy(args)


def run(policy: FreezePolicy, norms: list[tuple[float, ...]], min_active: int = 0, num_layers: int = L) -> list[int]:
    """F after each decision, from nothing frozen."""
    wanted, num_frozen, found = 0.0, 0, []
    for step, means in enumerate(norms, start=1):
        decision = decide(policy, FreezeSignal(step, 10**6, num_layers, num_frozen, wanted, means), min_active)
        wanted, num_frozen = decision.target_num_frozen, decision.num_frozen
        found.append(num_frozen)
    return found


def with_smallest(index: int, num_layers: int = L) -> tuple[float, ...]:
    """Norms whose least is at `index`."""
    return tuple(0.5 if i == index else 1.0 + i for i in range(num_layers + 1))


def signal(num_frozen: int, target_num_frozen: float, norms: tuple[float, ...] = ()) -> FreezeSignal:
    return FreezeSignal(1, 100, L, num_frozen, target_num_frozen, norms)


# ---- Eq. 1 and Eq. 3


def test_the_bound_at_one_third_of_twelve_layers() -> None:
    assert run(Schedule(1 / 3), [()] * 9) == [4, 7, 9, 10, 11, 11, 12, 12, 12]


@pytest.mark.parametrize("num_layers", [1, 2, 6, 12, 24])
@pytest.mark.parametrize("alpha", [1 / 5, 1 / 3, 1 / 2, 2 / 3])
def test_the_bound_has_the_closed_form_of_equation_3(num_layers: int, alpha: float) -> None:
    closed = [math.ceil(num_layers * (1 - (1 - alpha) ** t) - 1e-9) for t in range(1, 15)]
    assert run(Schedule(alpha), [()] * 14, num_layers=num_layers) == closed


def test_a_bound_that_is_a_whole_number_is_not_rounded_up_by_noise() -> None:
    """Floating point may say a little more than 6."""
    assert decide(Says(6 + 1e-14), signal(0, 0.0), 0).num_frozen == 6
    assert decide(Says(6 + 1e-6), signal(0, 0.0), 0).num_frozen == 7


@pytest.mark.parametrize(("rule", "expected"), [("exclusive", 3), ("inclusive", 4)])
def test_the_layer_of_the_smallest_norm_bounds_the_prefix(rule: str, expected: int) -> None:
    """With alpha 1/2 the bound alone would give 6."""
    assert run(GradientNorm(1 / 2, rule), [with_smallest(3)]) == [expected]
    assert run(Schedule(1 / 2), [()]) == [6]


def test_the_bound_holds_where_the_smallest_norm_comes_later() -> None:
    for rule in ("exclusive", "inclusive"):
        assert run(GradientNorm(1 / 3, rule), [with_smallest(11)] * 3) == [4, 7, 9]


@pytest.mark.parametrize("rule", ["exclusive", "inclusive"])
def test_a_smallest_norm_at_the_head_leaves_the_bound_alone(rule: str) -> None:
    policy = GradientNorm(1 / 3, rule)
    assert run(policy, [with_smallest(L)] * 9) == [4, 7, 9, 10, 11, 11, 12, 12, 12]
    assert decide(policy, signal(11, 11.9, with_smallest(L)), 0).num_frozen == L


def test_a_smallest_norm_in_the_first_layer_freezes_nothing_or_that_layer() -> None:
    assert run(GradientNorm(1 / 3, "exclusive"), [with_smallest(0)] * 3) == [0, 0, 0]
    assert run(GradientNorm(1 / 3, "inclusive"), [with_smallest(0)]) == [1]


def test_frozen_layers_whose_norm_is_zero_are_no_candidates() -> None:
    norms = (0.0,) * 4 + tuple(float(i) for i in range(9, 0, -1))
    assert decide(GradientNorm(1 / 3, "exclusive"), signal(4, 4.0, norms), 0).num_frozen == 7
    least_active = (0.0,) * 4 + (0.1,) + (1.0,) * 8
    assert decide(GradientNorm(1 / 3, "exclusive"), signal(4, 4.0, least_active), 0).num_frozen == 4
    assert decide(GradientNorm(1 / 3, "inclusive"), signal(4, 4.0, least_active), 0).num_frozen == 5


def test_after_an_early_stop_the_bound_goes_on_from_there() -> None:
    """Eq. 1 is recursive: 2 frozen, then 2 + (12 - 2) / 3 = 5.33."""
    policy = GradientNorm(1 / 3, "exclusive")
    assert run(policy, [with_smallest(2), with_smallest(11), with_smallest(11)]) == [2, 6, 8]


def test_without_norms_nothing_is_frozen() -> None:
    assert run(GradientNorm(1 / 3, "inclusive"), [(), (), with_smallest(11)]) == [0, 0, 4]


@given(
    st.sampled_from(["exclusive", "inclusive"]),
    st.floats(0.01, 0.99),
    st.integers(0, L + 2),
    st.lists(st.lists(st.floats(0, 100), min_size=L + 1, max_size=L + 1), min_size=1, max_size=8),
)
def test_f_never_falls_never_passes_the_bound_and_leaves_what_must_stay(
    rule: str, alpha: float, min_active: int, norms: list[list[float]]
) -> None:
    found = run(GradientNorm(alpha, rule), [tuple(means) for means in norms], min_active)
    assert found == sorted(found)
    bounds = run(Schedule(alpha), [()] * len(norms))
    assert all(num_frozen <= bound + 1 for num_frozen, bound in zip(found, bounds, strict=True))
    assert found[-1] <= max(L - min_active, 0)


def test_layers_that_must_stay_active_do() -> None:
    assert run(Schedule(1 / 3), [()] * 8, min_active=2) == [4, 7, 9, 10, 10, 10, 10, 10]
    # More than that frozen by the user stays frozen.
    assert decide(Schedule(1 / 3), signal(8, 8.0), 6).num_frozen == 8


# ---- policies of the user


class Says(FreezePolicy):
    def __init__(self, answer: float) -> None:
        self.answer = answer

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        return self.answer


def test_the_old_name_of_an_answer_is_taken_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"Old\.num_wanted is called target_num_frozen now"):

        class Old(FreezePolicy):
            def num_wanted(self, signal: FreezeSignal) -> float:
                return signal.num_wanted + 1

    assert decide(Old(), signal(5, 5.0), 0).num_frozen == 6


@pytest.mark.parametrize(("answer", "expected"), [(2.1, 5), (-3, 5), (5.0, 5), (5.5, 6), (99, 12)])
def test_an_answer_is_rounded_up_and_never_unfreezes(answer: float, expected: int) -> None:
    decision = decide(Says(answer), signal(5, 5.0), 0)
    assert decision.num_frozen == expected
    assert decision.freezes == (expected > 5)
    assert json.loads(json.dumps(decision.as_event())) == decision.as_event()


@pytest.mark.parametrize("answer", [math.nan, math.inf, -math.inf])
def test_an_answer_that_is_no_number_is_refused(answer: float) -> None:
    with pytest.raises(ValueError, match=r"Says\.target_num_frozen returned (nan|inf|-inf): expected a number"):
        decide(Says(answer), signal(5, 5.0), 0)


def changed(lowest: float, head: float = 1.0) -> FreezeSignal:
    """A signal of two layers."""
    return FreezeSignal(1, 100, 2, 0, 0.0, (lowest, 1.0, head))


def test_a_policy_that_remembers_goes_on_from_its_state() -> None:
    policy, resumed = Settled(), Settled()
    assert [decide(policy, changed(0.5), 0).num_frozen, policy.num_calm] == [0, 1]
    resumed.load_state(json.loads(json.dumps(policy.state())))
    assert decide(resumed, changed(0.5), 0).num_frozen == decide(policy, changed(0.5), 0).num_frozen == 1
    assert decide(Settled(), changed(0.5), 0).num_frozen == 0


def test_a_policy_says_before_a_run_what_cannot_be() -> None:
    assert check_policy(Settled(), L, 40, 1) == []
    with pytest.raises(ValueError, match="freeze_min_active_layers=2 of 2 layers: nothing could freeze"):
        check_policy(Settled(), 2, 40, 2)
    fixed = policy_of("fixed", "5:2,40:3")
    assert check_policy(fixed, L, 40, L) == [
        "freeze_at: the run ends after 40 steps, before step 40 freezes or unfreezes anything."
    ]
    assert check_policy(policy_of("none"), L, 40, L) == []
    with pytest.raises(ValueError, match=r"freeze_layers or freeze_at freezes 3 layers: the model has 2\."):
        check_policy(fixed, 2, 50, 0)
    with pytest.raises(ValueError, match=r"share must be above 0, found -1"):
        check_policy(Settled(share=-1), L, 40, 0)
    wants = Says(1)
    wants.needs = ["gradient_norms"]
    assert check_policy(wants, L, 40, 0) == []
    wants.needs = "gradient_norms"
    with pytest.raises(ValueError, match=r"Says\.needs is 'gradient_norms': expected a collection of names"):
        check_policy(wants, L, 40, 0)
    wants.needs = frozenset({"gradient_norms", "the_weather"})
    with pytest.raises(ValueError, match=r"Says\.needs has the_weather: expected some of"):
        check_policy(wants, L, 40, 0)


# ---- when


def due_steps(interval: str, warmup: float, steps_per_epoch: int, max_steps: int) -> list[int]:
    clock, policy = make_clock(interval, warmup, steps_per_epoch, max_steps), Schedule(1 / 3)
    return [step for step in range(max_steps + 1) if policy.is_due(step, clock)]


@pytest.mark.parametrize(
    ("interval", "warmup", "expected"),
    [
        ("epoch", 0.0, [10, 20, 30]),
        ("15", 0.0, [15, 30]),
        ("0.25", 0.0, [10, 20, 30]),
        ("0.001", 0.9, [36, 37, 38, 39]),
        ("epoch", 0.5, [20, 30]),
        ("epoch", 0.51, [30]),
        ("epoch", 0.99, []),
        ("7", 0.3, [14, 21, 28, 35]),
        ("40", 0.0, []),
    ],
)
def test_decisions_are_due_between_steps_after_the_warm_up(interval: str, warmup: float, expected: list[int]) -> None:
    assert due_steps(interval, warmup, steps_per_epoch=10, max_steps=40) == expected


def test_no_policy_none_is_ever_asked() -> None:
    policy, clock = policy_of("none"), make_clock("1", 0.0, 10, 40)
    assert not any(policy.is_due(step, clock) for step in range(41))
    assert policy.target_num_frozen(signal(3, 3.0)) == 3


def test_a_fixed_table_is_followed_at_its_steps_only() -> None:
    policy, clock = policy_of("fixed", "0:1, 12:4,5:2"), make_clock("epoch", 0.9, 10, 40)
    assert [step for step in range(41) if policy.is_due(step, clock)] == [0, 5, 12]
    frozen = [decide(policy, FreezeSignal(step, 40, L, 0, 0.0, ()), 0).num_frozen for step in (0, 5, 12)]
    assert frozen == [1, 2, 4]


def test_auto_freezes_half_of_the_layers_in_short_runs_only() -> None:
    """Of 2 or 3 epochs: in one nothing that is stored is read again, and in longer ones all layers end higher.

    With many steps in an epoch they do so, too.
    """
    policy = policy_of("auto")
    asked = {steps: list(policy.due_steps(make_clock("epoch", 0.5, 10, steps))) for steps in (10, 19, 20, 30, 31, 40)}
    assert asked == {10: [], 19: [], 20: [0], 30: [0], 31: [], 40: []}
    assert decide(policy, FreezeSignal(0, 20, 5, 0, 0.0), 4).num_frozen == 2
    for steps in (200, 202):
        assert list(policy.due_steps(make_clock("epoch", 0.5, steps // 2, steps))) == [0] * (steps == 200)
    assert "auto' freezes in runs of 2 to 3 epochs and at most 200 steps" in describe_outlook(policy, [], 6, 0, 40, 10)


def test_what_was_measured_is_said_of_runs_that_freeze_half_of_the_layers_alone() -> None:
    options = SimpleNamespace(freeze_interval="epoch", freeze_warmup=0.0, freeze_min_active_layers=1)
    for table, is_said in (("0:3", True), ("0:4", False), ("0:2,10:3", False)):
        freezing, _, measured = freezing_of(policy_of("fixed", table), options, 6, 0, (20, 10))
        assert freezing is not None and bool(measured) == is_said, table


def test_a_table_is_read_and_sorted() -> None:
    assert parse_freeze_at("100:2, 20:1 ,300:12") == {20: 1, 100: 2, 300: 12}
    assert list(parse_freeze_at("9:1,3:0")) == [3, 9]


@pytest.mark.parametrize(
    "text", ["", "5", "5:", ":2", "5:2,", "a:1", "5:-1", "-5:1", "5.5:1", "5:1;6:2", "5:1:2", "²:1"]
)
def test_a_table_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"freeze_at=.*Expected for example '100:2,200:4'"):
        parse_freeze_at(text)


def test_a_table_that_names_a_step_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"freeze_at='0:1,0:2' names step 0 twice: expected each step once"):
        parse_freeze_at("0:1,0:2")


@pytest.mark.parametrize("name", FREEZE_POLICIES)
def test_policies_are_made_by_their_names(name: str) -> None:
    policy = policy_of(name, "5:2")
    assert policy.name == name
    assert policy.describe().startswith(name)


@pytest.mark.parametrize("name", FREEZE_POLICIES)
def test_options_that_a_policy_reads_are_known_to_be_read(name: str) -> None:
    """Or a run warns that they do nothing: `POLICIES_READING` in options/combinations.py lists the policies."""
    policy = policy_of(name, "5:2")
    decides_by_the_clock = type(policy).is_due is FreezePolicy.is_due
    for option in ("freeze_interval", "freeze_warmup"):
        is_listed = name in POLICIES_READING[option]
        assert is_listed == decides_by_the_clock, f"{name} in POLICIES_READING[{option!r}]"
    is_limited = policy.freezes and policy.keeps_minimum
    assert (name in POLICIES_READING["freeze_min_active_layers"]) == is_limited


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown freeze policy 'unfreeze'"):
        policy_of("unfreeze")


# ---- the monitor


def squares(*norms: float) -> torch.Tensor:
    return torch.tensor(norms, dtype=torch.float64) ** 2


def test_the_signal_is_the_mean_of_the_norms_of_the_steps() -> None:
    """Not the norm of the mean, nor the root of the mean of the squares."""
    monitor = GradientNormMonitor(2, torch.device("cpu"))
    monitor.record(squares(1.0, 3.0, 0.0))
    monitor.record(squares(3.0, 3.0, 4.0))
    assert monitor.means() == pytest.approx((2.0, 3.0, 2.0), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_will_be_skipped_does_not_count(bad: float) -> None:
    monitor = GradientNormMonitor(2, torch.device("cpu"))
    monitor.record(squares(1.0, 2.0, 3.0))
    monitor.record(torch.tensor([1.0, bad, 1.0]))
    assert monitor.means() == pytest.approx((1.0, 2.0, 3.0))


def test_a_new_interval_forgets_the_old_one() -> None:
    monitor = GradientNormMonitor(1, torch.device("cpu"))
    assert monitor.means() == ()
    monitor.record(squares(1.0, 2.0))
    monitor.reset()
    assert monitor.means() == ()
    monitor.record(squares(5.0, 6.0))
    assert monitor.means() == pytest.approx((5.0, 6.0))


def test_the_state_goes_through_json_to_the_bit() -> None:
    monitor, other = (GradientNormMonitor(2, torch.device("cpu")) for _ in range(2))
    for norms in ((0.1, 0.2, 0.3), (1 / 3, 1e-9, 7.0)):
        monitor.record(squares(*norms))
    other.record(squares(9.0, 9.0, 9.0))
    other.load_state(json.loads(json.dumps(monitor.state())))
    assert other.means() == monitor.means()
    for each in (monitor, other):
        each.record(squares(1.0, 2.0, 3.0))
    assert other.state() == monitor.state()


# ---- outlook


def coming(policy: FreezePolicy, max_steps: int = 40, interval: str = "10", warmup: float = 0.5, most: int = 2):
    clock = make_clock(interval, warmup, 10, max_steps)
    return outlook(policy, clock, 6, 0, most), clock


def test_the_outlook_of_a_bound_is_what_its_decisions_give() -> None:
    """Nothing that is measured can freeze more than Eq. 1 allows."""
    expected = [(20, 2), (30, 4)]
    assert coming(Schedule(1 / 3))[0] == expected
    assert coming(GradientNorm(1 / 3, "inclusive"))[0] == expected
    signal, frozen = FreezeSignal(20, 40, 6, 0, 0.0), []
    for step, _ in expected:
        decision = decide(Schedule(1 / 3), replace(signal, step=step), 2)
        signal = replace(signal, num_frozen=decision.num_frozen, target_num_frozen=decision.target_num_frozen)
        frozen.append((step, decision.num_frozen))
    assert frozen == expected


def test_the_outlook_of_a_table_is_the_table() -> None:
    assert coming(Fixed({3: 1, 12: 5}))[0] == [(3, 1), (12, 5)]


@pytest.mark.parametrize("interval", ["epoch", "1", "3", "7", "100", "0.1"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("max_steps", [0, 1, 10, 41])
def test_due_steps_are_those_that_are_due(interval: str, warmup: float, max_steps: int) -> None:
    """Also where a policy of the user's own says so."""

    class Odd(Fixed):
        def is_due(self, step: int, clock: DecisionClock) -> bool:
            return step % 5 == 0 or super().is_due(step, clock)

    clock = make_clock(interval, warmup, 10, max_steps)
    for policy in (Schedule(0.5), Fixed({0: 1, 3: 1, 40: 2}), Odd({3: 1}), Auto(), NoFreezing()):
        assert list(policy.due_steps(clock)) == [step for step in range(max_steps) if policy.is_due(step, clock)]


def test_the_outlook_looks_only_at_steps_that_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that is planned there are ten times as many, and it is looked at some twenty times."""

    def ask(*_: Any) -> bool:
        raise AssertionError("a step was asked about")

    monkeypatch.setattr(DecisionClock, "is_due", ask)
    assert coming(Schedule(1 / 3), 40)[0] == [(20, 2), (30, 4)]
    assert coming(Fixed({3: 1, 10**12: 5}), 10**11)[0] == [(3, 1)]


def test_a_policy_that_counts_what_it_is_asked_is_the_same_after_the_outlook() -> None:
    class Counting(Schedule):
        asked: list[int] = []

        def is_due(self, step: int, clock: DecisionClock) -> bool:
            self.asked.append(step)
            return len(self.asked) % 5 == 0

        def state(self) -> dict[str, Any]:
            return {"asked": self.asked}

        def load_state(self, state: Mapping[str, Any]) -> None:
            self.asked = state["asked"]

    policy = Counting(0.5)
    policy.asked = [7]
    assert coming(policy, 10)[0] and policy.asked == [7]
    assert coming(policy, 10**12)[0][-1][0] < MOST_ASKED


def test_the_outlook_in_words_says_when_nothing_can_freeze() -> None:
    found, clock = coming(Schedule(1 / 3), max_steps=10)
    assert "no decision falls into its 10 steps" in describe_outlook(Schedule(1 / 3), found, 6, 0, clock.max_steps, 10)
    found, clock = coming(Schedule(1 / 3), most=6)
    assert "all others must stay active" in describe_outlook(Schedule(1 / 3), found, 6, 0, clock.max_steps, 10)


def test_the_outlook_of_a_resumed_run_counts_the_layers_that_are_frozen_already() -> None:
    text = describe_outlook(Schedule(1 / 3), [(20, 3), (30, 3)], 6, 3, 40, 10)
    assert text.startswith("3 of 6 layers are frozen already, and no more freeze in this run: all others must stay")
    assert "No layer freezes" not in text


def test_the_outlook_of_a_table_names_the_table() -> None:
    """The other options decide nothing there."""
    table = Fixed({10: 2})
    text = describe_outlook(table, [(10, 2)], 6, 2, 40, 10)
    assert text == "2 of 6 layers are frozen already, and no more freeze in this run: freeze_at asks for no more."
    late = describe_outlook(table, [], 6, 0, 10, 10)
    assert late == "No layer freezes in this run: no step of freeze_at falls into its 10 steps."


def test_the_outlook_in_words_says_when_no_epoch_reads_the_cache() -> None:
    found, clock = coming(Schedule(1 / 3))
    text = describe_outlook(Schedule(1 / 3), found, 6, 0, clock.max_steps, 10)
    assert text == "Of 6 layers at most 2 from step 20 on, 4 from step 30 on are frozen, in a run of 40 steps."
    assert "the activation cache gains nothing" in describe_outlook(Schedule(1 / 3), found, 6, 0, clock.max_steps, 20)


def test_a_decision_held_back_by_the_minimum_knows_it() -> None:
    signal = FreezeSignal(20, 40, 6, 4, 4.0)
    assert decide(Schedule(1 / 3), signal, 2).is_held_back
    assert not decide(Schedule(1 / 3), signal, 0).is_held_back


def test_what_is_not_trained_has_no_smallest_norm() -> None:
    """Adapters leave the head, and layers without one, with no gradient at all."""
    assert GradientNorm.smallest(FreezeSignal(1, 100, 6, 0, 0.0, (5.0, 0.0, 4.0, 3.0, 2.0, 9.0, 0.0))) == 4
    assert GradientNorm.smallest(FreezeSignal(1, 100, 6, 0, 0.0, (0.0,) * 7)) == 6
