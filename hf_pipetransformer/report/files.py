"""Regular files in folders that others may write to, opened without waiting for what else is there; full disks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from typing import TextIO

from hf_pipetransformer.report import in_bytes


FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a write that found no space."""

FindCheckpoint = Callable[[str], tuple[str, int] | None]
"""Function that returns the newest whole checkpoint of a folder and its bytes, without reading the files' contents."""

_NO_SPACE = re.compile(rf"No space left|[Dd]isk quota exceeded|(os error|Errno) ({'|'.join(map(str, FULL_DISK))})\b")
_TORCH_CANNOT_WRITE = re.compile("iostream error|inline_container|PytorchStreamWriter")
"""Text of a failed `torch.save`, which does not say why it failed."""
_LITTLE_BYTES = 2**24
_NOTE = "(no space in"


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
        # What opening gives for a link, for a folder that is to be written, and for a pipe that nobody reads.
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise refusal from None
        raise
    # The open file is asked, not its path, which may lead to something else by now.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return descriptor


def create(path: str | os.PathLike[str]) -> TextIO:
    """Open a text file to be written anew; raises like `open_regular`."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8")


# ---- full disks ----


def says_disk_is_full(error: BaseException) -> bool:
    """Return True if an error has the note of `note_space`, or is about one that has."""
    return any(_NOTE in text for text in (str(error), *getattr(error, "__notes__", [])))


def note_space(error: BaseException, output_dir: str, find_checkpoint: FindCheckpoint) -> None:
    """Note below an error of a full disk where it is, how much is free and how much a checkpoint takes."""
    if not says_disk_is_full(error) and (text := _describe(error, output_dir, find_checkpoint)) is not None:
        error.add_note(text)


def _describe(error: BaseException, output_dir: str, find_checkpoint: FindCheckpoint) -> str | None:
    chain, each = [], error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__  # type: ignore[assignment]
    found = [each for each in chain if getattr(each, "errno", None) in FULL_DISK or _NO_SPACE.search(str(each))]
    may_be = [each for each in chain if _TORCH_CANNOT_WRITE.search(str(each))]
    if not found and not may_be:
        return None
    folder = os.path.dirname(str(getattr((found or may_be)[-1], "filename", None) or "")) or output_dir
    # The folder may be what could not be made.
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    with contextlib.suppress(OSError):
        space, newest = shutil.disk_usage(folder), find_checkpoint(output_dir)
        # torch does not say why it could not write: where a checkpoint would have room, the disk was not full.
        if not found and space.free >= (newest[1] if newest else _LITTLE_BYTES):
            return None
        needed = f", a checkpoint takes {in_bytes(newest[1])}" if newest else ""
        return (
            f"{_NOTE} {folder}: {in_bytes(space.free)} of {in_bytes(space.total)} free{needed}; make space, "
            "lower save_total_limit or set another output_dir)"
        )
    return None
