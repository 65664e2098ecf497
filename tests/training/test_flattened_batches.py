"""Trainings on one process whose batches are one row of several samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.training.synchronous import LossCheck
from tests.support.decoders import make_decoder, make_rows


COMMON: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 8, "logging_steps": 1, "learning_rate": 1e-3, "use_cpu": True,
    "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What notes the passes of the model would see those of the check of the loss too."""
    monkeypatch.setattr(LossCheck, "_begin_step", lambda _check: None)


def trainer(folder: Path, collate: Any = None, kind: type[Trainer] = PipeTransformerTrainer, **options: Any) -> Any:
    torch.manual_seed(0)
    args: Any = TrainingArguments(str(folder), **COMMON)
    if issubclass(kind, PipeTransformerTrainer):
        own = {"freeze_policy": "none", "activation_cache": "off", "pipeline_parallel_num_microbatches": 3}
        args = PipeTransformerArguments(str(folder), **COMMON, **own | options)
    return kind(
        make_decoder("llama"), args, train_dataset=make_rows(24), data_collator=collate or DataCollatorWithFlattening()
    )


class Noting:
    """Numbers of tokens of each call of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.lengths: list[int] = []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _model: Any, _args: Any, named: dict[str, Any]) -> None:
        self.lengths.append(named["input_ids"].shape[1])


def test_micro_batches_of_a_run_are_even(tmp_path: Path) -> None:
    run, plain = trainer(tmp_path / "parts"), trainer(tmp_path / "plain", kind=Trainer)
    noted, whole = (Noting(each.model) for each in (run, plain))
    run.train()
    plain.train()
    steps = [noted.lengths[-9:][start : start + 3] for start in (0, 3, 6)]
    assert [sum(step) for step in steps] == whole.lengths
    assert all(max(step) <= 1.1 * sum(step) / 3 for step in steps)


class OwnLoader(PipeTransformerTrainer):
    """Reads with a loader of its own."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=8, collate_fn=self.data_collator)


class PlainLoader(Trainer):
    """The same without a pipeline."""

    get_train_dataloader = OwnLoader.get_train_dataloader


@pytest.mark.parametrize("marks", [False, True])
def test_rows_of_an_own_loader_are_cut_if_marked(marks: bool, tmp_path: Path) -> None:
    """Without marks they stay whole: a row of one packed sample looks the same."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=marks)
    run, plain = trainer(tmp_path / "own", collate, OwnLoader), trainer(tmp_path / "plain", collate, PlainLoader)
    noted = Noting(run.model)
    for each in (run, plain):
        each.train()
    losses, expected = ([entry["loss"] for entry in each.state.log_history[:3]] for each in (run, plain))
    assert losses == pytest.approx(expected, rel=1e-5)
    lengths = [sum(len(row["input_ids"]) for row in make_rows(24)[start : start + 8]) for start in (0, 8, 16)]
    assert marks == (noted.lengths[-3:] != lengths)


def test_no_slices_are_cut_from_rows_of_several_samples(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a slice would hold tokens of several"):
        trainer(tmp_path, pipeline_schedule="token").train()


def test_nothing_of_such_rows_is_stored(tmp_path: Path) -> None:
    run = trainer(tmp_path, activation_cache="on", freeze_policy="fixed", freeze_at="1:2")
    run.train()
    assert run.layout.num_frozen_layers == 2
    assert run.layout.cache_level == 0
    events = [json.loads(line) for line in (tmp_path / "pipetransformer_events.jsonl").read_text().splitlines()]
    (reason,) = [event["reason"] for event in events if event["event"] == "cache" and event["what"] == "off"]
    assert "of which no sample has a record of its own" in reason


def test_labels_across_borders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the last token of a sample predicts the first of the next: expected -100"):
        trainer(tmp_path, DataCollatorWithFlattening(separator_id=5)).train()


def test_models_that_mix_the_samples_of_a_row_are_refused(tmp_path: Path) -> None:
    """OPT takes position_ids, but its masks do not: at first the loss differs by 5e-6 only."""
    run = trainer(tmp_path)
    run.model = make_decoder("opt")
    with pytest.raises(ValueError, match="OPTForCausalLM lets the samples of a row see each other"):
        run.train()
