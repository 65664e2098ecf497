"""Policies that go by what still changes, against cases worked out by hand; what they remember goes through JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.freeze.outlook import in_words, outlook
from hf_pipetransformer.freeze.policies import (
    FreezePolicy,
    FreezeSignal,
    GradientChange,
    Plasticity,
    check_policy,
    decide,
    make_clock,
    make_policy,
)
from hf_pipetransformer.freeze.policies.gradient_change import percentile_of


L = 4
HEAD = 1.0
Values = tuple[float, ...]


def decided(
    policy: FreezePolicy,
    measured: list[Values],
    field: str,
    min_active: int = 0,
    start: int = 0,
    first_step: int = 10,
    resumes_at: int | None = None,
) -> list[int]:
    """F after each decision, ten steps apart; what is frozen is measured as 0 or as unchanged.

    Args:
        resumes_at: before this decision another policy, made like it, takes up its state.
    """
    frozen, wanted, found = start, float(start), []
    still = 1.0 if field == "activation_similarity" else 0.0
    for index, values in enumerate(measured):
        if index == resumes_at:
            state = json.loads(json.dumps(policy.state()))
            policy = again(policy)
            policy.load_state(state)
        step = first_step + 10 * index
        seen = tuple(still if layer < frozen else value for layer, value in enumerate(values))
        decision = decide(policy, FreezeSignal(step, 10**6, L, frozen, wanted, **{field: seen}), min_active)
        assert policy.explain(decision.signal).startswith(policy.name)
        wanted, frozen = decision.num_wanted, decision.num_frozen
        found.append(frozen)
    return found


def again(policy: FreezePolicy) -> FreezePolicy:
    if isinstance(policy, Plasticity):
        return Plasticity(policy.tolerance, policy.patience)
    assert isinstance(policy, GradientChange)
    return GradientChange(policy.percentile)


def by_gradients(policy: FreezePolicy, *norms: Values, **options: int) -> list[int]:
    return decided(policy, [(*values, HEAD) if values else () for values in norms], "gradient_norms", **options)


def by_plasticity(policy: FreezePolicy, *values: Values, **options: int) -> list[int]:
    measured = [tuple(1 - 10 * value for value in each) for each in values]
    return decided(policy, measured, "activation_similarity", **options)


# ---- gradient_change


@pytest.mark.parametrize(("percentile", "expected"), [(0, 1), (33, 1), (34, 2), (50, 2), (66, 2), (67, 2), (100, 4)])
def test_the_prefix_whose_gradients_changed_no_more_than_the_percentile_freezes(
    percentile: float, expected: int
) -> None:
    """Changes of 10, 20, 60 and 40 %; at 50 the bound is 30 %, at 67 it is 40.2 %, which layer 3 is above."""
    found = by_gradients(GradientChange(percentile), (10, 10, 10, 10), (9, 12, 4, 14))
    assert found == [0, expected]


def test_the_first_layer_holds_back_the_others() -> None:
    assert by_gradients(GradientChange(50), (10, 10, 10, 10), (2, 10, 10, 10)) == [0, 0]


def test_changes_are_between_the_last_two_intervals_and_of_active_layers_only() -> None:
    """Then layers 3 and 4 are left: 0 and 50 %, the bound is 25 %."""
    assert by_gradients(GradientChange(50), (10,) * 4, (9, 9, 5, 4), (9, 9, 5, 6)) == [0, 2, 3]
    assert by_gradients(GradientChange(50), (10,) * 4, (10,) * 4, start=3) == [3, 4]


def test_an_interval_without_finite_gradients_is_left_out() -> None:
    assert by_gradients(GradientChange(50), (10,) * 4, (), (9, 12, 4, 14)) == [0, 0, 2]
    assert by_gradients(GradientChange(50), (10,) * 4, (math.nan,) * 4, (9, 12, 4, 14)) == [0, 0, 2]
    assert by_gradients(GradientChange(50), (), (10,) * 4, (9, 12, 4, 14)) == [0, 0, 2]


def test_a_layer_that_nobody_trains_neither_counts_nor_holds_back() -> None:
    assert by_gradients(GradientChange(50), (10, 0, 10, 10), (9, 0, 4, 6)) == [0, 2]
    assert by_gradients(GradientChange(100), (0,) * 4, (0,) * 4) == [0, 0]
    assert by_gradients(GradientChange(100), (10, 0, 10, 10), (9, 3, 10, 10)) == [0, 1]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0, 100), st.floats(0, 100))
def test_a_percentile_lies_between_the_values_and_grows(values: list[float], first: float, second: float) -> None:
    low, high = sorted((first, second))
    least, largest = min(values), max(values)
    assert least <= percentile_of(values, low) * (1 + 1e-12)
    assert percentile_of(values, low) <= percentile_of(values, high) * (1 + 1e-12) <= largest * (1 + 1e-11)
    assert (percentile_of(values, 0), percentile_of(values, 100)) == (least, largest)


norms = st.lists(st.tuples(*[st.floats(0, 1e3)] * L), min_size=1, max_size=6)
rates = st.lists(st.tuples(*[st.floats(0, 0.1)] * L), min_size=1, max_size=8)


@given(st.floats(0, 100), st.integers(0, L + 1), norms)
def test_gradient_change_never_thaws_and_leaves_what_must_stay(
    percentile: float, min_active: int, found: list[Values]
) -> None:
    frozen = by_gradients(GradientChange(percentile), *found, min_active=min_active)
    assert frozen[0] == 0
    assert frozen == sorted(frozen)
    assert frozen[-1] <= max(L - min_active, 0)


@given(st.floats(0, 100), st.floats(0, 100), st.tuples(norms, norms))
def test_a_higher_percentile_freezes_no_less(first: float, second: float, pair: tuple[list[Values], ...]) -> None:
    low, high = sorted((first, second))
    before, now = pair[0][0], pair[1][0]
    less = by_gradients(GradientChange(low), before, now)[-1]
    assert less <= by_gradients(GradientChange(high), before, now)[-1]


# ---- plasticity


def test_a_layer_freezes_once_it_was_calm_often_enough() -> None:
    """Layer 1 at 0.1, then 0: averages 0.05, 0.033, 0, so calm at a tolerance of 0.4 from the third on."""
    falling = [(0.1, 0.1, 0.1, 0.1), (0.0, 0.1, 0.1, 0.1), (0.0, 0.1, 0.1, 0.1), (0.0, 0.1, 0.1, 0.1)]
    assert by_plasticity(Plasticity(0.4, 1), *falling) == [0, 0, 1, 1]
    assert by_plasticity(Plasticity(0.4, 2), *falling) == [0, 0, 0, 1]
    assert by_plasticity(Plasticity(0.5, 1), *falling) == [0, 1, 1, 1]
    assert by_plasticity(Plasticity(0.3, 1), *falling) == [0, 0, 0, 1]


def test_several_layers_freeze_at_once_but_none_above_one_that_changes() -> None:
    first, then = (0.1, 0.1, 0.1, 0.1), (0.0, 0.0, 0.1, 0.0)
    assert by_plasticity(Plasticity(0.5, 1), first, then, then) == [0, 2, 2]
    assert by_plasticity(Plasticity(0.5, 1), first, (0.1, 0, 0, 0), (0.1, 0, 0, 0)) == [0, 0, 0]
    assert by_plasticity(Plasticity(0.5, 1), first, (0,) * 4, min_active=1) == [0, 3]


def test_what_counts_is_a_layers_own_largest_change() -> None:
    """Layer 2 never changes as much as layer 1 in the end, and yet stays."""
    found = [(0.1, 0.001, 0.1, 0.1), (0.01, 0.001, 0.1, 0.1), (0.01, 0.001, 0.1, 0.1), (0.01, 0.001, 0.1, 0.1)]
    assert by_plasticity(Plasticity(0.2, 1), *found) == [0, 0, 0, 1]


def test_a_layer_that_changes_more_again_stays_although_it_is_below_the_bound() -> None:
    """The average goes from 0.0 to 0.02: at that pace it is at 0.04, above 0.03, the next time."""
    rising = [(0.1,) * 4, *[(0.0, 0.1, 0.1, 0.1)] * 3, (0.06, 0.1, 0.1, 0.1)]
    policy = Plasticity(0.3, 3)
    assert by_plasticity(policy, *rising) == [0, 0, 0, 0, 0]
    assert policy.state()["num_calm"][0] == 0
    assert by_plasticity(Plasticity(0.3, 1), *rising) == [0, 0, 0, 1, 1]


def test_an_interval_counts_by_its_steps() -> None:
    """The warm-up is four intervals long: as much change in all is a fourth of it a step."""
    long = [(0.1,) * 4, (0.1,) * 4, (0.1,) * 4]
    policy = Plasticity(0.5, 1)
    assert by_plasticity(policy, *long, first_step=40) == [0, 0, 0]
    assert policy.state()["largest"] == pytest.approx([0.1] * 4)
    assert policy.state()["recent"][0] == pytest.approx([0.025] * 4)


def test_what_never_changed_freezes_after_the_decisions_that_were_only_watched() -> None:
    assert by_plasticity(Plasticity(0.2, 2), *[(0,) * 4] * 3) == [0, 0, 4]


@pytest.mark.parametrize("bad", [(), (math.nan, 1.0, 1.0, 1.0)])
def test_a_decision_without_similarities_decides_nothing(bad: Values) -> None:
    policy = Plasticity(0.5, 1)
    assert decided(policy, [bad, (0.0,) * 4, bad, (1.0,) * 4], "activation_similarity") == [0, 0, 0, 4]


def test_a_similarity_above_one_by_rounding_is_no_change() -> None:
    policy = Plasticity()
    decided(policy, [(1.0 + 1e-12,) * 4], "activation_similarity")
    assert policy.state()["largest"] == [0.0] * 4


@given(st.floats(0.01, 0.99), st.integers(1, 3), st.integers(0, L + 1), rates)
def test_plasticity_never_thaws_and_leaves_what_must_stay(
    tolerance: float, patience: int, min_active: int, found: list[Values]
) -> None:
    frozen = by_plasticity(Plasticity(tolerance, patience), *found, min_active=min_active)
    assert frozen[:patience] == [0] * min(patience, len(frozen))
    assert frozen == sorted(frozen)
    assert frozen[-1] <= max(L - min_active, 0)


@given(st.tuples(*[st.floats(0.01, 0.99)] * 2), st.tuples(*[st.integers(1, 3)] * 2), rates)
def test_more_tolerance_and_less_patience_freeze_no_less(
    tolerances: tuple[float, ...], patiences: tuple[int, ...], found: list[Values]
) -> None:
    strict = by_plasticity(Plasticity(min(tolerances), max(patiences)), *found)
    loose = by_plasticity(Plasticity(max(tolerances), min(patiences)), *found)
    assert all(less <= more for less, more in zip(strict, loose, strict=True))


# ---- all of them


@given(st.integers(0, 5), norms)
def test_gradient_change_goes_on_from_its_state(resumes_at: int, found: list[Values]) -> None:
    policy = GradientChange(40)
    assert by_gradients(policy, *found) == by_gradients(GradientChange(40), *found, resumes_at=resumes_at)


@given(st.integers(0, 7), rates)
def test_plasticity_goes_on_from_its_state(resumes_at: int, found: list[Values]) -> None:
    policy = Plasticity(0.4, 2)
    assert by_plasticity(policy, *found) == by_plasticity(Plasticity(0.4, 2), *found, resumes_at=resumes_at)


@pytest.mark.parametrize("make", [GradientChange, Plasticity])
def test_the_state_at_the_start_makes_a_policy_as_it_was_given(make: Callable[[], FreezePolicy]) -> None:
    policy = make()
    start = json.loads(json.dumps(policy.state()))
    for field in ("gradient_norms", "activation_similarity"):
        policy.num_wanted(FreezeSignal(10, 100, L, 0, 0.0, **{field: (0.5,) * (L + (field == "gradient_norms"))}))
    assert policy.state() != start
    policy.load_state(start)
    assert policy.state() == start


@pytest.mark.parametrize(("name", "num_watched"), [("gradient_change", 1), ("plasticity", 2)])
def test_the_outlook_knows_the_decisions_that_are_only_watched(name: str, num_watched: int) -> None:
    policy, clock = make_policy(name, 1 / 3, "inclusive", None), make_clock("10", 0.0, 10, 50)
    found = outlook(policy, clock, L, 0, 1)
    assert found == [(step, 0 if index < num_watched else L - 1) for index, step in enumerate((10, 20, 30, 40))]
    short = make_clock("10", 0.0, 10, 11 + 10 * (num_watched - 1))
    text = in_words(outlook(policy, short, L, 0, 1), L, 0, short.max_steps, 10, policy.num_watched)
    needed = f"the policy needs {num_watched + 1} decisions, and {num_watched} fall into its {short.max_steps} steps"
    assert needed in text
    assert policy.describe().startswith(name)
    assert check_policy(policy, L, 50, 1) == []


# ---- options


def arguments(folder: Path, **options: object) -> PipeTransformerArguments:
    return PipeTransformerArguments(output_dir=str(folder), use_cpu=True, report_to="none", **options)


@pytest.mark.parametrize(
    ("option", "value", "policy"),
    [
        ("freeze_percentile", "70", "gradient_change"),
        ("freeze_tolerance", 0.1, "plasticity"),
        ("freeze_patience", 3, "plasticity"),
    ],
)
def test_an_option_of_another_policy_is_refused(tmp_path: Path, option: str, value: object, policy: str) -> None:
    args = arguments(tmp_path, freeze_policy=policy, **{option: value})
    assert getattr(args, option) == float(str(value))
    with pytest.raises(ValueError, match=f"{option}=.* needs freeze_policy='{policy}', found 'schedule'"):
        arguments(tmp_path, freeze_policy="schedule", **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [("freeze_percentile", 101), ("freeze_percentile", -1), ("freeze_tolerance", 1), ("freeze_patience", 0)],
)
def test_values_outside_their_range_are_refused(tmp_path: Path, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} must be .*, found {value}"):
        arguments(tmp_path, **{option: value})
