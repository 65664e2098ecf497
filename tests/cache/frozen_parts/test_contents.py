"""Records by content: found again, bounded, of present weights only, and lost rather than wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_pipetransformer.cache.folder import Use, take_store
from hf_pipetransformer.cache.frozen_parts.contents import ContentStore
from hf_pipetransformer.cache.records import RecordFormat


KEY = "part-0123"


def open_store(folder: Path, num_places: int = 8, max_bytes: int = 10**7, key: str | None = None) -> ContentStore:
    content, use = RecordFormat(2, torch.float32), Use("a part", "some data")
    taken, made = take_store(folder, key, num_places, content, max_bytes, use)
    store = ContentStore(made, folder=taken)
    store.use_weights("weights")
    return store


def words(*numbers: int) -> Any:
    return np.array([[number, number + 100] for number in numbers], np.uint64)


def records(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, 3, 2).contiguous()


def write(store: ContentStore, *numbers: int, lengths: tuple[int, ...] = ()) -> None:
    store.write(words(*numbers), records(*numbers), np.array(lengths or [3] * len(numbers)))


def test_records_are_found_by_what_they_were_computed_from(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 5, 6, 5)
    assert len(store) == 2
    places = store.find(words(6, 7, 5))
    assert places.tolist()[1] == -1
    found = store.read(places[[0, 2]], 3)
    assert found is not None and torch.equal(found, records(6, 5))
    # The second half of a hash counts, too.
    assert store.find(np.array([[5, 106]], np.uint64)).tolist() == [-1]
    store.close()
    assert not list(tmp_path.rglob("records-*"))


def test_a_record_ends_at_its_own_length(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 5, lengths=(2,))
    found = store.read(store.find(words(5)), 4)
    assert found is not None and found[0].tolist() == [[5, 5], [5, 5], [0, 0], [0, 0]]


def test_other_weights_have_no_records(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 5, 6)
    store.use_weights("others")
    assert store.find(words(5)).tolist() == [-1]
    write(store, 7)
    store.use_weights("weights")
    assert (store.find(words(5, 6)) >= 0).tolist() == [False, True], "the first place was written anew"


def test_a_record_that_is_another_by_now_is_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    write(store, 5)
    places = store.find(words(5))
    store.use_weights("others")
    write(store, 7)
    with caplog.at_level(logging.WARNING, "hf_pipetransformer"):
        store.use_weights("weights")
        assert store.read(places, 3) is None
    assert "records are not those that were written" in caplog.text


def test_what_finds_no_place_is_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_places=2)
    write(store, 1, 2, 3)
    write(store, 4)
    assert (store.find(words(1, 2, 3, 4)) >= 0).tolist() == [True, True, False, False]


def test_a_kept_store_is_found_by_the_next_run(tmp_path: Path) -> None:
    first = open_store(tmp_path, key=KEY)
    write(first, 5)
    first.close()
    second = open_store(tmp_path, key=KEY)
    assert (second.find(words(5, 6)) >= 0).tolist() == [True, False]
    write(second, 6)
    found = second.read(second.find(words(5, 6)), 3)
    assert found is not None and torch.equal(found, records(5, 6))


def test_a_damaged_record_turns_the_store_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    write(store, 5)
    (path,) = tmp_path.rglob("records-0.bin")
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(bytes(content))
    with caplog.at_level(logging.WARNING, "hf_pipetransformer"):
        assert store.read(store.find(words(5)), 3) is None
    assert "Outputs of frozen parts are computed from here on, not read" in caplog.text
    assert store.is_off and store.find(words(5)).tolist() == [-1]
    write(store, 6)
    assert not len(store)
