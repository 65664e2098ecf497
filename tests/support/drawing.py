"""Data that draw random numbers, as scripts have them, and short trainings on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.support.models import build_model, collate, make_dataset


GLOBAL_BATCH = 4
NUM_STEPS = 6


class Augmented(Dataset[Any]):
    """Images with noise from whatever generator is at hand."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.rows[index])
        pixels = torch.tensor(row["pixel_values"])
        noise = torch.rand(pixels.shape) + np.random.rand() + random.random()
        return row | {"pixel_values": (pixels + noise).tolist()}


class Masked(Dataset[Any]):
    """Token ids alone."""

    def __init__(self, rows: Any) -> None:
        self.rows = [{"input_ids": row["input_ids"]} for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def masking(seed: int | None = None) -> DataCollatorForLanguageModeling:
    """The collator of run_mlm, for the tokens of the tiny models."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    words = {name: index for index, name in enumerate([*special, *(f"w{i}" for i in range(20))])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "[UNK]")), pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", unk_token="[UNK]",
    )  # fmt: skip
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=seed)


class SavesAt(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == self.step


def trainer_of(
    data: str, base: type, folder: Path, world_size: int = 1, dropout: float = 0.0, save_at: int | None = None,
    **options: Any,
) -> Trainer:  # fmt: skip
    """A trainer of six steps, three an epoch, that evaluates in the middle of epochs.

    Args:
        data: "images" or "masks", maybe "seeded masks".
    """
    set_seed(3)
    kind = PipeTransformerArguments if issubclass(base, PipeTransformerTrainer) else TrainingArguments
    args = kind(
        output_dir=str(folder), per_device_train_batch_size=GLOBAL_BATCH // world_size,
        per_device_eval_batch_size=GLOBAL_BATCH // world_size, max_steps=NUM_STEPS, eval_strategy="steps",
        eval_steps=2, logging_steps=1, save_strategy="steps", save_steps=1000, learning_rate=1e-3, use_cpu=True,
        report_to="none", disable_tqdm=True, **options,
    )  # fmt: skip
    name = "vit" if data == "images" else "bert_masked"
    model = build_model(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    rows = {"train": make_dataset(name, 10), "eval": make_dataset(name, 6, seed=1)}
    sets = {which: Augmented(found) if data == "images" else Masked(found) for which, found in rows.items()}
    set_seed(5)
    return base(
        model, args, train_dataset=sets["train"], eval_dataset=sets["eval"], callbacks=[SavesAt(save_at)],
        data_collator=collate if data == "images" else masking(7 if data == "seeded masks" else None),
    )  # fmt: skip


def losses(trainer: Trainer) -> list[tuple[int, str, float]]:
    """Each loss of the log, with its step."""
    return [
        (entry["step"], name, entry[name])
        for entry in trainer.state.log_history
        for name in ("loss", "eval_loss")
        if name in entry
    ]
