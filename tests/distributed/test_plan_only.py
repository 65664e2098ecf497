"""`plan_only`: a script prints the plan of its run, and ends on every rank before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from tests.distributed.scenarios import run, scenario
from tests.support.models import build_model, collate, make_dataset


class Begins(TrainerCallback):
    """Fails the test if Trainer comes to its first event."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        raise AssertionError("the training began")


def trainer_of(folder: Path, **options: Any) -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, plan_only=True,
        **{"per_device_train_batch_size": 4, **options},
    )  # fmt: skip
    model = build_model("bert_sequence")
    data = make_dataset("bert_sequence", 24)
    return PipeTransformerTrainer(model, args, train_dataset=data, data_collator=collate, callbacks=[Begins()])


def planned(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


@pytest.mark.parametrize("options", [{}, {"freeze_policy": "fixed", "freeze_at": "2:1"}, {"bf16": True}])
def test_one_process_prints_the_plan_and_ends(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, **options)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert not ended.value.code
    found, text = planned(tmp_path), capsys.readouterr().out
    # 24 samples in batches of 4, three epochs.
    assert (found["course"]["num_steps"], found["course"]["steps_per_epoch"]) == (18, 6)
    assert found["course"]["num_samples"] == 24 and found["machine"]["is_host"]
    assert "Measured here: blocks (with 4 samples)" in text and "reading samples" in text and "Assumed" not in text
    assert [(row["kind"], row["pipeline_size"]) for row in found["rows"]] == [("Trainer", 1), ("run", 1)]
    assert found["chosen"]["step_seconds"] > 0 and ("Activation cache" in text) == bool(options.get("freeze_at"))
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert not (tmp_path / EVENTS_FILE).exists() or read_events(str(tmp_path / EVENTS_FILE)) == []


@scenario
def ends(folder: Path, **options: Any) -> dict[str, Any]:
    trainer, code = trainer_of(folder / "run", **options), "none"
    try:
        trainer.train()
    except SystemExit as ended:
        code = str(ended.code)
    return {"code": code, "step": trainer.state.global_step, "in_group": dist.is_initialized()}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options", [{"pipeline_parallel_size": 1}, {"pipeline_parallel_size": 2, "freeze_policy": "schedule"}]
)
def test_every_rank_ends_with_status_0_and_has_left_its_group(options: dict[str, Any], tmp_path: Path) -> None:
    for record in run(ends, tmp_path, 2, options, timeout=150):
        assert record == {"code": "None", "step": 0, "in_group": False}
    found = planned(tmp_path / "run")
    kinds = [row["kind"] for row in found["rows"]]
    assert [row["pipeline_size"] for row in found["rows"] if row["kind"] == "run"] == [1, 2]
    assert found["chosen"]["pipeline_size"] == options["pipeline_parallel_size"]
    assert "transfers" in found["course"]["measured"] and kinds.count("schedule") == 5
    assert found["verdicts"]
