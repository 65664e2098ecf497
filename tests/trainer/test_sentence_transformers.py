"""The trainer of sentence-transformers under the mixin, on one process."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Dense

from hf_pipetransformer.sentence_transformers import (
    SentenceTransformerPipelineArguments,
    SentenceTransformerPipelineTrainer,
)
from tests.support.sentences import save_encoder, sentences


def trainer_of(kind: Any, arguments: Any, folder: Path, **options: Any) -> Any:
    """A trainer of a dense layer above a frozen encoder."""
    save_encoder(folder / "encoder")
    model = SentenceTransformer(str(folder / "encoder"), device="cpu").requires_grad_(False)
    model.append(Dense(32, 8))
    args = arguments(
        output_dir=str(folder), num_train_epochs=3, per_device_train_batch_size=8, logging_steps=1, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    rows = Dataset.from_dict({"anchor": sentences(16, 0), "positive": sentences(16, 1)})
    return kind(model, args, train_dataset=rows, loss=losses.MultipleNegativesRankingLoss(model))


def logged(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_frozen_encoder_is_computed_once_with_the_same_losses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "propagate", True)
    plain = trainer_of(SentenceTransformerTrainer, SentenceTransformerTrainingArguments, tmp_path)
    ours = trainer_of(
        SentenceTransformerPipelineTrainer, SentenceTransformerPipelineArguments, tmp_path, activation_cache="on"
    )
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        assert logged(ours) == pytest.approx(logged(plain), rel=1e-5)
    assert "Transformer" in caplog.text and "is frozen: it is computed once" in caplog.text
    assert "0 (" not in caplog.text


def test_one_stage_is_what_such_a_trainer_takes(tmp_path: Path) -> None:
    assert SentenceTransformerPipelineArguments(str(tmp_path), use_cpu=True).pipeline_size == 1
    with pytest.raises(ValueError, match="_load_from_checkpoint would not run as in Trainer"):
        trainer_of(SentenceTransformerPipelineTrainer, SentenceTransformerPipelineArguments, tmp_path, freeze_layers=1)
