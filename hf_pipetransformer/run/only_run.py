"""One run at a time in an `output_dir`: two would overwrite each other's checkpoints and mix their events."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.json_values import entries, entry, number, text, whole_number
from hf_pipetransformer.report.events import logger


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
        path = os.path.join(output_dir, LOCK_FILE)
        if topology.rank == 0 and is_held and _read(path) == own:
            with contextlib.suppress(OSError):
                os.remove(path)


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
        for _ in range(_ATTEMPTS):
            if _create(path, own):
                return True
            _remove_if_gone(path)
    except OSError as error:
        logger.warning(f"{path} cannot be written ({error}): make sure that no other run uses this output_dir.")
        return False
    raise ValueError(f"{path} comes and goes: other runs begin in this output_dir. Set another one.")


def _create(path: str, own: dict[str, Any]) -> bool:
    """Make the file, with all of its content at once; False if it is there."""
    draft = f"{path}.{own['run']}"
    try:
        with open(draft, "x", encoding="utf-8") as file:
            json.dump(own, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:
            # A file system without links.
            with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
                json.dump(own, file)
                return True
            return False
        return True
    finally:
        with contextlib.suppress(OSError):
            os.remove(draft)


def _remove_if_gone(path: str) -> None:
    """Remove the lock of a process that is gone.

    Raises:
        ValueError: it is another run's.
    """
    owner = _read(path)
    if owner is None:
        if os.path.lexists(path):
            raise ValueError(
                f"{path} cannot be read: expected the lock of a run. Remove this file if no other run trains in this "
                "output_dir, or set another one."
            )
        return
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
    # Another run may be doing the same, and hold the lock by now.
    aside = f"{path}.{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if _read(aside) != owner:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        os.remove(aside)


def _read(path: str) -> dict[str, Any] | None:
    """The owner that a lock names; None if there is none, or it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            owner = dict(entries(json.load(file), "owner"))
        whole_number(entry(owner, "pid"), "pid", 1)
        number(entry(owner, "started"), "started")
        text(entry(owner, "host"), "host")
    except (OSError, ValueError, RecursionError):
        return None
    return owner
