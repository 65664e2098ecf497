"""Private folders and files of this user, accessed through descriptors so that no link is ever followed.

Other users cannot redirect a store in a shared temporary directory by replacing a path component.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from hf_pipetransformer.report.files import open_regular


Array = np.ndarray[Any, np.dtype[Any]]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, independent of the file system's block size."""
_REMEDY = "Set activation_cache_dir to a folder of your own, or activation_cache to off."
_CHANGED = (
    "Something outside the run changed or deleted it; keep the folder of the activation cache away from cleaning jobs."
)


class StoreDamagedError(RuntimeError):
    """Damaged file of the activation store, not what was written; the message names the file and the finding."""


class PrivateFolder:
    """Folder of this user with mode 0700; all access goes through its descriptor and follows no links."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._fd = descriptor

    def __del__(self) -> None:
        os.close(self._fd)

    @classmethod
    def at(cls, path: str | os.PathLike[str], create: bool = False) -> PrivateFolder:
        """Open a folder by its path, or create it. The parent folders are not checked.

        Raises:
            ValueError: it is a link, belongs to another user, or is writable by others.
            OSError: it is missing, or cannot be created.
        """
        # Not `realpath`, which would follow the links that are to be refused.
        whole = Path(os.path.abspath(path))
        if create:
            whole.parent.mkdir(parents=True, exist_ok=True)
        return cls._opened(whole, os.fspath(whole), None, create)

    @classmethod
    def under(cls, base: str | os.PathLike[str], name: str, create: bool = False) -> PrivateFolder:
        """Open or create the folder `name` in `base`, a folder that the user chose or the temporary directory.

        `base` may belong to root and be writable by all if it is sticky like `/tmp`, where nobody can replace this
        user's files. Links above `base` are followed if they belong to root or this user. Raises like `at`.
        """
        path = Path(os.path.abspath(base))
        descriptor = _open_base(path, create)
        try:
            return cls._opened(path / name, name, descriptor, create)
        finally:
            os.close(descriptor)

    def child(self, name: str, create: bool = False) -> PrivateFolder:
        return self._opened(self.path / name, name, self._fd, create)

    @classmethod
    def _opened(cls, path: Path, name: str, dir_fd: int | None, create: bool) -> PrivateFolder:
        # Open first, then check the descriptor: checking the path would race with a replacement of the folder.
        if create:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=dir_fd)
        # From here on the object owns the descriptor, and closes it where a check below raises.
        folder = cls(path, _open_folder(path, name, dir_fd))
        status = os.fstat(folder._fd)
        if status.st_uid != os.geteuid():
            raise ValueError(f"{path} belongs to another user ({status.st_uid}, not {os.geteuid()}). {_REMEDY}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"{path} may be written by other users (mode {stat.S_IMODE(status.st_mode):04o}): what lies in it "
                f"cannot be trusted. Delete it. {_REMEDY}"
            )
        # mkdir's mode is subject to the umask, and an existing folder may be readable by others.
        os.fchmod(folder._fd, 0o700)
        return folder

    def names(self) -> list[str]:
        """Return the names of everything in the folder, sorted; empty if the folder was removed."""
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self._fd))
        return []

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of a regular file of this user; with O_CREAT its mode becomes 0600.

        Raises:
            OSError: it is missing, a link, not a regular file, or another user's.
        """
        descriptor = open_regular(name, flags, 0o600, self._fd)
        try:
            self._check_own(name, os.fstat(descriptor))
            if flags & os.O_CREAT:
                os.fchmod(descriptor, 0o600)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_own(self, name: str, status: os.stat_result) -> os.stat_result:
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"not a regular file of user {os.geteuid()}", os.fspath(self.path / name))
        return status

    def status(self, name: str) -> os.stat_result:
        """Return the status of a regular file of this user; raises like `open`."""
        return self._check_own(name, os.stat(name, dir_fd=self._fd, follow_symlinks=False))

    def bytes_on_disk(self, name: str) -> int:
        """Return the disk usage of a file, less than its size if it is sparse; raises like `open`."""
        status = self.status(name)
        # Of a small file the blocks take more than its bytes.
        return min(status.st_size, status.st_blocks * _BLOCK_BYTES)

    def holds(self, name: str) -> bool:
        with suppress(OSError):
            return bool(self.status(name))
        return False

    def read(self, name: str, limit: int = 1 << 20) -> bytes:
        """Return the first `limit` bytes of a file; raises like `open`."""
        with os.fdopen(self.open(name), "rb") as file:
            return file.read(limit)

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file atomically; raises like `open`."""
        # If the process dies before the renaming, `StoreFolder.clear` knows this name too.
        unfinished = name + ".tmp"
        with os.fdopen(self.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(content)
        os.rename(unfinished, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        """Delete a regular file of this user; anything else of that name stays."""
        if self.holds(name):
            os.unlink(name, dir_fd=self._fd)

    def rmdir(self, name: str) -> None:
        """Delete an empty folder in this one; raises OSError if it is not empty, or not a folder."""
        os.rmdir(name, dir_fd=self._fd)


class StoreFile:
    """Open file of a store, read and written at byte offsets; raises StoreDamagedError if it cannot be opened.

    `pread` is as fast as a memory map, and if the file is truncated it gives an error, not a SIGBUS.
    """

    def __init__(self, folder: PrivateFolder, name: str, create: bool = False) -> None:
        self.path = folder.path / name
        # Set before opening, because `__del__` also runs if that raises.
        self._fd = -1
        try:
            self._fd = folder.open(name, os.O_RDWR | (os.O_CREAT if create else 0))
        except OSError as error:
            # A file that cannot be made is no damage: the disk is full or may not be written.
            if create:
                raise
            raise StoreDamagedError(f"{self.path} cannot be opened ({error}).") from error

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def size(self) -> int:
        """Return the size in bytes; raises StoreDamagedError if the file was deleted."""
        status = os.fstat(self._fd)
        # An open descriptor survives deletion of its file; only the link count shows it.
        if not status.st_nlink:
            raise StoreDamagedError(f"{self.path} has vanished. {_CHANGED}")
        return status.st_size

    def check_size(self, expected: int) -> None:
        """Raise StoreDamagedError if the file was deleted or has another size."""
        if (found := self.size()) != expected:
            raise StoreDamagedError(f"{self.path} has {found} bytes: expected {expected} bytes. {_CHANGED}")

    def read(self, offset: int, targets: Sequence[Any]) -> None:
        """Fill C-contiguous arrays, together below 2 GB, with consecutive bytes of the file.

        Raises:
            StoreDamagedError: the file ends too early, or cannot be read.
        """
        try:
            num_read = os.preadv(self._fd, targets, offset)
        except OSError as error:
            raise StoreDamagedError(f"A record of {self.path} cannot be read ({error}).") from error
        if num_read != sum(target.nbytes for target in targets):
            raise StoreDamagedError(f"{self.path} ends before the record that is read. {_CHANGED}")

    def write(self, offset: int, values: Sequence[Any]) -> None:
        """Write arrays one after the other; raises OSError."""
        written = os.pwritev(self._fd, values, offset)
        if written != sum(part.nbytes for part in values):
            raise OSError(errno.EIO, "a record was written in part", os.fspath(self.path))

    def reserve(self, start: int, end: int) -> None:
        """Reserve disk space for the bytes `start` to `end`; the file grows. Raises OSError if the disk is full."""
        os.posix_fallocate(self._fd, start, end - start)

    def resize(self, size: int) -> None:
        """Set the size; new bytes are zeros that take no disk space until they are written."""
        os.ftruncate(self._fd, size)

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Lock the file against other processes.

        Raises:
            TimeoutError: another process, probably a stopped one, had the lock for all of `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                # flock has no timeout: poll.
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"Another process holds {self.path} for {seconds:g} s: end it, or set activation_cache_dir to "
                        "another folder."
                    ) from None
                time.sleep(0.02)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def _open_folder(path: Path, name: str, dir_fd: int | None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise ValueError(f"{path} is a link or no folder: the activation cache follows no links. {_REMEDY}") from None


def _open_base(path: Path, create: bool) -> int:
    trusted = (0, os.geteuid())
    for parent in path.parents:
        if parent.is_symlink() and parent.lstat().st_uid not in trusted:
            raise ValueError(f"{parent}, on the way to {path}, is another user's link. {_REMEDY}")
    if create and not path.is_symlink():
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(0o700)
    descriptor = _open_folder(path, os.fspath(path), None)
    status = os.fstat(descriptor)
    if status.st_uid in trusted and (not status.st_mode & stat.S_IWOTH or status.st_mode & stat.S_ISVTX):
        return descriptor
    os.close(descriptor)
    raise ValueError(
        f"{path} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}: expected a folder "
        f"of user {os.geteuid()} that others may not write to. {_REMEDY}"
    )
