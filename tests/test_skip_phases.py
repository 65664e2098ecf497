"""The phases of a run that skips weight gradients: through replays, resumptions, failures. Without training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.adapters import check_skipping_model
from hf_pipetransformer.execution import StageRunner
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.option_combinations import unused_freeze_options
from hf_pipetransformer.pipeline.losses import LossRule
from hf_pipetransformer.report.events import EventLog, SkipPhase, read_skips
from hf_pipetransformer.run import skipping as run_skipping
from hf_pipetransformer.run.journal import Journal
from hf_pipetransformer.run.replay import read_replayed_skips
from hf_pipetransformer.run.skipping import TRIAL_STEPS, Skips
from hf_pipetransformer.splitters.check import ActivationShape
from tests.models import build_model
from tests.skipped import write_plan


LAYOUT = Layout(1, 0, 1, 1, (0, 4), 1, "1f1b")
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Run:
    """A run of one process whose steps compute nothing; 1 s each, half a second less if all is skipped."""

    def __init__(
        self,
        folder: Path,
        replayed: list[SkipPhase] | None = None,
        most: float = 0.5,
        start: int = 0,
        model: nn.Module = MODEL,
    ) -> None:
        self.path = folder / "pipetransformer_events.jsonl"
        state = SimpleNamespace(global_step=start, epoch=0.0)
        args = SimpleNamespace(gradient_accumulation_steps=1, per_device_train_batch_size=1, seed=0)
        self.trainer: Any = SimpleNamespace(state=state, args=args)
        log = EventLog(str(folder))
        log.write("run", start, 0.0, layout=LAYOUT.as_event())
        held = dict(model.named_parameters())
        stage = SimpleNamespace(
            groups=SimpleNamespace(position=0),
            store=SimpleNamespace(held=lambda: held, is_active=lambda name: True),
            owners=dict.fromkeys(held, (0,)),
            view=SimpleNamespace(model=model),
        )
        self.resets = 0
        meter = SimpleNamespace(reset=self._reset, last_parts=self._parts)
        plans = SimpleNamespace(costs=SimpleNamespace(overheads=SimpleNamespace(hop=0.0)))
        pipeline: Any = SimpleNamespace(
            layout=LAYOUT,
            stage=stage,
            settings=SimpleNamespace(meter=meter),
            start_up=SimpleNamespace(plans=plans),
        )
        topology: Any = SimpleNamespace(
            rank=0, gather=lambda value: [value], decide=lambda call, where=None: json.loads(json.dumps(call()))
        )
        controller: Any = SimpleNamespace(is_trying=False, expect=lambda seconds: None)
        self.skips = Skips(self.trainer, topology, pipeline, Journal(self.trainer, log), controller, most, 2, replayed)
        self.skipped: list[bool] = []

    def _reset(self) -> None:
        self.resets += 1

    def _parts(self) -> dict[str, float]:
        seconds = 0.5 if self.skipped[-1] else 1.0
        return {"forward": 0.25, "backward": seconds, "total": 0.25 + seconds}

    def go_to(self, end: int) -> list[bool]:
        """Steps up to `end`; which of them asked for something to be skipped."""
        for step in range(self.trainer.state.global_step, end):
            self.trainer.state.global_step = step
            self.skips.before_step()
            with self.skips.skipping():
                self.skipped.append(not all(parameter.requires_grad for parameter in MODEL.parameters()))
            self.skips.end_step()
        self.trainer.state.global_step = end
        return self.skipped


def shares_of(phases: list[SkipPhase], end: int) -> list[tuple[float, ...]]:
    return [run_skipping.shares_at(phases, step) for step in range(end)]


def folders(tmp_path: Path, *names: str) -> list[Path]:
    found = [tmp_path / name for name in names]
    for folder in found:
        folder.mkdir()
    return found


END = TRIAL_STEPS + 8


@pytest.mark.parametrize("step", [1, 5, 6, TRIAL_STEPS + 4])
def test_a_replay_tells_what_it_skips(tmp_path: Path, step: int) -> None:
    """Its own events can be replayed, and it can be resumed without the plan."""
    first, second, third, fourth = folders(tmp_path, "first", "second", "third", "fourth")
    original = Run(first)
    skipped = original.go_to(END)
    assert any(skipped[:TRIAL_STEPS]) and any(skipped[TRIAL_STEPS:])
    phases = read_skips(str(original.path))
    replay = Run(second, phases, most=0.0)
    replay.go_to(step)
    state = json.loads(json.dumps(replay.skips.state()))
    assert replay.go_to(END) == skipped
    again = read_skips(str(replay.path))
    assert shares_of(again, END) == shares_of(phases, END)
    # The replay is resumed, with its state or without.
    for folder, takes_state in ((third, True), (fourth, False)):
        Run(folder, phases).go_to(step)
        resumed = Run(folder, phases, start=step)
        resumed.skips.load_state(state) if takes_state else resumed.skips.restart()
        assert resumed.go_to(END) == skipped[step:]
        assert shares_of(read_skips(str(resumed.path)), END) == shares_of(phases, END)


def test_a_replay_that_is_resumed_without_the_plan_goes_on_skipping(tmp_path: Path) -> None:
    first, second = folders(tmp_path, "first", "second")
    original = Run(first)
    skipped = original.go_to(END)
    replay = Run(second, read_skips(str(original.path)))
    replay.go_to(END - 2)
    resumed = Run(second, start=END - 2)
    resumed.skips.load_state(json.loads(json.dumps(replay.skips.state())))
    assert resumed.go_to(END) == skipped[END - 2 :]
    assert resumed.resets == 0  # No trial began.


@pytest.mark.parametrize("loads", [True, False])
def test_another_policy_stops_skipping_in_the_events_too(tmp_path: Path, loads: bool) -> None:
    """Resumed under another policy; or under the same, after a replay that skipped what this policy does not."""
    run = Run(tmp_path)
    run.go_to(END)
    resumed = Run(tmp_path, most=0.0, start=END)
    resumed.skips.load_state(run.skips.state()) if loads else resumed.skips.restart()
    assert not any(resumed.go_to(END + 20))
    phases = read_skips(str(resumed.path))
    assert shares_of(phases, END + 20) == shares_of(read_skips(str(run.path)), END) + [()] * 20


def test_a_plan_has_one_share_a_stage(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.jsonl", 2, 1)
    topology: Any = SimpleNamespace(world_size=2, decide=lambda call: call(), rank=0)
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, layout_plan=str(plan))
    layout = Layout(4, 0, 2, 1, (0, 4, 10), 2, "1f1b")
    assert len(read_replayed_skips(args, {0: layout}, topology)) == 3
    longer = Layout(4, 0, 4, 1, (0, 2, 4, 6, 10), 4, "1f1b")
    with pytest.raises(ValueError, match=r"at step 3 shares .* of 2 stages, \[0.3, 0.6\], beside a layout of 4"):
        read_replayed_skips(args, {0: layout, 3: longer}, topology)


def test_a_plan_that_skips_nothing_goes_with_every_option(tmp_path: Path) -> None:
    """What a run without skipping writes when it is resumed excludes nothing."""
    run = Run(tmp_path, most=0.0)
    run.skips.restart()
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, layout_plan=str(run.path), activation_cache="on")
    topology: Any = SimpleNamespace(decide=lambda call: call())
    assert not any(phase.shares for phase in read_replayed_skips(args, {0: LAYOUT}, topology))


def refuse(*args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(x=None, message="infeasible")


def test_a_programme_that_cannot_be_solved_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scipy.optimize.linprog", refuse)
    run = Run(tmp_path)
    with caplog.at_level("INFO", logger="hf_pipetransformer"):
        skipped = run.go_to(END + TRIAL_STEPS)
    assert any(skipped) and not any(skipped[TRIAL_STEPS + 2 :])
    assert read_skips(str(run.path))[-1] == SkipPhase(TRIAL_STEPS + 2, False, (0.0,))
    assert "infeasible" in json.loads(run.path.read_text().splitlines()[-1])["reason"]
    assert "no weight gradient is skipped by plan: The linear programme" in caplog.text


@pytest.mark.parametrize("start", [0, 8])
def test_where_nothing_can_be_skipped_trials_end(tmp_path: Path, start: int, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, start=start, model=nn.LayerNorm(4))
    with caplog.at_level("INFO", logger="hf_pipetransformer"):
        run.go_to(start + 4 * TRIAL_STEPS)
    end = max(start, 2) + TRIAL_STEPS
    assert read_skips(str(run.path))[1:] == [
        SkipPhase(end - TRIAL_STEPS, True, (0.5,)),
        SkipPhase(end, False, (0.0,)),
    ]
    assert run.resets == 1
    assert "in the trial no layer was skipped" in caplog.text


def test_norms_of_steps_that_skip_need_no_new_mask() -> None:
    """Copied to the device once, whatever a step skips."""
    held = dict(MODEL.named_parameters())
    structure = SimpleNamespace(units_of_parameter={name: (1 if name[0] == "0" else 3,) for name in held})
    stage: Any = SimpleNamespace(
        layout=LAYOUT,
        store=SimpleNamespace(held=lambda: held),
        settings=SimpleNamespace(device=torch.device("cpu")),
        view=SimpleNamespace(structure=structure),
    )
    runner = StageRunner(stage, ActivationShape("input_ids", (4,), (4,)), LossRule.MEAN, False)
    masks = []
    for skipped in ("", "0.weight", "1.weight"):
        for name, parameter in held.items():
            parameter.grad = None if name == skipped else torch.ones_like(parameter)
        squares = runner.own_gradient_squares()
        assert squares.sum().item() == pytest.approx(40 - 16 * bool(skipped))
        assert sorted(squares.tolist())[-1] == pytest.approx(20)
        masks.append(runner._mask)
    MODEL.zero_grad()
    assert masks[0] is masks[1] is masks[2]


def test_adapters_are_refused() -> None:
    check_skipping_model(MODEL, "freeze_policy='timely'")
    adapted: Any = SimpleNamespace(peft_config={"default": None})
    with pytest.raises(ValueError, match="layout_plan='a' with a PEFT model"):
        check_skipping_model(adapted, "layout_plan='a'")


@pytest.mark.parametrize(
    ("policy", "given", "unused"),
    [
        ("timely", {}, []),
        ("timely", {"freeze_warmup": 0.1}, []),
        ("timely", {"freeze_interval": "5", "freeze_min_active_layers": 1}, ["interval", "min_active_layers"]),
        ("none", {}, []),
        ("none", {"freeze_alpha": 0.5, "freeze_warmup": 0.1}, ["alpha", "warmup"]),
        ("none", {"freeze_rule": "exclusive", "freeze_interval": "5"}, ["rule", "interval"]),
        ("schedule", {"freeze_rule": "exclusive", "freeze_alpha": 0.5}, ["rule"]),
        ("gradient_norm", {"freeze_rule": "exclusive", "freeze_interval": "5", "freeze_warmup": 0.1}, []),
        ("fixed", {"freeze_at": "0:1", "freeze_warmup": 0.1}, ["warmup"]),
    ],
)
def test_options_without_a_use_are_told(
    tmp_path: Path, policy: str, given: dict[str, Any], unused: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, report_to="none", freeze_policy=policy, **given)
    texts = unused_freeze_options(args, policy)
    assert [text.split("=")[0] for text in texts] == [f"freeze_{name}" for name in unused]
    with caplog.at_level("WARNING"):
        PipeTransformerTrainer(nn.Linear(2, 2), args)
    assert [record.message for record in caplog.records if "does nothing" in record.message] == texts


def test_options_beside_a_replay_are_not_said_to_do_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What freezes is replayed, by whatever policy it was decided."""
    plan = write_plan(tmp_path / "plan.jsonl", 1, 1)
    args = PipeTransformerArguments(
        str(tmp_path), use_cpu=True, report_to="none", layout_plan=str(plan), freeze_alpha=0.5
    )
    with caplog.at_level("WARNING"):
        PipeTransformerTrainer(build_model("bert_sequence"), args)
    assert "does nothing" not in caplog.text
