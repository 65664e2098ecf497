"""While one stage trains everything, its checkpoints are Trainer's too: plain Trainer goes on from them."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin, PipeTransformerTrainer
from hf_pipetransformer.data.node_shares import NodeOrder
from hf_pipetransformer.data.sampler import EpochOrder
from hf_pipetransformer.state import checkpoint, saving
from hf_pipetransformer.state.plain_checkpoint import export_checkpoint, read_progress
from hf_pipetransformer.state.resumption import find_for_trainer
from hf_pipetransformer.training import loaders
from tests.support.models import build_model, collate, make_dataset


TRAINERS = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
FREEZES = {"freeze_policy": "fixed", "freeze_at": "4:2"}


def make(base: type[Trainer], folder: Path, seed: int = 0, own_order: bool = False, **options: Any) -> Any:
    kind = TrainingArguments if base is Trainer else PipeTransformerArguments
    args = kind(
        output_dir=str(folder), max_steps=6, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        learning_rate=1e-3, **{"save_steps": 1, "per_device_train_batch_size": 4, **options},
    )  # fmt: skip
    model = build_model("bert_sequence", seed)
    # As a user may give them: not as the model has them, and in groups of their own.
    backwards = list(model.parameters())[::-1]
    groups = [{"params": backwards[:5], "lr": 1e-2}, {"params": backwards[5:]}]
    optimizers = (torch.optim.AdamW(groups, lr=1e-3), None) if own_order else (None, None)
    return base(
        model, args, train_dataset=make_dataset("bert_sequence", 16), data_collator=collate, optimizers=optimizers
    )


DROPS_NOTHING: Any = SimpleNamespace(dataloader_drop_last=False, splits_batches=False)


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
    expected = [set(entry) for entry in plain.state.log_history]
    assert [set(entry) for entry in entries[:4]] == expected[:4]
    # Trainer has no such layout: throughput, memory and bubble are logged with it.
    added = {"samples_per_second", "tokens_per_second", "memory_gb", "bubble_share"}
    assert [set(entry) - added for entry in entries[5:]] == expected[4:]
    assert all({"samples_per_second", "memory_gb"} <= set(entry) for entry in entries[5:] if "loss" in entry)


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
    saving.begin(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", checkpoint.STATE_FOLDER}


def test_random_states_of_more_processes_than_now_are_not_those_of_the_next_run(tmp_path: Path) -> None:
    """The other processes may already have written theirs when the first one clears the folder."""
    names = [f"rng_state{suffix}.pth" for suffix in ("", "_0", "_1", "_2", "_11")]
    for name in names:
        (tmp_path / name).touch()
    saving.clear(str(tmp_path), num_ranks=2)
    assert {path.name for path in tmp_path.iterdir()} == {"rng_state_0.pth", "rng_state_1.pth"}
    saving.clear(str(tmp_path))
    assert not list(tmp_path.iterdir())


class Dealt(EpochOrder):
    """Order that is dealt to nodes, as in a run over several that stores activations."""

    def __init__(self, global_batches: Any) -> None:
        super().__init__(global_batches)
        self.nodes = NodeOrder(1, (1,), 4)


def test_an_epoch_that_was_dealt_to_nodes_is_none_of_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws another order, in which the samples that are done are not the first ones."""
    monkeypatch.setattr(loaders, "EpochOrder", Dealt)
    make(PipeTransformerTrainer, tmp_path, **FREEZES).train()
    found = [{path.name for path in (tmp_path / f"checkpoint-{step}").iterdir()} & TRAINERS for step in range(1, 5)]
    assert found == [set(), set(), set(), TRAINERS]
    said = {
        step: export_checkpoint(str(tmp_path / f"checkpoint-{step}"), str(tmp_path / f"{step}")) for step in (3, 4)
    }
    assert [len(texts) for texts in said.values()] == [1, 0]
    assert "The epoch under way was split by node" in said[3][0]


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


# ---- a checkpoint when the job is told to end ----


class Told(TrainerCallback):
    """Sends this process the signal at an event of a step, and goes on when its handler has taken it up."""

    def __init__(self, event: str, step: int) -> None:
        self.event, self.step = event, step
        self.manager: Any = None
        setattr(self, event, self.tell)

    def tell(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.manager.is_checkpoint_requested:
                time.sleep(0.001)


def told_to_end(folder: Path, event: str, step: int, **options: Any) -> Any:
    """A run of six steps that was told to end."""
    trainer = make(PipeTransformerTrainer, folder, enable_jit_checkpoint=True, **HALVES, **options)
    told = Told(event, step)
    (own,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))
    told.manager, own.jit_manager.kill_wait = own.jit_manager, 0
    trainer.add_callback(told)
    before = own.jit_manager._original_sigterm_handler
    try:
        trainer.train()
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)
    return trainer


HALVES = {"pipeline_parallel_num_microbatches": 2, "activation_cache": "off"}


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_a_run_that_was_told_to_end_saves_after_its_step_and_goes_on_as_if_it_had_not(
    event: str, tmp_path: Path
) -> None:
    whole = make(PipeTransformerTrainer, tmp_path / "whole", **HALVES, save_strategy="no")
    whole.train()
    in_step = 2 if event == "on_step_end" else 1
    trainer = told_to_end(tmp_path / "ours", event, in_step, save_strategy="no", eval_strategy="no")
    assert [path.name for path in (tmp_path / "ours").glob("checkpoint-*")] == ["checkpoint-2"]
    assert trainer.state.global_step == 2 and losses(trainer) == losses(whole)[:2]
    assert not list((tmp_path / "ours").rglob("*incomplete*"))
    again = make(PipeTransformerTrainer, tmp_path / "ours", 1, save_strategy="no", **HALVES)
    again.train(resume_from_checkpoint=True)
    assert losses(again, 2) == losses(whole, 2)


@pytest.mark.parametrize(
    ("event", "step", "strategy", "expected"),
    [
        # Until it is whole again it would hold no state, and the process may be ended at any moment.
        pytest.param("on_step_begin", 3, "epoch", [4], id="which also ends the epoch"),
        pytest.param("on_epoch_end", 4, "steps", [1, 2, 3, 4], id="after the epoch's last step, which was saved"),
    ],
)
def test_a_checkpoint_of_a_signal_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, step: int, strategy: str, expected: list[int]
) -> None:
    saved, write = [], checkpoint.write_state
    monkeypatch.setattr(checkpoint, "write_state", lambda folder, *rest: (saved.append(folder), write(folder, *rest)))
    assert told_to_end(tmp_path, event, step, save_strategy=strategy).state.global_step == 4
    assert [Path(folder).name for folder in saved] == [f"checkpoint-{step}" for step in expected]


# ---- weights in other files than were saved ----


def put_into_files(folder: Path, num_files: int, change: Any = None) -> None:
    """The same tensors, in so many files."""
    paths = sorted(folder.glob("model*.safetensors"))
    tensors = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    for path in folder.glob("model*"):
        path.unlink()
    if change is not None:
        change(tensors)
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = {
        key: f"model-{index % num_files + 1:05}-of-{num_files:05}.safetensors" for index, key in enumerate(tensors)
    }
    for name in set(names.values()):
        save_file({key: tensors[key] for key in tensors if names[key] == name}, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A run with two micro-batches, and its third checkpoint."""
    folder = tmp_path_factory.mktemp("halves")
    trainer = make(PipeTransformerTrainer, folder, **HALVES)
    trainer.train()
    return trainer, folder / "checkpoint-3"


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said reaches `caplog`, whoever has announced something before."""
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "propagate", True)


@pytest.mark.parametrize("sizes", [[3], [3, 2], [3, 1]], ids=str)
def test_a_run_goes_on_where_weights_were_put_into_other_files(
    sizes: list[int], halves: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, saved = halves
    shutil.copytree(saved, tmp_path / "checkpoint-3")
    for size in sizes:
        put_into_files(tmp_path / "checkpoint-3", size)
    resumed = make(PipeTransformerTrainer, tmp_path, 1, **HALVES)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed, 3) == losses(whole, 3)
    # Of one file again nothing is to be told if it has the same bytes.
    said = [record.message for record in caplog.records if "other files than were saved" in record.message]
    assert len(said) == (0 if sizes[-1] == 1 else 1)


def lose_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["bert.encoder.layer.1.output.dense.weight"]


def change_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["bert.encoder.layer.1.output.dense.weight"][0, 0] += 1e-6


def shorten_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["bert.encoder.layer.1.output.dense.bias"] = tensors["bert.encoder.layer.1.output.dense.bias"].half()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lead_elsewhere(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere.safetensors")
    index = path.parent / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(path.name, "../elsewhere.safetensors"))


@pytest.mark.parametrize("change", [lose_one, change_one, shorten_one])
def test_other_tensors_in_other_files_are_damage(change: Any, halves: tuple[Any, Path], tmp_path: Path) -> None:
    shutil.copytree(halves[1], tmp_path / "checkpoint-3")
    put_into_files(tmp_path / "checkpoint-3", 3, change)
    with pytest.raises(ValueError, match="is damaged: model-0000.*the weights are not those that were saved"):
        checkpoint.read_state(str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, lead_elsewhere])
def test_damage_to_other_files_is_damage(damage: Any, halves: tuple[Any, Path], tmp_path: Path) -> None:
    shutil.copytree(halves[1], tmp_path / "checkpoint-3")
    put_into_files(tmp_path / "checkpoint-3", 3)
    damage(tmp_path / "checkpoint-3" / "model-00002-of-00003.safetensors")
    with pytest.raises(ValueError, match="is damaged: model"):
        checkpoint.read_state(str(tmp_path / "checkpoint-3"))


def test_weights_that_were_laid_before_those_of_the_checkpoint_are_damage(
    halves: tuple[Any, Path], tmp_path: Path
) -> None:
    """One file is read before several: of a checkpoint with several nobody would look at them."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(halves[1], folder)
    put_into_files(folder, 2)
    checkpoint.write_state(str(folder), checkpoint.read_state(str(folder)), {})
    checkpoint.read_state(str(folder))
    shutil.copy(halves[1].parent / "checkpoint-6" / "model.safetensors", folder)
    with pytest.raises(ValueError, match="is damaged: model.safetensors was not written with it"):
        checkpoint.read_state(str(folder))


@pytest.mark.parametrize(
    ("name", "value"),
    [("global_step", 1e30), ("global_step", -5), ("global_step", None), ("epoch", "x"), ("epoch", -1),
     ("train_batch_size", 2.5), ("train_batch_size", [])],
)  # fmt: skip
def test_counts_of_trainer_that_cannot_be_are_damage(tmp_path: Path, name: str, value: Any) -> None:
    content = {"global_step": 4, "epoch": 1.0, "train_batch_size": 4}
    (tmp_path / "trainer_state.json").write_text(json.dumps(content | {name: value}))
    with pytest.raises(ValueError, match=f"{tmp_path}.*damaged: trainer_state.json.*{name}"):
        read_progress(str(tmp_path), 16, DROPS_NOTHING)


# ---- what a run with all defaults saves and goes on from ----

DEFAULTS: dict[str, Any] = {"freeze_policy": "none"}


class TouchesFirst(TrainerCallback):
    """Changes the time of modification of the first checkpoint, as a backup or `touch` may."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        later = time.time() + 1000 * state.global_step
        for path in sorted(Path(args.output_dir).glob("checkpoint-*"))[:1]:
            os.utime(path, (later, later))


@pytest.mark.parametrize("options", [DEFAULTS, FREEZES], ids=["left to Trainer", "freezing"])
def test_old_checkpoints_go_by_their_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = make(PipeTransformerTrainer, tmp_path, save_total_limit=2, **options)
    trainer.add_callback(TouchesFirst())
    trainer.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-6"}


@pytest.mark.parametrize("options", [DEFAULTS, FREEZES], ids=["left to Trainer", "freezing"])
def test_a_checkpoint_is_pushed_when_it_is_whole_and_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    pushed = []

    def push(self: Any, folder: str) -> None:
        there = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
        pushed.append((Path(folder).name, there, checkpoint.is_complete(folder)))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    trainer = make(PipeTransformerTrainer, tmp_path, save_total_limit=1, save_steps=2, **options)
    trainer.args.push_to_hub = True
    trainer.train()
    is_whole = options is FREEZES
    assert pushed == [
        ("checkpoint-2", ["checkpoint-2"], is_whole),
        ("checkpoint-4", ["checkpoint-2", "checkpoint-4"], is_whole),
        ("checkpoint-6", ["checkpoint-4", "checkpoint-6"], is_whole),
    ]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]


class SavesAlone(Trainer):
    """Writes what Trainer does, and deletes nothing."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = f"{self.args.output_dir}/checkpoint-{self.state.global_step}"
        self.save_model(folder, _internal_call=True)
        self._save_optimizer_and_scheduler(folder)
        self._save_rng_state(folder)
        self.state.save_to_json(f"{folder}/trainer_state.json")


class SavesAloneInStages(PipeTransformerMixin, SavesAlone):
    pass


def test_a_checkpoint_that_a_scripts_own_method_writes_is_completed(tmp_path: Path) -> None:
    make(SavesAloneInStages, tmp_path, save_total_limit=1, save_steps=3, **FREEZES).train()
    assert [checkpoint.read_state(str(tmp_path / f"checkpoint-{step}")).step for step in (3, 6)] == [3, 6]


def test_the_best_and_the_last_checkpoint_stay_and_those_of_a_longer_run_go_first(tmp_path: Path) -> None:
    def left(limit: int | None, step: int, best: str | None = None) -> set[int]:
        for name in (1, 2, 3, 10, 99):
            (tmp_path / f"checkpoint-{name}").mkdir(exist_ok=True)
        (tmp_path / "checkpoint-best").mkdir(exist_ok=True)
        saving.rotate(str(tmp_path), limit, best, step)
        assert (tmp_path / "checkpoint-best").is_dir()
        return {int(path.name[11:]) for path in tmp_path.glob("checkpoint-*") if path.name != "checkpoint-best"}

    assert left(None, 3) == left(0, 3) == left(5, 3) == {1, 2, 3, 10, 99}
    assert left(4, 99) == {2, 3, 10, 99}
    assert left(1, 99) == {99}
    assert left(2, 3) == {2, 3}
    assert left(1, 3) == {3}
    assert left(1, 3, f"{tmp_path}/checkpoint-1") == {1, 3}
    assert left(3, 3, f"{tmp_path}/./checkpoint-99") == {2, 3, 99}


def test_the_target_of_a_link_among_old_checkpoints_stays_whole(tmp_path: Path) -> None:
    archived, folder = tmp_path / "archive", tmp_path / "output"
    for each in (archived, *(folder / f"checkpoint-{step}" for step in (2, 3))):
        each.mkdir(parents=True)
        (each / "trainer_state.json").touch()
    (folder / "checkpoint-1").symlink_to(archived)
    saving.rotate(str(folder), 1, None, 3)
    assert (archived / "trainer_state.json").is_file()
    assert {path.name for path in folder.iterdir()} == {"checkpoint-1", "checkpoint-3"}


class DrawsLonger(PipeTransformerTrainer):
    """Draws three times as many samples an epoch as the data set has."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=48)


def test_a_run_whose_sampler_is_longer_than_the_data_set_is_resumed(tmp_path: Path) -> None:
    make(DrawsLonger, tmp_path, **FREEZES).train()
    # 20 of 48 samples of the epoch, of a data set of 16.
    assert checkpoint.read_state(str(tmp_path / "checkpoint-5")).place.samples == 20
    assert checkpoint.newest_verified(str(tmp_path))[0] == str(tmp_path / "checkpoint-6")


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run with all defaults saved."""
    folder = tmp_path_factory.mktemp("defaults")
    make(PipeTransformerTrainer, folder, **DEFAULTS).train()
    assert not list(folder.glob("*/pipetransformer"))
    return folder


@pytest.fixture
def copied(trainers: Path, tmp_path: Path) -> Path:
    for step in (4, 6):
        shutil.copytree(trainers / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    assert find_for_trainer(str(tmp_path), True) == (str(tmp_path / "checkpoint-6"), False)
    return tmp_path


KINDS_OF_DAMAGE: list[tuple[str, Any]] = [
    *((name, damage) for name in ("optimizer.pt", "rng_state.pth") for damage in (cut, flip, empty)),
    *((name, damage) for name in ("scheduler.pt", "trainer_state.json") for damage in (cut, empty)),
    *((name, Path.unlink) for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json")),
    *(("model.safetensors", damage) for damage in (cut, empty)),
]


@pytest.mark.parametrize(("name", "damage"), KINDS_OF_DAMAGE)
def test_a_damaged_checkpoint_of_trainer_is_passed_over(
    copied: Path, name: str, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    damage(copied / "checkpoint-6" / name)
    assert find_for_trainer(str(copied), True) == (str(copied / "checkpoint-4"), False)
    assert re.search(rf"Passed over on the way to .*checkpoint-4.*checkpoint-6.*{name}", caplog.text)
    # As a run reads it that freezes.
    with pytest.raises(ValueError, match=f"checkpoint-6.*{name}"):
        read_progress(str(copied / "checkpoint-6"), 16, DROPS_NOTHING)
    damage(copied / "checkpoint-4" / name)
    with pytest.raises(ValueError, match=f"found no sound checkpoint.*checkpoint-6.*{name}.*checkpoint-4.*{name}"):
        find_for_trainer(str(copied), True)


def test_a_file_that_a_callback_added_is_no_damage(copied: Path) -> None:
    (copied / "checkpoint-6" / "averaged.pt").write_bytes(b"not a zip archive")
    assert find_for_trainer(str(copied), True) == (str(copied / "checkpoint-6"), False)


def test_weights_alone_and_none_are_told_apart(copied: Path) -> None:
    newest = copied / "checkpoint-6"
    for name in TRAINERS:
        (newest / name).unlink()
    assert find_for_trainer(str(copied), True)[0] == str(newest)  # As save_only_model leaves it.
    (newest / "model.safetensors").unlink()
    assert find_for_trainer(str(copied), True)[0] == str(copied / "checkpoint-4")
    assert find_for_trainer(str(copied), False)[0] == str(newest)  # Where the user's own method loads them.


class KilledError(BaseException):
    """In place of a kill."""


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_a_run_with_all_defaults_that_was_killed_while_it_saved_goes_on(
    trainers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Also where the checkpoint of an earlier run was being overwritten."""
    shutil.copytree(trainers / "checkpoint-3", tmp_path / "checkpoint-3")
    whole = make(PipeTransformerTrainer, trainers, 1, **DEFAULTS)
    whole.train(resume_from_checkpoint=str(trainers / "checkpoint-2"))
    written = torch.save

    def save(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith(f"checkpoint-3/{name}"):
            Path(path).write_bytes(b"PK half of it")
            raise KilledError
        written(value, path, *args, **kwargs)

    def save_to_json(self: Any, path: str) -> None:
        if path.endswith("checkpoint-3/trainer_state.json"):
            raise KilledError
        original(self, path)

    original = TrainerState.save_to_json
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        if name == "trainer_state.json":
            patch.setattr(TrainerState, "save_to_json", save_to_json)
        with pytest.raises(KilledError):
            make(PipeTransformerTrainer, tmp_path, **DEFAULTS).train()
    resumed = make(PipeTransformerTrainer, tmp_path, 2, **DEFAULTS)
    resumed.train(resume_from_checkpoint=True)
    assert re.search("Passed over on the way to .*checkpoint-2.*checkpoint-3.*interrupted", caplog.text)
    assert losses(resumed, 2) == losses(whole, 2)


def test_a_newer_checkpoint_of_a_pipeline_is_gone_on_with_by_it(trainers: Path, tmp_path: Path) -> None:
    """Whoever saved it: what is left to Trainer has an eye on both kinds."""
    shutil.copytree(trainers / "checkpoint-6", tmp_path / "checkpoint-6")
    make(PipeTransformerTrainer, tmp_path / "own", **FREEZES).train()
    shutil.copytree(tmp_path / "own" / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    assert find_for_trainer(str(tmp_path), True) == (str(tmp_path / "checkpoint-4"), True)
    resumed = make(PipeTransformerTrainer, tmp_path, 2, **DEFAULTS)
    resumed.train(resume_from_checkpoint=True)
    assert len(losses(resumed, 4)) == 2 and (tmp_path / "checkpoint-6" / checkpoint.STATE_FOLDER).is_dir()


# ---- permissions ----


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root may read everything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("closed", [".", "model.safetensors", "optimizer.pt", "trainer_state.json", "pipetransformer"])
@pytest.mark.parametrize("finder", ["of Trainer", "of a pipeline"])
def test_a_newest_checkpoint_that_may_not_be_read_is_not_passed_over(
    trainers: Path, open_folder: Path, closed: str, finder: str
) -> None:
    for step in (4, 6):
        shutil.copytree(trainers / f"checkpoint-{step}", open_folder / f"checkpoint-{step}")
    if closed == "pipetransformer":
        (open_folder / "checkpoint-6" / closed).mkdir()
    path = open_folder / "checkpoint-6" / closed
    path.chmod(0)
    where = str(open_folder)
    with as_another_user(), pytest.raises(ValueError, match=r"checkpoint-6' cannot be read: this user has no perm"):
        find_for_trainer(where, True) if finder == "of Trainer" else checkpoint.newest_verified(where)
    open_folder.chmod(0)
    with as_another_user(), pytest.raises(ValueError, match="cannot be read: this user has no permission"):
        find_for_trainer(where, True) if finder == "of Trainer" else checkpoint.newest_verified(where)


# ---- links ----


@pytest.mark.parametrize("options", [DEFAULTS, FREEZES], ids=["left to Trainer", "freezing"])
@pytest.mark.parametrize("name", ["", "pipetransformer", "model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_saving_follows_no_link(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    other, folder = tmp_path / "other", tmp_path / "run" / "checkpoint-2"
    link = folder / name if name else folder
    link.parent.mkdir(parents=True)
    if name in ("", "pipetransformer"):
        other.mkdir()
    else:
        other.write_bytes(b"precious")
    link.symlink_to(other)
    trainer = make(PipeTransformerTrainer, tmp_path / "run", **options)
    with pytest.raises(ValueError, match=re.escape(f"{str(link)!r} is a link to {str(other)!r}")):
        trainer.train()
    assert list(other.iterdir()) == [] if other.is_dir() else other.read_bytes() == b"precious"
