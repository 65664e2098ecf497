"""What the activation cache says when a folder, a file or values are not what it expects."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hf_pipetransformer.cache import records
from hf_pipetransformer.cache.files import PrivateFolder, StoreDamagedError, StoreFile
from hf_pipetransformer.cache.folder import StoreFolder, check_base
from hf_pipetransformer.cache.opening import CacheInputs
from hf_pipetransformer.cache.records import HEADER_FILE, RecordFormat
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.schedules.abilities import abilities_of
from tests.cache.test_store import RECORD, digests_of, put, values_of


STRANGER = 65534


def test_a_folder_that_others_own_or_may_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, open_to_all = tmp_path / "base", tmp_path / "open"
    base.mkdir(0o700)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ValueError, match="and has mode 0777: expected a folder of user"):
        check_base(open_to_all)
    (base / "kept").mkdir()
    (base / "kept").chmod(0o777)
    with pytest.raises(ValueError, match=r"may be written by other users \(mode 0777\)"):
        PrivateFolder.under(base, "kept")
    (base / "kept").chmod(0o700)
    PrivateFolder.under(base, "kept").names()
    # Root's folders are trusted as a base, but not as a store.
    real = os.fstat

    def of_stranger(descriptor: int) -> Any:
        found = real(descriptor)
        is_store = os.path.samestat(found, os.stat(base / "kept"))
        return SimpleNamespace(st_uid=STRANGER, st_mode=found.st_mode) if is_store else found

    monkeypatch.setattr(os, "fstat", of_stranger)
    with pytest.raises(ValueError, match=rf"kept belongs to another user \({STRANGER}, not"):
        PrivateFolder.under(base, "kept")


def test_a_base_that_anothers_link_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    real = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: SimpleNamespace(st_uid=STRANGER, st_mode=real(path).st_mode))
    with pytest.raises(ValueError, match=r"link, on the way to .*base, is another user's link"):
        check_base(tmp_path / "link" / "base")


def test_a_file_that_cannot_be_opened_or_read(tmp_path: Path) -> None:
    folder = PrivateFolder.under(tmp_path, "store", create=True)
    with pytest.raises(StoreDamagedError, match=r"none.bin cannot be opened \("):
        StoreFile(folder, "none.bin")
    file = StoreFile(folder, "some.bin", create=True)
    descriptor = os.open(folder.path / "some.bin", os.O_WRONLY)
    os.dup2(descriptor, file._fd)
    os.close(descriptor)
    with pytest.raises(StoreDamagedError, match=r"A record of .*some.bin cannot be read \("):
        file.read(0, [np.zeros(1)])


def test_a_folder_that_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> bool:
        raise OSError("planted")

    folder = StoreFolder.take(tmp_path, "key")
    monkeypatch.setattr(StoreFolder, "clear", fail)
    with caplog.at_level(logging.WARNING, "hf_pipetransformer"):
        folder.remove()
    assert "could not be deleted: planted" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("version", 0, "it is of version 0, expected"), ("num_samples", 5, "its hash does not hold")],
)
def test_a_header_of_another_version_or_content(tmp_path: Path, name: str, value: int, words: str) -> None:
    ActivationStore.create(tmp_path / "store", 4, RECORD, 2**30).close()
    path = tmp_path / "store" / HEADER_FILE
    values = json.loads(path.read_text()) | {name: value}
    del values["hash"]
    values["hash"] = records._hash(values if name == "version" else {})
    path.write_text(json.dumps(values))
    with pytest.raises(StoreDamagedError, match=words):
        ActivationStore.open(tmp_path / "store", 0)


def test_a_file_that_ends_before_what_the_index_names(tmp_path: Path) -> None:
    store = ActivationStore.create(tmp_path / "store", 4, RECORD, 2**30)
    put(store, [0], [5])
    store.close()
    os.truncate(tmp_path / "store" / "records-0.bin", 64)
    with pytest.raises(StoreDamagedError, match="has 64 bytes: the index names .* It was cut"):
        ActivationStore.open(tmp_path / "store", 0)


def test_a_format_of_what_cannot_be_stored() -> None:
    with pytest.raises(ValueError, match=r"Activations cannot be stored as torch\.int8: expected one of"):
        RecordFormat(4, torch.int8)


def test_values_that_are_not_of_the_format(tmp_path: Path) -> None:
    store = ActivationStore.create(tmp_path / "store", 4, RECORD, 2**30)
    activation = values_of(RECORD, 1, 5)
    with pytest.raises(ValueError, match=r"activation is torch.int64 \(1, 5, 8\): expected floats of"):
        RECORD.stored(activation.long())
    with pytest.raises(ValueError, match="lengths are 0 to 0: expected 1 to 5"):
        store.write(np.array([0]), 1, activation, np.array([0]), digests_of([0]))
    put(store, [0], [5])
    store.close()
    reader = ActivationStore.open(tmp_path / "store", None)
    with pytest.raises(ValueError, match="was opened to read only"):
        put(reader, [0], [5])


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("token", "runs slices of sequences. Use pipeline_schedule='1f1b'"),
        ("async_1f1b", "reads ahead of what is stored"),
        ("1f1b", "get_train_dataloader returned a list, which does not say which samples it reads"),
    ],
)
def test_why_nothing_is_stored_whatever_is_in_the_samples(schedule: str, words: str) -> None:
    inputs = SimpleNamespace(
        start_up=SimpleNamespace(probe=SimpleNamespace(activation=None)),
        args=SimpleNamespace(pipeline_schedule=schedule),
        abilities=abilities_of(schedule),
    )
    assert words in str(CacheInputs._why_not(inputs, []))  # type: ignore[arg-type]


def test_activations_that_are_not_one_a_token() -> None:
    class Loader(PipelineLoader):
        is_stream = False

        def __init__(self) -> None:
            pass

    activation = SimpleNamespace(hidden_shape=(5, 4), input_shape=(8,), changes_length=True)
    inputs = SimpleNamespace(
        start_up=SimpleNamespace(probe=SimpleNamespace(activation=activation), samples=SampleBatch()),
        args=SimpleNamespace(pipeline_schedule="1f1b"),
        abilities=abilities_of("1f1b"),
    )
    found = str(CacheInputs._why_not(cast(Any, inputs), Loader()))
    assert "the layers' activations have 5 positions for 8 tokens" in found
