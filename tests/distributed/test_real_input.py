"""Law 1 on real input: pretrained checkpoints, real sentences, real images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    ViTForImageClassification,
    set_seed,
)

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.scenarios import run, scenario
from tests.support.trainings import our_arguments, plain_arguments


GLOBAL_BATCH = 8
NUM_STEPS = 10
NUM_SENTENCES = 200
NUM_IMAGES = 100
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Of the images that the ViT was trained on.
PIXEL_MEAN = np.array([0.48, 0.448, 0.398], dtype=np.float32)
PIXEL_STD = np.array([0.277, 0.269, 0.282], dtype=np.float32)

Parts = tuple[PreTrainedModel, Dataset, Callable[[list[Any]], dict[str, Any]]]


def text(model: Path, data: Path) -> Parts:
    tokenizer = AutoTokenizer.from_pretrained(model)
    sentences = read(data / "sst2_train.parquet", NUM_SENTENCES)
    rows = [
        {**tokenizer(row["sentence"], truncation=True, max_length=64), "labels": row["label"]} for row in sentences
    ]
    # The checkpoint is of a sentence encoder: the head for classes is new.
    bert = BertForSequenceClassification.from_pretrained(model, num_labels=2, **NO_DROPOUT)
    return bert, Dataset.from_list(rows), DataCollatorWithPadding(tokenizer)


def images(model: Path, data: Path) -> Parts:
    pictures = read(data / "cifar10_train_20000.parquet", NUM_IMAGES)

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        pixels = np.stack([np.asarray(row["image"].convert("RGB"), dtype=np.float32) / 255 for row in rows])
        pixels = ((pixels - PIXEL_MEAN) / PIXEL_STD).transpose(0, 3, 1, 2)
        return {"pixel_values": torch.from_numpy(pixels.copy()), "labels": torch.tensor([r["label"] for r in rows])}

    vit = ViTForImageClassification.from_pretrained(model, num_labels=10, ignore_mismatched_sizes=True, **NO_DROPOUT)
    return vit, pictures, collate


def read(path: Path, num_rows: int) -> Dataset:
    return load_dataset("parquet", data_files=str(path), split=f"train[:{num_rows}]")


@scenario
def ten_steps(folder: Path, task: str, model: str, data: str, num_stages: int) -> list[dict[str, Any]]:
    """Return the log of a BERT on SST-2 (`text`) or a ViT on CIFAR-10 (`images`); 0 stages: plain Trainer."""
    set_seed(42)
    pretrained, dataset, collate = {"text": text, "images": images}[task](Path(model), Path(data))
    options: dict[str, Any] = {
        "batch": GLOBAL_BATCH,
        "max_steps": NUM_STEPS,
        "learning_rate": 5e-5,
        "warmup_steps": 2,
        "weight_decay": 0.01,
        # Images are decoded in the collator.
        "remove_unused_columns": task == "text",
    }
    if num_stages:
        args = our_arguments(folder, num_stages, pipeline_parallel_num_microbatches=4, **options)
        trainer = PipeTransformerTrainer(model=pretrained, args=args, train_dataset=dataset, data_collator=collate)
    else:
        args = plain_arguments(folder, **options)
        trainer = Trainer(model=pretrained, args=args, train_dataset=dataset, data_collator=collate)
        # The loss of BERT ignores `num_items_in_batch`, that of ViT does not.
        trainer.model_accepts_loss_kwargs = task == "images"
    trainer.train()
    history: list[dict[str, Any]] = trainer.state.log_history
    return history


TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.shared_data, pytest.mark.timeout(300)]


def logged_steps(task: str, model: Path, data: Path, output: Path, num_stages: int, num_processes: int):
    output.mkdir(parents=True)
    options = {"task": task, "model": str(model), "data": str(data), "num_stages": num_stages}
    # One cache of data sets per run, so that nothing is written outside of the test's folder.
    env = {"HF_DATASETS_CACHE": str(output / "cache")}
    histories = run(ten_steps, output, num_processes, options, timeout=140, env=env)
    steps = [[entry for entry in history if "loss" in entry] for history in histories]
    assert all(entries == steps[0] for entries in steps)
    return steps[0]


@pytest.mark.parametrize("task", ["text", pytest.param("images", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_stages", "num_processes"),
    [pytest.param(2, 2, id="2x1"), pytest.param(1, 2, id="1x2", marks=pytest.mark.slow)],
)
def test_first_losses_on_real_input_equal_trainers(
    request: pytest.FixtureRequest, tmp_path: Path, shared_data: Path, task: str, num_stages: int, num_processes: int
):
    model = request.getfixturevalue({"text": "minilm", "images": "shared_vit"}[task])
    plain = logged_steps(task, model, shared_data, tmp_path / "plain", 0, 1)
    ours = logged_steps(task, model, shared_data, tmp_path / "pipeline", num_stages, num_processes)
    assert len(plain) == len(ours) == NUM_STEPS
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
        assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-12)
    assert len({entry["loss"] for entry in plain}) == NUM_STEPS
