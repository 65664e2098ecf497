"""In Trainer's loop a frozen tower of images is computed once at any batch size, with rows of text between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.media_store_worker import Counts
from tests.support.comparison import far_tensors
from tests.support.media_models import MODELS, build, make_rows
from tests.support.trainings import losses_of, our_arguments, plain_arguments, weights_of


NUM_ROWS, NUM_EPOCHS = 22, 3
# As on stages: of each batch size one stays in the tests of every change.
QUICK = (("smolvlm", 1, False), ("qwen2_vl", 3, False), ("llava", 8, True))


def cases() -> list[Any]:
    every = [(model, batch, starts) for model in MODELS for batch in (1, 3, 8) for starts in (False, True)]
    return [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in every]


def make(kind: Any, arguments: Any, name: str, begins_with_text: bool) -> Trainer:
    family, model = MODELS[name], build(name)
    for parameter, weights in model.named_parameters():
        weights.requires_grad_(not parameter.startswith(family.tower))
    rows = make_rows(family, NUM_ROWS)
    if begins_with_text:
        rows.sort(key=lambda row: bool(row["images"]))
    trainer: Trainer = kind(model, arguments, train_dataset=rows, data_collator=family.collate)
    return trainer


@pytest.mark.parametrize(("name", "batch", "begins_with_text"), cases())
def test_a_frozen_tower_is_stored_with_trainers_numbers(
    name: str, batch: int, begins_with_text: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "batch": batch, "num_train_epochs": NUM_EPOCHS, "learning_rate": 1e-3, "adam_epsilon": 1e-6,
        "remove_unused_columns": False,
    }  # fmt: skip
    if begins_with_text:
        options["train_sampling_strategy"] = "sequential"
    plain = make(Trainer, plain_arguments(tmp_path / "plain", **options), name, begins_with_text)
    arguments = our_arguments(tmp_path / "ours", 1, activation_cache="on", **options)
    ours = make(PipeTransformerTrainer, arguments, name, begins_with_text)
    counts = Counts(ours)
    ours.add_callback(counts)
    plain.train()
    ours.train()
    assert losses_of(ours) == pytest.approx(losses_of(plain), rel=1e-5)
    norms = [[entry["grad_norm"] for entry in each.state.log_history if "loss" in entry] for each in (ours, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert far_tensors(weights_of(ours), weights_of(plain), 1e-5) == {}
    read, new = np.subtract(counts.by_epoch[-1], counts.by_epoch[-2])
    assert (read > 0, new) == (True, 0), counts.by_epoch
