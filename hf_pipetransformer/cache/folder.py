"""Folders of activation stores: location, locking by one run, and cleanup."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import IterableDataset

from hf_pipetransformer.cache.files import PrivateFolder, StoreDamagedError, StoreFile
from hf_pipetransformer.cache.records import HEADER_FILE, Header, RecordFormat
from hf_pipetransformer.cache.store import DROPPED_FILE, ActivationStore
from hf_pipetransformer.report import logger


CACHE_FOLDER = "_activation_cache"
"""The leading underscore keeps Trainer from pushing the folder to the Hub."""

NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "glusterfs"),
    *("fuse.sshfs", "fuse.glusterfs"),
)
MARKER = b"An activation store of hf_pipetransformer: its files may be deleted when no run holds it.\n"
"""Content of the lock file in every store folder; a folder without it is never deleted."""

_MOUNT_TABLE = Path("/proc/mounts")
_LOCK_FILE = "lock"
KEEP_FILE = "keep"
# The names that end in .arrow are those of versions before 6.
_STORE_FILES = re.compile(
    r"(store\.json|index\.(bin|arrow)|records-\d+\.bin|shard-\d+-\d+\.arrow|dropped|keep)(\.tmp)?"
)
_LOCK_SECONDS = 10.0


@dataclass(frozen=True)
class Use:
    """Last use of a kept store: whose outputs of which data, and how many reads of the run were hits."""

    model: str
    data: str
    hits: int = 0
    misses: int = 0

    @classmethod
    def of(cls, model: Any, part: str, dataset: Any) -> Use:
        name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        size = f"{len(dataset)} samples of a " if hasattr(dataset, "__len__") else ""
        return cls(f"{part} of {name}", f"{size}{type(dataset).__name__}")


class StoreFolder:
    """`<base>/_activation_cache/<key>`, locked by this run until it is released or the process ends."""

    def __init__(self, root: PrivateFolder, folder: PrivateFolder, lock: int) -> None:
        self.folder = folder
        self.path = folder.path
        self._root = root
        self._lock = lock
        self._use: Use | None = None

    @classmethod
    def take(cls, base: str | os.PathLike[str], key: str) -> StoreFolder:
        """Create and lock a folder for a store, or lock one that an earlier run kept.

        If another live run has the folder, or it contains foreign files, `<key>-2`, `<key>-3`, ... is used. Stores
        that dead runs left under the same base are deleted unless marked by `keep`.

        Args:
            base: a folder on a local disk of this node; created if missing.
            key: a valid file name that identifies the data; equal for runs that can share records.

        Raises:
            ValueError: `base` is on a network file system, is a link, or is writable by other users.
            OSError: `base` is not writable.
        """
        assert re.fullmatch(r"\w[\w.-]*", key), key
        check_local(base)
        root = open_root(base, create=True)
        # No other run may delete the folder after it was made and before it is locked.
        with _locked(root):
            found = _take(root, key)
        # After the lock is released: deleting takes it again, and it is not reentrant.
        delete_leftovers(root)
        return found

    @property
    def is_kept(self) -> bool:
        """True if the folder is marked to outlive its run."""
        return self.folder.holds(KEEP_FILE)

    @property
    def is_held(self) -> bool:
        """True if this process has the lock."""
        return self._lock >= 0

    def is_reusable(self, record_format: RecordFormat, num_samples: int | None = None) -> bool:
        """Return True if an earlier run kept a store of the same format, and of the same size if one is given."""
        if not self.is_kept or self.folder.holds(DROPPED_FILE):
            return False
        try:
            header = Header.read(self.folder)
        except StoreDamagedError:
            return False
        return header.record_format == record_format and num_samples in (None, header.num_samples)

    def keep(self, use: Use | None = None) -> None:
        """Mark the folder to outlive this run, for a later one with the same key; the list of stores shows `use`."""
        self._use = use
        self.folder.write(KEEP_FILE, b"" if use is None else json.dumps(asdict(use)).encode())

    def clear(self) -> bool:
        """Delete the store's files but keep the folder locked; return True if no other files are left in it."""
        # The header first: a crash midway then leaves no folder that looks like a complete store.
        self.folder.unlink(HEADER_FILE)
        for name in self.folder.names():
            if _STORE_FILES.fullmatch(name):
                self.folder.unlink(name)
        return self.folder.names() in ([_LOCK_FILE], [])

    def release(self) -> None:
        """Unlock the folder for other runs; the files stay."""
        if self.is_held:
            # Closing is not enough: forked DataLoader workers inherit the descriptor, and with it the flock.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1

    def close(self, hits: int = 0, misses: int = 0) -> None:
        """Release a kept folder, with the reads of the run noted beside its use, and delete any other."""
        if not self.is_kept:
            self.remove()
            return
        if self._use is not None:
            self.keep(replace(self._use, hits=hits, misses=misses))
        self.release()

    def remove(self) -> None:
        """Delete the folder unless it contains foreign files. Failures give a warning, never an exception."""
        try:
            with _locked(self._root):
                if self.clear():
                    self.folder.unlink(_LOCK_FILE)
                    self._root.rmdir(self.path.name)
                else:
                    logger.warning(f"{self.path} stays: there are files in it that are not of an activation store.")
        except OSError as error:
            logger.warning(f"The activation cache in {self.path} could not be deleted: {error}")
        finally:
            self.release()


def take_store(
    base: str | os.PathLike[str],
    key: str | None,
    num_samples: int,
    record_format: RecordFormat,
    max_bytes: int,
    use: Use | None = None,
    goes_on: bool = False,
) -> tuple[StoreFolder, ActivationStore]:
    """Open the store kept under `key`, or create one, as writer 0; raises like `take` and `create`.

    Without a key no later run finds it. With one, and the `use` that it is listed with, it is kept for later runs.

    Args:
        goes_on: True if records have no place of their own: behind those that are kept, there is room for as many as
            `num_samples` more.
    """
    # No other run takes the name of a store without a key, whose records nobody could know again.
    name = key or f"unnamed-{uuid.uuid4().hex}"
    folder, store = StoreFolder.take(base, name), None
    if folder.is_reusable(record_format, None if goes_on else num_samples):
        try:
            store = ActivationStore.reopen(folder.folder, name, max_bytes, num_samples if goes_on else 0)
        except StoreDamagedError as error:
            logger.warning(f"The activation cache of an earlier run is made again: {error}")
    if store is None and not folder.clear():
        # Foreign files have appeared in the folder: take another one.
        folder.release()
        folder = StoreFolder.take(base, name)
    try:
        if store is None:
            store = ActivationStore.create(folder.folder, num_samples, record_format, max_bytes, name)
        # Marked from the start: of a run that is killed, the next one still finds the records.
        if key is not None and use is not None:
            folder.keep(use)
    # Also when interrupted: nobody has the folder yet who could give it back, on a disk that is full perhaps.
    except BaseException:
        folder.close()
        raise
    return folder, store


def default_base() -> Path:
    """Return this user's folder in the temporary directory."""
    return Path(tempfile.gettempdir()) / f"hf_pipetransformer_{os.geteuid()}"


def open_root(base: str | os.PathLike[str], create: bool = False) -> PrivateFolder:
    """Open the folder of all stores under `base`; raises like `PrivateFolder.under`."""
    return PrivateFolder.under(base, CACHE_FOLDER, create)


def check_base(base: str | os.PathLike[str]) -> None:
    """Check that a store can be placed in `base`; creates nothing. Raises ValueError like `StoreFolder.take`."""
    check_local(base)
    with suppress(FileNotFoundError):
        open_root(base)


def find_stores(root: PrivateFolder, with_kept: bool = True) -> list[StoreFolder]:
    """Return the stores under a root, kept ones if asked; lock those that no live run uses. Raises OSError."""
    found = []
    with _locked(root):
        for name in root.names():
            with suppress(OSError, ValueError):
                store = _opened(root, root.child(name))
                if store is not None and (with_kept or not store.is_kept):
                    found.append(store)
                elif store is not None:
                    # Still under the root lock, so no other run sees the folder as taken.
                    store.release()
    return found


def delete_leftovers(root: PrivateFolder) -> None:
    """Delete the stores of dead runs that are not marked by `keep`; on an error, leave the rest to the next run."""
    with suppress(OSError):
        for store in find_stores(root, with_kept=False):
            if store.is_held:
                store.remove()


def safe_max_bytes(base: str | os.PathLike[str]) -> int:
    """Return half of the free space on the disk of `base`, which need not exist yet."""
    path = Path(os.path.realpath(base))
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free // 2


def check_local(base: str | os.PathLike[str]) -> None:
    """Raise ValueError on network file systems, where a process does not reliably see the writes of others."""
    path, point, kind = Path(os.path.realpath(base)), Path(), ""
    table = _MOUNT_TABLE.read_text(encoding="utf-8", errors="replace") if _MOUNT_TABLE.exists() else ""
    for _, escaped, found, *_ in map(str.split, table.splitlines()):
        # /proc/mounts escapes special characters in octal: a space is \040.
        mount = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped))
        if path.is_relative_to(mount) and len(mount.parts) >= len(point.parts):
            # Of several mounts at the longest matching prefix, the last one hides the others.
            point, kind = mount, found
    if kind in NETWORK_FILE_SYSTEMS:
        raise ValueError(
            f"The activation cache cannot be in {path}: {point} is a network file system ({kind}), where a "
            "process does not reliably see what others write. Set activation_cache_dir to a folder on a disk of each "
            "node, such as /tmp."
        )


def _take(root: PrivateFolder, key: str) -> StoreFolder:
    attempt = 1
    while True:
        name = key if attempt == 1 else f"{key}-{attempt}"
        # A link, or a folder that others may write to: leave it alone and try the next name.
        with suppress(ValueError):
            folder = root.child(name, create=True)
            # Also new: a folder whose run was killed before it could write the marker.
            is_new = not folder.names() or (folder.names() == [_LOCK_FILE] and folder.holds(_LOCK_FILE))
            found = _opened(root, folder, is_new)
            if found is not None and found.is_held:
                if found.is_kept or found.clear():
                    return found
                found.release()
        attempt += 1


def _opened(root: PrivateFolder, folder: PrivateFolder, is_new: bool = False) -> StoreFolder | None:
    """Return a store's folder, locked if no other process has it, or None if it is not marked as one."""
    try:
        lock = folder.open(_LOCK_FILE, os.O_RDWR | (os.O_CREAT if is_new else 0))
    except OSError:
        if is_new:
            raise
        return None
    # One byte more than the marker, to notice longer content.
    found = os.pread(lock, len(MARKER) + 1, 0)
    if found == MARKER or (is_new and not found):
        try:
            # The kernel frees the lock when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(lock, MARKER, 0)
            return StoreFolder(root, folder, lock)
        except BlockingIOError:
            # Another run holds it, which may not have written its marker yet.
            found = MARKER
    os.close(lock)
    return StoreFolder(root, folder, -1) if found == MARKER else None


def _locked(root: PrivateFolder) -> AbstractContextManager[None]:
    """Lock all folders under one base, taken and deleted by one run at a time; raises TimeoutError after 10 s."""
    return StoreFile(root, _LOCK_FILE, create=True).locked(_LOCK_SECONDS)


def as_dataset(folder: str | os.PathLike[str]) -> IterableDataset:
    """Return the records of a store as a data set that reads them one by one, in the order of the samples.

    Its columns are `sample` and `activation` `(tokens, hidden)` as floats.
    """
    return IterableDataset.from_generator(_iterate_records, gen_kwargs={"folder": os.fspath(folder)})


def _iterate_records(folder: str) -> Iterator[dict[str, Any]]:
    store = ActivationStore.open(folder, None)
    for sample in np.flatnonzero(store.weights_ids(np.arange(store.num_samples))).tolist():
        (length,) = store.entries(np.array([sample]))["length"].tolist()
        found = store.read(np.array([sample]), length)
        yield {"sample": sample, "activation": found.activation[0].float().numpy()}
