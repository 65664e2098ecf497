"""The example policies train; a resumed run takes their decisions again, from what they remember."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.policies.gradient_change import GradientChange
from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.freeze.policy import MEASUREMENTS, FreezePolicy, FreezeSignal
from tests.support.models import build_model, collate, make_dataset


NUM_STEPS = 8
POLICIES: dict[str, Callable[[], FreezePolicy]] = {
    "gradient_change": lambda: GradientChange(percentile=10),
}
RESUMES_AT = {"gradient_change": 2}
"""For each policy that remembers something: a step before the decision that freezes."""


def trainer_of(folder: Path, policy: str, **options: Any) -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=NUM_STEPS, save_steps=2, logging_steps=1,
        use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-3,
        freeze_interval="1", freeze_warmup=0, freeze_min_active_layers=1, activation_cache="off",
        **options,
    )  # fmt: skip
    data = make_dataset("bert_sequence", 12)
    parts = {"train_dataset": data, "data_collator": collate, "policy": POLICIES[policy]()}
    return PipeTransformerTrainer(build_model("bert_sequence"), args, **parts)


def freezes(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*events*.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] == "freeze"]


def what_was_decided(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "time_s"}


@pytest.mark.parametrize("policy", POLICIES)
def test_it_trains_and_freezes(tmp_path: Path, policy: str) -> None:
    trainer_of(tmp_path, policy, save_strategy="no").train()
    found = freezes(tmp_path)
    assert found[-1]["num_frozen"] > 0
    made = POLICIES[policy]()
    assert {name for name in MEASUREMENTS if any(event[name] for event in found)} == set(made.needs)
    assert bool(made.state()) == (policy in RESUMES_AT), f"{policy}: RESUMES_AT lists the policies with a state"


@pytest.mark.parametrize("policy", RESUMES_AT)
def test_its_first_state_begins_anew(policy: str) -> None:
    """A second training of one trainer loads the state that the policy was given with."""
    made = POLICIES[policy]()
    start = json.loads(json.dumps(made.state()))
    made.target_num_frozen(FreezeSignal(10, 100, 4, 0, 0.0, (0.5,) * 5, learning_rate=0.1))
    assert made.state() != start
    made.load_state(start)
    assert made.state() == start


@pytest.mark.slow
@pytest.mark.parametrize("policy", RESUMES_AT)
def test_a_resumed_run_decides_as_one_that_was_never_interrupted(tmp_path: Path, policy: str) -> None:
    whole, step = trainer_of(tmp_path / "whole", policy), RESUMES_AT[policy]
    whole.train()
    saved = tmp_path / "resumed" / f"checkpoint-{step}"
    shutil.copytree(tmp_path / "whole" / saved.name, saved)
    resumed = trainer_of(tmp_path / "resumed", policy)
    resumed.train(resume_from_checkpoint=str(saved))
    expected = [what_was_decided(event) for event in freezes(tmp_path / "whole") if event["step"] >= step]
    assert [what_was_decided(event) for event in freezes(tmp_path / "resumed")] == expected
    for name, value in whole.model.named_parameters():
        assert torch.equal(value, resumed.model.get_parameter(name)), name
    assert any(event["num_frozen"] > event["num_frozen_before"] for event in expected)
    assert {name for name in MEASUREMENTS if expected[0][name]} == set(POLICIES[policy]().needs)
    rates = {entry["step"]: entry["learning_rate"] for entry in whole.state.log_history if "learning_rate" in entry}
    # A log entry has the rate of the step that it follows, a decision that of the step that comes.
    assert all(event["learning_rate"] == rates[event["step"] + 1] for event in expected)
