"""Last message of a run that failed: cause, newest checkpoint and how to resume, once, after everything else.

Rank 0 speaks; another rank only if rank 0 is gone or says nothing. Nothing here communicates between ranks: they see
each other's message as a file in `output_dir`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import logging
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from types import TracebackType
from typing import Any

import psutil

from hf_pipetransformer.report import in_bytes, logger


FAILURE_FILE = "pipetransformer_failure.txt"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a write that found no space."""

_NO_SPACE = re.compile(rf"No space left|[Dd]isk quota exceeded|(os error|Errno) ({'|'.join(map(str, FULL_DISK))})\b")
_TORCH_CANNOT_WRITE = re.compile("iostream error|inline_container|PytorchStreamWriter")
"""Text of a failed `torch.save`, which does not say why it failed."""
_LITTLE_BYTES = 2**24
_NO_SPACE_NOTE = "(no space in"
_FIRST_RANK_IS_LOST = re.compile(r"^(rank 0\b[^(:]* not answer|The launcher, which hosts)")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LONGEST = 1200

_PATIENCE = 3.0
"""Seconds that other ranks leave rank 0 to speak, and a process that is told to end leaves its cause to be found."""

_ERROR_SECONDS = 0.5
"""Seconds from a cause that is known to the end of the script by it."""

_LATE_SECONDS = 10.0
"""Seconds after which the message no longer waits for the end of the process, which may hang; also for each file."""

_NO_SIGNAL, _TAKEN = 0, 255
"""Bytes that are no numbers of signals; the second one says that this library's handler ran."""


def install(output_dir: str | None) -> None:
    """Say a last message if this process ends by an error that nobody handles. May be called again.

    Not in an interactive session, which goes on after an error, and not in a child of `multiprocessing`, which reports
    errors to its parent.
    """
    global _last_words
    if _last_words is None:
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive or _is_ipython()
        is_main = threading.current_thread() is threading.main_thread() and multiprocessing.parent_process() is None
        if is_interactive or not is_main:
            return
        _last_words = LastWords(sys.excepthook)
        _last_words.listen()
    _last_words.output_dir = output_dir or _last_words.output_dir


def find_checkpoints_with(find: Callable[[str], tuple[str, int] | None]) -> None:
    """Set what finds the newest whole checkpoint of a folder, and its bytes; files are not read as a whole."""
    global _find_checkpoint
    _find_checkpoint = find


@contextlib.contextmanager
def training(output_dir: str, is_resumed: bool) -> Iterator[None]:
    """Wrap a training: the message of an earlier run goes, and SIGTERM gets one even without other processes.

    `is_resumed` says that checkpoints of an earlier run are this one's too.
    """
    words = _last_words
    if words is None:
        yield
        return
    words.output_dir, words.is_resumed = output_dir, is_resumed
    if words.rank == 0:
        for path in words.paths():
            with contextlib.suppress(OSError):
                if not _is_of_this_launch(path):
                    os.remove(path)
    words.num_trainings += 1
    # Trainer's checkpoint upon a signal has a handler of its own until the end of the training.
    was_others = words.is_others
    words.is_others = signal.getsignal(signal.SIGTERM) is not _leave_it_to_the_thread
    try:
        yield
    finally:
        words.num_trainings -= 1
        if words.is_others:
            words.read_signals()
        words.is_others = was_others


def note_cause(cause: str, details: str = "") -> None:
    """Note the first cause of a fault of the ranks, and the traceback of the rank where it happened."""
    if _last_words is not None:
        _last_words.cause, _last_words.details = cause, details
        _last_words.is_known.set()


def forget_cause() -> None:
    if _last_words is not None:
        _last_words.cause, _last_words.details = None, ""
        _last_words.is_known.clear()


def ask_with(ask: Callable[[], str | None]) -> None:
    """Set what finds out the cause when this process is told to end; it may take a few seconds."""
    if _last_words is not None:
        _last_words.ask = ask


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
    output_dir = _last_words.output_dir if _last_words is not None else None
    folder = os.path.dirname(str(getattr((found or may_be)[-1], "filename", None) or "")) or output_dir or os.getcwd()
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    with contextlib.suppress(OSError):
        space = shutil.disk_usage(folder)
        newest = _newest(output_dir)
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
    if not isinstance(error, Exception) or _is_of(type(error), "hf_pipetransformer.") or space_left(error):
        return False
    if type(error).__name__ == "OutOfMemoryError":  # torch's; the options to set stand below it.
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    is_raised_here = last is not None and last.tb_frame.f_code.co_filename.startswith(_PACKAGE)
    return not (isinstance(error, ValueError) and is_raised_here)


def in_one_line(error: BaseException) -> str:
    """Return an error's class, text and notes."""
    parts = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    line = " ".join(" ".join(parts).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


@dataclass
class LastWords:
    """Facts of this process for its last message; made once."""

    previous: Callable[[type[BaseException], BaseException, TracebackType | None], Any]
    output_dir: str | None = None
    rank: int = int(os.environ.get("RANK", "0"))
    world_size: int = int(os.environ.get("WORLD_SIZE", "1"))
    cause: str | None = None
    details: str = ""
    ask: Callable[[], str | None] = lambda: None
    num_trainings: int = 0
    is_resumed: bool = False
    """True if the run goes on from a checkpoint."""
    is_known: threading.Event = field(default_factory=threading.Event)
    """Set once the cause is known, or an error has reached the end of the script."""
    is_ending: bool = False
    """True once SIGTERM has come."""
    is_others: bool = False
    """True while SIGTERM is left to a handler that was there when a training began."""
    _has_error: threading.Event = field(default_factory=threading.Event)
    """Set once an error has reached the end of the script."""
    _is_settled: threading.Event = field(default_factory=threading.Event)
    """Set once that error is dealt with."""
    _wake: int | None = None
    """Where the numbers of signals are written; None if nobody reads them."""
    _has_read: threading.Event = field(default_factory=threading.Event)
    # Not that of the moment: torch's hook replaces it while it calls this one.
    _stream: Any = field(default_factory=lambda: sys.stderr or sys.__stderr__)
    _pid: int = field(default_factory=os.getpid)
    _message: str | None = None
    _is_prepared: bool = False
    _preparing: threading.Lock = field(default_factory=threading.Lock)
    _printing: threading.Lock = field(default_factory=threading.Lock)

    # ---- the moments ----

    def listen(self) -> None:
        """Have unhandled errors, the end of the process and SIGTERM come here."""
        sys.excepthook = self.on_error
        atexit.register(self.on_exit)
        # A handler in Python runs when the main thread returns from a wait for other ranks, which may be never; the
        # bytes of the wakeup descriptor are written at once, and read by a thread.
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        awake, wake = os.pipe()
        os.set_blocking(wake, False)
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(awake)
            os.close(wake)
            return
        self._wake = wake
        signal.signal(signal.SIGTERM, _leave_it_to_the_thread)
        os.register_at_fork(before=_hold_signal, after_in_parent=_let_signal_come, after_in_child=_as_by_default)
        threading.Thread(target=self._wait_for_the_end, args=(awake,), name="last-words", daemon=True).start()

    def on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Replace the traceback of an error that nobody handled, where it says no more than the message."""
        if os.getpid() != self._pid:
            self.previous(kind, error, trace)
            return
        self._has_error.set()
        try:
            self._answer(kind, error, trace)
        except KeyboardInterrupt:
            pass  # Ctrl-C once more: the message comes without what was still being looked up.
        except Exception:
            self.previous(kind, error, trace)
        finally:
            self._is_settled.set()

    def _answer(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        of_users = is_of_users(error)
        # torch's own only marks the lines with the rank.
        is_users = self.previous is not sys.__excepthook__ and not _is_of(self.previous, "torch.distributed")
        if is_users or logger.isEnabledFor(logging.DEBUG):
            self.previous(kind, error, trace)
            of_users = False
        where = space_left(error)
        if where is not None and not any(note.startswith(_NO_SPACE_NOTE) for note in getattr(error, "__notes__", [])):
            error.add_note(where)
        line, own = in_one_line(error), traceback_of(error)
        of_all = line.partition("First cause: ")[2]  # Of a PipelineError.
        # An error inside a training is known to rank 0, which may be waiting for the end of this process.
        is_shared = self.cause is not None and (bool(of_all) or line in self.cause)
        cause = self.cause if is_shared and self.cause else (of_all or line)
        others = self.details if is_shared and not of_users else ""
        self.is_known.set()
        if self._may_speak(cause, is_shared):
            if of_users or others:
                self._show(others or own)
            _within(_LATE_SECONDS, lambda: self._prepare(cause, f"{others}\n{own}".lstrip()))
            late = threading.Timer(_LATE_SECONDS, self.speak)
            late.daemon = True
            late.start()
        elif "TORCHELASTIC_RUN_ID" not in os.environ:
            # Without an agent, which says how each process ended, outputs often go to a file by rank.
            self._show(f"hf-pipetransformer, rank {self.rank}: {line}")

    def on_exit(self) -> None:
        if os.getpid() == self._pid:
            self.speak()
            if self.is_ending:
                _die_of(signal.SIGTERM)

    def read_signals(self) -> None:
        """Wait until the thread has read all signals that came before: it may be late."""
        self._has_read.clear()
        if self.tell(_NO_SIGNAL):
            self._has_read.wait(_LATE_SECONDS)

    def tell(self, number: int) -> bool:
        """Write a byte to the thread; return False if nobody reads it."""
        if self._wake is None or os.getpid() != self._pid:
            return False
        with contextlib.suppress(BlockingIOError):
            return bool(os.write(self._wake, bytes([number])))
        return False

    def _wait_for_the_end(self, awake: int) -> None:
        while numbers := os.read(awake, 64):
            is_ours = signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread and not self.is_others
            if _TAKEN in numbers or (signal.SIGTERM in numbers and is_ours):
                self.is_ending = True
                with contextlib.suppress(Exception):
                    self._end()
                _die_of(signal.SIGTERM)
            if _NO_SIGNAL in numbers:
                self._has_read.set()

    def _end(self) -> None:
        """Say the last message of a process that is told to end: most often another rank has failed."""
        if self.world_size > 1 and not self.is_known.is_set():
            # Ranks that go on for this while are not taken for the lost one.
            threading.Thread(target=self._find_out, daemon=True).start()
            self.is_known.wait(_PATIENCE)
        # The error of a lost rank is about to reach the end of the script, unless somebody handles it.
        if self._has_error.wait(_ERROR_SECONDS if self.is_known.is_set() else 0):
            self._is_settled.wait(_LATE_SECONDS)
        elif (self.world_size > 1 or self.num_trainings) and self._may_speak(self.cause or "", is_shared=True):
            if self.details:
                self._show(self.details)
            cause = self.cause or f"rank {self.rank} was ended by SIGTERM, which launchers, schedulers and users send."
            _within(_LATE_SECONDS, lambda: self._prepare(cause, self.details))
        self.speak()

    def _find_out(self) -> None:
        cause = self.ask()
        if cause is not None and not self.is_known.is_set():
            note_cause(cause)

    # ---- the message ----

    def _may_speak(self, cause: str, is_shared: bool) -> bool:
        """Return True if this rank is the one to speak: the first, or another one if the first is lost or silent."""
        if not self.rank and cause:
            return True
        if self.rank and not _FIRST_RANK_IS_LOST.search(cause):
            if is_shared:
                return False
            end = time.monotonic() + _PATIENCE
            while not self._is_said() and time.monotonic() < end:
                time.sleep(0.05)
        return not self._is_said()

    def paths(self) -> list[str]:
        """Return where the message may lie: in `output_dir`, or, where that cannot be written, in a folder of all."""
        folder = os.path.abspath(self.output_dir or "")
        name, ending = os.path.splitext(FAILURE_FILE)
        other = f"{name}_{sha256(folder.encode()).hexdigest()[:12]}{ending}"
        own = [os.path.join(folder, FAILURE_FILE)] if self.output_dir else []
        return [*own, os.path.join(tempfile.gettempdir(), other)]

    def _is_said(self) -> bool:
        """Return True if another rank of this launch has spoken."""
        return not self._is_prepared and any(map(_is_of_this_launch, self.paths()))

    def _prepare(self, cause: str, details: str) -> None:
        """Make the message, and write it with `details` to the file."""
        with self._preparing:
            if self._is_prepared:
                return
            self._is_prepared = True
            self._compose(cause, details)

    def _compose(self, cause: str, details: str) -> None:
        is_interrupt = "KeyboardInterrupt" in cause
        why = "was interrupted (KeyboardInterrupt: Ctrl-C or SIGINT)." if is_interrupt else f"failed: {cause}"
        lines = [f"The run {why}"]
        self._message = "\n".join(lines)
        newest = _newest(self.output_dir)
        # Another run may have left one in the same folder.
        if newest is not None and (self.is_resumed or _is_of_this_launch(newest[0])):
            path = shlex.quote(newest[0])
            lines += [
                f"Newest whole checkpoint: {newest[0]}",
                f"Resume: trainer.train(resume_from_checkpoint={newest[0]!r}), or the same command with "
                f"--resume_from_checkpoint {path} if the script reads it.",
            ]
        elif self.output_dir and _find_checkpoint is not None:
            lines.append(f"The run has saved no whole checkpoint in {self.output_dir}.")
        self._message = "\n".join(lines)
        for path in self.paths():
            text = "\n".join([*lines, "", f"Script, on rank {self.rank}: {shlex.join(sys.argv)}", "", details])
            try:
                _write(path, text)
            except OSError:
                continue
            self._message = "\n".join([*lines, f"All of it: {path}"])
            return

    def speak(self) -> None:
        """Print the message, once."""
        with self._printing:
            text, self._message = self._message, None
        if text is not None:
            self._show(f"\n{text}")

    def _show(self, text: str) -> None:
        with contextlib.suppress(Exception):
            print(text.rstrip(), file=self._stream, flush=True)


_last_words: LastWords | None = None
_held = threading.local()
_find_checkpoint: Callable[[str], tuple[str, int] | None] | None = None


def _newest(output_dir: str | None) -> tuple[str, int] | None:
    if output_dir is not None and _find_checkpoint is not None:
        with contextlib.suppress(Exception):  # The first error is what counts.
            return _find_checkpoint(output_dir)
    return None


def _is_of_this_launch(path: str) -> bool:
    """Return True if a file or folder is there, and is no older than this process."""
    try:
        return os.stat(path).st_mtime >= psutil.Process().create_time()
    except OSError:
        return False


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    unfinished = f"{path}.{os.getpid()}"
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise


def _within(seconds: float, call: Callable[[], Any]) -> None:
    """Wait for a call in a thread of its own: a file system may hang."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _is_of(what: Any, package: str) -> bool:
    return str(getattr(what, "__module__", "")).startswith(package)


def _is_ipython() -> bool:
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def _leave_it_to_the_thread(_number: int, _frame: Any) -> None:
    # Not if the training's own handler calls this one: only once it is gone, before the training is.
    is_back = signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread
    if is_back and _last_words is not None and _last_words.is_others:
        _last_words.tell(_TAKEN)


def _hold_signal() -> None:
    """Hold SIGTERM during a fork: a child that got it before `_as_by_default` would write to its parent's pipe."""
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_signal_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _as_by_default() -> None:
    """Give a forked child, such as a worker of a data loader, back what the signal does by default."""
    if signal.getsignal(signal.SIGTERM) is _leave_it_to_the_thread:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_signal_come()


def _die_of(number: int) -> None:
    """End this process by a signal, from whatever thread, so that its status says so."""
    set_handler = ctypes.pythonapi.PyOS_setsig  # `signal.signal` is for the main thread alone.
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_handler(int(number), None)
    os.kill(os.getpid(), number)
