"""The search for the next layout: no other number of stages with any way to store takes less time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.planning.layouts import WORTH_MOVING, Choice, PlanInputs
from hf_pipetransformer.planning.search import TIE, moving_seconds, search, seconds_left, without_reading
from hf_pipetransformer.planning.storing import Storing
from hf_pipetransformer.schedules.layout import Layout
from tests.support.costs import block_costs


L, PER_EPOCH = 4, 10
CUTS = tuple(range(2 * L + 3))
START = Layout(L, 0, 4, 1, (0, 3, 5, 7, 10), 8, "1f1b")


def inputs_of(forward: float = 1.0, device_bytes: float = 1e9, elastic: bool = True, **overheads: float) -> PlanInputs:
    blocks = block_costs(
        forward=(forward,) * 10, backward=(2 * forward,) * 10, edge_backward=(forward,) * 10, parameters=(100,) * 10,
        activation_bytes=(1.0,) * 10,
    )  # fmt: skip
    rules: dict[str, Any] = {"compression": "throughput", "cut_positions": CUTS, "device_bytes": device_bytes}
    return PlanInputs(blocks, Overheads(**overheads), samples_per_device=4, elastic=elastic, initial_size=4, **rules)


def storing(read: float = 0.0, write: float = 0.0, mode: str = "auto", **more: float) -> Storing:
    return Storing((), read=read, write=write, mode=mode, steps_per_epoch=PER_EPOCH, **more)


def epochs(number: float) -> int:
    return round(number * PER_EPOCH)


costs = st.floats(0, 5)


@settings(max_examples=40)
@given(st.integers(1, L - 1), st.floats(0.3, 6), costs, costs, costs, costs, st.sampled_from([0.3, 1.0]))
def test_nothing_else_takes_less_time(num_frozen, length, read, write, hop, per_byte, fits):
    """Of numbers of stages up to that of the active blocks, with a store and without."""
    inputs, steps = inputs_of(hop=hop, reduction_per_byte=per_byte / 100, per_step=1.0), epochs(length)
    store = storing(read, write, fits_share=fits)
    choice, others = search(START, num_frozen, steps, inputs, store), []
    fixed = replace(inputs, elastic=False)
    for size in (size for size in (1, 2, 4) if size <= START.num_blocks - (1 + 2 * num_frozen)):
        # Boundaries are even for what is computed: a run that writes nothing has those for level 0.
        for mode, level in (("off", 0), ("on", num_frozen if steps > PER_EPOCH else 0)):
            layout = inputs.lay_out("1f1b", size, 4 // size, 1, num_frozen, level)
            alone = search(layout, num_frozen, steps, fixed, replace(store, mode=mode))
            others.append(alone.seconds_left + moving_seconds(START, alone.layout, inputs))
    # Of equal ones the shorter pipeline is taken, and stages that hardly differ do not move.
    assert choice.seconds_left <= min(others) * (1 + TIE + WORTH_MOVING)
    inputs = without_reading(inputs, START, store)
    assert choice.seconds_left == pytest.approx(choice.moving + seconds_left(choice.layout, choice.way.passes, inputs))


def test_the_seconds_of_a_choice_by_hand() -> None:
    """One stage, four samples a step: 10 forwards and 1 + 6 x 2 backwards; 7 fewer forwards where 3 are stored."""
    alone = replace(START, num_stages=1, boundaries=(0, 10), num_microbatches=1)
    inputs = inputs_of(per_step=2.0)
    off = search(alone, 3, epochs(3), inputs, storing(mode="off"))
    assert off.seconds_left == 30 * (4 * (10 + 1 + 2 * 2) + 2)
    on = search(alone, 3, epochs(3), inputs, storing(read=0.25, write=1.0, mode="on"))
    first, later = 4 * (15 + 1) + 2, 4 * (15 - 7 + 0.25) + 2
    assert (on.seconds_left, on.layout.cache_level) == (10 * first + 20 * later, 3)
    assert on.way.seconds == {"compute": off.seconds_left, "write": on.seconds_left}


def test_a_store_may_pay_with_one_number_of_stages_alone() -> None:
    """Four stages share the frozen forward, and one of them reads for all: reading pays on one stage alone."""
    slow = storing(read=4.5, write=0.0)
    assert search(START, 2, epochs(20), inputs_of(), slow).layout.cache_level == 2
    over_sum = inputs_of(reduction_per_byte=1e3)
    kept = search(START, 2, epochs(20), over_sum, slow).layout
    assert (kept.pipeline_size, kept.cache_level) == (4, 0)


def test_weights_do_not_move_for_the_last_steps() -> None:
    inputs = inputs_of(reduction_per_byte=0.01)
    found = {steps: search(START, 1, steps, inputs) for steps in (1, 1000)}
    assert found[1000].layout.pipeline_size < 4
    assert found[1].layout.pipeline_size == 4, found[1].alternatives


def test_modes_and_dropout_decide_what_is_stored() -> None:
    def found(length: float = 5, **options: float) -> Choice:
        return search(START, 2, epochs(length), inputs_of(), storing(**options))

    def told(choice: Choice) -> tuple[int, str]:
        return choice.layout.cache_level, choice.way.reason

    assert told(found(mode="off")) == (0, "the cache is switched off")
    assert told(found(read=90.0, mode="on")) == (2, "the cache is switched on")
    assert told(found(0.5, mode="on")) == (0, "nothing is written with 0.5 epochs left: no record would be read again")
    assert told(found(0.5)) == (0, "0.5 epochs left: no record would be read again")
    level, reason = told(found())
    assert level == 2 and reason.startswith("over 5 epochs the rest of the run costs: recomputing ")
    assert told(found(dropout_from=2)) == (0, "frozen layers compute something else in training mode")
    assert told(found(dropout_from=2, mode="on"))[0] == 2
