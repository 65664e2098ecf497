"""Rank 0 decides: what the other ranks measured on themselves reaches a layout by no way but its answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_pipetransformer import PipeTransformerArguments, controller, decisions
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.autopipe.costs import Overheads
from hf_pipetransformer.autopipe.inputs import PlanInputs
from hf_pipetransformer.controller import Change, LayoutController
from hf_pipetransformer.decisions import Decisions
from hf_pipetransformer.errors import PipelineError
from hf_pipetransformer.freeze.policies import DecisionClock, FreezePolicy, FreezeSignal
from hf_pipetransformer.messages import pack, unpack
from hf_pipetransformer.pipeline.timing import PARTS
from tests.test_planning import costs_of, layout_of, rules_for


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


class Meter:
    """Steps of one length, all measured; it differs from rank to rank."""

    def __init__(self, seconds: float) -> None:
        self.device, self.last_seconds, self.num_tokens = torch.device("cpu"), seconds, 8
        self.is_done = True

    def medians(self) -> dict[str, float]:
        return dict.fromkeys(PARTS, self.last_seconds) | {"samples": 8}

    def reset(self, skip: int = 0) -> None:
        self.last_seconds *= 0.7

    def begin_step(self) -> None:
        self.last_seconds *= 0.9

    def end_step(self) -> bool:
        return True


class OneMore(FreezePolicy):
    """One layer more each time, and then at other steps than before."""

    needs = frozenset()

    def __init__(self) -> None:
        self.num_asked = 0

    def num_wanted(self, signal: FreezeSignal) -> float:
        self.num_asked += 1
        return signal.num_frozen + 1

    def is_due(self, step: int, clock: DecisionClock) -> bool:
        return step in (4, 9) if self.num_asked < 2 else step == 30


def forbidden(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("planned by a rank that does not decide")


def run(folder: Path, rank: int, told: list[Any], device_bytes: float, steps: int = 40) -> list[Change]:
    """The changes of a run on one rank."""
    layout = layout_of(L, 4, WORLD_SIZE)
    inputs = PlanInputs(costs_of(L), Overheads(), rules_for(L, device_bytes=device_bytes), samples_per_device=16)
    policy = OneMore()
    if rank:
        policy.num_wanted = policy.is_due = policy.explain = forbidden
    args = PipeTransformerArguments(output_dir=str(folder), use_cpu=True, report_to="none", freeze_min_active_layers=0)
    decided = Decisions(
        policy, DecisionClock(1, 0, steps), args, inputs, 0, WORLD_SIZE, {}, lambda *_, **__: None, None
    )
    structure = SimpleNamespace(units_of_parameter={})
    stage = SimpleNamespace(layout=layout, view=SimpleNamespace(structure=structure))
    meter: Any = Meter(1.0 + rank)
    no_probe: Any = None  # No policy asks for it.
    watcher = LayoutController(decided, Heard(rank, told), stage, lambda *_, **__: None, meter, no_probe, None)
    changes = []
    for step in range(steps):
        change = watcher.change_before(step, stage)
        if change is not None:
            changes.append(change)
            stage.layout = change.layout
        watcher.begin_step(stage)
        watcher.end_step()
    return changes


def test_ranks_that_measure_otherwise_take_rank_0s_layouts_and_never_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    first = run(tmp_path, 0, told, device_bytes=1e12)
    assert len([change for change in first if change.moves]) == 3
    assert len({change.layout.num_microbatches for change in first}) > 2  # M was tried.
    for module, name in ((decisions, "plan_transition"), (decisions, "calibrate"), (controller, "fitting_candidates")):
        monkeypatch.setattr(module, name, forbidden)
    assert run(tmp_path, 1, told, device_bytes=1.0) == first
    assert not told


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
