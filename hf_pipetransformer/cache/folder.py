"""Folders of activation stores: where they lie, who may use them, and looking after them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from hf_pipetransformer.cache.files import PrivateFolder, locked
from hf_pipetransformer.cache.rows import DROPPED_FILE, HEADER_FILE, Header, RowFormat
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.cache.table import StoreDamagedError
from hf_pipetransformer.report import logger


CACHE_FOLDER = "_activation_cache"
"""A name with a leading underscore is never pushed to the hub."""

NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "glusterfs"),
    *("fuse.sshfs", "fuse.glusterfs"),
)
MARKER = b"An activation store of hf_pipetransformer: its files may be deleted when no run holds it.\n"
"""Content of the lock file of every folder of a store: only what has it is ever deleted."""

_MOUNT_TABLE = Path("/proc/mounts")
_LOCK_FILE = "lock"
_KEEP_FILE = "keep"
_STORE_FILES = re.compile(r"(store\.json|index\.arrow|shard-\d+-\d+\.arrow|dropped|keep)(\.tmp)?")
_LOCK_SECONDS = 10.0


class StoreFolder:
    """`<base>/_activation_cache/<key>`, held by this run until it is released or the process ends."""

    def __init__(self, root: PrivateFolder, folder: PrivateFolder, lock: int) -> None:
        self.folder = folder
        self.path = folder.path
        self._root = root
        self._lock = lock

    @classmethod
    def take(cls, base: str | os.PathLike[str], key: str) -> StoreFolder:
        """Make a folder for a store, or take one that was kept.

        If another live run holds it, or something in it is not a store's, `<key>-2`, `<key>-3`, ... is taken. What
        dead runs left under the same base is deleted, unless it was meant to be kept (`keep`).

        Args:
            base: a folder on a disk of this node; made if it is missing.
            key: a name for what is stored, fit for a file name; equal for runs that can use each other's rows.

        Raises:
            ValueError: `base` is on a network file system, is a link, or other users may write there.
            OSError: it cannot be written.
        """
        assert re.fullmatch(r"\w[\w.-]*", key), key
        check_local(base)
        root = open_root(base, create=True)
        with _locked(root):
            found = _take(root, key)
        delete_leftovers(root)
        return found

    @property
    def is_kept(self) -> bool:
        """Whether the folder outlives its run."""
        return self.folder.holds(_KEEP_FILE)

    @property
    def is_held(self) -> bool:
        """Whether it is this process that holds the folder, and not another."""
        return self._lock >= 0

    def is_reusable(self, num_samples: int, row_format: RowFormat, num_writers: int) -> bool:
        """Whether an earlier run kept a store of exactly these rows here, that as many processes can write."""
        if not self.is_kept or self.folder.holds(DROPPED_FILE):
            return False
        try:
            header = Header.read(self.folder)
        except StoreDamagedError:
            return False
        return (header.num_samples, header.row_format) == (
            num_samples,
            row_format,
        ) and header.num_writers >= num_writers

    def keep(self) -> None:
        """Let the folder outlive this run, for a later one with the same key."""
        self.folder.write(_KEEP_FILE, b"")

    def clear(self) -> bool:
        """Delete the files of a store in the folder, which stays this run's; whether nothing else is in it."""
        # The header first: a folder that is half deleted holds no store.
        self.folder.unlink(HEADER_FILE)
        for name in self.folder.names():
            if _STORE_FILES.fullmatch(name):
                self.folder.unlink(name)
        return self.folder.names() in ([_LOCK_FILE], [])

    def release(self) -> None:
        """Let another run have the folder; the files stay."""
        if self.is_held:
            # Closing alone would leave it to the workers of a loader, which have it from their parent.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Delete the folder, unless there is something in it that is not a store's. It never raises, it warns."""
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
    key: str,
    num_samples: int,
    row_format: RowFormat,
    max_bytes: int,
    num_writers: int,
    row_length: int = 0,
) -> tuple[StoreFolder, ActivationStore]:
    """The store that an earlier run kept under `key`, or a new one; this process is writer 0.

    Args and raises: see `StoreFolder.take` and `ActivationStore.create`.
    """
    folder = StoreFolder.take(base, key)
    if folder.is_reusable(num_samples, row_format, num_writers):
        try:
            # The bound is this run's. What is there already is served, also beyond it.
            header = replace(Header.read(folder.folder, key), max_bytes=max_bytes, run_id=uuid.uuid4().hex)
            header.write(folder.folder)
            return folder, ActivationStore.open(folder.folder, 0, key)
        except StoreDamagedError as error:
            logger.warning(f"The activation cache of an earlier run is made anew: {error}")
    if not folder.clear():
        # Something that is not a store's is in the way of the new files.
        folder.release()
        folder = StoreFolder.take(base, key)
    try:
        args = (folder.folder, num_samples, row_format, max_bytes, num_writers, row_length, key)
        return folder, ActivationStore.create(*args)
    except BaseException:
        folder.remove()
        raise


def default_base() -> Path:
    """The folder under the temporary folder where this user's stores are if none is named."""
    return Path(tempfile.gettempdir()) / f"hf_pipetransformer_{os.geteuid()}"


def open_root(base: str | os.PathLike[str], create: bool = False) -> PrivateFolder:
    """The folder of all stores under `base`; raises as `PrivateFolder.under`."""
    return PrivateFolder.under(base, CACHE_FOLDER, create)


def check_base(base: str | os.PathLike[str]) -> None:
    """Refuse a folder that a store cannot be in; nothing is made.

    Raises:
        ValueError: it is on a network file system, a link, another user's, or others may write to it.
    """
    check_local(base)
    with suppress(FileNotFoundError):
        open_root(base)


def find_stores(root: PrivateFolder, with_kept: bool = True) -> list[StoreFolder]:
    """The stores under a root, also the kept ones if asked; those that no live run holds are held now by this process.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    with _locked(root):
        for name in root.names():
            with suppress(OSError, ValueError):
                store = _opened(root, root.child(name))
                if store is not None and (with_kept or not store.is_kept):
                    found.append(store)
                elif store is not None:
                    # Before another run may look for it.
                    store.release()
    return found


def delete_leftovers(root: PrivateFolder) -> None:
    """Delete the stores that dead runs left, unless they are meant to be kept; what fails is left for the next run."""
    with suppress(OSError):
        for store in find_stores(root, with_kept=False):
            if store.is_held:
                store.remove()


def safe_max_bytes(base: str | os.PathLike[str]) -> int:
    """Half of the free space of the disk that `base` is, or will be, on."""
    path = Path(os.path.realpath(base))
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free // 2


def check_local(base: str | os.PathLike[str]) -> None:
    """Refuse a network file system: there, what one process writes through its map does not reach the others.

    Raises:
        ValueError: `base` is on one.
    """
    path, point, kind = Path(os.path.realpath(base)), Path(), ""
    table = _MOUNT_TABLE.read_text(encoding="utf-8", errors="replace") if _MOUNT_TABLE.exists() else ""
    for _, escaped, found, *_ in map(str.split, table.splitlines()):
        # The table writes a space as \040.
        mount = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped))
        if path.is_relative_to(mount) and len(mount.parts) >= len(point.parts):
            # The last mount at the longest prefix is the one that is seen.
            point, kind = mount, found
    if kind in NETWORK_FILE_SYSTEMS:
        raise ValueError(
            f"The activation cache cannot be in {path}: {point} is a network file system ({kind}), where memory maps "
            "are not shared between processes. Set activation_cache_dir to a folder on a disk of each node."
        )


def _take(root: PrivateFolder, key: str) -> StoreFolder:
    attempt = 1
    while True:
        name = key if attempt == 1 else f"{key}-{attempt}"
        with suppress(ValueError):
            folder = root.child(name, create=True)
            # A kill may have come before its lock was marked.
            is_new = not folder.names() or (folder.names() == [_LOCK_FILE] and folder.holds(_LOCK_FILE))
            found = _opened(root, folder, is_new)
            if found is not None and found.is_held:
                if found.is_kept or found.clear():
                    return found
                found.release()
        attempt += 1


def _opened(root: PrivateFolder, folder: PrivateFolder, is_new: bool = False) -> StoreFolder | None:
    """A store's folder, held if nobody else holds it; None if it is not marked as one. A new one is marked now."""
    try:
        lock = folder.open(_LOCK_FILE, os.O_RDWR | (os.O_CREAT if is_new else 0))
    except OSError:
        if is_new:
            raise
        return None
    found = os.pread(lock, len(MARKER) + 1, 0)
    if found == MARKER or (is_new and not found):
        try:
            # The kernel frees the lock when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(lock, MARKER, 0)
            return StoreFolder(root, folder, lock)
        except BlockingIOError:
            found = MARKER
    os.close(lock)
    return StoreFolder(root, folder, -1) if found == MARKER else None


@contextmanager
def _locked(root: PrivateFolder) -> Iterator[None]:
    """Hold the lock of all folders under one base: they are taken and deleted by one run at a time.

    Raises:
        TimeoutError: another process has held it for ten seconds; it takes a moment only, so that one was stopped.
    """
    with (
        os.fdopen(root.open(_LOCK_FILE, os.O_RDWR | os.O_CREAT), "r+b") as file,
        locked(file.fileno(), root.path / _LOCK_FILE, _LOCK_SECONDS),
    ):
        yield


_SOUND = "sound"


def list_stores(base: str | os.PathLike[str]) -> list[str]:
    """A line for each store: name, whether a run uses it, size, and how much is in it; raises as `open_root`."""
    return _lines(base, _content_of)


def verify_stores(base: str | os.PathLike[str]) -> tuple[list[str], bool]:
    """A line for each store that says what is damaged in it, and whether all are sound; raises as `open_root`."""
    lines = _lines(base, _damage_of)
    return lines, all(line.endswith(_SOUND) for line in lines)


def prune_stores(base: str | os.PathLike[str], with_kept: bool) -> list[str]:
    """Delete the stores that no run uses, the kept ones only if asked for; a line for each, raises as `open_root`."""
    lines = []
    with suppress(FileNotFoundError):
        for store in find_stores(open_root(base), with_kept):
            if store.is_held:
                lines.append(f"{store.path.name}  {_size_of(store.folder)}  deleted")
                store.remove()
    return lines


def _lines(base: str | os.PathLike[str], look: Callable[[ActivationStore], str]) -> list[str]:
    stores: list[StoreFolder] = []
    with suppress(FileNotFoundError):
        stores = find_stores(open_root(base))
    states = [("kept" if store.is_kept else "left behind") if store.is_held else "in use" for store in stores]
    for store in stores:
        # A run that wants it shall not wait until all of it has been read.
        store.release()
    lines = []
    for store, state in zip(stores, states, strict=True):
        try:
            found = look(ActivationStore.open(store.folder, None, _key_of(store.path.name, store.folder)))
        except StoreDamagedError as error:
            found = f"damaged: {error}"
        lines.append(f"{store.path.name}  {state}  {_size_of(store.folder)}  {found}")
    return lines


def _key_of(name: str, folder: PrivateFolder) -> str:
    """The key that a store in a folder of this name must have: `key-2` is that of a second run beside `key`."""
    key = Header.read(folder).key
    return key if re.fullmatch(re.escape(key) + r"-\d+", name) else name


def _size_of(folder: PrivateFolder) -> str:
    total = 0
    for name in folder.names():
        with suppress(OSError):
            total += folder.bytes_on_disk(name)
    return f"{total / 1e6:.1f} MB"


def _content_of(store: ActivationStore) -> str:
    stored = np.count_nonzero(store.weights_ids(np.arange(store.num_samples)))
    return f"{stored} of {store.num_samples} samples stored"


def _damage_of(store: ActivationStore) -> str:
    errors = []
    for sample in range(store.num_samples):
        try:
            store.read(np.array([sample]), 0)
        except StoreDamagedError as error:
            errors.append(str(error))
    return f"damaged: {len(errors)} of {store.num_samples} samples. {errors[0]}" if errors else _SOUND
