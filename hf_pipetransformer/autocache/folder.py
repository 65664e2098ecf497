"""The folder of a run's activation store: which one, that no other run has it, and that it goes away."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_pipetransformer.autocache.header import DROPPED_FILE, HEADER_FILE, Header
from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.autocache.table import StoreDamagedError


CACHE_FOLDER = "_activation_cache"
"""A name with a leading underscore is never pushed to the hub."""

NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "glusterfs"),
    *("fuse.sshfs", "fuse.glusterfs"),
)
_MOUNT_TABLE = Path("/proc/mounts")
_LOCK_FILE = "lock"
_KEEP_FILE = "keep"


class StoreFolder:
    """`<base>/_activation_cache/<key>`, held by this run until it is released or the process ends.

    If another live run holds it, `<key>-2`, `<key>-3`, ... is taken. What dead runs left under the same base is
    deleted, unless it was meant to be kept (`keep`).

    Args:
        base: a folder on a disk of this node; made if it is missing.
        key: a name for what is stored, fit for a file name; equal for runs that can use each other's rows.

    Raises:
        ValueError: `base` is on a network file system.
        OSError: it cannot be written.
    """

    def __init__(self, base: str | os.PathLike[str], key: str) -> None:
        assert re.fullmatch(r"\w[\w.-]*", key), key
        check_local(base)
        self._root = Path(base) / CACHE_FOLDER
        self._root.mkdir(parents=True, exist_ok=True)
        with _locked(self._root):
            self.path, self._lock = self._take(key)
            if not self.is_kept:
                self.clear()
            self._delete_leftovers()

    @property
    def is_kept(self) -> bool:
        """Whether the folder outlives its run."""
        return (self.path / _KEEP_FILE).exists()

    def is_reusable(self, num_samples: int, row_format: RowFormat, num_writers: int) -> bool:
        """Whether an earlier run kept a store of exactly these rows here, that as many processes can write."""
        if not self.is_kept:
            return False
        try:
            header = Header.read(self.path)
        except StoreDamagedError:
            return False
        fits = header.num_writers >= num_writers and not (self.path / DROPPED_FILE).exists()
        return fits and (header.num_samples, header.row_format) == (num_samples, row_format)

    def keep(self) -> None:
        """Let the folder outlive this run, for a later one with the same key."""
        (self.path / _KEEP_FILE).touch()

    def clear(self) -> None:
        """Delete what is in the folder; it stays this run's."""
        # The header first: a folder that is half deleted holds no store.
        (self.path / HEADER_FILE).unlink(missing_ok=True)
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _LOCK_FILE:
                path.unlink()

    def release(self) -> None:
        """Let another run have the folder; the files stay."""
        if self._lock >= 0:
            # Closing alone would leave it to the workers of a loader, which have it from their parent.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Delete the folder."""
        with _locked(self._root):
            shutil.rmtree(self.path, ignore_errors=True)
            self.release()

    def _take(self, key: str) -> tuple[Path, int]:
        attempt = 1
        while True:
            path = self._root / (key if attempt == 1 else f"{key}-{attempt}")
            path.mkdir(exist_ok=True)
            lock = _try_lock(path)
            if lock is not None:
                return path, lock
            attempt += 1

    def _delete_leftovers(self) -> None:
        for path in self._root.iterdir():
            if path == self.path or not (path / _LOCK_FILE).exists() or (path / _KEEP_FILE).exists():
                continue
            lock = _try_lock(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


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
    path = Path(os.path.realpath(base))
    # The last mount at the longest prefix is the one that is seen.
    holders = [mount for mount in _mounts() if path.is_relative_to(mount[0])]
    if not holders:
        return
    depth = max(len(Path(point).parts) for point, _ in holders)
    point, kind = [mount for mount in holders if len(Path(mount[0]).parts) == depth][-1]
    if kind in NETWORK_FILE_SYSTEMS:
        raise ValueError(
            f"The activation cache cannot be in {path}: {point} is a network file system ({kind}), where memory maps "
            "are not shared between processes. Set activation_cache_dir to a folder on a disk of each node."
        )


def _mounts() -> list[tuple[str, str]]:
    """Mount points and kinds of file system; empty where there is no table of them."""
    if not _MOUNT_TABLE.exists():
        return []
    lines = [line.split() for line in _MOUNT_TABLE.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [(_unescaped(words[1]), words[2]) for words in lines if len(words) > 2]


def _unescaped(point: str) -> str:
    """A mount point as a path: the table writes a space as `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)


def _try_lock(path: Path) -> int | None:
    """Lock a run's folder; the kernel frees the lock when the process ends, however it ends."""
    lock = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the lock of all folders under one base: they are taken and deleted by one run at a time."""
    with open(root / _LOCK_FILE, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
