"""Rank 0 decides: what the other ranks measured on themselves reaches a layout by no way but its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.comm.transfers import pack, unpack
from hf_pipetransformer.elastic import controller, decisions
from hf_pipetransformer.elastic.controller import Change, LayoutController
from hf_pipetransformer.elastic.decisions import Decisions, Write
from hf_pipetransformer.engine import timing
from hf_pipetransformer.engine.timing import MEASURED_STEPS, PARTS, WARMUP_STEPS, StepMeter
from hf_pipetransformer.freeze.policy import DecisionClock, FreezePolicy, FreezeSignal
from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.planning.layouts import PlanInputs
from hf_pipetransformer.planning.storing import Storing
from hf_pipetransformer.report import duration
from hf_pipetransformer.report.events import EVENTS_FILE, EventLog, read_known_microbatches
from hf_pipetransformer.schedules.layout import Layout
from tests.planning.test_planning import costs_of, layout_of, rules_for


L, WORLD_SIZE = 4, 4


class Heard(Topology):
    """One rank of four, without the others: rank 0 notes what it tells them, any other one hears that.

    Args:
        rank: this one.
        told: what rank 0 says, in turn.
    """

    def __init__(self, rank: int, told: list[Any]) -> None:
        self.rank, self.world_size, self.told = rank, WORLD_SIZE, told

    def broadcast(self, value: Any, source: int = 0) -> Any:
        if self.rank == 0:
            self.told.append(unpack(pack(value)))
            return value
        return self.told.pop(0)

    def gather(self, value: Any) -> list[Any]:
        return [value] * WORLD_SIZE

    def together(self, call: Callable[[], Any]) -> Any:
        return call()


class Meter:
    """Steps of one length, all measured; it differs from rank to rank."""

    def __init__(self, seconds: float) -> None:
        self.device, self.last_seconds, self.num_tokens = torch.device("cpu"), seconds, 8
        self.is_done = True

    @property
    def latest_seconds(self) -> float:
        return self.last_seconds

    def medians(self) -> dict[str, float]:
        return dict.fromkeys(PARTS, self.last_seconds) | {"samples": 8}

    def reset(self, skip: int = 0) -> None:
        self.last_seconds *= 0.7

    def begin_step(self) -> None:
        self.last_seconds *= 0.9

    def end_step(self) -> bool:
        return True


def stage_of(layout: Layout, rank: int = 0, seconds: float = 1.0) -> Any:
    """What a controller reads of a stage."""
    settings = SimpleNamespace(device=torch.device("cpu"), meter=Meter(seconds))
    return SimpleNamespace(rank=rank, layout=layout, settings=settings)


def ignore(*_: Any, **__: Any) -> None:
    pass


def controller_of(
    folder: Path, stage: Any, told: list[Any], policy: FreezePolicy, clock: DecisionClock, cache: Any = None,
    replay: dict[int, Layout] | None = None, write: Write = ignore, device_bytes: float = 1e12, **options: Any,
) -> LayoutController:  # fmt: skip
    args = PipeTransformerArguments(output_dir=str(folder), use_cpu=True, report_to="none", freeze_min_active_layers=0)
    rules = rules_for(L, device_bytes=device_bytes)
    inputs = PlanInputs(costs_of(L), Overheads(), 16, **rules, **options)
    frozen = stage.layout.num_frozen_layers
    decided = Decisions(policy, clock, args, inputs, frozen, {}, ignore, cache)
    run = SimpleNamespace(learning_rate=0.0, state=SimpleNamespace(max_steps=1000, global_step=400))
    journal = SimpleNamespace(write=write)
    context: Any = SimpleNamespace(topology=Heard(stage.rank, told), run=run, journal=journal)
    return LayoutController(context, decided, stage, replay)


class OneMore(FreezePolicy):
    """One layer more each time, and then at other steps than before.

    Args:
        due: the steps at first.
    """

    needs = frozenset()

    def __init__(self, due: tuple[int, ...]) -> None:
        self.num_asked, self.due = 0, due

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        self.num_asked += 1
        return signal.num_frozen + 1

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return step in self.due if self.num_asked < 2 else step == 30


def forbidden(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("planned by a rank that does not decide")


def run(
    folder: Path,
    rank: int,
    told: list[Any],
    device_bytes: float,
    steps: int = 40,
    due: tuple[int, ...] = (4, 9),
    write: Write = ignore,
) -> list[Change]:
    """The changes of a run on one rank."""
    policy = OneMore(due)
    if rank:
        policy.target_num_frozen = policy.is_due = policy.explain = forbidden
    stage, clock = stage_of(layout_of(L, 4, WORLD_SIZE), rank, 1.0 + rank), DecisionClock(1, 0, steps)
    watcher = controller_of(folder, stage, told, policy, clock, write=write, device_bytes=device_bytes)
    changes = []
    for step in range(steps):
        change = watcher.change_before(step, stage)
        if change is not None:
            changes.append(change)
            stage.layout = change.layout
        watcher.meter.begin_step()
        watcher.end_step()
    return changes


def test_ranks_that_measure_otherwise_take_rank_0s_layouts_and_never_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    first = run(tmp_path, 0, told, device_bytes=1e12)
    assert len([change for change in first if change.moves]) == 3
    assert len({change.layout.num_microbatches for change in first}) > 2  # M was tried.
    for module, name in ((decisions, "search"), (decisions, "calibrate"), (controller, "fitting_candidates")):
        monkeypatch.setattr(module, name, forbidden)
    assert run(tmp_path, 1, told, device_bytes=1.0) == first
    assert not told


def test_a_later_run_reads_what_the_trials_of_an_earlier_one_found(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path))
    changes = run(tmp_path, 0, [], 1e12, due=(), write=lambda kind, **fields: log.write(kind, 0, 0.0, **fields))
    last = changes[-1].layout
    assert read_known_microbatches(str(tmp_path / EVENTS_FILE), last, 16) == {last.shape: last.num_microbatches}


def test_a_rank_that_stands_elsewhere_says_where() -> None:
    told: list[Any] = []
    assert Heard(0, told).decide(lambda: 7, {"step": 3}) == 7
    with pytest.raises(PipelineError, match="Rank 1 is at step 4 while rank 0 is at 3: the ranks have lost step"):
        Heard(1, told).decide(forbidden, {"step": 4})


def test_what_rank_0_refuses_is_refused_everywhere() -> None:
    told: list[Any] = []

    def refuse() -> None:
        raise ValueError("no such plan")

    for rank in (0, 1):
        with pytest.raises(ValueError, match="no such plan"):
            Heard(rank, told).decide(refuse if rank == 0 else forbidden)


# ---- gone on with elsewhere ----


class Watching(FreezePolicy):
    """Freezes nothing."""

    def target_num_frozen(self, signal: FreezeSignal) -> float:
        return signal.num_frozen


class Cache:
    """A planner of the activation cache that stores whatever is frozen."""

    steps_per_epoch = 5

    def __init__(self, mode: str = "on") -> None:
        self.mode = mode

    def storing(self, *_present: Any) -> Storing:
        return Storing((), 1.0, 0.0, 0.0, mode=self.mode, steps_per_epoch=self.steps_per_epoch)

    def report(self, *_choice: Any) -> None:
        pass


CLOCK = DecisionClock(4, 0, 40)


def test_a_layout_whose_activations_cannot_be_stored_stores_none(tmp_path: Path) -> None:
    """The store could not be opened, or the cache was switched off since the checkpoint."""
    layout = replace(layout_of(L, 4, WORLD_SIZE), num_frozen_layers=1, cache_level=1)
    stage = stage_of(layout)
    for cache, is_lost in ((None, True), (Cache("off"), True), (Cache("auto"), False)):
        change = controller_of(tmp_path, stage, [], Watching(), CLOCK, cache).change_without_cache(6, stage)
        assert (change is not None) == is_lost
        assert change is None or (change.layout.cache_level, change.layout.num_frozen_layers) == (0, 1)


def test_a_store_that_rank_0_finds_lost_while_it_decides_is_lost_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rank 0 alone would ask for a layout without it, and the others not listen."""
    told: list[Any] = []
    layout = replace(layout_of(L, 4, WORLD_SIZE), num_frozen_layers=1, cache_level=1)
    for rank in range(2):
        stage, cache = stage_of(layout, rank), Cache("auto")

        def look(_policy: Any, signal: FreezeSignal) -> float:
            cache.mode = "off"  # noqa: B023
            return signal.num_frozen

        monkeypatch.setattr(Watching, "target_num_frozen", look if rank == 0 else forbidden)
        watcher = controller_of(tmp_path, stage, told, Watching(), CLOCK, cache)
        tried = watcher.change_before(4, stage)
        assert tried is not None and not tried.moves
        change = watcher.change_without_cache(4, stage)
        assert change is not None and change.layout.cache_level == 0
    assert not told


def test_a_cache_that_is_switched_on_begins_with_the_resumed_run(tmp_path: Path) -> None:
    layout = replace(layout_of(L, 4, WORLD_SIZE), num_frozen_layers=1)
    stage = stage_of(layout)
    saved = {"num_wanted": 1.0, "num_fruitless": 0, "policy": {}, "gradient_norms": None, "known_microbatches": {}}
    for mode, begins in (("on", True), ("auto", False)):
        watcher = controller_of(tmp_path, stage, [], Watching(), CLOCK, Cache(mode))
        watcher.load_state(saved, is_elsewhere=False, is_same_policy=True)
        change = watcher.change_before(6, stage)
        assert (change is not None and change.layout.cache_level == 1) == begins


def test_a_replayed_run_stands_where_the_plan_does_at_any_step(tmp_path: Path) -> None:
    """Plain Trainer, whose checkpoint it goes on from, has frozen nothing; the plan has."""
    start = layout_of(L, 4, WORLD_SIZE)
    frozen = replace(layout_of(L, 2, WORLD_SIZE), num_frozen_layers=2, cache_level=2)
    stage = stage_of(start)
    for cache in (Cache(), None):
        watcher = controller_of(tmp_path, stage, [], Watching(), CLOCK, cache, {0: start, 3: frozen})
        assert watcher.change_before(2, stage) is None
        change = watcher.change_before(5, stage)
        assert change is not None and change.moves
        assert change.layout == (frozen if cache else replace(frozen, cache_level=0))
        assert watcher.change_before(6, stage_of(change.layout)) is None


def test_a_transition_tells_the_time_of_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps after a change, which the plan is calibrated by, may be slow for other reasons."""
    clock = count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    meter = StepMeter(torch.device("cpu"))
    for step in range(WARMUP_STEPS + 2 * MEASURED_STEPS):
        assert (meter.latest_seconds is None) == (step <= WARMUP_STEPS) == (not meter.medians())
        meter.begin_step()
        for _ in range(4 if step < WARMUP_STEPS + MEASURED_STEPS else 0):
            next(clock)
        meter.end_step()
    assert (meter.medians()["total"], meter.latest_seconds) == (5, 1)
    meter.reset()
    assert meter.latest_seconds is None


@pytest.mark.parametrize(("seconds", "drifts"), [(10.0, False), (2000.0, True)])
def test_after_some_steps_the_measured_time_and_what_is_left_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: float, drifts: bool
) -> None:
    """A step is predicted to take less than a thousand seconds; a drift is told with its likely cause."""
    stage = stage_of(layout_of(L, 4, WORLD_SIZE))
    policy, clock = OneMore(()), DecisionClock(1, 0, 40)
    watcher = controller_of(tmp_path, stage, [], policy, clock, measures_microbatches=False)
    predicted = watcher.decisions.inputs.predict(stage.layout).seconds
    stage.settings.meter.last_seconds = seconds
    with caplog.at_level("INFO", "hf_pipetransformer"):
        for step in range(3):
            watcher.change_before(step, stage)
    (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Measured")]
    assert f"predicted {duration(predicted)}: {duration(600 * seconds)} of steps are left if nothing changes." in said
    assert ("Likely cause: " in said) == drifts == (seconds > 1.5 * predicted)
