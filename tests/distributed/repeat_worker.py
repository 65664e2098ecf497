"""Trains several times in one folder, and notes what each training did.

A run has its options, and optionally the `dropout` of its model and, by rank, the `device_bytes` and `free_bytes` that
its device reports and the `slowness` of its clock. `frozen_by_hand` is the layers that plain Trainer freezes at each
step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.planning.microbatches import MicrobatchTrial
from hf_pipetransformer.startup import costs
from tests.distributed.scenarios import RANK, scenario
from tests.distributed.transition_worker import FreezeByHand
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import our_arguments, plain_arguments


MODEL = "bert_sequence"


class Note(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.counts: list[int] = []
        self.layouts: list[dict[str, Any]] = []
        self.trainer: Any = None

    def on_step_end(self, args, state, control, **kwargs):
        layout = getattr(self.trainer, "layout", None)  # Plain Trainer has none.
        if layout is not None:
            self.counts.append(layout.num_microbatches)
            self.layouts.append(layout.as_event())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def plant(device_bytes: list[float], free_bytes: list[float], slowness: list[float]) -> None:
    """What this rank's device and clock say from now on."""
    costs._device_bytes = lambda *_: device_bytes[RANK]
    costs._free_bytes = lambda *_: free_bytes[RANK]
    medians, record = StepMeter.medians, MicrobatchTrial.record
    StepMeter.medians = lambda self: {part: value * slowness[RANK] for part, value in medians(self).items()}
    # Rank 0 finds few micro-batches fast, the others many.
    MicrobatchTrial.record = lambda self, _, tokens: record(self, self.current() ** (-1.0 if RANK else 1.0), 1)


def train(
    folder: Path,
    options: dict[str, Any],
    dropout: float = 0.0,
    planted: dict[str, list[float]] | None = None,
    frozen_by_hand: dict[str, int] | None = None,
) -> dict[str, Any]:
    if planted is not None:
        plant(**planted)
    options = {"per_device_train_batch_size": 8, "max_steps": 20, **options}
    torch.manual_seed(0)
    model = build_model(MODEL)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    note = Note()
    parts: dict[str, Any] = {"model": model, "train_dataset": make_dataset(MODEL, 53), "data_collator": collate}
    if frozen_by_hand is None:
        args = our_arguments(folder / "output", 2, **{"pipeline_timeout": 30, **options})
        trainer: Trainer = PipeTransformerTrainer(args=args, callbacks=[note], **parts)
    else:
        by_hand = FreezeByHand({int(step): layers for step, layers in frozen_by_hand.items()})
        trainer = Trainer(args=plain_arguments(folder / "output", **options), callbacks=[note, by_hand], **parts)
        trainer.model_accepts_loss_kwargs = False  # transformers#47688
    note.trainer = trainer
    trainer.train()
    return {"losses": note.losses, "counts": note.counts, "layouts": note.layouts}


@scenario
def train_each(folder: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every run the loss, the number of micro-batches and the layout of each step."""
    return [train(folder, **run) for run in runs]
