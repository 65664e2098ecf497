"""Regular files in folders that others may write to, opened without waiting for what else may lie there."""

from __future__ import annotations

import errno
import os
import stat
from typing import TextIO


def open_regular(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o666,
    dir_fd: int | None = None,
    follows_links: bool = False,
) -> int:
    """Return a descriptor of a regular file; `mode` is that of a file that `flags` create.

    Raises:
        PermissionError: a link, unless links are followed, or something else: a folder, a pipe, a device.
        OSError: it is missing, or cannot be opened.
    """
    # O_NONBLOCK: opening a pipe would otherwise wait for its other end.
    flags |= os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    refusal = PermissionError(errno.EPERM, "a link, or no regular file", os.fspath(path))
    try:
        descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise refusal from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return descriptor


def create(path: str | os.PathLike[str]) -> TextIO:
    """Open a text file to be written anew; raises like `open_regular`."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8")
