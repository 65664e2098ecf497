"""What decides the number of micro-batches: rank 0 for all, and no clock and no older file where masks hang on it.

A run has its options, and optionally the `dropout` of its model and, by rank, the `device_bytes` and `free_bytes` that
its device reports and the `slowness` of its clock. `frozen_by_hand` is the layers that plain Trainer freezes at each
step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.planning.microbatches import MicrobatchTrial
from hf_pipetransformer.startup import costs
from tests.distributed.scenarios import RANK, records, scenario, start
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


def train_once(
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
    return [train_once(folder, **run) for run in runs]


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def train(folder: Path, *runs: dict[str, Any], num_processes: int = 2) -> tuple[list[list[dict[str, Any]]], str]:
    """Runs one after the other in one folder: for each rank what each run did, and rank 0's output."""
    result = start(train_each, folder, num_processes, {"runs": runs}, timeout=120)
    return records(folder, num_processes), result.outputs[0]


def test_a_seeded_run_with_dropout_is_the_same_twice_in_one_folder(tmp_path: Path):
    """Its own events file, which the second run finds, holds what a trial found best if it is asked for one."""
    measured = {"options": {"pipeline_parallel_num_microbatches": "measured", "learning_rate": 0}}
    seeded = {"options": {}, "dropout": 0.1}
    (first, *_), output = train(tmp_path, measured | {"dropout": 0.1}, seeded, seeded)
    assert len(set(first[0]["counts"])) > 1
    assert first[1]["losses"] == first[2]["losses"]
    assert first[1]["counts"] == first[2]["counts"]
    assert len(set(first[1]["counts"])) == 1
    assert "by rule, since dropout masks depend on M" in output


@pytest.mark.slow
def test_without_dropout_an_earlier_trial_is_taken_over_with_a_word(tmp_path: Path):
    (first, second), output = train(tmp_path, {"options": {}}, {"options": {}})
    assert first == second
    assert len(set(first[0]["counts"])) > 1
    assert set(first[1]["counts"]) == {first[0]["counts"][-1]}
    assert f"M={first[0]['counts'][-1]} for K=2: measured by an earlier run in this folder" in output


# Both devices differ from each other in all that is measured; the larger one is rank 0's, then rank 1's.
UNEQUAL = {"free_bytes": [1e12, 1.0], "slowness": [1.0, 7.0]}
FREEZES = {"freeze_policy": "fixed", "freeze_at": "16:2", "freeze_warmup": 0, "freeze_min_active_layers": 0}


def test_all_ranks_try_the_same_numbers_of_micro_batches_on_unequal_devices(tmp_path: Path):
    """What fits the smallest device, wherever that is: the second rank's holds only the smallest micro-batches."""
    (rank0, rank1), _ = train(tmp_path, {"options": {}, "planted": {"device_bytes": [1e12, 1.0], **UNEQUAL}})
    assert rank0 == rank1
    assert set(rank0[0]["counts"]) == {12}


def test_unequal_ranks_train_under_rank_0s_layouts_as_trainer_does(tmp_path: Path):
    """Each would choose another M, and plan from other times."""
    planted = {"device_bytes": [1.0e12, 1.1e12], **UNEQUAL}
    (rank0, rank1), _ = train(tmp_path, {"options": FREEZES, "planted": planted})
    assert rank0 == rank1
    assert len(set(rank0[0]["counts"][:15])) == 5
    assert rank0[0]["counts"][15] == 2
    assert rank0[0]["layouts"][-1]["num_frozen_layers"] == 2
    plain = {"options": {"per_device_train_batch_size": 16}, "frozen_by_hand": {"16": 2}}
    ((by_hand,),), _ = train(tmp_path, plain, num_processes=1)
    assert rank0[0]["losses"] == pytest.approx(by_hand["losses"], rel=1e-5)
