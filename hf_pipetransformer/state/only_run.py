"""Lock that admits one run at a time to an `output_dir`: two would mix their checkpoints and events.

The kernel holds it (`flock`), and drops it with its process, however that ends. On file systems that have no such
locks, or whose locks other machines do not see, only the user can keep two runs apart.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from filelock import FileLock, Timeout

from hf_pipetransformer.comm.topology import Topology, host_name
from hf_pipetransformer.report import logger
from hf_pipetransformer.report.files import open_regular
from hf_pipetransformer.schedules.json_values import Positive, read_as


LOCK_FILE = "_pipetransformer_run.json"
"""Name with a leading underscore: such files are never pushed to the hub."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Error numbers of a file system that has no such locks."""

_WAIT_SECONDS = 1.0
"""Time in which a run that is ending leaves its lock."""

_MOST_BYTES = 2**16


class _Owner(TypedDict):
    """Process that has the lock."""

    host: str
    pid: Positive


@contextmanager
def only_run(output_dir: str, topology: Topology) -> Iterator[None]:
    """Lock a folder with a file that names rank 0's process. Collective: call on every rank.

    Raises:
        ValueError: on every rank: another run has the lock, or something else lies in the place of its file.
    """
    lock = _RunLock(output_dir)
    try:
        topology.decide(lock.take)
        yield
    finally:
        lock.release()


class _RunLock:
    """Lock of a folder, which has a file while it is held."""

    def __init__(self, output_dir: str) -> None:
        self.path = os.path.join(os.path.abspath(output_dir), LOCK_FILE)
        self._lock = FileLock(self.path, timeout=_WAIT_SECONDS, thread_local=False, on_acquired=self._sign)
        self._file: os.stat_result | None = None

    def take(self) -> bool:
        """Take the lock; return False, with a warning, if there can be none."""
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._lock.acquire()
        except Timeout:
            owner = _owner_of(self._read())
            of = "" if owner is None else f" (process {owner['pid']} on {_machine(owner)})"
            raise ValueError(
                f"{self.path}: another run{of} is training in this output_dir; two would overwrite each other's "
                "checkpoints. Wait for its end, or set another output_dir."
            ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                with contextlib.suppress(OSError):
                    os.remove(self.path)
            elif os.path.lexists(self.path):
                raise ValueError(
                    f"{self.path} cannot be read: expected the lock of a run. Remove this file if no other run trains "
                    "in this output_dir, or set another one."
                ) from error
            logger.warning(
                f"{self.path} cannot be locked ({error}): make sure that no other run uses this output_dir."
            )
            return False
        return True

    def release(self) -> None:
        """Remove the file, and drop the lock if this process has it."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                # Before the lock is dropped: whoever gets a lock of a file that is gone knows it, and locks anew.
                if self._file is not None and os.path.samestat(os.lstat(self.path), self._file):
                    os.remove(self.path)
            self._lock.release()

    def _sign(self, descriptor: int) -> None:
        """Write this process into the locked file; called with the lock held.

        Raises:
            PermissionError: it is no regular file, or has another name.
        """
        self._file = os.fstat(descriptor)
        # Another name of the file would lose its content.
        if not stat.S_ISREG(self._file.st_mode) or self._file.st_nlink > 1:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), self.path)
        last = _owner_of(os.pread(descriptor, _MOST_BYTES, 0))
        if last is not None and last["host"] != host_name():
            logger.warning(
                f"{self.path}: a run on {_machine(last)} (process {last['pid']}) did not end in order. Make sure that "
                "it is over: on some file systems, a lock holds on one machine only."
            )
        own: _Owner = {"host": host_name(), "pid": os.getpid()}
        with contextlib.suppress(OSError):  # The lock holds also where a full disk leaves the file empty.
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(own).encode(), 0)

    def _read(self) -> bytes:
        # A pipe in its place would never end, and a link leads to what is not ours.
        with contextlib.suppress(OSError), os.fdopen(open_regular(self.path), "rb") as file:
            return file.read(_MOST_BYTES)
        return b""


def _machine(owner: _Owner) -> str:
    return owner["host"].split(" ", 1)[0]


def _owner_of(content: bytes) -> _Owner | None:
    """Parse a lock file; None if it is malformed."""
    try:
        owner: _Owner = read_as(_Owner, json.loads(content), "owner")
    except (ValueError, RecursionError):
        return None
    return owner
