"""Time budgets in corners: older runs in one file, options that change, odd optimizers, streams that end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from hf_pipetransformer.autodp.shares import NodeOrder
from hf_pipetransformer.freeze.policies import FreezeSignal
from hf_pipetransformer.freeze.policies.gradient_norm import GradientNorm
from hf_pipetransformer.freeze.policies.schedule import Schedule
from hf_pipetransformer.refusals import check_same_run
from hf_pipetransformer.report.events import EventLog, read_events
from hf_pipetransformer.run import step_overheads
from hf_pipetransformer.run.budget import Budget, check_budget, planned_before
from hf_pipetransformer.run.first_batches import TypicalBatches
from hf_pipetransformer.run.journal import Journal
from hf_pipetransformer.run.remainder import Remainder
from hf_pipetransformer.run.step_overheads import optimizer_seconds
from hf_pipetransformer.samples import OwnBatches


def budget_of(num_steps: int, steps_per_epoch: int = 7) -> Budget:
    return Budget(num_steps, steps_per_epoch, planned_s=1.0, full_s=1.0)


def test_a_replay_takes_the_budget_of_the_last_run_in_the_file(tmp_path: Path) -> None:
    """Which a resumed run of it goes on with; a run without one has none, whatever was planned before it."""
    log = EventLog(str(tmp_path))
    file = next(iter(tmp_path.iterdir()), tmp_path / "pipetransformer_events.jsonl")
    for step, num_steps in ((0, 8), (0, 9), (4, 9)):
        log.write("run", step, 0.0)
        log.write("profile", step, 0.0, what="budget", budget=vars(budget_of(num_steps)), because=None)
    assert planned_before(str(file)).num_steps == 9
    log.write("run", 0, 0.0)
    with pytest.raises(ValueError, match="is of a run with freeze_budget='epochs'"):
        planned_before(str(file))


def test_epochs_of_another_length_are_counted_exactly() -> None:
    rest = Remainder(epoch=1, num_done=0, first=0, num_batches=14, num_updates=14, share=1.0)
    assert 29 / 7 * 14 > 58
    assert rest.last_step(14, budget_of(29).num_epochs, 14) == 58
    for num_steps in range(1, 60):
        expected = -(-num_steps * 14 // 7)
        assert math.ceil(budget_of(num_steps).num_epochs * 14) == expected
        assert budget_of(num_steps).counts((2, 14, 100, 200, 20, 14, 28))[-1] == expected


def test_events_before_a_run_has_its_state_are_of_its_own_step(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=40, epoch=2.5))
    journal = Journal(trainer, EventLog(str(tmp_path)))
    with journal.at(0, 0.0):
        journal.write("cache", what="nodes")
    journal.write("cache", what="epoch")
    (file,) = tmp_path.iterdir()
    assert [(event["step"], event["epoch"]) for event in read_events(str(file))] == [(0, 0.0), (40, 2.5)]


class Renamed(Schedule):
    """As certain."""

    name = "renamed"


class Wavering(Schedule):
    """Not what `most_wanted` says."""

    def num_wanted(self, signal: FreezeSignal) -> float:
        return 0.5 * self.most_wanted(signal)


class StillWavering(Wavering):
    """As the one that it is of."""


class Sure(Schedule):
    """Says so itself."""

    is_certain = True

    def num_wanted(self, signal: FreezeSignal) -> float:
        return self.most_wanted(signal)


class Mixed(GradientNorm, Schedule):
    """Its answer is that of the class which is not certain."""


def test_a_policy_that_answers_otherwise_is_not_certain() -> None:
    kinds = (Schedule, Renamed, Wavering, StillWavering, Sure, GradientNorm, Mixed)
    assert [kind.is_certain for kind in kinds] == [True, True, False, False, True, False, False]


def test_options_that_were_changed_later_are_refused() -> None:
    args: Any = SimpleNamespace(freeze_budget="time", max_steps=-1, full_determinism=False, layout_plan=None)
    check_budget(args, Schedule(0.5))
    with pytest.raises(ValueError, match="expected freeze_policy='fixed' or 'schedule'"):
        check_budget(args, GradientNorm(0.5, "inclusive"))
    args.max_steps = 3
    with pytest.raises(ValueError, match="freeze_budget='time' with max_steps=3"):
        check_budget(args, Schedule(0.5))


def test_other_epochs_are_said_to_change_nothing() -> None:
    def description(**arguments: Any) -> dict[str, Any]:
        given = {"freeze_budget": "time", "num_train_epochs": 3, "seed": 1, **arguments}
        fields = {
            "model": "m",
            "data": {"num_samples": None, "fingerprint": "f"},
            "parameters": {},
            "policy_class": "Schedule",
        }
        return {**fields, "world_size": 1, "policy": "p", "has_plan": False, "arguments": given}

    told = check_same_run("there", description(), description(num_train_epochs=5))
    assert told is not None and told.startswith("freeze_budget='time': the run stays as long as it was planned")
    both = check_same_run("there", description(), description(num_train_epochs=5, seed=2))
    assert both is not None and "than it was saved with: seed=2 (was 1). It goes on" in both and told in both
    epochs = description(freeze_budget="epochs")
    other = check_same_run("there", epochs, description(freeze_budget="epochs", num_train_epochs=5))
    assert other is not None and "num_train_epochs=5 (was 3)" in other


def trainer_with(kind: type[torch.optim.Optimizer]) -> Any:
    return SimpleNamespace(
        optimizer=None, model=None, args=SimpleNamespace(max_grad_norm=1.0),
        get_optimizer_cls_and_kwargs=lambda *_: (kind, {}),
    )  # fmt: skip


def test_an_optimizer_that_may_wait_for_other_ranks_is_not_made_on_one() -> None:
    class Sharded(torch.optim.SGD):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise SystemExit("a collective call")

    assert optimizer_seconds(trainer_with(Sharded), [nn.Parameter(torch.ones(4))]) > 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.5}),
        (Adafactor, {"scale_parameter": False}),
    ],
)
def test_the_optimizer_of_the_run_is_the_one_that_is_stepped(kind: Any, options: dict[str, Any]) -> None:
    parameters = [nn.Parameter(torch.ones(4))]
    trainer: Any = SimpleNamespace(optimizer=kind(parameters, **options), args=SimpleNamespace(max_grad_norm=1.0))
    made = step_overheads._alike(trainer, [nn.Parameter(torch.ones(4))])
    assert type(made) is kind and made.defaults == trainer.optimizer.defaults


@pytest.mark.parametrize("fails", ["__init__", "step"])
@pytest.mark.parametrize("error", [KeyError("state"), AttributeError("train"), torch.OutOfMemoryError("none left")])
def test_an_odd_optimizer_is_measured_as_adamw(fails: str, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    trainer = trainer_with(type("Odd", (torch.optim.SGD,), {fails: fail, "__module__": "torch.optim.odd"}))
    assert optimizer_seconds(trainer, [nn.Parameter(torch.ones(4))]) > 0
    assert optimizer_seconds(trainer, []) == 0


def test_what_cannot_be_stepped_at_all_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch.optim, "AdamW", fail)
    trainer: Any = SimpleNamespace(optimizer=None, model=None, args=None, get_optimizer_cls_and_kwargs=fail)
    assert optimizer_seconds(trainer, [nn.Parameter(torch.ones(4))]) == 0


class Ended(torch.utils.data.IterableDataset):
    """A stream that has nothing more to give."""

    def __iter__(self) -> Any:
        return iter(())


def test_a_stream_that_ended_is_said() -> None:
    with pytest.raises(ValueError, match="Let `__iter__` begin anew"):
        TypicalBatches(OwnBatches(Ended(), lambda rows: {"rows": rows}, 4), "rows").read(4)


@pytest.mark.parametrize("saved", [{"batch_size": 7}, {"devices": []}, {"devices": [2, 0]}, {"batch_size": 0}])
def test_an_order_of_nodes_that_cannot_be_is_refused(saved: dict[str, Any]) -> None:
    good = {"seed": 1, "devices": [2, 2], "batch_size": 8}
    assert NodeOrder.from_json(json.loads(json.dumps(good))).counts(8) == [4, 4]
    with pytest.raises(ValueError, match="expected at least one device on each node"):
        NodeOrder.from_json({**good, **saved})
