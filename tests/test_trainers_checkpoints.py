"""While one stage trains everything, its checkpoints are Trainer's too: plain Trainer goes on from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer, checkpoint
from hf_pipetransformer.autodp.shares import NodeOrder
from hf_pipetransformer.plain_checkpoint import export_checkpoint, read_plain_state
from tests.models import build_model, collate, make_dataset


TRAINERS = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
FREEZES = {"freeze_policy": "fixed", "freeze_at": "4:2"}


def make(base: type[Trainer], folder: Path, seed: int = 0, own_order: bool = False, **options: Any) -> Any:
    kind = TrainingArguments if base is Trainer else PipeTransformerArguments
    args = kind(
        output_dir=str(folder), max_steps=6, logging_steps=1, save_steps=1, use_cpu=True, report_to="none",
        disable_tqdm=True, learning_rate=1e-3, **{"per_device_train_batch_size": 4, **options},
    )  # fmt: skip
    model = build_model("bert_sequence", seed)
    # As a user may give them: not as the model has them, and in groups of their own.
    backwards = list(model.parameters())[::-1]
    groups = [{"params": backwards[:5], "lr": 1e-2}, {"params": backwards[5:]}]
    optimizers = (torch.optim.AdamW(groups, lr=1e-3), None) if own_order else (None, None)
    return base(
        model, args, train_dataset=make_dataset("bert_sequence", 16), data_collator=collate, optimizers=optimizers
    )


def losses(trainer: Any, after: int = 0) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > after]


@pytest.mark.parametrize("own_order", [False, True])
def test_plain_trainer_goes_on_where_nothing_is_frozen_yet(own_order: bool, tmp_path: Path) -> None:
    plain = make(Trainer, tmp_path / "plain", own_order=own_order)
    plain.train()
    ours = make(PipeTransformerTrainer, tmp_path / "ours", own_order=own_order, **FREEZES)
    ours.train()
    # Also what a run saved that had gone on itself.
    again = make(PipeTransformerTrainer, tmp_path / "again", 1, own_order, **FREEZES)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    for where in (tmp_path / "ours", tmp_path / "again"):
        resumed = make(Trainer, tmp_path / "resumed", 2, own_order)
        resumed.train(resume_from_checkpoint=str(where / "checkpoint-3"))
        assert losses(resumed, 3) == pytest.approx(losses(plain, 3), rel=1e-5)


def test_trainers_files_are_there_until_something_is_frozen(tmp_path: Path) -> None:
    trainer = make(PipeTransformerTrainer, tmp_path, **FREEZES)
    trainer.train()
    for step in range(1, 7):
        names = {path.name for path in (tmp_path / f"checkpoint-{step}").iterdir()}
        assert names & TRAINERS == (TRAINERS if step <= 4 else set()), step
        assert checkpoint.STATE_FOLDER in names


def test_log_entries_have_trainers_keys_until_something_is_frozen(tmp_path: Path) -> None:
    plain, ours = make(Trainer, tmp_path / "plain"), make(PipeTransformerTrainer, tmp_path / "ours", **FREEZES)
    plain.train()
    ours.train()
    entries = ours.state.log_history
    own = [index for index, entry in enumerate(entries) if "frozen_layers" in entry]
    assert own == [4]  # Of its own, when it happens.
    others = [entry.keys() for index, entry in enumerate(entries) if index not in own]
    assert others == [entry.keys() for entry in plain.state.log_history]


def test_ours_goes_on_from_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(PipeTransformerTrainer, tmp_path / "whole", **FREEZES)
    whole.train()

    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Trainer's files were read")

    monkeypatch.setattr(torch, "load", read)
    resumed = make(PipeTransformerTrainer, tmp_path / "resumed", 1, **FREEZES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(resumed, 3) == losses(whole, 3)


def test_what_trainer_left_of_an_earlier_run_is_not_that_of_the_next(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth", "config.json"):
        (tmp_path / name).touch()
    checkpoint.begin(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", checkpoint.STATE_FOLDER}


class Dealing(TrainerCallback):
    """Deals epochs to nodes, as a run over several does that stores activations."""

    trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.pipeline_run.training_loader.keep_on(NodeOrder(1, (1,), 4))


def test_an_epoch_that_was_dealt_to_nodes_is_none_of_trainers(tmp_path: Path) -> None:
    """It draws another order, in which the samples that are done are not the first ones."""
    trainer, dealing = make(PipeTransformerTrainer, tmp_path, **FREEZES), Dealing()
    dealing.trainer = trainer
    trainer.add_callback(dealing)
    trainer.train()
    found = [{path.name for path in (tmp_path / f"checkpoint-{step}").iterdir()} & TRAINERS for step in range(1, 5)]
    assert found == [set(), set(), set(), TRAINERS]
    said = {
        step: export_checkpoint(str(tmp_path / f"checkpoint-{step}"), str(tmp_path / f"{step}")) for step in (3, 4)
    }
    assert [len(texts) for texts in said.values()] == [1, 0]
    assert "The epoch under way was dealt to nodes" in said[3][0]


def test_a_place_that_no_number_of_steps_tells_is_none_of_trainers(tmp_path: Path) -> None:
    """A step of four samples and one of six: Trainer would believe in two of six, and leave two samples out."""
    make(PipeTransformerTrainer, tmp_path / "first", **FREEZES).train()
    trainer = make(PipeTransformerTrainer, tmp_path, per_device_train_batch_size=6, **FREEZES)
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    found = [{path.name for path in (tmp_path / f"checkpoint-{step}").iterdir()} & TRAINERS for step in (2, 3)]
    assert found == [set(), TRAINERS], "the third step ends the epoch"
    said = [export_checkpoint(str(tmp_path / f"checkpoint-{step}"), str(tmp_path / f"{step}")) for step in (2, 3)]
    assert [len(texts) for texts in said] == [1, 0]
    assert "which leads to another one" in said[0][0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("global_step", 1e30), ("global_step", -5), ("global_step", None), ("epoch", "x"), ("epoch", -1),
     ("train_batch_size", 2.5), ("train_batch_size", [])],
)  # fmt: skip
def test_counts_of_trainer_that_cannot_be_are_damage(tmp_path: Path, name: str, value: Any) -> None:
    content = {"global_step": 4, "epoch": 1.0, "train_batch_size": 4}
    (tmp_path / "trainer_state.json").write_text(json.dumps(content | {name: value}))
    with pytest.raises(ValueError, match=f"{tmp_path}.*damaged: trainer_state.json.*{name}"):
        read_plain_state(str(tmp_path), 16, drops_last=False)
