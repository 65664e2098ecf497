"""Whatever happens to the files of the activation cache, and whoever else is on the machine: nothing wrong is served,
no run dies of it, and nothing that is not a store's is touched.
"""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from hf_pipetransformer.cache import folder as folder_module
from hf_pipetransformer.cache.cache import ActivationCache
from hf_pipetransformer.cache.files import StoreDamagedError
from hf_pipetransformer.cache.folder import StoreFolder, Use, check_base, delete_leftovers, open_root, take_store
from hf_pipetransformer.cache.inputs import SampleForm
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.storage import measure_storage
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.cli import main
from hf_pipetransformer.data.batches import SampleBatch, detach_tags
from hf_pipetransformer.engine.program import MicroBatch


NUM_SAMPLES = 12
HIDDEN = 4
LENGTHS = [1 + sample * 5 % 7 for sample in range(NUM_SAMPLES)]
RECORD = RecordFormat(HIDDEN, torch.float32)
STRANGER = 65534
CHANGES = [
    *("flip", "top bits", "swap", "reverse", "copy", "zero", "noise"),
    *("cut", "empty", "longer", "gone", "link", "other"),
]


# ---- files that are changed by somebody ----


def read(samples: list[int]) -> dict[str, torch.Tensor]:
    """The data set, collated: token ids tell sample and place."""
    length = max(LENGTHS[sample] for sample in samples)
    places = torch.arange(length)
    mask = places < torch.tensor([LENGTHS[sample] for sample in samples])[:, None]
    ids = (100 * torch.tensor(samples)[:, None] + places + 1) * mask
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.tensor(samples)}


def activation_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """`(batch, seq, hidden)`: what the frozen layers give, no two numbers alike."""
    return inputs["input_ids"][:, :, None] + torch.arange(HIDDEN) / 8


FORM = SampleForm(
    main_input="input_ids",
    shape=None,
    num_positions=max(LENGTHS),
    record_length=max(LENGTHS),
    record_format=RECORD,
    pad_token_id=0,
    keeps_padding=False,
)


def run(base: Path, weights: str, disturb: Callable[[Path], Any] = lambda folder: None) -> int:
    """Two epochs of a run that keeps its store, disturbed after the first; how many activations came from it.

    Whatever it is served is compared: inputs, and activations to the bit.
    """
    folder, store = take_store(base, "key", NUM_SAMPLES, RECORD, 10**7)
    folder.keep()
    cache = ActivationCache(store, FORM)
    cache.use_weights(["", f"{weights} 1", f"{weights} 2"])
    hits, order = 0, [sample * 7 % NUM_SAMPLES for sample in range(NUM_SAMPLES)]
    batches = [order[:5], order[5:], order[::-1][:5], order[::-1][5:]]
    for number, samples in enumerate(batches):
        if number == 2:
            cache.prefetch(samples)
            disturb(folder.path)
        expected = read(samples)
        inputs, tags = detach_tags(cache.tagged(samples, SampleBatch(expected)))
        assert all(torch.equal(inputs[name], values) for name, values in expected.items())
        if tags is None:
            # Given up, with a warning.
            assert store.dropped is not None
            continue
        found = tags.num_layers > 0
        activation = activation_of(expected).float() * expected["attention_mask"][:, :, None]
        if tags.hidden is not None:
            assert torch.equal(tags.hidden[found], activation[found])
        hits += int(found.sum())
        cache.writer.write(MicroBatch(0, inputs, 1.0, tuple(activation.shape), lambda _: None, tags=tags), activation)
    cache.close()
    folder.release()
    return hits


def written(cache: ActivationCache, samples: list[int], batch: SampleBatch) -> torch.Tensor:
    """What frozen layers give for a batch, which the cache gets."""
    inputs, tags = detach_tags(cache.tagged(samples, batch))
    activation = activation_of(inputs).float() * inputs["attention_mask"][:, :, None]
    cache.writer.write(MicroBatch(0, inputs, 1.0, tuple(activation.shape), lambda _: None, tags=tags), activation)
    return activation


@pytest.mark.parametrize("padding", [0, 3])
def test_the_records_of_a_batch_are_read_ahead_though_some_of_its_samples_have_none(
    tmp_path: Path, padding: int
) -> None:
    _, store = take_store(tmp_path, "key", NUM_SAMPLES, RECORD, 10**7)
    cache = ActivationCache(store, FORM)
    cache.use_weights(["", "1", "2"])
    activation, samples = written(cache, [5, 3], SampleBatch(read([5, 3]))), [5, 4, 3, 2]
    batch = {
        name: pad(values, (0, padding)) if values.dim() == 2 else values for name, values in read(samples).items()
    }
    with patch.object(store, "read", wraps=store.read) as reads:
        cache.prefetch(samples)
        whole, tags = detach_tags(cache.tagged(samples, SampleBatch(batch)))
    assert reads.call_count == 1, "what was read ahead is used"
    assert tags is not None and tags.hidden is not None
    assert tags.num_layers.tolist() == [2, 0, 2, 0]
    length = min(tags.hidden.shape[1], activation.shape[1])
    assert torch.equal(tags.hidden[[0, 2], :length], activation[:, :length]) and not tags.hidden[:, length:].any()
    assert all(torch.equal(whole[name], values) for name, values in batch.items())
    cache.close()


def test_a_sample_that_changes_is_computed_again_and_most_of_them_end_the_storing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, store = take_store(tmp_path, "key", NUM_SAMPLES, RECORD, 10**7)
    cache, samples = ActivationCache(store, FORM), [0, 1, 2, 3]
    cache.use_weights(["", "1"])
    written(cache, samples, SampleBatch(read(samples)))
    for others, is_over in ((1, False), (3, True)):
        batch = read(samples)
        batch["input_ids"][:others, 0] += 1 + others
        _, tags = detach_tags(cache.tagged(samples, SampleBatch(batch)))
        assert tags is not None and tags.num_layers.tolist() == [0] * others + [1] * (4 - others)
        cache.end_epoch()
        assert cache.is_off == is_over
    assert caplog.text.count("is not what it was when its activation was stored") == 1
    assert "3 of 4 samples were others when they were read again" in caplog.text
    cache.close()


def test_a_batch_that_has_no_row_for_each_sample_goes_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, store = take_store(tmp_path, "key", NUM_SAMPLES, RECORD, 10**7)
    cache, batch = ActivationCache(store, FORM), SampleBatch({**read([0, 1]), "scale": torch.tensor(2.0)})
    cache.use_weights(["", "1"])
    assert cache.tagged([0, 1], batch) is batch is cache.tagged([0, 1], batch)
    assert caplog.text.count("Nothing is stored of some batches, which are computed in every epoch: 'scale'") == 1
    cache.close()


def test_a_few_records_take_longer_each_than_many_at_once(tmp_path: Path) -> None:
    """By what is looked up for each, not by time: two look-ups of a batch, and one read of each record."""
    with patch.object(ActivationStore, "entries", autospec=True, side_effect=ActivationStore.entries) as entries:
        measure_storage(tmp_path, RECORD, 4, batch_size=2, num_samples=10**9)
    assert {len(call.args[1]) for call in entries.call_args_list} == {2}
    # Two writes, three reads with a look-up of their own.
    assert entries.call_count == 2 * (2 + 3) + 3


def change_file(path: Path, chance: random.Random, other: Path) -> None:
    """Do to a file what disks, programs and people do."""
    content = bytearray(path.read_bytes())
    # The words that are in use, and any word.
    words = [i for i in range(0, len(content) - 7, 8) if any(content[i : i + 8])]
    first, second = chance.choice(words), chance.choice(words)
    kind = chance.choice(CHANGES)
    if kind == "flip":
        content[first + chance.randrange(8)] ^= 1 << chance.randrange(8)
    elif kind == "top bits":
        for place in (first, second):
            content[place + 7] ^= 0x80
    elif kind == "swap":
        content[first : first + 8], content[second : second + 8] = (
            content[second : second + 8],
            content[first : first + 8],
        )
    elif kind == "reverse":
        content[first : first + 64] = content[first : first + 64][::-1]
    elif kind == "copy":
        content[first : first + 64] = content[second : second + 64].ljust(len(content[first : first + 64]), b"\0")
    elif kind in ("zero", "noise"):
        size = chance.choice([8, 64, 4096])
        part = content[first : first + size]
        content[first : first + size] = bytes(len(part)) if kind == "zero" else chance.randbytes(len(part))
    elif kind == "cut":
        del content[chance.randrange(len(content)) :]
    elif kind == "empty":
        content.clear()
    elif kind == "longer":
        content += chance.randbytes(chance.choice([1, 64, 5000]))
    if kind == "gone":
        path.unlink()
    elif kind == "link":
        path.rename(other / path.name)
        path.symlink_to(other / path.name)
    elif kind == "other":
        shutil.copy(other / "foreign" / path.name, path)
    elif chance.random() < 0.5:
        path.write_bytes(content)
    else:
        # Another file under the same name.
        unfinished = path.with_name("written")
        unfinished.write_bytes(content)
        os.replace(unfinished, path)


def mutate(place: Path, times: int) -> None:
    """Change a file of a store, between two runs or in the middle of one: `run` looks at what comes of it."""
    original = place / "original"
    assert run(original, "old") == NUM_SAMPLES
    stored = original / "_activation_cache" / "key"
    foreign = place / "foreign" / "_activation_cache" / "key"
    run(place / "foreign", "other")
    files = sorted(path.name for path in stored.iterdir() if path.name not in ("lock", "keep"))
    assert files == ["index.bin", "records-0.bin", "store.json"]
    hits = []
    for number in range(times):
        chance = random.Random(number)
        case, other = place / f"case-{number}", place / f"other-{number}"
        shutil.copytree(original, case)
        shutil.copytree(foreign, other / "foreign")
        name = chance.choice(files)

        def disturb(folder: Path) -> None:
            change_file(folder / name, chance, other)  # noqa: B023

        if number % 2:
            hits.append(run(case, "old", disturb))
        else:
            disturb(case / "_activation_cache" / "key")
            hits.append(run(case, "old"))
        # And nothing of it reaches a run with other weights.
        run(case, "new")
        shutil.rmtree(case)
        shutil.rmtree(other)
    assert max(hits) == 2 * NUM_SAMPLES and min(hits) < NUM_SAMPLES


def test_changed_files_give_no_wrong_rows_and_end_no_run(tmp_path: Path) -> None:
    mutate(tmp_path, 60)


@pytest.mark.slow
def test_five_hundred_changed_files_give_no_wrong_rows_and_end_no_run(tmp_path: Path) -> None:
    mutate(tmp_path, 500)


def test_rows_of_other_weights_are_no_hits_whatever_is_lost_beside_them(tmp_path: Path) -> None:
    assert run(tmp_path, "first") == NUM_SAMPLES
    for path in (tmp_path / "_activation_cache" / "key").iterdir():
        if path.suffix not in (".json", ".bin") and path.name not in ("lock", "keep"):
            path.unlink()
    assert run(tmp_path, "second") == NUM_SAMPLES
    assert run(tmp_path, "second") == 2 * NUM_SAMPLES


@pytest.mark.parametrize("change", ["swapped words", "reversed", "two top bits"])
def test_a_hash_knows_places(tmp_path: Path, change: str) -> None:
    store = ActivationStore.create(tmp_path, 1, RECORD, 10**7)
    values = torch.arange(1, 1 + 6 * HIDDEN).reshape(1, 6, HIDDEN).float()
    store.write(np.array([0]), 1, values, np.array([6]), np.zeros((1, 2), np.uint64))
    shard = tmp_path / "records-0.bin"
    content = bytearray(shard.read_bytes())
    row = values.numpy().tobytes()
    start = content.find(row)
    changed = bytearray(row)
    if change == "swapped words":
        changed[:8], changed[40:48] = row[40:48], row[:8]
    elif change == "reversed":
        changed.reverse()
    else:
        changed[7] ^= 0x80
        changed[47] ^= 0x80
    content[start : start + len(row)] = changed
    shard.write_bytes(content)
    with pytest.raises(StoreDamagedError, match="another hash"):
        store.read(np.array([0]), 6)


# ---- stores that are another's ----


def keep_rows(base: Path, key: str, value: float) -> Path:
    """A kept store whose rows are all `value`; what it was kept for is `key`."""
    folder, store = take_store(base, key, 4, RECORD, 10**7)
    folder.keep()
    rows = torch.full((4, 2, HIDDEN), value), np.full(4, 2), np.zeros((4, 2), np.uint64)
    assert store.write(np.arange(4), store.weights_id("weights"), *rows) == 4
    store.close()
    folder.release()
    return folder.path


def test_a_store_under_the_name_of_another_is_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = keep_rows(tmp_path, "first", 1.0), keep_rows(tmp_path, "second", 2.0)
    shutil.rmtree(first)
    shutil.copytree(second, first)
    with pytest.raises(SystemExit) as ended:
        main(["cache", "verify", "--activation_cache_dir", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert "damaged: " in lines[0] and "store of 'second': expected 'first'" in lines[0]
    assert lines[1].endswith("sound")
    with caplog.at_level(logging.WARNING):
        folder, store = take_store(tmp_path, "first", 4, RECORD, 10**7)
    assert not store.weights_ids(np.arange(4)).any()
    assert "is made again" in caplog.text and "store of 'second': expected 'first'" in caplog.text
    folder.remove()
    # The other processes of a node open the store by the same name.
    with pytest.raises(StoreDamagedError, match="expected 'first'. The folder was copied or renamed"):
        ActivationStore.open(second, 0, "first")
    folder, store = take_store(tmp_path, "second", 4, RECORD, 10**7)
    assert (store.weights_ids(np.arange(4)) == store.weights_id("weights")).all()


def test_a_store_beside_one_that_is_in_use_is_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = StoreFolder.take(tmp_path, "key")
    assert keep_rows(tmp_path, "key", 1.0).name == "key-2"
    held.remove()
    main(["cache", "verify", "--activation_cache_dir", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[0].endswith("sound")


# ---- folders that are somebody else's, or lead there ----


def as_stranger(act: Callable[[], Any]) -> bool:
    """Do something as another user; whether the system let him."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os.umask(0)
            act()
            status = 0
        except PermissionError:
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def contents(folder: Path) -> dict[str, Any]:
    """All that lies in a folder: kinds, owners, modes, and what is in the files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        text = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (status.st_mode, status.st_uid, text)
    return found


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a second user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may write to, as /tmp is."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What a neighbour would like to see deleted: it looks like a store as far as he can make it."""
    folder = tmp_path / "home"
    (folder / "_activation_cache" / "key").mkdir(parents=True, mode=0o700)
    for place in (folder, folder / "_activation_cache", folder / "_activation_cache" / "key"):
        (place / "thesis.txt").write_text("years of work")
        (place / "store.json").write_text("{}")
    return folder


def plant_nothing(base: Path, home: Path) -> None:
    """The folder is his."""
    (base / "_activation_cache").mkdir(parents=True)


def plant_store(base: Path, home: Path) -> None:
    """A whole store with rows of his own, labels forged."""
    base.mkdir(0o755)
    run(base, "weights")


def plant_link_at_the_base(base: Path, home: Path) -> None:
    base.symlink_to(home)


def plant_link_below_the_base(base: Path, home: Path) -> None:
    base.mkdir()
    (base / "_activation_cache").symlink_to(home)


def plant_link_above_the_base(base: Path, home: Path) -> None:
    base.parent.symlink_to(home)


def assert_refused(base: Path, home: Path, stranger: Path) -> None:
    before = contents(home), contents(stranger)
    for act in (check_base, lambda place: StoreFolder.take(place, "key"), open_root):
        with pytest.raises(ValueError, match="activation_cache_dir"):
            act(base)
    with pytest.raises(ValueError, match="activation_cache_dir"):
        measure_storage(base, RECORD, 4)
    for action in (["list"], ["verify"], ["prune", "--kept"]):
        with pytest.raises(SystemExit, match="activation_cache_dir"):
            main(["cache", *action, "--activation_cache_dir", str(base)])
    assert (contents(home), contents(stranger)) == before


@needs_root
@pytest.mark.parametrize(
    "plant", [plant_nothing, plant_store, plant_link_at_the_base, plant_link_below_the_base, plant_link_above_the_base]
)
def test_what_a_neighbour_planted_is_refused(shared: Path, home: Path, plant: Callable[[Path, Path], None]) -> None:
    base = shared / ("his" if plant is plant_link_above_the_base else "") / "hf_pipetransformer_0"
    assert as_stranger(lambda: plant(base, home))
    assert contents(shared)
    assert_refused(base, home, shared)


@needs_root
@pytest.mark.parametrize("plant", [plant_nothing, plant_store, plant_link_below_the_base])
def test_a_folder_that_everybody_may_write_to_is_refused(
    shared: Path, home: Path, plant: Callable[[Path, Path], None]
) -> None:
    base = shared / "hf_pipetransformer_0"
    assert as_stranger(lambda: plant(base, home))
    os.chown(base, 0, 0)
    base.chmod(0o777)
    assert_refused(base, home, shared)


@needs_root
def test_a_neighbour_can_neither_read_nor_write_a_store(shared: Path) -> None:
    os.umask(os.umask(0))
    base = shared / "hf_pipetransformer_0"
    run(base, "weights")
    store = base / "_activation_cache" / "key"
    for path in (base, *base.rglob("*")):
        assert not path.stat().st_mode & 0o077, path
    before = contents(base)
    for name in ("store.json", "index.bin", "records-0.bin"):
        assert not as_stranger(lambda: (store / name).read_bytes())  # noqa: B023
    assert not as_stranger(lambda: (store / "planted").symlink_to("/"))
    assert not as_stranger(lambda: (base / "_activation_cache" / "planted").mkdir())
    assert not as_stranger(lambda: base.rename(shared / "stolen"))
    assert contents(base) == before


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_modes_do_not_hang_on_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run(tmp_path / "base", "weights")
    finally:
        os.umask(before)
    made = list((tmp_path / "base").rglob("*"))
    assert {path.name for path in made} >= {"lock", "keep", "store.json", "index.bin", "records-0.bin"}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


@pytest.mark.parametrize("level", ["base", "base/_activation_cache"])
def test_the_users_own_links_are_refused_and_stay(tmp_path: Path, home: Path, level: str) -> None:
    link = tmp_path / level
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(home)
    assert_refused(tmp_path / "base", home, tmp_path)
    assert link.is_symlink()


def test_nothing_that_is_not_a_stores_is_deleted(tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Links and files of the user beside stores and in them."""
    run(tmp_path, "weights")
    root = tmp_path / "_activation_cache"
    (root / "link").symlink_to(home)
    (root / "notes").mkdir()
    (root / "notes" / "store.json").write_text("mine")
    (root / "notes" / "lock").write_text("mine")
    (root / "key" / "keep").unlink()
    (root / "key" / "records-7.bin").symlink_to(home / "thesis.txt")
    (root / "key" / "dropped").symlink_to(home)
    (root / "key" / "mine.txt").write_text("mine")
    before = contents(home), contents(root / "notes")
    with caplog.at_level(logging.WARNING):
        StoreFolder.take(tmp_path, "another").remove()
    assert "not of an activation store" in caplog.text
    assert (contents(home), contents(root / "notes")) == before
    left = {path.name for path in (root / "key").iterdir()}
    assert left == {"lock", "records-7.bin", "dropped", "mine.txt"}
    assert (root / "link").is_symlink() and (root / "key" / "dropped").is_symlink()
    # Its name is not taken for a store either.
    taken = StoreFolder.take(tmp_path, "notes")
    assert taken.path.name == "notes-2"
    taken.remove()
    assert contents(root / "notes") == before[1]


# ---- what dead runs left, and folders that vanish ----


def left_behind(base: Path, key: str) -> Path:
    """A store as a killed run leaves it."""
    folder = StoreFolder.take(base, key)
    ActivationStore.create(folder.folder, 4, RECORD, 10**7)
    folder.folder.write("store.json.tmp", b"half")
    folder.release()
    return folder.path


def test_the_measuring_of_a_killed_run_is_deleted_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # A kill does not come to the end.
        patch.setattr(StoreFolder, "remove", StoreFolder.release)
        measure_storage(tmp_path, RECORD, 4)
    (left,) = [path for path in (tmp_path / "_activation_cache").iterdir() if path.is_dir()]
    assert left.name.startswith("measured-")
    kept = left_behind(tmp_path, "kept")
    (kept / "keep").touch()
    delete_leftovers(open_root(tmp_path))
    assert not left.exists() and kept.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["_activation_cache"]


@pytest.mark.parametrize("what", ["store", "all stores", "base"])
def test_a_folder_that_a_cleaner_removed_is_no_error_at_the_end(tmp_path: Path, what: str) -> None:
    base = tmp_path / "base"
    folder = StoreFolder.take(base, "key")
    store = ActivationStore.create(folder.folder, NUM_SAMPLES, RECORD, 10**7)
    cache = ActivationCache(store, FORM)
    shutil.rmtree({"store": folder.path, "all stores": folder.path.parent, "base": base}[what])
    cache.use_weights(["", "key"])
    assert store.bytes_stored == 0 and not folder.is_kept
    batch = SampleBatch(read([0, 1]))
    assert cache.tagged([0, 1], batch) is batch and cache.is_off
    cache.close()
    folder.remove()


def test_a_lock_that_a_stopped_process_holds_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StoreFolder.take(tmp_path, "key")
    monkeypatch.setattr(folder_module, "_LOCK_SECONDS", 0.1)
    with folder_module._locked(open_root(tmp_path)):
        with pytest.raises(OSError, match="Another process holds .*activation_cache_dir"):
            StoreFolder.take(tmp_path, "other")
        folder.remove()
    delete_leftovers(open_root(tmp_path))
    assert not folder.path.exists()


# ---- the command line ----


def test_stores_are_listed_verified_and_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*words: str) -> list[str]:
        main(["cache", *words, "--activation_cache_dir", str(tmp_path)])
        return capsys.readouterr().out.splitlines()

    assert call("list") == [f"No activation store under {tmp_path}."]
    run(tmp_path, "weights")
    held = StoreFolder.take(tmp_path, "held")
    ActivationStore.create(held.folder, 4, RECORD, 10**7)
    left = left_behind(tmp_path, "left")
    lines = [line.split("  ") for line in call("list")]
    assert [(line[0], line[1], line[3]) for line in lines] == [
        ("held", "in use", "0 of 4 samples stored"),
        ("key", "kept", f"{NUM_SAMPLES} of {NUM_SAMPLES} samples stored"),
        ("left", "left behind", "0 of 4 samples stored"),
    ]
    assert [line.split("  ")[-1] for line in call("verify")] == ["sound"] * 3
    assert [line.split("  ")[0] for line in call("prune")] == ["left"]
    assert not left.exists() and held.path.exists()
    shard = tmp_path / "_activation_cache" / "key" / "records-0.bin"
    content = bytearray(shard.read_bytes())
    start = content.find(activation_of(read([0])).float().numpy().tobytes())
    content[start] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        call("verify")
    assert ended.value.code == 1
    assert f"damaged: 1 of {NUM_SAMPLES} samples. The record of sample 0 is not what was" in capsys.readouterr().out
    assert call("prune") == [f"No activation store under {tmp_path} to delete."]
    assert [line.split("  ")[0] for line in call("prune", "--kept")] == ["key"]
    held.remove()
    assert call("list") == [f"No activation store under {tmp_path}."]


def test_a_file_that_was_made_longer_is_damaged_whatever_it_would_hold(tmp_path: Path) -> None:
    store = ActivationStore.create(tmp_path / "store", 20, RECORD, 2**30)
    store.close()
    os.truncate(tmp_path / "store" / "index.bin", 2**42)
    with pytest.raises(StoreDamagedError, match="index.bin"):
        ActivationStore.open(tmp_path / "store", 0)


def test_a_store_that_was_kept_grows_to_the_bound_of_the_run_that_opens_it(tmp_path: Path) -> None:
    samples = np.arange(64)
    rows = torch.ones(64, 1024, HIDDEN), np.full(64, 1024), np.zeros((64, 2), dtype=np.uint64)

    def stored(max_bytes: int, some: np.ndarray) -> tuple[int, int]:
        """Records, and bytes on the disk."""
        folder, store = take_store(tmp_path, "key", 64, RECORD, max_bytes)
        folder.keep()
        store.write(some, store.weights_id("weights"), *(part[some] for part in rows))
        found = int((store.weights_ids(samples) > 0).sum()), store.bytes_stored
        store.close()
        folder.release()
        return found

    before, num_bytes = stored(10**7, samples[:8])
    assert before == 8
    # Only the rest of its first file is left to a run with a smaller bound; what is there is served.
    with_less, same_bytes = stored(10**5, samples[8:])
    assert 8 <= with_less < 64
    assert same_bytes == num_bytes
    with_more, more_bytes = stored(10**7, samples[8:])
    assert with_more == 64
    assert more_bytes > num_bytes


def test_the_list_says_who_has_used_a_kept_store_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever its note holds: another run may have died over it, and names are any text."""
    folder, store = take_store(tmp_path, "key", 4, RECORD, 10**7)
    store.close()
    folder.keep(Use.of(torch.nn.Linear(1, 1), "the encoder", range(4)))
    folder.keep(Use("the encoder of a\x1bname", "4 samples of a range", hits=3, misses=1))
    folder.release()

    def listed() -> str:
        main(["cache", "list", "--activation_cache_dir", str(tmp_path)])
        return capsys.readouterr().out

    assert re.search(r"used [\d.]+ m?s ago: the encoder of a�name, 4 samples of a range, 75% of its reads", listed())
    infinite = b'{"model": "a", "data": "b", "hits": Infinity, "misses": 1e999}'
    wrong_types = b'{"model": 1, "data": 2, "hits": "x", "misses": null}'
    for note in (b"", b"[]", b"{" * 10**5, b'{"model": 1}', wrong_types, infinite):
        (folder.path / "keep").write_bytes(note)
        assert listed().rstrip().endswith("0 of 4 samples stored")
