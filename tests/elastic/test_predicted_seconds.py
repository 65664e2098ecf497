"""Predicted seconds of the rest of a run, as freeze policies see them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cache.planner import CachePlanner, StorageSpeed
from hf_pipetransformer.cache.store import StoreSize
from hf_pipetransformer.elastic.decisions import Decisions
from hf_pipetransformer.freeze.policy import MEASUREMENTS, DecisionClock, FreezePolicy, FreezeSignal
from hf_pipetransformer.planning.costs import Overheads, predict_step
from hf_pipetransformer.planning.forecast import seconds_left
from hf_pipetransformer.planning.planner import PlanInputs
from hf_pipetransformer.planning.storing import CacheCosts, Pass, StoreContents, passes_ahead
from hf_pipetransformer.schedules.layout import Layout
from tests.planning.test_planning import costs_of, layout_of, rules_for
from tests.support.models import build_model, collate, make_dataset


L = 4


# ---- the rest of a run

# Seconds: a stored row takes 0.5 to read and 3 to write, a sample 1.
COSTS = CacheCosts(prefix=(1.0, 3.0, 5.0), input=1.0, read=0.5, write=3.0)


@pytest.mark.parametrize(
    ("level", "stored", "share", "fits", "steps", "expected"),
    [
        # Nothing is stored, before and after.
        (0, 0, 0.0, 1.0, 30, [Pass(30)]),
        # The first pass of ten steps writes, the others read and need no sample.
        (2, 0, 0.0, 1.0, 30, [Pass(10, record_seconds=3.0), Pass(20, 2, 1.0, -0.5)]),
        # Half fits.
        (2, 0, 0.0, 0.5, 30, [Pass(10, record_seconds=1.5), Pass(20, 2, 0.5, -0.25)]),
        # Everything is stored a layer below: read and written again.
        (2, 1, 1.0, 1.0, 30, [Pass(10, 1, 1.0, 3.0), Pass(20, 2, 1.0, 0.0)]),
        # Everything is stored here already.
        (2, 2, 1.0, 1.0, 30, [Pass(10, 2, 1.0, 0.0), Pass(20, 2, 1.0, 0.0)]),
        # Half is: the other half is computed and written.
        (2, 2, 0.5, 1.0, 30, [Pass(10, 2, 0.5, 1.5), Pass(20, 2, 1.0, -0.25)]),
        # Less than a pass is left, or rows are given up.
        (2, 0, 0.0, 1.0, 4, [Pass(4, record_seconds=3.0)]),
        (0, 2, 1.0, 1.0, 30, [Pass(30, record_seconds=0.5)]),
    ],
)
def test_the_passes_of_a_run_by_hand(
    level: int, stored: int, share: float, fits: float, steps: int, expected: list[Pass]
) -> None:
    assert list(passes_ahead(COSTS, level, StoreContents(stored, share, fits), steps, 10)) == expected


def test_the_rest_of_a_run_by_hand() -> None:
    """One of two layers frozen, a sample takes 11.4 s, 8.3 s with its row; 8 samples a step, and 5 s beside them."""
    layout = replace(layout_of(2, 1, 1), num_frozen_layers=1)
    seconds = {"costs": costs_of(2), "overheads": Overheads(per_step=5.0), "samples_per_device": 8}
    computed, read = 8 * 11.4 + 5, 8 * 8.3 + 5
    assert seconds_left(layout, [Pass(30)], **seconds) == pytest.approx(30 * computed)
    passes = [Pass(10, record_seconds=0.25), Pass(20, 1, 0.75, -0.125)]
    expected = 10 * (computed + 2) + 20 * (0.75 * read + 0.25 * computed - 1)
    assert seconds_left(layout, passes, **seconds) == pytest.approx(expected)
    # Reading can save no more than a step takes beside its computation.
    assert seconds_left(layout, [Pass(1, record_seconds=-7.0)], **seconds) == pytest.approx(8 * 11.4)


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

    return CachePlanner(mode, 0.0, lambda: StorageSpeed(0.01, 0.02), StoreSize(2.0, 1.0, 2.0), 10, write)


def decisions_of(
    folder: Path, policy: FreezePolicy, layout: Layout, cache: CachePlanner | None, **overheads: Any
) -> Decisions:
    args = PipeTransformerArguments(output_dir=str(folder), use_cpu=True, report_to="none", freeze_min_active_layers=1)
    rules = rules_for(L, device_bytes=1e12, initial_size=layout.pipeline_size)
    inputs = PlanInputs(costs_of(L), Overheads(per_step=1.0, **overheads), rules, samples_per_device=8)
    clock, frozen = DecisionClock(10, 0, 40), layout.num_frozen_layers
    return Decisions(policy, clock, args, inputs, frozen, layout.num_stages, {}, lambda *_, **__: None, cache)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_the_seconds_are_those_of_the_layouts_and_stores_that_would_follow(tmp_path: Path, num_stages: int) -> None:
    layout, written = layout_of(L, num_stages, num_stages), list[Any]()
    policy = Asks("predicted_seconds")
    decisions = decisions_of(tmp_path, policy, layout, planner(written))
    answer = decisions.freeze(20, layout, [], {}, learning_rate=0.25)
    (seen,) = policy.seen
    assert answer["change"] is None
    assert seen.learning_rate == 0.25
    assert written == [], "nothing was decided about the cache"
    assert seen.predicted_seconds[L] == 0, "one layer must stay active"
    costs, overheads = costs_of(L), Overheads(per_step=1.0)
    expected = 20 * predict_step(layout, costs, overheads, 8 * num_stages).seconds
    assert seen.predicted_seconds[0] == pytest.approx(expected)
    for num_frozen in range(1, L):
        plan = decisions._plan(num_frozen, layout, 20)
        assert plan.layout.cache_level == num_frozen, "one more epoch reads"
        samples = 8 * plan.layout.pipeline_size
        first = predict_step(replace(plan.layout, cache_level=0), costs, overheads, samples).seconds + samples * 0.02
        second = plan.prediction.seconds + samples * 0.01
        assert seen.predicted_seconds[num_frozen] == pytest.approx(10 * (first + second))
    assert list(seen.predicted_seconds[:L]) == sorted(seen.predicted_seconds[:L], reverse=True)


def test_pipelines_over_nodes_decide_on_no_store_until_they_fit_one(tmp_path: Path) -> None:
    layout, written = layout_of(L, 4, 4), list[Any]()
    # An expensive reduction keeps the pipeline on both nodes.
    over_nodes = {"node_size": 2, "reduction_per_byte": 1e6}
    policy = Asks("predicted_seconds", wants=2)
    decisions = decisions_of(tmp_path, policy, layout, planner(written), **over_nodes)
    change = decisions.freeze(20, layout, [], {})["change"]
    found = Layout.from_event(change["layout"])
    assert (found.pipeline_size, found.num_frozen_layers, found.cache_level) == (4, 2, 0)
    assert written == [], "nothing was decided about the cache"
    overheads = decisions.inputs.overheads
    expected = 20 * predict_step(found, costs_of(L), overheads, 32).seconds
    assert policy.seen[0].predicted_seconds[2] == pytest.approx(expected), "and no records are counted on"
    # Shorter pipelines store, as on one node.
    decisions = decisions_of(tmp_path, policy, layout, planner(written), node_size=2)
    found = Layout.from_event(decisions.freeze(20, layout, [], {})["change"]["layout"])
    assert found.pipeline_size <= 2 and found.cache_level == 2
    assert [fields["level"] for _, fields in written] == [2]


def test_a_pipeline_that_grows_over_nodes_again_says_that_it_stores_no_more(tmp_path: Path) -> None:
    written, noted = list[Any](), list[Any]()
    decisions = decisions_of(
        tmp_path, Asks(), layout_of(L, 4, 4), planner(written), node_size=2, reduction_per_byte=1e6
    )
    decisions.write = lambda kind, **fields: noted.append((kind, fields["what"], fields["reason"]))
    stored = replace(layout_of(L, 1, 4), num_frozen_layers=2, cache_level=2)
    found = decisions._plan(1, stored, 20).layout
    assert (found.pipeline_size, found.cache_level, found.fresh_share) == (4, 0, 0.0)
    assert written == []
    ((kind, what, reason),) = noted
    assert (kind, what) == ("cache", "off") and "spans nodes (K=4 on nodes of 2 processes)" in reason


def test_what_has_come_about_is_predicted_as_it_was_foreseen(tmp_path: Path) -> None:
    """Frozen at step 20, the same seconds are left but for what the store holds."""
    before, policy = layout_of(L, 1, 1), Asks("predicted_seconds", wants=2)
    decisions = decisions_of(tmp_path, policy, before, planner([]))
    decisions.freeze(20, before, [], {})
    after = replace(before, num_frozen_layers=2, cache_level=2)
    decisions.freeze(20, after, [], {})
    foreseen, found = policy.seen
    assert found.predicted_seconds[:2] == (0.0, 0.0)
    assert found.predicted_seconds[2] == pytest.approx(foreseen.predicted_seconds[2])


def test_seconds_are_predicted_for_who_asks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_args: Any) -> Any:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(Decisions, "_predicted_seconds", forbidden)
    layout = layout_of(L, 1, 1)
    assert "predicted_seconds" in MEASUREMENTS
    for name in MEASUREMENTS:
        policy = Asks(name)
        decisions = decisions_of(tmp_path, policy, layout, None)
        if name == "predicted_seconds":
            with pytest.raises(AssertionError, match="nobody asked"):
                decisions.freeze(20, layout, [], {})
        else:
            decisions.freeze(20, layout, [], {})
            assert policy.seen[0].predicted_seconds == ()


def test_a_deterministic_run_refuses_a_policy_that_reads_measured_times(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "full_determinism": True}
    parts = {"train_dataset": make_dataset("bert_sequence", 4), "data_collator": collate}
    model = build_model("bert_sequence")
    with pytest.raises(ValueError, match=r"full_determinism=True: the policy 'custom' decides by measured times"):
        PipeTransformerTrainer(model, PipeTransformerArguments(**options), policy=Asks("predicted_seconds"), **parts)
