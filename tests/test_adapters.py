"""Models with PEFT adapters are Trainer's, which one sentence says; parts of a pipeline are refused at once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import Trainer

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.models import build_model, collate, make_dataset
from tests.usages import BERT, USAGES, Usage, assert_same, outcome, with_adapters, with_added_adapter


SAID = "freezes and stores nothing: a model with PEFT adapters"


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "propagate", True)


def trainer_of(model: Any, folder: Path, **options: Any) -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to="none",
        disable_tqdm=True, learning_rate=0.05, save_steps=2, **options,
    )  # fmt: skip
    return PipeTransformerTrainer(model, args, train_dataset=make_dataset("bert_sequence", 10), data_collator=collate)


@pytest.mark.parametrize("more", [{}, {"freeze_policy": "none", "activation_cache": "on"}])
@pytest.mark.parametrize("name", ["adapters", "an added adapter"])
def test_what_freezes_and_stores_is_left_out_with_one_sentence(
    name: str, more: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = outcome(USAGES[name], PipeTransformerTrainer, more, tmp_path / "ours")
    assert len([record for record in caplog.records if SAID in record.message]) == 1
    assert_same(ours, outcome(USAGES[name], Trainer, {}, tmp_path / "plain"))
    assert ours["is_left"]


def test_nothing_is_said_where_nothing_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(with_adapters(), tmp_path, freeze_policy="none")
    assert SAID not in caplog.text


def test_a_function_that_makes_a_model_with_adapters_is_told_of_in_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {**BERT["given"](), "model_init": with_adapters}
    usage = Usage(**{**BERT, "model": lambda: None, "given": lambda: given})
    ours = outcome(usage, PipeTransformerTrainer, {}, tmp_path / "ours")
    assert len([record for record in caplog.records if SAID in record.message]) == 1
    assert_same(ours, outcome(usage, Trainer, {}, tmp_path / "plain"))


@pytest.mark.parametrize("make", [with_adapters, with_added_adapter])
def test_parts_of_a_pipeline_are_refused_when_the_trainer_is_made(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a model with PEFT adapters is neither split nor frozen"):
        trainer_of(make(), tmp_path, pipeline_parallel_num_microbatches=2)


def test_saved_adapters_load_and_merge_and_what_they_merge_into_trains_on(tmp_path: Path) -> None:
    trainer = trainer_of(with_adapters(), tmp_path / "adapters")
    trainer.train()
    trainer.save_model()
    batch = collate(list(make_dataset("bert_sequence", 4)))
    expected = logits(trainer.model, batch)
    loaded = PeftModel.from_pretrained(build_model("bert_sequence"), tmp_path / "adapters")
    assert torch.equal(logits(loaded, batch), expected)
    merged = trainer.model.merge_and_unload()
    torch.testing.assert_close(logits(merged, batch), expected)
    for parameter in merged.parameters():
        parameter.requires_grad_(True)
    whole = trainer_of(merged, tmp_path / "whole", freeze_policy="fixed", freeze_at="2:1")
    whole.train()
    assert whole.layout is not None and whole.layout.num_frozen_layers == 1


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits
