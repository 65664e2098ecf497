"""The activation store gives back exactly what was written, or nothing, or says that it is damaged."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer.cache import folder as folder_module
from hf_pipetransformer.cache.files import StoreDamagedError
from hf_pipetransformer.cache.folder import StoreFolder, Use, as_dataset, safe_max_bytes, take_store
from hf_pipetransformer.cache.records import ENTRY, RecordFormat, StoredRecords
from hf_pipetransformer.cache.store import ActivationStore, store_size


HIDDEN = 8
BOUND = 10**9
RECORD = RecordFormat(HIDDEN, torch.float32)


def values_of(record_format: RecordFormat, n: int, seq: int, seed: int = 0) -> torch.Tensor:
    """Random activations."""
    random_stream = torch.Generator().manual_seed(seed)
    return torch.randn((n, seq, record_format.hidden_size), generator=random_stream).to(record_format.dtype)


def digests_of(samples: Any) -> np.ndarray:
    return np.stack([np.asarray(samples, np.uint64), np.asarray(samples, np.uint64) + np.uint64(2**63)], axis=1)


def put(store: ActivationStore, samples: list[int], lengths: list[int], weights_id: int = 1, seed: int = 0) -> Any:
    activation = values_of(store.record_format, len(samples), max(lengths), seed)
    stored = store.write(np.array(samples), weights_id, activation, np.array(lengths), digests_of(samples))
    return stored, activation


def check_rows(rows: StoredRecords, activation: torch.Tensor, lengths: list[int]) -> None:
    """The rows are the values up to their length, and zero beyond."""
    length = rows.activation.shape[1]
    for row, stored in enumerate(lengths):
        copied = min(stored, length)
        assert torch.equal(rows.activation[row, :copied], activation[row, :copied])
        assert not rows.activation[row, copied:].any()


@pytest.fixture
def store(tmp_path: Path) -> ActivationStore:
    return ActivationStore.create(tmp_path / "store", 20, RECORD, BOUND)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


# ---- rows ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [1, 7, 3, 5]])
@pytest.mark.parametrize("length", [2, 5, 9])
@pytest.mark.parametrize("hidden_size", [8, 3, 1])
def test_round_trip_is_exact(
    tmp_path: Path, dtype: torch.dtype, lengths: list[int], length: int, hidden_size: int
) -> None:
    record_format = RecordFormat(hidden_size, dtype)
    store = ActivationStore.create(tmp_path, 10, record_format, BOUND)
    samples = [7, 0, 9, 3]
    stored, activation = put(store, samples, lengths)
    assert stored == 4
    rows = store.read(np.array(samples), length)
    assert rows.weights_ids.tolist() == [1] * 4 and rows.weights_ids.dtype == np.int64
    check_rows(rows, activation, lengths)
    assert store.entries(np.array(samples))["length"].tolist() == lengths
    assert store.entries(np.array([9]))["digest"].tolist() == [[9, 2**63 + 9]]
    assert store.weights_ids(np.arange(10)).tolist() == [1, 0, 0, 1, 0, 0, 0, 1, 0, 1]


def test_a_missing_row_is_zero_and_has_id_zero(store: ActivationStore) -> None:
    _, activation = put(store, [3], [4])
    rows = store.read(np.array([2, 3, 3]), 4)
    assert rows.weights_ids.tolist() == [0, 1, 1]
    assert not rows.activation[0].any() and torch.equal(rows.activation[1:], activation.expand(2, -1, -1))


def test_activations_of_another_dtype_are_converted(tmp_path: Path) -> None:
    store = ActivationStore.create(tmp_path, 1, RecordFormat(HIDDEN, torch.bfloat16), BOUND)
    activation = torch.randn(1, 4, HIDDEN)
    store.write(np.array([0]), 1, activation, np.array([4]), digests_of([0]))
    assert torch.equal(store.read(np.array([0]), 4).activation, activation.bfloat16())


def test_of_a_repeated_sample_the_last_row_counts(store: ActivationStore) -> None:
    stored, activation = put(store, [4, 4, 4], [2, 6, 3])
    assert stored == 1
    check_rows(store.read(np.array([4]), 6), activation[2:], [3])


def test_rewriting_in_place_makes_no_file_larger(store: ActivationStore) -> None:
    samples, lengths = list(range(20)), [6] * 20
    put(store, samples, lengths)
    size = store.bytes_stored
    for weights_id in range(2, 200):
        _, activation = put(store, samples, lengths, weights_id, seed=weights_id)
    assert store.bytes_stored == size
    rows = store.read(np.array(samples), 6)
    assert set(rows.weights_ids.tolist()) == {199}
    check_rows(rows, activation, lengths)


def test_a_longer_row_moves_and_a_shorter_one_stays(store: ActivationStore) -> None:
    put(store, [1, 2], [4, 4])
    for length in (9, 2, 4):
        _, activation = put(store, [1], [length], weights_id=length)
        check_rows(store.read(np.array([1]), 9), activation, [length])
    assert store.read(np.array([2]), 4).weights_ids.tolist() == [1]


def test_two_handles_see_each_others_rows(store: ActivationStore) -> None:
    other = ActivationStore.open(store.folder, writer=1)
    _, activation = put(store, [0, 1], [5, 5])
    check_rows(other.read(np.array([0, 1]), 5), activation, [5, 5])
    # In the slot that the first made, and in one of its own.
    _, activation = put(other, [1, 2], [4, 6], weights_id=2, seed=1)
    rows = store.read(np.array([1, 2]), 6)
    assert rows.weights_ids.tolist() == [2, 2]
    check_rows(rows, activation, [4, 6])
    assert {path.name for path in store.folder.glob("records*")} == {"records-0.bin", "records-1.bin"}


def test_an_opened_store_goes_on_where_it_was_left(store: ActivationStore) -> None:
    _, first = put(store, [0, 1], [5, 3])
    store.close()
    again = ActivationStore.open(store.folder, writer=0)
    assert again.record_format == RECORD and again.num_samples == 20
    _, second = put(again, [2], [4], seed=1)
    check_rows(again.read(np.array([0, 1]), 5), first, [5, 3])
    check_rows(again.read(np.array([2]), 5), second, [4])


def test_datasets_reads_the_records(store: ActivationStore) -> None:
    _, activation = put(store, [6, 5], [3, 4])
    first, second = as_dataset(store.folder)
    assert (first["sample"], second["sample"]) == (5, 6)
    assert torch.equal(torch.tensor(first["activation"]), activation[1])
    assert torch.equal(torch.tensor(second["activation"]), activation[0, :3])


def test_no_samples_are_no_rows(store: ActivationStore) -> None:
    none = np.array([], np.int64)
    rows = store.read(none, 5)
    assert rows.activation.shape == (0, 5, HIDDEN)
    assert store.write(none, 1, values_of(RECORD, 0, 5), none, digests_of([])) == 0


# ---- space ----


def test_the_bound_keeps_a_fixed_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_samples, length, hidden = 2000, 4, 64
    bound = 1_000_000
    store = ActivationStore.create(tmp_path, num_samples, RecordFormat(hidden, torch.float32), bound)
    activation = torch.randn(num_samples, length, hidden)
    everyone, lengths = np.arange(num_samples), np.full(num_samples, length)
    with caplog.at_level(logging.WARNING):
        counts = [
            store.write(everyone, weights_id, activation, lengths, digests_of(everyone)) for weights_id in (1, 2)
        ]
    assert store.bytes_stored <= bound
    assert counts[0] == counts[1] > 0.8 * bound / (length * hidden * 4)
    assert store.weights_ids(everyone).tolist() == [2] * counts[0] + [0] * (num_samples - counts[0])
    assert len(caplog.records) == 1 and "the bound of 1000000 bytes" in caplog.text
    assert torch.equal(store.read(everyone[: counts[0]], length).activation, activation[: counts[0]])


def fill(store: ActivationStore, samples: np.ndarray) -> int:
    """Records of 4 x 64 floats, in batches as a run writes them; how many were stored."""
    batches = np.split(samples, range(16, len(samples), 16))
    rows = [(batch, 1, torch.zeros(len(batch), 4, 64), np.full(len(batch), 4)) for batch in batches]
    return sum(store.write(*row, digests_of(row[0])) for row in rows)


@pytest.mark.parametrize("num_writing", [1, 2, 4])
@pytest.mark.parametrize("share", [0.4, 0.9, 1.25])
def test_what_the_planner_counts_on_is_stored_whichever_ranks_write(
    tmp_path: Path, num_writing: int, share: float
) -> None:
    """One rank of each pipeline writes, and which ones these are changes with the layout."""
    record_format, num_samples = RecordFormat(64, torch.float32), 8000
    bound = int(share * num_samples * 4 * 64 * 4)
    ActivationStore.create(tmp_path, num_samples, record_format, bound)
    first = ActivationStore.open(tmp_path, 3)
    stored = fill(first, np.arange(0, num_samples, 10))
    stores = [ActivationStore.open(tmp_path, writer) for writer in range(num_writing)]
    rest = np.setdiff1d(np.arange(num_samples), np.arange(0, num_samples, 10))
    for samples in np.split(rest, range(64, len(rest), 64)):
        for writer, own in enumerate(np.array_split(samples, num_writing)):
            stored += fill(stores[writer], own)
    assert first.bytes_stored <= bound
    fits = store_size(bound, num_samples, record_format, 4).share
    assert (fits == 1) == (share > 1)
    assert 0.9 * fits <= stored / num_samples <= fits


def test_writers_that_grow_at_the_same_time_stay_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_format, others = RecordFormat(64, torch.float32), []
    ActivationStore.create(tmp_path, 4000, record_format, 600_000)
    stores = [ActivationStore.open(tmp_path, writer) for writer in (0, 1)]
    reserve = os.posix_fallocate

    def reserve_while_another_grows(*args: int) -> None:
        if not others:
            others.append(threading.Thread(target=fill, args=(stores[1], np.arange(1000, 2000))))
            others[0].start()
            others[0].join(0.5)
        reserve(*args)

    monkeypatch.setattr(os, "posix_fallocate", reserve_while_another_grows)
    assert fill(stores[0], np.arange(1000)) > 0
    others[0].join()
    assert stores[0].bytes_stored <= 600_000


def test_an_index_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="and the index of 100000 samples alone takes .*activation_cache_max_gb"):
        ActivationStore.create(tmp_path, 100_000, RECORD, 1000)


def test_a_full_disk_keeps_what_is_stored(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, [0], [4])

    def refuse(descriptor: int, start: int, size: int) -> None:
        # As file systems do that keep the part that still fitted.
        os.ftruncate(descriptor, start + size // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    size = store.bytes_taken
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    long = 20_000
    with caplog.at_level(logging.WARNING):
        stored, _ = put(store, [1, 2, 0], [long, 3, 4], weights_id=2)
        assert put(store, [3], [long])[0] == 0
    assert stored == 2
    assert store.weights_ids(np.arange(4)).tolist() == [2, 0, 2, 0]
    assert len(caplog.records) == 1 and "is full" in caplog.text
    assert store.bytes_taken == size and not list(store.folder.glob("*.tmp"))


def disk_used(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_the_disk_used_follows_the_rows_that_are_stored(tmp_path: Path) -> None:
    """Also where the index has a place for each of very many samples, and shards are made for them."""
    num_samples, length, hidden = 1_280_000, 65, 192
    record_format = RecordFormat(hidden, torch.float32)
    store = ActivationStore.create(tmp_path, num_samples, record_format, 2**40)
    row_bytes, stored = length * hidden * 4, 0
    for count in (8, 200):
        samples = np.linspace(0, num_samples - 1, count, dtype=np.int64)
        put(store, samples.tolist(), [length] * count)
        stored = np.count_nonzero(store.weights_ids(np.arange(num_samples)))
        # An entry of the index takes a page of the disk, or two.
        needed = stored * (row_bytes + 2 * 4096)
        assert row_bytes * stored <= store.bytes_stored <= disk_used(tmp_path) <= 1.06 * needed + 300_000
    assert stored > 200
    assert (store.read(samples, length).weights_ids == 1).all()


def test_a_disk_that_has_no_page_for_an_entry_is_full(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, [0], [4])
    write = os.pwritev

    def refuse_the_index(descriptor: int, content: Any, place: int) -> int:
        if descriptor == store._index.file._fd and place >= 5 * ENTRY.itemsize:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content, place)

    monkeypatch.setattr(os, "pwritev", refuse_the_index)
    with caplog.at_level(logging.WARNING):
        assert put(store, [0, 4, 5, 6], [4] * 4, weights_id=2)[0] == 2
    assert np.flatnonzero(store.weights_ids(np.arange(20)) == 2).tolist() == [0, 4]
    assert len(caplog.records) == 1 and "is full" in caplog.text


def test_little_space_is_wasted_on_ragged_text(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).poisson(11, 2000) + 2
    store = ActivationStore.create(tmp_path, 2000, RecordFormat(384, torch.float32), BOUND)
    for start in range(0, 2000, 50):
        put(store, list(range(start, start + 50)), lengths[start : start + 50].tolist())
        if start >= 500:
            # At every moment, not only where the last shard happens to be full.
            assert store.bytes_stored <= 1.06 * lengths[: start + 50].sum() * 384 * 4
    assert (store.weights_ids(np.arange(2000)) == 1).all()


# ---- damage ----


@pytest.mark.parametrize("length", [2, 5, 9])
def test_a_flipped_bit_of_a_record_is_noticed(store: ActivationStore, length: int) -> None:
    put(store, [0, 1], [5, 5])
    path = store.folder / "records-0.bin"
    # The third token of the second record.
    place = RECORD.record_bytes(5) + 2 * HIDDEN * 4
    for bit in (0, 3, 7):
        flip(path, place, bit)
        with pytest.raises(StoreDamagedError, match=r"sample 1 .*records-0\.bin"):
            store.read(np.array([0, 1]), length)
        assert store.read(np.array([0]), length).weights_ids.tolist() == [1]
        flip(path, place, bit)
    assert store.read(np.array([0, 1]), length).weights_ids.tolist() == [1, 1]


def test_every_flipped_bit_of_an_entry_is_noticed(store: ActivationStore) -> None:
    put(store, [0, 1], [5, 5], weights_id=6)
    path, size = store.folder / "index.bin", ENTRY.itemsize
    both = np.array([0, 1])
    for byte in range(size):
        for bit in (0, 7):
            flip(path, size + byte, bit)
            with pytest.raises(StoreDamagedError, match=r"entry of sample 1 in .*index\.bin"):
                store.read(both, 5)
            flip(path, size + byte, bit)
    assert store.read(np.array([0, 1]), 5).weights_ids.tolist() == [6, 6]


def test_an_entry_in_the_place_of_another_sample_is_noticed(store: ActivationStore) -> None:
    put(store, [0, 1], [5, 5])
    path, size = store.folder / "index.bin", ENTRY.itemsize
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[size : 2 * size] + content[:size])
    with pytest.raises(StoreDamagedError, match=r"entry of sample 0 in .*index\.bin"):
        store.read(np.array([0]), 5)


@pytest.mark.parametrize("name", ["records-0.bin", "index.bin"])
def test_a_file_that_was_cut_is_noticed(store: ActivationStore, name: str) -> None:
    put(store, [0], [5])
    os.truncate(store.folder / name, 64)
    with pytest.raises(StoreDamagedError, match=f"{name} (has 64 bytes: expected|ends before the record)"):
        store.read(np.array([0]), 5)
    with pytest.raises(StoreDamagedError, match=f"{name} has 64 bytes: expected"):
        put(store, [0], [5])
    with pytest.raises(StoreDamagedError, match=name):
        ActivationStore.open(store.folder, 0)


@pytest.mark.parametrize("name", ["records-0.bin", "index.bin"])
def test_a_file_that_vanished_is_noticed(store: ActivationStore, name: str) -> None:
    put(store, [0], [5])
    (store.folder / name).unlink()
    with pytest.raises(StoreDamagedError, match="has vanished"):
        store.read(np.array([0]), 5)
    with pytest.raises(StoreDamagedError, match=name):
        ActivationStore.open(store.folder, 0)


def test_a_file_of_another_store_is_refused(store: ActivationStore, tmp_path: Path) -> None:
    put(store, [0], [5])
    foreign = ActivationStore.create(tmp_path / "foreign", 20, RECORD, BOUND)
    put(foreign, [0], [5], seed=1)
    os.replace(foreign.folder / "records-0.bin", store.folder / "records-0.bin")
    other = ActivationStore.open(store.folder, writer=1)
    with pytest.raises(StoreDamagedError, match="have another hash"):
        other.read(np.array([0]), 5)


def test_two_writers_under_one_number_are_noticed(store: ActivationStore) -> None:
    other = ActivationStore.open(store.folder, writer=0)
    put(store, [0], [5])
    with pytest.raises(StoreDamagedError, match="records-0.bin has .* bytes: expected"):
        put(other, [1], [5])
    assert store.read(np.array([0, 1]), 5).weights_ids.tolist() == [1, 0]


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreDamagedError, match="not the header of an activation store"):
        ActivationStore.open(tmp_path, 0)


def change_while_copying(monkeypatch: pytest.MonkeyPatch, change: Callable[[], Any]) -> None:
    """Change a store once, between the entry and the tokens of a row that is read."""
    copy, changes = ActivationStore._has_copied, [change]

    def change_and_copy(*arguments: Any) -> Any:
        if changes:
            changes.pop()()
        return copy(*arguments)

    monkeypatch.setattr(ActivationStore, "_has_copied", change_and_copy)


def test_a_row_that_is_being_overwritten_counts_as_missing(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, [0, 1], [5, 5])

    def begin() -> None:
        assert store._index.clear(0, is_new=False)
        store._file(0).write(2 * HIDDEN * 4, [np.ones((1, HIDDEN), np.float32)])

    change_while_copying(monkeypatch, begin)
    rows = store.read(np.array([0, 1]), 5)
    assert rows.weights_ids.tolist() == [0, 1] and not rows.activation[0].any()


@pytest.mark.parametrize("weights_id", [1, 2])
def test_a_row_that_was_rewritten_while_it_was_copied_is_read_again(
    store: ActivationStore, monkeypatch: pytest.MonkeyPatch, weights_id: int
) -> None:
    put(store, [0], [5])
    rewritten: list[Any] = []
    change_while_copying(monkeypatch, lambda: rewritten.append(put(store, [0], [4], weights_id, seed=1)))
    rows = store.read(np.array([0]), 5)
    assert rows.weights_ids.tolist() == [weights_id]
    check_rows(rows, rewritten[0][1], [4])


def test_a_dropped_store_is_empty_for_all(store: ActivationStore) -> None:
    put(store, [0], [5])
    other = ActivationStore.open(store.folder, writer=1)
    assert store.dropped is None and other.weights_ids(np.array([0])).tolist() == [1]
    store.drop("the data set changes")
    assert other.dropped == store.dropped == "the data set changes"
    assert other.weights_ids(np.array([0])).tolist() == [0]
    assert other.read(np.array([0]), 5).weights_ids.tolist() == [0]
    assert put(other, [1], [5])[0] == 0
    assert ActivationStore.open(store.folder, writer=1).dropped == "the data set changes"


# ---- against a model ----


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.lists(st.tuples(st.integers(0, 7), st.integers(1, 12)), min_size=1, max_size=6)
        ),
        max_size=12,
    ),
    st.integers(1, 14),
)
def test_random_writes_follow_a_dictionary(steps: list[tuple[int, list[tuple[int, int]]]], length: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        stores = [ActivationStore.create(place, 8, RECORD, BOUND)]
        stores.append(ActivationStore.open(place, 1))
        model: dict[int, tuple[int, int, torch.Tensor]] = {}
        for step, (writer, rows) in enumerate(steps):
            samples, lengths = [sample for sample, _ in rows], [stored for _, stored in rows]
            stored, activation = put(stores[writer], samples, lengths, weights_id=step + 1, seed=step)
            assert stored == len(set(samples))
            for row, (sample, tokens) in enumerate(rows):
                model[sample] = (step + 1, tokens, activation[row : row + 1])
        for store in stores:
            for sample in range(8):
                found = store.read(np.array([sample]), length)
                weights_id, tokens, activation = model.get(sample, (0, 0, torch.empty(0)))
                assert found.weights_ids.tolist() == [weights_id]
                if weights_id:
                    check_rows(found, activation, [tokens])
            store.close()


# ---- several processes ----

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["hf_pipetransformer.cache.store"])
TIME_LIMIT = 60


def ask_weights_ids(folder: str, offset: int, pipe: Connection) -> None:
    store = ActivationStore.open(folder, 0)
    pipe.send({f"key-{(i + offset) % 100}": store.weights_id(f"key-{(i + offset) % 100}") for i in range(100)})


def test_ids_of_weights_are_the_same_in_all_processes(store: ActivationStore) -> None:
    pipes, children = [], []
    for offset in (0, 50):
        mine, theirs = PROCESSES.Pipe()
        children.append(PROCESSES.Process(target=ask_weights_ids, args=(str(store.folder), offset, theirs)))
        children[-1].start()
        pipes.append(mine)
    answers = []
    for pipe, child in zip(pipes, children, strict=True):
        assert pipe.poll(TIME_LIMIT)
        answers.append(pipe.recv())
        child.join(TIME_LIMIT)
    assert answers[0] == answers[1]
    assert len(set(answers[0].values())) == 100 and min(answers[0].values()) > 0


def test_no_rows_of_other_weights_are_served_whatever_is_lost(store: ActivationStore) -> None:
    """Nothing gives out ids that could be given out again."""
    everyone = np.arange(20)
    put(store, everyone.tolist(), [5] * 20, weights_id=store.weights_id("weights of the first run"))
    store.close()
    for path in store.folder.iterdir():
        if path.name not in ("store.json", "index.bin") and not path.name.startswith("records"):
            path.unlink()
    again = ActivationStore.open(store.folder, writer=0)
    assert again.weights_id("weights of the second run") not in again.weights_ids(everyone)
    assert set(again.weights_ids(everyone).tolist()) == {again.weights_id("weights of the first run")}


def test_ids_of_one_store_mean_nothing_in_another(store: ActivationStore, tmp_path: Path) -> None:
    other = ActivationStore.create(tmp_path / "other", 20, RECORD, BOUND)
    assert store.weights_id("key") != other.weights_id("key")


KILL_FORMAT = RecordFormat(64, torch.float32)
KILL_SAMPLES, KILL_SEQ = 64, 24


def rows_at(samples: np.ndarray, weights_id: int) -> tuple[torch.Tensor, np.ndarray]:
    """What the writer that is killed writes: a function of samples and weights."""
    seeds = torch.from_numpy(samples * 1009 + weights_id)
    lengths = 1 + (samples * 7 + weights_id * 5) % KILL_SEQ
    base = seeds[:, None] + torch.arange(KILL_SEQ)
    activation = base[:, :, None].float() * 64 + torch.arange(64)
    return activation, lengths


def write_until_killed(folder: str, seed: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = ActivationStore.open(folder, 0)
    stream = np.random.default_rng(seed)
    is_ready = False
    while True:
        samples = stream.choice(KILL_SAMPLES, 16, replace=False)
        weights_id = int(stream.integers(1, 100))
        store.write(samples, weights_id, *rows_at(samples, weights_id), digests_of(samples))
        if not is_ready:
            pipe.send("ready")
            is_ready = True


def check_killed(folder: Path) -> int:
    """Every row that is served is exactly right; how many there are."""
    store = ActivationStore.open(folder, 0)
    everyone = np.arange(KILL_SAMPLES)
    rows = store.read(everyone, KILL_SEQ)
    for sample in np.flatnonzero(rows.weights_ids).tolist():
        activation, lengths = rows_at(np.array([sample]), int(rows.weights_ids[sample]))
        part = slice(sample, sample + 1)
        check_rows(StoredRecords(rows.weights_ids[part], rows.activation[part]), activation, lengths.tolist())
    store.close()
    return int((rows.weights_ids > 0).sum())


def kill_writers(folder: Path, times: int) -> None:
    moments = random.Random(times)
    served = []
    for attempt in range(times):
        if attempt % 20 == 0:
            # From time to time from an empty store, so that shards are being made when the kill comes.
            ActivationStore.create(folder, KILL_SAMPLES, KILL_FORMAT, BOUND).close()
        mine, theirs = PROCESSES.Pipe()
        writer = PROCESSES.Process(target=write_until_killed, args=(str(folder), attempt, theirs))
        writer.start()
        assert mine.poll(TIME_LIMIT) and mine.recv() == "ready"
        time.sleep(moments.random() * 0.02)
        writer.kill()
        writer.join(TIME_LIMIT)
        assert writer.exitcode == -9
        served.append(check_killed(folder))
    assert max(served) > KILL_SAMPLES // 2


def test_a_kill_leaves_only_whole_rows(tmp_path: Path) -> None:
    kill_writers(tmp_path, 10)


@pytest.mark.slow
def test_two_hundred_kills_leave_only_whole_rows(tmp_path: Path) -> None:
    kill_writers(tmp_path, 200)


# ---- the folder ----


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mounts"
    point = str(tmp_path / "a share").replace(" ", "\\040")
    table.write_text(f"disk / ext4 rw 0 0\nserver:/x {point} nfs4 rw 0 0\ndisk {point}/local ext4 rw 0 0\n")
    monkeypatch.setattr(folder_module, "_MOUNT_TABLE", table)
    with pytest.raises(ValueError, match=r"a share is a network file system \(nfs4\).*activation_cache_dir"):
        StoreFolder.take(tmp_path / "a share" / "cache", "key")
    StoreFolder.take(tmp_path / "a share" / "local", "key").remove()
    StoreFolder.take(tmp_path / "other", "key").remove()


def test_a_second_live_run_gets_another_folder(tmp_path: Path) -> None:
    first = StoreFolder.take(tmp_path, "key")
    second = StoreFolder.take(tmp_path, "key")
    assert [first.path.name, second.path.name] == ["key", "key-2"]
    assert first.path.parent.name == "_activation_cache"
    first.remove()
    assert not first.path.exists() and second.path.exists()
    third = StoreFolder.take(tmp_path, "key")
    assert third.path == first.path and second.path.exists()


def hold_folder(base: str, pipe: Connection) -> None:
    folder = StoreFolder.take(base, "dead")
    ActivationStore.create(folder.path, 4, RECORD, BOUND)
    pipe.send(str(folder.path))
    time.sleep(TIME_LIMIT)


def test_what_a_dead_run_left_is_deleted(tmp_path: Path) -> None:
    mine, theirs = PROCESSES.Pipe()
    child = PROCESSES.Process(target=hold_folder, args=(str(tmp_path), theirs))
    child.start()
    assert mine.poll(TIME_LIMIT)
    left = Path(mine.recv())
    live = StoreFolder.take(tmp_path, "live")
    assert (left / "index.bin").exists()
    child.kill()
    child.join(TIME_LIMIT)
    again = StoreFolder.take(tmp_path, "again")
    assert not left.exists() and live.path.exists() and again.path.exists()


def test_a_kept_folder_serves_a_later_run_of_the_same_rows(tmp_path: Path) -> None:
    first = StoreFolder.take(tmp_path, "key")
    assert not first.is_reusable(RECORD, 20)
    store = ActivationStore.create(first.path, 20, RECORD, BOUND)
    _, activation = put(store, [3], [4])
    first.keep()
    first.release()
    StoreFolder.take(tmp_path, "other").remove()
    again = StoreFolder.take(tmp_path, "key")
    assert again.path == first.path and again.is_reusable(RECORD, 20)
    assert not again.is_reusable(RECORD, 21) and not again.is_reusable(RecordFormat(HIDDEN, torch.bfloat16), 20)
    reopened = ActivationStore.open(again.path, 0)
    check_rows(reopened.read(np.array([3]), 4), activation, [4])
    reopened.drop("a reason")
    assert not again.is_reusable(RECORD, 20)


def test_a_store_that_an_earlier_version_kept_is_made_again(tmp_path: Path) -> None:
    folder = StoreFolder.take(tmp_path, "key")
    for name, content in {"store.json": b'{"version": "5"}', "index.arrow": b"", "shard-0-0.arrow": b""}.items():
        folder.folder.write(name, content)
    folder.keep()
    folder.release()
    again, store = take_store(tmp_path, "key", 20, RECORD, BOUND)
    assert again.path == folder.path and not store.weights_ids(np.arange(20)).any()
    names = {path.name for path in again.path.iterdir()}
    assert names == {"lock", "store.json", "index.bin", "records-0.bin"}


def test_a_store_that_cannot_be_marked_as_kept_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StoreFolder, "keep", fail)
        with pytest.raises(OSError, match="No space left"):
            take_store(tmp_path, "key", 20, RECORD, BOUND, Use("a", "b"))
    assert not (tmp_path / "key").exists()
    folder, _ = take_store(tmp_path, "key", 20, RECORD, BOUND, Use("a", "b"))
    assert folder.path.name == "key" and folder.is_kept
    folder.close()


def test_a_folder_that_is_not_kept_is_emptied(tmp_path: Path) -> None:
    first = StoreFolder.take(tmp_path, "key")
    ActivationStore.create(first.path, 20, RECORD, BOUND)
    first.release()
    again = StoreFolder.take(tmp_path, "key")
    assert [path.name for path in again.path.iterdir()] == ["lock"]


def test_the_safe_bound_leaves_half_of_the_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert safe_max_bytes(tmp_path / "not" / "made") == pytest.approx(free / 2, rel=0.05)
