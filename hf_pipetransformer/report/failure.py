"""Messages of a run that fails: the cause, the newest checkpoint and how to resume.

Notes of the error say it, which Python prints below it. Under torch's elastic agent (`torchrun`, `accelerate launch`)
they also go into the agent's error file, as with `torch.distributed.elastic`'s `record`: it is what the agent prints
last. SIGTERM, by which launchers end the other ranks, is no error: while a training runs, a thread answers it. Outside
of a training, nothing of the process is changed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import psutil

from hf_pipetransformer.report import in_bytes, logger


T = TypeVar("T")

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a write that found no space."""

_NO_SPACE = re.compile(rf"No space left|[Dd]isk quota exceeded|(os error|Errno) ({'|'.join(map(str, FULL_DISK))})\b")
_TORCH_CANNOT_WRITE = re.compile("iostream error|inline_container|PytorchStreamWriter")
"""Text of a failed `torch.save`, which does not say why it failed."""
_LITTLE_BYTES = 2**24
_NO_SPACE_NOTE = "(no space in"
_FIRST_RANK_IS_LOST = re.compile(r"^(rank 0\b[^(:]* not answer|The launcher, which hosts)")
_FIRST_CAUSE = "First cause: "
"""Words of a PipelineError before the cause that another rank reported."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_PATIENCE = 3.0
"""Seconds that a process which is told to end leaves its cause to be found."""

_LATE_SECONDS = 10.0
"""Limit of the search for a checkpoint: a file system may hang."""

_CREDENTIALS = struct.Struct("3i")
_STOP = b"\0"
"""Byte that is no number of a signal."""


@dataclass
class _Run:
    """Facts of the present run of this process."""

    output_dir: str | None = None
    is_resumed: bool = False
    """True if the run goes on from a checkpoint, so that those of earlier runs are this one's too."""
    cause: str | None = None
    details: str = ""
    """Traceback of the rank where the cause lies."""
    is_known: threading.Event = field(default_factory=threading.Event)
    ask: Callable[[], str | None] = lambda: None


_run = _Run()
_recorded_in: str | None = None
_find_checkpoint: Callable[[str], tuple[str, int] | None] | None = None


def find_checkpoints_with(find: Callable[[str], tuple[str, int] | None]) -> None:
    """Set what finds the newest whole checkpoint of a folder, and its bytes; files are not read as a whole."""
    global _find_checkpoint
    _find_checkpoint = find


def begin(output_dir: str | None, ask: Callable[[], str | None]) -> None:
    """Set the folder of the run, and what finds out why this process is told to end; that may take a few seconds."""
    _run.output_dir, _run.ask = output_dir, ask


def note_cause(cause: str, details: str = "") -> None:
    """Note the first cause of a fault of the ranks, and the traceback of the rank where it happened."""
    _run.cause, _run.details = cause, details
    _run.is_known.set()


def forget_cause() -> None:
    _run.cause, _run.details = None, ""
    _run.is_known.clear()


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Write an error that leaves this into the file which torch's elastic agent shows, if there is an agent."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        with contextlib.suppress(Exception):  # The first error is what counts.
            _record_error(error)
        raise


class Training:
    """Context of one training, whose failure is told.

    An error that leaves it gets notes on the rank that speaks. Of several ranks, none shows the traceback of an error
    that says all by itself. SIGTERM is told too, unless somebody else handles it, and ends the process still.
    """

    def __init__(self, output_dir: str, is_resumed: bool) -> None:
        self.output_dir, self.is_resumed = output_dir, is_resumed
        self._signals: _Signals | None = None

    def __enter__(self) -> None:
        _run.output_dir, _run.is_resumed = self.output_dir, self.is_resumed
        _remove_record()
        self._signals = _Signals.listen()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        is_told = isinstance(error, (Exception, KeyboardInterrupt))
        try:
            if error is None:
                _remove_record()
            elif is_told:
                with contextlib.suppress(Exception):
                    _add_notes(error)
                    _record_error(error)
        finally:
            if self._signals is not None:
                self._signals.stop()
        if error is not None and is_told and _world_size() > 1:
            if isinstance(error, Exception):
                _end_soon_after(error)
            if not _needs_traceback(error):
                raise error.with_traceback(None) from None


def _end_soon_after(error: BaseException) -> None:
    """End the process without its destructors, once all else that runs at exit has run, if the script ends by `error`.

    Those of process groups wait for peers that are gone: of NCCL's for longer than its timeout (measured).
    """

    # A reference would keep alive what the frames of the error hold, for a script that catches it and goes on.
    with contextlib.suppress(Exception):  # A class of the user's may be frozen.
        error._ends_rank = True  # type: ignore[attr-defined]
    atexit.unregister(_end_if_uncaught)
    atexit.register(_end_if_uncaught)


def _end_if_uncaught() -> None:
    # Python 3.12 has the one, 3.11 the other.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if getattr(last, "_ends_rank", False):
        atexit.unregister(_end_if_uncaught)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


def space_left(error: BaseException) -> str | None:
    """Return where there is no space, how much is free and how much a checkpoint takes, if that is the error."""
    chain, each = [], error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__  # type: ignore[assignment]
    found = [each for each in chain if getattr(each, "errno", None) in FULL_DISK or _NO_SPACE.search(str(each))]
    may_be = [each for each in chain if _TORCH_CANNOT_WRITE.search(str(each))]
    if not found and not may_be:
        return None
    named = os.path.dirname(str(getattr((found or may_be)[-1], "filename", None) or ""))
    folder = named or _run.output_dir or os.getcwd()
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    with contextlib.suppress(OSError):
        space = shutil.disk_usage(folder)
        newest = _newest()
        if not found and space.free >= (newest[1] if newest else _LITTLE_BYTES):
            return None
        needed = f", a checkpoint takes {in_bytes(newest[1])}" if newest else ""
        return (
            f"{_NO_SPACE_NOTE} {folder}: {in_bytes(space.free)} of {in_bytes(space.total)} free{needed}; make space, "
            "lower save_total_limit or set another output_dir)"
        )
    return None


def is_of_users(error: BaseException) -> bool:
    """Return True for an error of the user's code or of another library, whose traceback is of use."""
    is_own = type(error).__module__.startswith("hf_pipetransformer.")
    if not isinstance(error, Exception) or is_own or space_left(error):
        return False
    if type(error).__name__ == "OutOfMemoryError":  # torch's; the options to set stand below it.
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    is_raised_here = last is not None and last.tb_frame.f_code.co_filename.startswith(_PACKAGE)
    return not (isinstance(error, ValueError) and is_raised_here)


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _needs_traceback(error: BaseException) -> bool:
    return is_of_users(error) or logger.isEnabledFor(logging.DEBUG)


# ---- what is said ----


def _rank() -> int:
    # Not once at import: scripts and `notebook_launcher` set them later.
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _speaks(cause: str) -> bool:
    """Return True on the rank that says more than its own error: the first, or the next ones where that is lost."""
    is_next = _rank() == 1 or os.environ.get("LOCAL_RANK") == "0"
    return _rank() == 0 or (is_next and bool(_FIRST_RANK_IS_LOST.search(cause)))


def _add_notes(error: BaseException) -> None:
    where = space_left(error)
    if where is not None and not any(note.startswith(_NO_SPACE_NOTE) for note in getattr(error, "__notes__", [])):
        error.add_note(where)
    cause_of_others = str(error).partition(_FIRST_CAUSE)[2]
    if _speaks(cause_of_others):
        details = _details() if cause_of_others else ""
        for note in filter(None, [details, *_ways_on()]):
            error.add_note(note)


def _details() -> str:
    """Return the traceback of the rank where the cause lies; empty on one node, where it shows it itself."""
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "" if is_one_node else _run.details.rstrip()


def _ways_on() -> list[str]:
    """Return lines on where to go on from; none if the file system does not answer."""
    return _within(_LATE_SECONDS, _look_for_ways) or []


def _look_for_ways() -> list[str]:
    newest = _newest()
    # Another run may have left one in the same folder.
    if newest is not None and (_run.is_resumed or _is_of_this_launch(newest[0])):
        return [
            f"Newest whole checkpoint: {newest[0]}",
            f"Resume: trainer.train(resume_from_checkpoint={newest[0]!r}), or the same command with "
            f"--resume_from_checkpoint {shlex.quote(newest[0])} if the script reads it.",
        ]
    return [f"The run has saved no whole checkpoint in {_run.output_dir}."] if _find_checkpoint is not None else []


def _newest() -> tuple[str, int] | None:
    if _run.output_dir is not None and _find_checkpoint is not None:
        with contextlib.suppress(Exception):
            return _find_checkpoint(_run.output_dir)
    return None


def _is_of_this_launch(path: str) -> bool:
    """Return True if a folder is there, and is no older than this process."""
    try:
        return os.stat(path).st_mtime >= psutil.Process().create_time()
    except OSError:
        return False


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """Return the result of a call; None if it takes longer (its thread is abandoned)."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


# ---- the agent's file ----


def _record_error(error: BaseException) -> None:
    shown = traceback_of(error) if _needs_traceback(error) else "".join(traceback.format_exception_only(error))
    _record(f"{type(error).__name__}: {error}", shown.rstrip())


def _record(message: str, shown: str) -> None:
    """Write the file of torch's agent in its format; `shown` is what it prints."""
    global _recorded_in
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.lexists(path) and not os.path.isfile(path)):
        return
    extra = {"py_callstack": shown, "timestamp": str(int(time.time()))}
    unfinished = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        # Replaced as a whole: the agent would end by half of a file.
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        os.replace(unfinished, path)
        _recorded_in = path


def _remove_record() -> None:
    """Take back the record of an error that the script has handled: it is not the cause of a later one."""
    global _recorded_in
    if _recorded_in is not None:
        with contextlib.suppress(OSError):
            os.remove(_recorded_in)
        _recorded_in = None


# ---- SIGTERM ----


class _Signals:
    """Answer to SIGTERM during a training, by a thread: the main one may wait for other ranks without end.

    A handler in Python would run when the main thread returns from such a wait. The bytes of the wakeup descriptor are
    written at once, also by forked children, which inherit it: the socket tells whose each byte is.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_over = False
        self._awake, self._wake = socket.socketpair()
        self._awake.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._read, name="last-words", daemon=True)

    @classmethod
    def listen(cls) -> _Signals | None:
        """Begin to answer; return None if the signal or the wakeup descriptor is somebody else's."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or not hasattr(socket, "SO_PASSCRED"):
            return None
        signals = cls()
        before = signal.set_wakeup_fd(signals._wake.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            signals._close()
            return None
        signal.signal(signal.SIGTERM, signals._handle)
        signals._thread.start()
        return signals

    def stop(self) -> None:
        """Take everything back; does not return if SIGTERM has come."""
        self._is_over = True
        self._wake.send(_STOP)
        self._thread.join()
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        own, present = self._wake.fileno(), signal.set_wakeup_fd(-1)
        if present != own:
            signal.set_wakeup_fd(present)
        self._close()

    def _close(self) -> None:
        self._awake.close()
        self._wake.close()

    def _handle(self, number: int, _frame: Any) -> None:
        # In a child, or once the thread reads no more.
        if self._is_over or os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _read(self) -> None:
        while True:
            byte, ((_, _, sender),), _, _ = self._awake.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            if _CREDENTIALS.unpack(sender)[0] != self._pid:
                continue
            if byte == _STOP:
                return
            if byte[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == self._handle:
                with contextlib.suppress(Exception):
                    _say_why_it_ends()
                _die_of(signal.SIGTERM)


def _say_why_it_ends() -> None:
    """Say the cause on the rank that speaks: most often another rank has failed."""
    if _world_size() > 1 and not _run.is_known.is_set():
        # Ranks that go on for this while are not taken for the lost one.
        threading.Thread(target=_find_out, daemon=True).start()
        _run.is_known.wait(_PATIENCE)
    cause = _run.cause or f"rank {_rank()} was ended by SIGTERM, which launchers, schedulers and users send."
    if _speaks(cause):
        text = "\n".join(filter(None, [_details(), f"The run failed: {cause}", *_ways_on()]))
        _record(cause, text)
        print(f"\n{text}", file=sys.stderr, flush=True)


def _find_out() -> None:
    cause = _run.ask()
    if cause is not None and not _run.is_known.is_set():
        note_cause(cause)


def _die_of(number: int) -> None:
    """End this process by a signal, from whatever thread, so that its status says so."""
    set_handler = ctypes.pythonapi.PyOS_setsig  # `signal.signal` is for the main thread alone.
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_handler(int(number), None)
    os.kill(os.getpid(), number)
