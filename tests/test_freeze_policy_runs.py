"""Policies that remember, in runs of one process: what is measured for them, and what a resumed run decides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.decisions import Decisions
from hf_pipetransformer.freeze.policies import MEASUREMENTS
from hf_pipetransformer.layout import Layout
from tests.models import build_model, collate, make_dataset


NUM_STEPS = 8
POLICIES: dict[str, dict[str, Any]] = {
    "gradient_change": {"freeze_percentile": 10},
    "plasticity": {"freeze_tolerance": 0.3, "freeze_patience": 2},
    "saliency": {},
}
RESUMES_AT = {"gradient_change": 2, "plasticity": 4, "saliency": 4}
"""Before the decision that freezes, for which something must be remembered."""
MEASURED = {
    "gradient_change": {"gradient_norms"},
    "plasticity": {"activation_similarity"},
    "saliency": {"gradient_norms", "predicted_seconds"},
}


def trainer_of(folder: Path, policy: str, **options: Any) -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=NUM_STEPS, save_steps=2, logging_steps=1,
        use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-3, freeze_policy=policy,
        freeze_interval="1", freeze_warmup=0, freeze_min_active_layers=1, activation_cache="off",
        **POLICIES[policy], **options,
    )  # fmt: skip
    data = make_dataset("bert_sequence", 12)
    return PipeTransformerTrainer(build_model("bert_sequence"), args, train_dataset=data, data_collator=collate)


def freezes(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*events*.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] == "freeze"]


def what_was_decided(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "time_s"}


def without_a_clock(_decisions: Decisions, layout: Layout, step: int, _known: Any) -> tuple[float, ...]:
    """Seconds that layers save more of from step to step, so that freezing pays after some."""
    num_layers, least = layout.num_layers, layout.num_frozen_layers
    saved = [0.004 * step**2 * (num_layers - frozen) for frozen in range(num_layers)]
    return (*(1 + seconds if frozen >= least else 0.0 for frozen, seconds in enumerate(saved)), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_run_decides_as_one_that_was_never_interrupted(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what they measure only predicted seconds come from a clock; here they do not."""
    monkeypatch.setattr(Decisions, "_predicted_seconds", without_a_clock)
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
    assert {name for name in MEASUREMENTS if expected[0][name]} == MEASURED[policy]
    rates = {entry["step"]: entry["learning_rate"] for entry in whole.state.log_history if "learning_rate" in entry}
    # A log entry has the rate of the step that it follows, a decision that of the step that comes.
    assert all(event["learning_rate"] == rates[event["step"] + 1] for event in expected)
