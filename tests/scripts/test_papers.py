"""The papers' tables: simulated speed-ups within bounds counted here, the page, and errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from bench import simulator, tables, terapipe
from bench.measure import REPOSITORY
from bench.papers import SETTINGS, Job, Parts, fitted


CIFAR = SETTINGS["CIFAR-100"]
LAYERS, EPOCHS = 12, 10
FROZEN = [math.ceil(LAYERS * (1 - (2 / 3) ** epoch) - 1e-9) for epoch in range(EPOCHS)]
"""Layers frozen in each epoch by the bound of Eq. 1 with alpha = 1/3, rounded up."""


def forwards(frozen: int, computed: int) -> int:
    """Forwards of a layer that a sample's step takes: three for an active one, one for each that is computed anew."""
    return 3 * (LAYERS - frozen) - (0 < frozen < LAYERS) + computed


@pytest.mark.parametrize(
    ("cache", "computed"),
    [("off", FROZEN), ("auto", [new - old for old, new in zip([0, *FROZEN], FROZEN, strict=False)])],
)
def test_a_run_is_as_fast_as_the_count_of_forwards_and_the_bubble_allow(cache: str, computed: list[int]) -> None:
    job = Job(CIFAR)
    found = job.run(parts=Parts(cache=cache)).speedup
    count = EPOCHS * forwards(0, 0) / sum(map(forwards, FROZEN, computed))
    k, m = job.start.pipeline_size, job.start.num_microbatches
    # Stages of a static pipeline have whole sublayers: the slowest of eight may have half a layer more than the mean.
    slowest = (LAYERS / k + 0.5) / (LAYERS / k)
    assert 0.75 * count < found < count * (m + k - 1) / m * slowest


def test_every_mechanism_adds_to_the_speed() -> None:
    job = Job(CIFAR)
    freeze, replicas, all_of_them = (
        job.run(parts=parts).speedup for parts in (Parts(False, False, "off"), Parts(cache="off"), Parts())
    )
    assert 1 < freeze < replicas < all_of_them
    # Without stages to pack, backwards are what freezing saves: at most two of three parts of the run.
    assert freeze < 3


def test_a_fitted_device_takes_the_papers_time_for_the_baseline() -> None:
    job = fitted(CIFAR)
    assert job.static_seconds == pytest.approx(3600 * CIFAR.hours[0], rel=0.05)
    assert 0 < job.utilization < 1


def test_slices_gain_at_most_the_bubble_of_whole_sequences() -> None:
    setting = replace(terapipe.SETTINGS["(10) GPT3-175B"], length=512)
    whole, sliced, (count, lengths) = terapipe.compare(setting)
    assert sum(lengths) == setting.length
    assert setting.samples % count == 0
    assert 1 <= whole / sliced < (setting.samples + setting.stages - 1) / setting.samples


def test_a_table_has_a_line_for_each_row() -> None:
    rows = [{"what": "a", "ours": 1.23456}, {"what": "b", "ours": None}]
    found = tables.rows_as_table(rows)
    assert found.splitlines() == ["| what | ours |", "| --- | --- |", "| a | 1.235 |", "| b |  |"]


def test_errors_are_relative_to_what_was_measured() -> None:
    pairs = [simulator.Pair("step: gpipe", name, *each) for name, each in (("a", (1.1, 1.0)), ("b", (0.5, 1.0)))]
    row = simulator.summarized(pairs)["errors"][0]
    assert (row["pairs"], row["median error, %"], row["worst, %"], row["where"]) == (2, 30.0, -50.0, "b")
    assert row["within 10 and 20 %"] == "no"


def test_pairs_of_the_committed_files_are_those_figures() -> None:
    pairs = [pair for source in simulator.SOURCES for pair in source()]
    plan = json.loads((REPOSITORY / "benchmarks" / "plan.json").read_text())["MiniLM, K=1"]
    [own] = [each for each in pairs if (each.kind, each.name) == ("step: a plan with measured blocks", "MiniLM, K=1")]
    assert own.error + 1 == pytest.approx(plan["seconds of a step, --plan_only"]["ratio"], abs=1e-3)
    assert {each.kind for each in pairs} >= set(simulator.IS_PREDICTED)
    assert all(each.predicted > 0 and each.measured > 0 for each in pairs)
