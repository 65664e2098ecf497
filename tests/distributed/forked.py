"""Ranks forked from a process that has imported torch and transformers: importing takes longer than most tests.

Two servers, for the even and the odd ranks, so that neighbours order their sets of strings differently, as they do on
their own. Only what other projects ship is imported before the fork; the library and the script are not.

    python -u -m tests.distributed.forked DESCRIPTOR      a server; it ends, and kills its ranks, with its client
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any


__all__ = ["ForkedRank", "can_fork", "start_forked"]

# Variables that somebody reads when a module is imported, or when a process starts.
_READ_AT_IMPORT = ("HF_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS_")
_READ_LATE = ("PYTHONPATH",)
_START_SECONDS = 120


def can_fork(changes: Mapping[str, str | None] | None) -> bool:
    """Whether a fork is like a new interpreter for a rank with these changes to its environment.

    Beside a GPU it is not: CUDA does not survive a fork.
    """
    late = (name in _READ_LATE or not name.startswith(_READ_AT_IMPORT) for name in changes or ())
    return all(late) and not Path("/dev/nvidiactl").exists()


class ForkedRank:
    """A rank, with the part of `subprocess.Popen` that a launcher needs."""

    def __init__(self, server: _Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, minus the signal for a rank that one ended, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.code_of(self.pid)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def start_forked(
    rank: int, arguments: Sequence[str], environment: Mapping[str, str], log: Path, directory: Path
) -> ForkedRank:
    """Run `arguments`, a script and what it gets, as `python -u` would; the rank leads a process group of its own.

    Args:
        log: the file that stdout and stderr are appended to.
        directory: where the imports before the fork find this package.
    """
    with _starting:
        if not all(server.is_alive() for server in _servers) or not _servers:
            _servers[:] = [_Server(environment, directory) for _ in range(2)]
        return _servers[rank % 2].fork(arguments, environment, log)


_starting = threading.Lock()
_servers: list[_Server] = []


class _Server:
    """The client's end of one server."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", __name__, str(theirs.fileno())],
                env={name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket = ours
        self._stream: IO[str] = ours.makefile("rw")
        self._news = threading.Condition()
        self._started: int | None = None
        self._codes: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedRank:
        log.touch()
        request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log), "cwd": os.getcwd()}
        with self._news:
            self._started = None
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()
            if not self._news.wait_for(lambda: self._started is not None, _START_SECONDS):
                raise RuntimeError(f"the server of ranks did not fork one within {_START_SECONDS} s")
            assert self._started is not None
            return ForkedRank(self, self._started)

    def code_of(self, pid: int) -> int | None:
        with self._news:
            code = self._codes.get(pid)
        if code is None and not self.is_alive():
            return -signal.SIGKILL
        return code

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _listen(self) -> None:
        for line in self._stream:
            news = json.loads(line)
            with self._news:
                if "code" in news:
                    self._codes[news["pid"]] = news["code"]
                else:
                    # Ids are given again.
                    self._codes.pop(news["pid"], None)
                    self._started = news["pid"]
                self._news.notify_all()


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a rank for each request; gives the rank its request, and the server None when its client is gone."""
    awake, wake = socket.socketpair()
    for end in (awake, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: set[int] = set()
    stream = connection.makefile("rw")

    def say(**news: int) -> None:
        stream.write(json.dumps(news) + "\n")
        stream.flush()

    pending = b""
    try:
        while True:
            ready, _, _ = select.select([connection, awake], [], [])
            if awake in ready:
                awake.recv(4096)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.remove(pid)
                    say(pid=pid, code=os.waitstatus_to_exitcode(status))
            if connection not in ready:
                continue
            received = connection.recv(1 << 16)
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    stream.close()
                    for end in (connection, awake, wake):
                        end.close()
                    request: dict[str, Any] = json.loads(line)
                    return request
                # The rank does it, too: whoever comes first, its group can be killed from now on.
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.setpgid(pid, pid)
                running.add(pid)
                say(pid=pid)
    except (BrokenPipeError, ConnectionResetError):
        pass
    signal.set_wakeup_fd(-1)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _become(request: Mapping[str, Any]) -> None:
    """Turn this fork into `python -u SCRIPT ARGUMENTS` and run it."""
    os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    import numpy as np

    # A new interpreter would draw it from the system; a fork inherits it.
    np.random.seed()
    script, *arguments = request["arguments"]
    sys.argv = [script, *arguments]
    python_path = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path(script).parent), *filter(None, python_path), *sys.path[1:]]
    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_text(), script, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers.trainer  # noqa: F401
    from transformers.models.bert import modeling_bert  # noqa: F401
    from transformers.models.vit import modeling_vit  # noqa: F401

    # A shell that starts the tests in the background lets them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.freeze()
    # In a rank this goes on where a new interpreter would begin, and ends as one would.
    what = _serve(socket.socket(fileno=int(sys.argv[1])))
    if what is not None:
        _become(what)
