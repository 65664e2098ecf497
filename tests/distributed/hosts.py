"""Two hosts on this machine: network namespaces with host names of their own, joined by a cable that can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


INTERFACE = "cable"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_MACS = ("02:00:00:00:00:01", "02:00:00:00:00:02")
_NOWHERE = "02:00:00:00:00:99"
_SECONDS = 10


ENVIRONMENT = {"MASTER_ADDR": _ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE, "LOCAL_WORLD_SIZE": "1"}
"""What ranks need to meet, one on each host. The names of these hosts resolve to nothing."""


@contextlib.contextmanager
def two_hosts() -> Iterator[list[int]]:
    """Make two hosts; yields a process on each, for `move_to`. Skips the test where they cannot be made, and says why.

    Raises:
        pytest.skip.Exception: namespaces, or a command that makes them, are missing.
    """
    with contextlib.ExitStack() as stack:
        try:
            # The namespace of users must be one, or nobody may lay a cable between the two others.
            outside = stack.enter_context(_living(["unshare", "--user", "--map-root-user", "--net"]))
            command = [*_entering(outside), "unshare", "--net", "--uts"]
            inside = [stack.enter_context(_living(command)) for _ in _ADDRESSES]
            _lay_cable(outside, inside)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"needs namespaces of networks and the commands ip, nsenter and unshare: {_why(error)}")
        yield inside


def move_to(pid: int) -> None:
    """Move this process, which must have one thread, to the host of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    folders = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net", "uts")]
    for folder in folders:
        if libc.setns(folder, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(folder)


def cut_cable() -> None:
    """Lose all that this host sends or is sent from now on, without a word to either side. Call it on a host."""
    # Each side only knows the other's old address, and packets for an unknown one are dropped.
    _run(["ip", "link", "set", "dev", INTERFACE, "address", _NOWHERE])
    for address in _ADDRESSES:
        _run(["ip", "neigh", "replace", address, "lladdr", _NOWHERE, "dev", INTERFACE, "nud", "permanent"])


def _lay_cable(outside: int, inside: list[int]) -> None:
    ends = [["name", INTERFACE, "address", mac, "netns", str(pid)] for mac, pid in zip(_MACS, inside, strict=True)]
    _run([*_entering(outside), "ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
    for number, pid in enumerate(inside):
        other = 1 - number
        _run([*_entering(pid), "hostname", f"host-{number}"])
        for words in (
            ["link", "set", "lo", "up"],
            ["address", "add", f"{_ADDRESSES[number]}/24", "dev", INTERFACE],
            ["link", "set", INTERFACE, "up"],
            ["neigh", "replace", _ADDRESSES[other], "lladdr", _MACS[other], "dev", INTERFACE, "nud", "permanent"],
        ):
            _run([*_entering(pid), "ip", *words])


def _entering(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--user", "--net", "--uts", "--preserve-credentials"]


@contextlib.contextmanager
def _living(command: list[str]) -> Iterator[int]:
    """Start a process that lives until the end in namespaces of its own; yields its process ID."""
    process = subprocess.Popen([*command, "sleep", "infinity"], stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + _SECONDS
        # Only then is it in its namespaces.
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            if process.poll() is not None:
                raise subprocess.CalledProcessError(process.returncode, command, stderr=process.stderr.read())
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(command, _SECONDS)
            time.sleep(0.02)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)


def _why(error: Exception) -> str:
    said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
    return f"{error} {said}".strip()
