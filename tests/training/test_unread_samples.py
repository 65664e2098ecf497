"""Samples whose outputs are stored are not read any more: same numbers, how many are read, and what is noticed."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cache.frozen_parts import stored, unread, watching
from hf_pipetransformer.data.row_table import ROWS, RowTable
from tests.support.frozen_models import (
    Case,
    bert_probe,
    images,
    logged,
    pad,
    sentences,
    sounds,
    stack,
    trainer_of,
    vit_probe,
    whisper,
)


NUM_SAMPLES = 12
TOLERANCE = 1e-5
PROBE = Case(vit_probe, images, "vit", stack)


@pytest.fixture(autouse=True)
def _whatever_it_takes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(watching, "WORTH", 0.0)
    caplog.set_level(logging.INFO, "hf_pipetransformer")


class Read(Dataset[Any]):
    """Samples that count how often one is read, in any process.

    Args:
        change: changes what is read, given the sample, its number, and how often one was read before.
    """

    def __init__(self, rows: list[Any], change: Callable[[dict[str, Any], int, int], Any] | None = None) -> None:
        self.rows, self._change = rows, change
        self._number = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def number(self) -> int:
        return int(self._number)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = dict(self.rows[index])
        if self._change is not None:
            row = self._change(row, index, self.number)
        self._number += 1
        return row


class Counts(TrainerCallback):
    """Notes how many samples each epoch has read."""

    def __init__(self, data: Read) -> None:
        self._data, self.found = data, list[int]()

    def on_epoch_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.found.append(self._data.number - sum(self.found))


def both(
    folder: Path,
    case: Case = PROBE,
    change: Any = None,
    callback: Callable[[], TrainerCallback] | None = None,
    kinds: tuple[type, type] = (Trainer, PipeTransformerTrainer),
    **options: Any,
) -> tuple[list[int], list[int], Trainer]:
    """Samples that each epoch has read under Trainer and under ours, after trainings of the same numbers."""
    found, counts, last = [], [], None
    for kind in kinds:
        data = Read(case.data(), change)
        last = trainer_of(kind, case, folder / kind.__name__, data, **{"num_train_epochs": 5, **options})
        counts.append(Counts(data))
        last.add_callback(counts[-1])
        if callback is not None:
            last.add_callback(callback())
        weights = logged(last), {name: value.clone() for name, value in last.model.state_dict().items()}
        found.append((weights, last.state.total_flos, torch.get_rng_state()))
    (expected, flos, state), (ours, own_flos, own_state) = found
    np.testing.assert_allclose(ours[0], expected[0], rtol=TOLERANCE)
    for name, value in expected[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=TOLERANCE, atol=TOLERANCE)
    assert own_flos == flos
    assert torch.equal(own_state, state)
    assert last is not None
    return counts[0].found, counts[1].found, last


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [12, 12, 4, 4, 4]),
        ({"gradient_accumulation_steps": 3}, [12, 12, 4, 4, 4]),
        ({"dataloader_num_workers": 2}, [12, 12, 8, 8, 8]),
        ({"dataloader_num_workers": 1, "dataloader_persistent_workers": True}, [12, 12, 4, 4, 4]),
        ({"bf16": True}, [12, 12, 4, 4, 4]),
        ({"train_sampling_strategy": "sequential"}, [12, 12, 4, 4, 4]),
        ({"per_device_train_batch_size": 5}, [12, 12, 5, 5, 5]),
    ],
    ids=["plain", "accumulation", "workers", "persistent", "bf16", "in order", "uneven"],
)
def test_from_the_third_epoch_on_the_first_batch_is_read_alone(
    options: dict[str, Any], expected: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, ours, _ = both(tmp_path, **options)
    assert plain == [12] * 5 and ours == expected
    assert "Samples whose outputs are stored are not read any more" in caplog.text


def test_how_long_steps_took_is_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def slow(row: dict[str, Any], *_: int) -> dict[str, Any]:
        time.sleep(0.02)
        return row

    both(tmp_path, change=slow, per_device_train_batch_size=2, num_train_epochs=3)
    told = re.search(
        r"Steps took ([\d.]+) ms while outputs were stored, and ([\d.]+) ms once they were read", caplog.text
    )
    assert told is not None and float(told[1]) > 40
    caplog.clear()
    both(tmp_path / "few", per_device_train_batch_size=4, num_train_epochs=3)
    assert "outputs were read instead" in caplog.text and "Steps took" not in caplog.text


def test_an_encoder_of_sounds_below_a_trained_decoder(tmp_path: Path) -> None:
    _, ours, _ = both(tmp_path, Case(whisper, sounds, "model.encoder", stack))
    assert max(ours[2:]) < NUM_SAMPLES


def test_random_augmentation_is_read_in_every_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def augmented(row: dict[str, Any], *_: int) -> dict[str, Any]:
        return {**row, "pixel_values": row["pixel_values"] + torch.randn(1)}

    _, ours, _ = both(tmp_path, change=augmented)
    assert ours == [12] * 5
    assert "not read any more" not in caplog.text


def test_samples_that_are_others_from_an_epoch_on_are_seen_at_its_first_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Later(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            data = kwargs["train_dataloader"].dataset
            assert isinstance(data, Read)
            if int(state.epoch) == 3:
                data.rows = [{**row, "labels": (row["labels"] + 1) % 3} for row in data.rows]

    _, ours, _ = both(tmp_path, callback=Later)
    assert ours[2] < NUM_SAMPLES and ours[3:] == [12, 12]
    assert "Samples are read in every pass from here on: they are not the same" in caplog.text
    assert "Steps 7 to 9 may have used what they were before" in caplog.text, "the last that was read was step 7's"


class InEpochs(Read):
    """Samples of which some are others from the fourth epoch on, as in a curriculum; Trainer tells it the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = int(epoch >= 3)

    def __getitem__(self, index: int) -> Any:
        row = super().__getitem__(index)
        return {**row, "labels": (row["labels"] + 1) % 3} if self.epoch and index == 5 else row


@pytest.mark.parametrize("workers", [0, 2])
def test_some_samples_that_are_others_are_seen_by_the_state_of_their_data_set(workers: int, tmp_path: Path) -> None:
    found, counts = [], []
    for kind in (Trainer, PipeTransformerTrainer):
        data = InEpochs(PROBE.data())
        options = {"num_train_epochs": 6, "dataloader_num_workers": workers, "train_sampling_strategy": "sequential"}
        trainer = trainer_of(kind, PROBE, tmp_path / kind.__name__, data, **options)
        counts.append(Counts(data))
        trainer.add_callback(counts[-1])
        found.append(logged(trainer))
    np.testing.assert_allclose(found[1], found[0], rtol=TOLERANCE)
    assert counts[1].found[2] < NUM_SAMPLES, "nothing has changed"
    assert counts[1].found[3] == NUM_SAMPLES, "the data set was told another epoch"


def test_samples_that_change_within_an_epoch_are_told_with_the_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Later(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 7:
                data = kwargs["train_dataloader"].dataset
                data.rows = [{**row, "labels": (row["labels"] + 1) % 3} for row in data.rows]

    data = Read(images())
    trainer = trainer_of(PipeTransformerTrainer, PROBE, tmp_path, data, num_train_epochs=5)
    trainer.add_callback(Later())
    trainer.train()
    assert (
        "from here on: they are not the same when they are read again. Steps 7 to 9 may have used what" in caplog.text
    )


@pytest.mark.parametrize("method", ["compute_loss", "training_step", "get_batch_samples"])
def test_batches_that_the_script_sees_are_read(method: str, tmp_path: Path) -> None:
    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(type(self), self), method)(*args, **kwargs)

    kinds = tuple(type(f"Own{kind.__name__}", (kind,), {method: own}) for kind in (Trainer, PipeTransformerTrainer))
    _, ours, _ = both(tmp_path, kinds=kinds)  # type: ignore[arg-type]
    assert ours == [12] * 5


@pytest.fixture
def taken_for_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave samples unread although code of these tests sees their fields, as code of a package might."""
    monkeypatch.setattr(stored, "is_script_free", lambda _: True)


class Mean(nn.Module):
    """Pixels are read beside the frozen part, too."""

    def __init__(self) -> None:
        super().__init__()
        self.probe, self.own = vit_probe(), nn.Linear(1, 1)
        self.config: Any = self.probe.config

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        output = self.probe(pixel_values, labels=labels)
        return {"loss": output.loss + self.own(pixel_values.mean().reshape(1)).square().mean()}


@pytest.mark.usefixtures("taken_for_installed")
def test_what_is_read_beside_a_frozen_part_comes_from_the_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "ROWS_TOLERATED", 0)
    _, ours, _ = both(tmp_path, Case(Mean, images, "probe.vit", stack), num_train_epochs=8)
    assert ours[-1] == NUM_SAMPLES
    assert "from here on: they are not used by frozen parts alone" in caplog.text


class Shifted(nn.Module):
    """Pixels are written into before the frozen part gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = vit_probe()
        self.config: Any = self.probe.config
        self.steps = 0

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        self.steps += 1
        pixel_values.add_(0.1 * self.steps)
        return self.probe(pixel_values, labels=labels)


@pytest.mark.usefixtures("taken_for_installed")
def test_what_is_written_into_a_field_counts(tmp_path: Path) -> None:
    both(tmp_path, Case(Shifted, images, "probe.vit", stack))


def test_changed_weights_are_computed_from_the_samples(tmp_path: Path) -> None:
    class Moved(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 9:
                with torch.no_grad():
                    kwargs["model"].vit.layernorm.weight.mul_(1.5)

    _, ours, _ = both(tmp_path, callback=Moved, num_train_epochs=6)
    assert ours[2] < NUM_SAMPLES <= ours[3] and ours[5] < NUM_SAMPLES


def test_a_callback_reads_whole_batches_from_the_loader(tmp_path: Path) -> None:
    seen: list[float] = []

    class Reads(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for batch in kwargs["train_dataloader"]:
                assert list(batch) == ["pixel_values", "labels"]
                seen.append(float(batch["pixel_values"].double().sum()))

    plain = [float(stack(images()[start : start + 4])["pixel_values"].double().sum()) for start in (0, 4, 8)]
    both(tmp_path, callback=Reads, train_sampling_strategy="sequential")
    assert seen == pytest.approx(plain * 10)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("labels", lambda labels: labels.roll(1)),
        ("labels", lambda labels: labels.float()),
        (ROWS, lambda rows: replace(rows, digests={"pixel_values": rows.digests["pixel_values"][::-1]})),
        (ROWS, lambda rows: replace(rows, indices=rows.indices[::-1])),
    ],
    ids=["rows", "dtype", "keys", "indices"],
)
def test_a_table_that_is_wrong_is_seen_at_its_first_batch(
    name: str, change: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = RowTable.known

    def of_others(self: RowTable, indices: Any) -> Any:
        batch = known(self, indices)
        return None if batch is None else {**batch, name: change(batch[name])}

    monkeypatch.setattr(RowTable, "known", of_others)
    _, ours, _ = both(tmp_path)
    assert ours == [12] * 5
    assert "not read any more" not in caplog.text, "none was left unread"


def test_texts_are_read(tmp_path: Path) -> None:
    _, ours, _ = both(tmp_path, Case(bert_probe, sentences, "bert", pad))
    assert ours == [12] * 5


def test_a_run_that_resumes_within_an_epoch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_train_epochs": 5, "save_strategy": "steps", "save_steps": 8}
    expected = logged(trainer_of(Trainer, PROBE, tmp_path / "plain", Read(images()), **options))
    first = trainer_of(PipeTransformerTrainer, PROBE, tmp_path / "ours", Read(images()), **options)
    assert logged(first) == expected
    again = trainer_of(PipeTransformerTrainer, PROBE, tmp_path / "ours", Read(images()), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-8"))
    entries = [(each["loss"], each["grad_norm"]) for each in again.state.log_history if "grad_norm" in each]
    assert entries == expected


def test_a_loader_outside_of_a_training_is_trainers(tmp_path: Path) -> None:
    trainer = trainer_of(PipeTransformerTrainer, PROBE, tmp_path, Read(images()))
    for batch in trainer.get_train_dataloader():
        assert list(batch) == ["pixel_values", "labels"]


@pytest.mark.usefixtures("taken_for_installed")
def test_a_process_that_trains_reads_no_sample_where_workers_do(tmp_path: Path) -> None:
    main = os.getpid()

    def in_a_worker(row: dict[str, Any], *_: int) -> dict[str, Any]:
        assert os.getpid() != main
        return row

    options = {"dataloader_num_workers": 1, "save_strategy": "epoch", "num_train_epochs": 8}
    _, ours, _ = both(tmp_path, change=in_a_worker, **options)
    assert ours[2] < NUM_SAMPLES
    both(tmp_path / "mean", Case(Mean, images, "probe.vit", stack), change=in_a_worker, **options)


class Formed(nn.Module):
    """Asks pixels for what needs none of them, and converts them in ways that do."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = vit_probe()
        self.config: Any = self.probe.config

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        assert pixel_values.type() == "torch.FloatTensor"
        pixels = pixel_values.to("cpu").type(torch.float32).to(torch.device("cpu"), torch.float32)
        for changed in (
            pixels.type("torch.DoubleTensor"),
            pixels.to(torch.zeros(1).double()),
            pixels.to(torch.float64),
        ):
            assert changed.dtype == torch.float64
        assert pixels.to(torch.float32, False, True).data_ptr() != pixels.data_ptr()
        return self.probe(pixels, labels=labels)


@pytest.mark.usefixtures("taken_for_installed")
def test_conversions_of_a_field_are_torchs(tmp_path: Path) -> None:
    both(tmp_path, Case(Formed, images, "probe.vit", stack))


def test_a_field_that_a_hook_of_the_script_sees_is_read(tmp_path: Path) -> None:
    def seen(_module: nn.Module, args: Any, kwargs: Any) -> None:
        assert type(kwargs["pixel_values"]) is torch.Tensor

    def hooked() -> nn.Module:
        model = vit_probe()
        model.register_forward_pre_hook(seen, with_kwargs=True)
        return model

    _, ours, _ = both(tmp_path, Case(hooked, images, "vit", stack))
    assert ours == [12] * 5
    _, ours, _ = both(tmp_path / "model", Case(Shifted, images, "probe.vit", stack))
    assert ours == [12] * 5
