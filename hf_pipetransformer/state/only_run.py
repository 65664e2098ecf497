"""Lock that admits one run at a time to an `output_dir`: two would mix their checkpoints and events."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import psutil

from hf_pipetransformer.comm.topology import Topology, host_name
from hf_pipetransformer.report import logger
from hf_pipetransformer.report.files import open_regular
from hf_pipetransformer.state.run_state import Positive, read_as


LOCK_FILE = "_pipetransformer_run.json"
"""Name with a leading underscore: such files are never pushed to the hub."""

_ATTEMPTS, _ATTEMPT_SECONDS = 50, 0.05
_MOST_BYTES = 2**16


class _Owner(TypedDict):
    """Process that has the lock. Process IDs are unique on a `host`: one machine, or a PID namespace on it."""

    host: str
    pid: Positive
    started: float
    run: str


@contextmanager
def only_run(output_dir: str, topology: Topology) -> Iterator[None]:
    """Lock a folder with a file that names rank 0's process. Collective: call on every rank.

    The lock of a dead process is taken over.

    Raises:
        ValueError: on every rank: another run has the lock, or its process cannot be checked from this host.
    """
    own = _describe_process()
    try:
        topology.decide(lambda: _take(output_dir, own))
        yield
    finally:
        path = Path(output_dir, LOCK_FILE)
        # Also where the other ranks never heard of it: the file itself says whose it is.
        if topology.rank == 0:
            with contextlib.suppress(OSError):
                if _owner_of(_read(path)) == own:
                    path.unlink()


def _describe_process() -> _Owner:
    return {"host": _here(), "pid": os.getpid(), "started": _start_of(os.getpid()), "run": uuid.uuid4().hex}


def _here() -> str:
    with contextlib.suppress(OSError):
        return f"{host_name()} {os.readlink('/proc/self/ns/pid')}"
    return host_name()


def _start_of(pid: int) -> float:
    """Return the start time of a process, on Linux in clock ticks since boot, which clock changes do not affect."""
    with contextlib.suppress(OSError):
        return float(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return psutil.Process(pid).create_time()


def _is_alive(owner: _Owner) -> bool:
    try:
        process = psutil.Process(owner["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and _start_of(owner["pid"]) == owner["started"]
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # Another user's process, about which nothing more is known.


def _take(output_dir: str, own: _Owner) -> bool:
    """Take the lock; return False, with a warning, if no file can be created."""
    path = os.path.join(output_dir, LOCK_FILE)
    draft = f"{path}.{own['run']}"
    try:
        os.makedirs(output_dir, exist_ok=True)
        try:
            # A complete file is linked to its final place, so that nobody reads a part of it.
            _write(draft, own)
            for _ in range(_ATTEMPTS):
                if _create(path, draft, own) or _take_over(path, draft):
                    return True
        finally:
            with contextlib.suppress(OSError):
                os.remove(draft)
    except OSError as error:
        logger.warning(f"{path} cannot be written ({error}): make sure that no other run uses this output_dir.")
        return False
    raise ValueError(f"{path} comes and goes, or stays locked: other runs begin in this output_dir. Set another one.")


def _read(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(_MOST_BYTES)


def _write(path: str, owner: _Owner) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(owner, file)
        file.flush()
        os.fsync(file.fileno())


def _create(path: str, draft: str, own: _Owner) -> bool:
    """Create the lock file atomically; return False if one exists."""
    try:
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # File system without hard links.
            _write(path, own)
    except FileExistsError:
        return False
    return True


def _take_over(path: str, draft: str) -> bool:
    """Replace the lock of a dead process by the draft; return False if the lock has changed meanwhile.

    Raises:
        ValueError: the lock's process may be alive.
    """
    try:
        file = os.fdopen(open_regular(path), "rb")
    except FileNotFoundError:
        return False
    except PermissionError:
        _check_gone(path, None)
        raise
    with file:
        try:
            # Several runs may find the same stale lock. Only one replaces it, and at no moment is there none.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_ATTEMPT_SECONDS)
            return False
        except OSError:
            pass  # File system without such locks.
        try:
            is_same = os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False
        if is_same:
            _check_gone(path, _owner_of(file.read(_MOST_BYTES)))
            os.replace(draft, path)
        return is_same


def _check_gone(path: str, owner: _Owner | None) -> None:
    """Raise ValueError unless the process that a lock names is gone."""
    if owner is None:
        raise ValueError(
            f"{path} cannot be read: expected the lock of a run. Remove this file if no other run trains in this "
            "output_dir, or set another one."
        )
    name = owner["host"].split(" ", 1)[0]
    if owner["host"] != _here():
        raise ValueError(
            f"{path}: a run on {name} (process {owner['pid']}) began to train in this output_dir, and it cannot be "
            "seen from here whether it still does. Remove this file if that run is over, or set another output_dir."
        )
    if _is_alive(owner):
        raise ValueError(
            f"{path}: another run (process {owner['pid']} on {name}) is training in this output_dir; two would "
            "overwrite each other's checkpoints. Wait for its end, or set another output_dir."
        )


def _owner_of(content: bytes) -> _Owner | None:
    """Parse a lock file; None if it is malformed."""
    try:
        owner: _Owner = read_as(_Owner, json.loads(content), "owner")
    except (ValueError, RecursionError):
        return None
    return owner
