"""`accelerate.notebook_launcher` starts a pipeline from inside Python, as it starts Trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Trainer, TrainingArguments

from tests.distributed.launcher import free_port, launch
from tests.support.models import build_model, collate, make_dataset


NOTEBOOK = Path(__file__).with_name("notebook.py")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_a_notebook_trains_on_two_stages_and_goes_on_with_what_was_saved(tmp_path: Path) -> None:
    launch(NOTEBOOK, [tmp_path, str(free_port()), str(free_port())], timeout=150)
    first, second = (json.loads((tmp_path / f"notes-{number}.json").read_text()) for number in range(2))
    args = TrainingArguments(
        output_dir=str(tmp_path / "plain"), per_device_train_batch_size=8, max_steps=4, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, learning_rate=1e-3, use_cpu=True,
    )  # fmt: skip
    plain = Trainer(
        build_model("bert_sequence"), args, train_dataset=make_dataset("bert_sequence", 16), data_collator=collate
    )
    plain.train()
    losses = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert first["losses"] == pytest.approx(losses, rel=1e-5)
    assert first["K"] == second["K"] == 2
    assert second["losses"][0] < first["losses"][0]
