"""Decisions of rank 0: predicted seconds of the rest of a run, and what is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.cache.pricing import CachePlanner
from hf_pipetransformer.cache.storage import StorageSpeed
from hf_pipetransformer.cache.store import StoreSize
from hf_pipetransformer.elastic.decisions import Decisions
from hf_pipetransformer.freeze.policy import DecisionClock, FreezePolicy, FreezeSignal
from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.planning.layouts import PlanInputs
from hf_pipetransformer.planning.search import seconds_left
from hf_pipetransformer.planning.storing import Pass, Storing, passes_ahead
from hf_pipetransformer.schedules.layout import Layout
from tests.planning.test_planning import costs_of, layout_of, rules_for


L = 4


# ---- the rest of a run

# Seconds: a stored row takes 0.5 to read and 3 to write.
COSTS = Storing(prefix=(1.0, 3.0, 5.0), read=0.5, write=3.0, steps_per_epoch=10)


@pytest.mark.parametrize(
    ("level", "stored", "share", "fits", "steps", "expected"),
    [
        # Nothing is stored, before and after.
        (0, 0, 0.0, 1.0, 30, [Pass(30)]),
        # The first pass of ten steps writes, the others read.
        (2, 0, 0.0, 1.0, 30, [Pass(10, record_seconds=3.0), Pass(20, 2, 1.0, 0.5)]),
        # Half fits.
        (2, 0, 0.0, 0.5, 30, [Pass(10, record_seconds=1.5), Pass(20, 2, 0.5, 0.25)]),
        # Everything is stored a layer below: read and written again.
        (2, 1, 1.0, 1.0, 30, [Pass(10, 1, 1.0, 3.5), Pass(20, 2, 1.0, 0.5)]),
        # Everything is stored here already.
        (2, 2, 1.0, 1.0, 30, [Pass(10, 2, 1.0, 0.5), Pass(20, 2, 1.0, 0.5)]),
        # Half is: the other half is computed and written.
        (2, 2, 0.5, 1.0, 30, [Pass(10, 2, 0.5, 1.75), Pass(20, 2, 1.0, 0.5)]),
        # Less than a pass is left, or rows are given up.
        (2, 0, 0.0, 1.0, 4, [Pass(4, record_seconds=3.0)]),
        (0, 2, 1.0, 1.0, 30, [Pass(30)]),
    ],
)
def test_the_passes_of_a_run_by_hand(
    level: int, stored: int, share: float, fits: float, steps: int, expected: list[Pass]
) -> None:
    storing = replace(COSTS, level=stored, share=share, fits_share=fits)
    assert list(passes_ahead(storing, 2, level, steps)) == expected


def test_the_rest_of_a_run_by_hand() -> None:
    """One of two layers frozen, a sample takes 11.4 s, 8.3 s with its row; 8 samples a step, and 5 s beside them."""
    layout = replace(layout_of(2, 1, 1), num_frozen_layers=1)
    inputs = PlanInputs(costs_of(2), Overheads(per_step=5.0), 8, **rules_for(2))
    computed, read = 8 * 11.4 + 5, 8 * 8.3 + 5
    assert seconds_left(layout, [Pass(30)], inputs) == pytest.approx(30 * computed)
    passes = [Pass(10, record_seconds=0.25), Pass(20, 1, 0.75, 0.125)]
    expected = 10 * (computed + 2) + 20 * (0.75 * read + 0.25 * computed + 1)
    assert seconds_left(layout, passes, inputs) == pytest.approx(expected)


# ---- who asks, and what is told


class Wants(FreezePolicy):
    """Always wants as many layers frozen."""

    def __init__(self, wants: int) -> None:
        self.wants = wants

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        return self.wants


def planner(written: list[Any], mode: str = "auto") -> CachePlanner:
    """Rows cost next to nothing, an epoch has ten steps."""

    def write(kind: str, **fields: Any) -> None:
        written.append((kind, fields))

    return CachePlanner(mode, lambda: StorageSpeed(0.01, 0.02), StoreSize(2.0, 1.0, 2.0), 10, write)


def decisions_of(
    folder: Path, policy: FreezePolicy, layout: Layout, cache: CachePlanner | None, **overheads: Any
) -> Decisions:
    args = PipeTransformerArguments(output_dir=str(folder), use_cpu=True, report_to="none", freeze_min_active_layers=1)
    rules = rules_for(L, device_bytes=1e12, initial_size=layout.pipeline_size)
    inputs = PlanInputs(costs_of(L), Overheads(per_step=1.0, **overheads), 8, **rules)
    clock, frozen = DecisionClock(10, 0, 40), layout.num_frozen_layers
    return Decisions(policy, clock, args, inputs, frozen, {}, lambda *_, **__: None, cache)


def test_pipelines_over_nodes_decide_on_no_store_until_they_fit_one(tmp_path: Path) -> None:
    layout, written = layout_of(L, 4, 4), list[Any]()
    # An expensive reduction keeps the pipeline on both nodes.
    over_nodes = {"node_size": 2, "reduction_per_byte": 1e6}
    decisions = decisions_of(tmp_path, Wants(2), layout, planner(written), **over_nodes)
    found = Layout.from_event(decisions.freeze(20, layout, [], ())["change"]["layout"])
    assert (found.pipeline_size, found.num_frozen_layers, found.cache_level) == (4, 2, 0)
    assert written == [], "nothing was decided about the cache"
    # Shorter pipelines store, as on one node.
    decisions = decisions_of(tmp_path, Wants(2), layout, planner(written), node_size=2)
    found = Layout.from_event(decisions.freeze(20, layout, [], ())["change"]["layout"])
    assert found.pipeline_size <= 2 and found.cache_level == 2
    assert [fields["level"] for _, fields in written] == [2]


def test_a_pipeline_that_grows_over_nodes_again_says_that_it_stores_no_more(tmp_path: Path) -> None:
    written, noted = list[Any](), list[Any]()
    decisions = decisions_of(
        tmp_path, Wants(0), layout_of(L, 4, 4), planner(written), node_size=2, reduction_per_byte=1e6
    )
    decisions.write = lambda kind, **fields: noted.append((kind, fields["what"], fields["reason"]))
    stored = replace(layout_of(L, 1, 4), num_frozen_layers=2, cache_level=2)
    found = decisions._search(1, stored, 20).layout
    assert (found.pipeline_size, found.cache_level) == (4, 0)
    assert written == []
    ((kind, what, reason),) = noted
    assert (kind, what) == ("cache", "off") and "spans nodes (K=4 on nodes of 2 processes)" in reason
