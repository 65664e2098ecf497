"""Checkpoints that the code of before has written are gone on with, to the losses that it had itself.

They were written by this file, `python -m tests.state.test_saved_before FOLDER`, on one process and, started by
`torchrun`, on two. Whoever raises the version of `state.json` writes them anew with the code before the change.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.state.checkpoint import VERSION, read_state
from tests.support.models import NUM_LABELS, VOCABULARY, collate, enlarge_weights, make_dataset


SAVED = Path(__file__).with_name("saved_before")
SAVED_AT, NUM_STEPS = 4, 7


def trainer_of(folder: Path, **options: Any) -> PipeTransformerTrainer:
    """A run of 7 steps of 4 samples, of which an epoch has 12; its last checkpoint is amid an epoch."""
    args = PipeTransformerArguments(
        str(folder), max_steps=NUM_STEPS, save_steps=SAVED_AT, logging_steps=1, use_cpu=True, report_to="none",
        disable_tqdm=True, learning_rate=1e-2, freeze_policy="fixed", freeze_at="1:1", activation_cache="off",
        **{"per_device_train_batch_size": 4, **options},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        config = BertConfig(vocab_size=VOCABULARY, num_labels=NUM_LABELS, max_position_embeddings=32, **sizes)
        model = BertForSequenceClassification(config)
        enlarge_weights(model)
    data = make_dataset("bert_sequence", 12)
    return PipeTransformerTrainer(model, args, train_dataset=data, data_collator=collate)


def continued(checkpoint: Path, **options: Any) -> list[float]:
    """The losses of the steps that follow on a checkpoint, on one process."""
    trainer = trainer_of(checkpoint.parent / "again", save_strategy="no", **options)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > SAVED_AT]


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "as it was": ("one", {}),
    "in other batches": ("one", {"per_device_train_batch_size": 3}),
    "on fewer processes": ("two", {}),
    "on fewer processes, in other batches": ("two", {"per_device_train_batch_size": 3}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_before_is_gone_on_with(way: str, tmp_path: Path) -> None:
    name, options = WAYS[way]
    with zipfile.ZipFile(SAVED / f"{name}.zip") as packed:
        packed.extractall(tmp_path)
    checkpoint = tmp_path / f"checkpoint-{SAVED_AT}"
    assert read_state(str(checkpoint)).step == SAVED_AT
    assert json.loads((checkpoint / "pipetransformer" / "state.json").read_text())["version"] == VERSION
    expected = json.loads((SAVED / "losses.json").read_text())[way]
    assert continued(checkpoint, **options) == pytest.approx(expected, rel=1e-3)


if __name__ == "__main__":
    trainer = trainer_of(Path(sys.argv[1]), **json.loads("".join(sys.argv[2:]) or "{}"))
    trainer.train()
    trainer.end()
