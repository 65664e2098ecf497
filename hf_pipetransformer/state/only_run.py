"""One run at a time in an `output_dir`: two would overwrite each other's checkpoints and mix their events."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.report import logger
from hf_pipetransformer.schedules.json_values import entries, entry, number, text, whole_number


LOCK_FILE = "_pipetransformer_run.json"
"""A name with a leading underscore is never pushed to the hub."""

_ATTEMPTS = 5


@contextmanager
def only_run(output_dir: str, topology: Topology) -> Iterator[None]:
    """Hold the lock of a folder inside: a file that names the process of rank 0. A collective call.

    The lock of a process that is gone is taken over.

    Raises:
        ValueError: on every rank: another run holds it, or nobody can tell from here.
    """
    own = _describe_process()
    is_held = topology.decide(lambda: _take(output_dir, own))
    try:
        yield
    finally:
        path = Path(output_dir, LOCK_FILE)
        if topology.rank == 0 and is_held:
            with contextlib.suppress(OSError):
                if _owner_of(path.read_bytes()) == own:
                    path.unlink()


def _describe_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": _here(), "pid": pid, "started": _start_of(pid), "run": uuid.uuid4().hex}


def _here() -> str:
    """Where process numbers mean the same: a host, or one of the containers on it."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _start_of(pid: int) -> float:
    """When a process began, in a unit that a change of the clock leaves as it is, where there is one."""
    with contextlib.suppress(OSError):
        return float(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return psutil.Process(pid).create_time()


def _is_alive(owner: dict[str, Any]) -> bool:
    pid = owner["pid"]
    if not psutil.pid_exists(pid):
        return False
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and _start_of(pid) == owner["started"]
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # Another user's, of which nothing more can be known.


def _take(output_dir: str, own: dict[str, Any]) -> bool:
    """Take the lock; False where no file can be made at all, after a warning."""
    path = os.path.join(output_dir, LOCK_FILE)
    try:
        os.makedirs(output_dir, exist_ok=True)
        with _drafted(path, own) as draft:
            for _ in range(_ATTEMPTS):
                if _create(path, draft, own) or _take_over(path, draft):
                    return True
    except OSError as error:
        logger.warning(f"{path} cannot be written ({error}): make sure that no other run uses this output_dir.")
        return False
    raise ValueError(f"{path} comes and goes: other runs begin in this output_dir. Set another one.")


@contextmanager
def _drafted(path: str, own: dict[str, Any]) -> Iterator[str]:
    """A lock file that is whole, beside the place where it is to stand."""
    draft = f"{path}.{own['run']}"
    try:
        with open(draft, "x", encoding="utf-8") as file:
            json.dump(own, file)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        with contextlib.suppress(OSError):
            os.remove(draft)


def _create(path: str, draft: str, own: dict[str, Any]) -> bool:
    """Make the file, with all of its content at once; False if there is one."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:
        # A file system without links.
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump(own, file)
        except FileExistsError:
            return False
    return True


def _take_over(path: str, draft: str) -> bool:
    """Put the draft in the place of the lock of a process that is gone; False if that is another one by now.

    Raises:
        ValueError: it is another run's.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return False
    except PermissionError:
        _check_gone(path, None)
        raise
    with file:
        with contextlib.suppress(OSError):
            # Several may find the same lock: one replaces it, and there is a lock at every moment.
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            is_same = os.path.samestat(os.stat(path), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False
        if is_same:
            _check_gone(path, _owner_of(file.read()))
            os.replace(draft, path)
        return is_same


def _check_gone(path: str, owner: dict[str, Any] | None) -> None:
    """Raises ValueError unless the process that a lock names is gone."""
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


def _owner_of(content: bytes) -> dict[str, Any] | None:
    """The owner that a lock names; None if it names none."""
    try:
        owner = dict(entries(json.loads(content), "owner"))
        whole_number(entry(owner, "pid"), "pid", 1)
        number(entry(owner, "started"), "started")
        text(entry(owner, "host"), "host")
    except (ValueError, RecursionError):
        return None
    return owner
