"""When caching is worth it: tables worked out by hand, laws, and a simulation that walks through the epochs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_pipetransformer.cache.pricing import CachePlanner
from hf_pipetransformer.cache.storage import StorageSpeed
from hf_pipetransformer.cache.store import StoreSize
from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.planning.layouts import Choice, PlanInputs
from hf_pipetransformer.planning.search import search
from hf_pipetransformer.planning.storing import (
    Pass,
    Storing,
    Way,
    decide_cache,
    epochs_of_a_record,
    passes_ahead,
    ways_of_storing,
)
from hf_pipetransformer.schedules.layout import Layout
from tests.support.costs import block_costs


# Seconds, chosen so that sums are easy: a layer and the embeddings take 2 each, a stored row 0.5, writing one 3.
COSTS = Storing(prefix=(2.0, 4.0, 6.0, 8.0, 10.0), read=0.5, write=3.0)


def decided(costs: Storing, frozen: int, stored: tuple[float, ...], epochs: float, mode: str = "auto") -> Way:
    """What is decided with a level, a share of the samples and what fits already `stored`."""
    contents = dict(zip(("level", "share", "fits_share"), stored, strict=False))
    return decide_cache(replace(costs, mode=mode, **contents), frozen, epochs)


@pytest.mark.parametrize(
    ("frozen", "level", "share", "epochs", "fits", "expected"),
    [
        # Nothing stored: 3 x 6 against (6 + 3) + 2 x 0.5.
        (2, 0, 0.0, 3.0, 1.0, {"compute": 18.0, "write": 10.0}),
        # Half fits: half of the above and half of computing.
        (2, 0, 0.0, 3.0, 0.5, {"compute": 18.0, "write": 14.0}),
        # Everything stored a layer below: 3 (0.5 + 2) against (0.5 + 2 + 3) + 2 x 0.5.
        (2, 1, 1.0, 3.0, 1.0, {"compute": 18.0, "keep": 7.5, "write": 6.5}),
        # Half stored there: the others are written, there 0.5 x 2.5 + 0.5 x 9 + 2 x 2.5, or here 0.5 x 5.5 + 0.5 x 9
        # + 2 x 0.5.
        (2, 1, 0.5, 3.0, 1.0, {"compute": 18.0, "keep": 10.75, "write": 8.25}),
        # Everything stored at this very level: 3 x 0.5, and nothing is written again.
        (2, 2, 1.0, 3.0, 1.0, {"compute": 18.0, "keep": 1.5}),
        # Half stored at this level: 0.5 x 0.5 + 0.5 x 9 + 2 x 0.5.
        (2, 2, 0.5, 3.0, 1.0, {"compute": 18.0, "keep": 5.75}),
        # What is stored fits, whatever the bound says.
        (2, 1, 0.5, 3.0, 0.0, {"compute": 18.0, "keep": 12.75, "write": 0.5 * 6.5 + 9.0}),
        # Records above the frozen layers hold trained layers: of no use.
        (2, 3, 1.0, 3.0, 1.0, {"compute": 18.0, "write": 10.0}),
        # The last epoch: nothing is read again.
        (2, 1, 1.0, 1.0, 1.0, {"compute": 6.0, "keep": 2.5}),
        (2, 0, 0.0, 0.5, 1.0, {"compute": 3.0}),
        # Nothing frozen.
        (0, 0, 0.0, 3.0, 1.0, {"compute": 6.0}),
    ],
)
def test_costs_by_hand(frozen, level, share, epochs, fits, expected):
    decision = decided(COSTS, frozen, (level, share, fits), epochs)
    assert decision.seconds == pytest.approx(expected)
    cheapest = min(expected, key=expected.get)
    assert decision.name == cheapest
    assert decision.level == {"compute": 0, "keep": level, "write": frozen}[cheapest]


def test_writing_that_does_not_pay_leaves_rows_as_they_are():
    # 1.5 more epochs save 1.5 x 0.5 of one layer of 0.5; writing costs 3.
    costs = Storing(prefix=(2.0, 9.0, 9.5), read=0.5, write=3.0)
    decision = decided(costs, 2, (1, 1.0), 2.5)
    assert (decision.name, decision.level) == ("keep", 1)
    assert decision.seconds["write"] - decision.seconds["keep"] == pytest.approx((1.0 + 3.0 + 1.5 * 0.5) - 2.5 * 1.0)


def test_equal_choices_go_to_computing():
    costs = Storing(prefix=(1.0, 1.0), read=1.0, write=0.0)
    decision = decided(costs, 1, (1, 1.0), 2.0)
    assert decision.seconds == {"compute": 2.0, "keep": 2.0}
    assert not decision.use


def test_off_never_caches():
    decision = decided(COSTS, 2, (1, 1.0), 10.0, "off")
    assert (decision.name, decision.level) == ("compute", 0)
    assert "off" in decision.reason


def test_on_caches_wherever_rows_are_read_again():
    slow = Storing(prefix=COSTS.prefix, read=100.0, write=100.0)
    for level, share in ((0, 0.0), (1, 1.0)):
        assert not decided(slow, 2, (level, share), 3.0).use
        forced = decided(slow, 2, (level, share), 3.0, "on")
        assert (forced.name, forced.level) == ("write", 2)
    last = decided(slow, 2, (1, 1.0), 1.0, "on")
    assert (last.name, last.level) == ("keep", 1)
    assert "with 1 epoch left" in last.reason
    assert not decided(slow, 2, (0, 0.0), 1.0, "on").use
    assert not decided(slow, 0, (0, 0.0), 3.0, "on").use


# ---- laws ----

seconds = st.floats(0, 10)
shares = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
NUM_LAYERS = 4


@st.composite
def measured(draw):
    layers = draw(st.lists(seconds, min_size=NUM_LAYERS + 1, max_size=NUM_LAYERS + 1))
    prefix = tuple(sum(layers[: depth + 1]) for depth in range(NUM_LAYERS + 1))
    return Storing(prefix, draw(seconds), draw(seconds))


@st.composite
def stores(draw):
    """Frozen layers, and level and share of what is stored."""
    frozen = draw(st.integers(0, NUM_LAYERS))
    level = draw(st.integers(0, frozen))
    return frozen, level, draw(shares) if level else 0.0


@given(measured(), stores(), st.floats(1, 20), st.floats(0, 20), shares)
def test_more_epochs_never_turn_writing_off(costs, store, epochs, more, fits):
    assume(decided(costs, store[0], (*store[1:], fits), epochs).name == "write")
    later = decided(costs, store[0], (*store[1:], fits), epochs + more)
    # With a margin, for where two choices are equal but for rounding.
    assert later.seconds["write"] <= min(later.seconds.values()) + 1e-6


@given(measured(), stores(), st.floats(0.5, 20), shares)
def test_a_read_that_is_slower_than_computing_turns_the_use_off(costs, store, epochs, fits):
    frozen = store[0]
    throttled = Storing(costs.prefix, costs.prefix[frozen] + 0.1, costs.write)
    assert not decided(throttled, store[0], (*store[1:], fits), epochs).use


@given(measured(), stores(), st.floats(0, 20), shares)
def test_the_cheapest_is_taken(costs, store, epochs, fits):
    decision = decided(costs, store[0], (*store[1:], fits), epochs)
    assert decision.seconds[decision.name] == pytest.approx(min(decision.seconds.values()))
    assert epochs > 1 or decision.name != "write"


NUM_SAMPLES = 4
"""So that the shares above are whole numbers of samples."""


def simulate(costs, choice, frozen, level, share, epochs, fits):
    """Mean seconds of a sample, walking through every epoch sample by sample."""
    num_stored, num_fitting = round(share * NUM_SAMPLES), round(max(share, fits) * NUM_SAMPLES)
    levels = [level] * num_stored + [0] * (NUM_SAMPLES - num_stored)
    total = 0.0
    for _ in range(epochs):
        for sample in range(NUM_SAMPLES):
            if choice == "compute" or levels[sample] == 0:
                total += costs.prefix[frozen]
            else:
                total += costs.read + costs.prefix[frozen] - costs.prefix[levels[sample]]
            stored_at = {"compute": 0, "keep": level, "write": frozen}[choice]
            if stored_at and sample < num_fitting and levels[sample] != stored_at:
                total += costs.write
                levels[sample] = stored_at
    return total / NUM_SAMPLES


@given(measured(), stores(), st.integers(1, 6), shares)
def test_costs_are_those_of_a_simulation(costs, store, epochs, fits):
    decision = decided(costs, store[0], (*store[1:], fits), float(epochs))
    assert "compute" in decision.seconds
    for choice, cost in decision.seconds.items():
        assert cost == pytest.approx(simulate(costs, choice, *store, epochs, fits), rel=1e-9, abs=1e-9)


# ---- beside a device that leaves the host free ----


def pass_of_a_device(read: float, active: float, num_steps: int, num_at_once: int) -> float:
    """Seconds of a pass whose steps take so many batches, walking through them: a thread reads one batch ahead."""
    device = reader = 0.0
    for _ in range(num_steps):
        # They are taken once all are read and the device is free; from then on the thread reads the next one.
        device = reader = max(device, reader + read) + (num_at_once - 1) * read
        device += num_at_once * active
    return device


@given(seconds, seconds, seconds, st.integers(1, 40), st.integers(1, 4))
def test_what_reading_costs_beside_a_device_is_what_a_pass_takes_longer(read, write, active, num_steps, num_at_once):
    measured = Storing((1.0, 2.0), read, write, is_apart=True, num_at_once=num_at_once)
    costs, num_batches = measured.beside(active), num_steps * num_at_once
    # But for the first batch, for which there is nothing to read it beside.
    more = pass_of_a_device(read, active, num_steps, num_at_once) - num_batches * active
    assert more - min(read, num_at_once * active) == pytest.approx(num_batches * costs.reading(), abs=1e-9)
    assert costs.writing(1.0) == max(0.0, write - active - 1.0)
    on_cpu = replace(measured, is_apart=False).beside(active)
    assert (on_cpu.reading(1.0), on_cpu.writing(1.0)) == (read, write), "what reads takes a core from what computes"


def test_a_record_is_written_while_the_frozen_layers_compute_too():
    """Computing takes 2 x 4. Storing takes 4 once, if the 5 of a record are hidden behind 4 and 1 of computation."""
    costs = Storing((0.0, 4.0), read=1.0, write=5.0, is_apart=True).beside(1.0)
    decision = decided(costs, 1, (), 2.0)
    assert decision.seconds == {"compute": 8.0, "write": 4.0} and decision.name == "write"
    # Each batch of the first pass occupies the device for 5 s, and writing the last one for as long.
    assert [each.record_seconds for each in passes_ahead(replace(costs, steps_per_epoch=10), 1, 1, 20)] == [0.0, 0.0]


def test_stages_share_the_computation_but_one_of_them_reads():
    """On one device the frozen layer takes 2 s and a record 1; of four stages the layer takes half a second each."""
    costs = Storing((0.0, 2.0), read=1.0, write=0.0)
    assert decided(costs.beside(4.0), 1, (), 10.0).use
    decision = decided(costs.beside(4.0, 4), 1, (), 10.0)
    assert decision.seconds["compute"] == 10 * 0.5 and not decision.use
    apart = replace(costs, is_apart=True)
    assert apart.beside(4.0, 2).reading() == 0.0 and apart.beside(2.0, 4).reading() == 0.5


def test_what_is_measured_now_is_not_what_follows():
    """All is stored, a record takes 4 s: nothing beside 5 s of computation now, 2 s beside 2 when more has frozen."""
    planner = planner_of(StorageSpeed(4.0, 0.0), "on", is_apart=True)
    planner.follow(SimpleNamespace(store=SimpleNamespace(dropped=None), stored_share=lambda _: 1.0), [0])
    storing = planner.storing(1, 5.0)
    assert (storing.level, storing.share, storing.now) == (1, 1.0, 0.0)
    ways = ways_of_storing(replace(storing, prefix=(0.0, 1.0, 2.0)).beside(2.0), 2, 40)
    assert ways["write"].passes[-1].record_seconds == 2.0


def test_what_is_kept_is_read_beside_the_frozen_layers_above_it():
    """Two layers are frozen, one is stored: a record takes 4 s, of which the second layer hides all."""
    costs = Storing((3.0, 4.0, 8.0), read=4.0, write=9.0, is_apart=True)
    decision = decided(costs, 2, (1, 1.0), 6.0)
    # 6 x 4 of computation; anew 4 and 5 of writing that nothing hides, then 5 x 4.
    assert decision.seconds == {"compute": 6 * 8.0, "keep": 24.0, "write": 4.0 + 5.0 + 5 * 4.0}
    assert (decision.name, decision.level) == ("keep", 1)


def test_records_of_layers_that_unfreeze_are_not_read_again():
    costs = Storing((0.0, 1.0, 2.0), read=0.5, write=0.25, level=5, share=1.0, steps_per_epoch=10)
    assert passes_ahead(costs, 2, 2, 30) == (
        Pass(10, record_seconds=0.25),
        Pass(20, 2, 1.0, 0.5),
    )


def searched(planner: CachePlanner, forward: float, above: float, steps: int = 40) -> Choice:
    """What a run with its one layer frozen decides: `forward` for the layer, `above` for everything over it."""
    nothing = (0.0,) * 4
    blocks = block_costs((0.0, forward, 0.0, above), nothing, nothing, (1,) * 4, activation_bytes=nothing)
    layout = Layout(1, 0, 1, 1, (0, 4), 1, "1f1b")
    storing = planner.storing()
    choice = search(layout, 1, steps, PlanInputs(blocks, Overheads(), 1, "throughput", tuple(range(5)), 1e9), storing)
    planner.report(0, choice, steps, storing, blocks)
    return choice


def planner_of(speed: StorageSpeed, mode: str = "auto", size: StoreSize | None = None, **options) -> CachePlanner:
    written = options.pop("write", lambda *_, **__: None)
    return CachePlanner(mode, lambda: speed, size or StoreSize(1.0, 0.0, 2.0), 10, written, **options)


def test_an_evaluation_takes_one_batch_after_the_other_whatever_a_step_accumulates():
    """A record takes 4 s to read, its layers 2, the forward above 3: 1 s is left, or 3.5 of the eight of a step."""
    planner = planner_of(StorageSpeed(4.0, 0.0), is_apart=True, num_at_once=8)
    assert not searched(planner, 2.0, 9.0).way.use
    assert planner.pays_for_evaluation(1, passes_left=20, fits_share=1.0)


@pytest.mark.parametrize(("is_apart", "active", "level"), [(True, 9.0, 1), (True, 1.0, 0), (False, 9.0, 0)])
def test_records_that_are_read_while_a_device_computes_are_stored(is_apart, active, level):
    """A record takes 4 s to read, the prefix 2: it pays where the layers above take longer than reading."""
    written = []

    def write(kind, **fields):
        written.append(fields)

    planner = planner_of(StorageSpeed(4.0, 5.0), is_apart=is_apart, write=write)
    decision = searched(planner, 2.0, active).way
    assert decision.use == bool(level) and decision.level == level
    assert (written[0]["read_s"], written[0]["write_s"]) == (4.0, 5.0), "as measured"
    # Of an evaluation the forward above takes 3 s or less, so that a record takes 1 s of its own or more.
    assert planner.pays_for_evaluation(1, passes_left=20, fits_share=1.0) == bool(level)


@pytest.mark.parametrize(
    ("size", "mode", "level", "told"),
    [
        ((4.2e6, 1e3, 9e9), "on", "INFO", "needs 4.2 MB on this node; the activation cache may take 9.0 GB."),
        ((1e9, 0.0, 0.75e9), "on", "INFO", "the activation cache may take 750 MB: 75% of them are stored."),
        (
            (390e9, 0.0, 38e9),
            "on",
            "WARNING",
            "may take 38 GB: 10% of them are stored. The others are computed in every",
        ),
        ((1e9, 0.0, 1e9), "off", "", ""),
    ],
)
def test_bytes_and_share_of_a_store_that_is_used_are_told_once(
    size: tuple[float, float, float], mode: str, level: str, told: str, caplog: pytest.LogCaptureFixture
):
    planner = planner_of(StorageSpeed(0.01, 0.02), mode, StoreSize(*size))
    with caplog.at_level("INFO", "hf_pipetransformer"):
        for steps in (90, 80):
            searched(planner, 2.0, 1.0, steps=steps)
    found = [record for record in caplog.records if "A record of every sample needs" in record.msg]
    assert [record.levelname for record in found] == ([level] if level else [])
    assert all(told in record.getMessage() for record in found)
    assert ("Raise activation_cache_max_gb" in caplog.text) == (level == "WARNING")


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_epochs_of_a_record_over_nodes_are_those_of_samples_that_are_dealt(num_nodes: int) -> None:
    generator = np.random.default_rng(0)
    epochs, num_samples = 4, 20_000
    seen, written = np.zeros((num_nodes, num_samples), bool), 0
    for _ in range(epochs):
        owners = generator.integers(num_nodes, size=num_samples)
        written += int((~seen[owners, np.arange(num_samples)]).sum())
        seen[owners, np.arange(num_samples)] = True
    assert epochs_of_a_record(epochs, num_nodes) == pytest.approx(epochs * num_samples / written, rel=0.02)
    assert epochs_of_a_record(0, num_nodes) == 0
