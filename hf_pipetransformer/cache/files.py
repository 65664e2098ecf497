"""Private folders and files of this user, accessed through descriptors so that no link is ever followed.

Other users cannot redirect a store in a shared temporary directory by replacing a path component.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NOT_A_FOLDER = (errno.ELOOP, errno.ENOTDIR)
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, independent of the file system's block size."""
_REMEDY = "Set activation_cache_dir to a folder of your own, or activation_cache to off."


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
        whole = Path(os.path.abspath(path))
        if create:
            whole.parent.mkdir(parents=True, exist_ok=True)
        return cls._opened(whole, os.fspath(whole), None, create)

    @classmethod
    def _opened(cls, path: Path, name: str, dir_fd: int | None, create: bool) -> PrivateFolder:
        # Open first, then check the descriptor: checking the path would race with a replacement of the folder.
        if create:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=dir_fd)
        folder = cls(path, _open_folder(path, name, dir_fd))
        status = os.fstat(folder._fd)
        if status.st_uid != os.geteuid():
            raise ValueError(f"{path} belongs to user {status.st_uid}: expected {os.geteuid()}. {_REMEDY}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"{path} may be written by other users (mode {stat.S_IMODE(status.st_mode):04o}): what lies in it "
                f"cannot be trusted. Delete it. {_REMEDY}"
            )
        # mkdir's mode is subject to the umask, and an existing folder may be readable by others.
        os.fchmod(folder._fd, 0o700)
        return folder

    @classmethod
    def under(cls, base: str | os.PathLike[str], name: str, create: bool = False) -> PrivateFolder:
        """Open or create the folder `name` in `base`, a folder that the user chose or the temporary directory.

        `base` may belong to root and be writable by all if it is sticky like `/tmp`, where nobody can replace this
        user's files. Links above `base` are followed if they belong to root or this user.

        Raises:
            ValueError: either folder is a link, belongs to another user, or is writable by others.
            OSError: either is missing, or cannot be created.
        """
        path = Path(os.path.abspath(base))
        descriptor = _open_base(path, create)
        try:
            return cls._opened(path / name, name, descriptor, create)
        finally:
            os.close(descriptor)

    def child(self, name: str, create: bool = False) -> PrivateFolder:
        return self._opened(self.path / name, name, self._fd, create)

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
        # O_NONBLOCK: opening a FIFO would otherwise block.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self._fd)
        try:
            _check_own(os.fstat(descriptor), self.path / name)
            if flags & os.O_CREAT:
                os.fchmod(descriptor, 0o600)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def size(self, name: str) -> int:
        """Return the size of a regular file in bytes; raises like `open`."""
        status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        _check_own(status, self.path / name)
        return status.st_size

    def bytes_on_disk(self, name: str) -> int:
        """Return the disk usage of a file, less than its size if it is sparse; raises like `open`."""
        status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        _check_own(status, self.path / name)
        return min(status.st_size, status.st_blocks * _BLOCK_BYTES)

    def holds(self, name: str) -> bool:
        try:
            return self.size(name) >= 0
        except OSError:
            return False

    def read(self, name: str, limit: int = 1 << 20) -> bytes:
        """Return the first `limit` bytes of a file; raises like `open`."""
        with os.fdopen(self.open(name), "rb") as file:
            return file.read(limit)

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file atomically; raises like `open`."""
        unfinished = name + ".tmp"
        with os.fdopen(self.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(content)
        self.rename(unfinished, name)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        """Delete a regular file of this user; anything else of that name stays."""
        if self.holds(name):
            os.unlink(name, dir_fd=self._fd)

    def rmdir(self, name: str) -> None:
        """Delete an empty folder in this one; raises OSError if it is not empty, or not a folder."""
        os.rmdir(name, dir_fd=self._fd)


@contextmanager
def locked(descriptor: int, path: Path, seconds: float) -> Iterator[None]:
    """Lock the file behind `descriptor` against other processes; `path` is for the message.

    Raises:
        TimeoutError: another process, probably a stopped one, had the lock for all of `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            # flock has no timeout: poll.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Another process holds {path} for {seconds:g} s: end it, or set activation_cache_dir to "
                    "another folder."
                ) from None
            time.sleep(0.02)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _open_folder(path: Path, name: str, dir_fd: int | None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _NOT_A_FOLDER:
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


def _check_own(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"not a regular file of user {os.geteuid()}", os.fspath(path))
