"""Message of a run that fails: the first cause, the checkpoint to resume from and the events file.

They are the text of the error and a note of it, which Python prints last. Under torch's elastic agent (`torchrun`,
`accelerate launch`) they also go into the agent's error file, as with `torch.distributed.elastic`'s `record`: it is
what the agent prints last. Nothing of the process is changed outside of a training.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import cache
from types import TracebackType
from typing import Any, Protocol

import psutil

from hf_pipetransformer.report import logger
from hf_pipetransformer.report.files import FindCheckpoint, note_space, says_disk_is_full


_FIRST_RANK_IS_LOST = re.compile(r"^(rank 0\b[^(:]* not answer|The launcher, which hosts)")
_FIRST_CAUSE = "First cause: "
"""Words of a PipelineError before the cause that another rank reported."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


SECONDS_TO_HANDLE = 5.0
"""Seconds that a main thread has to return to Python after SIGTERM: less than launchers wait before they kill."""


class Faults(Protocol):
    """Knowledge of a rank about the faults of all ranks in the present run."""

    details: str
    """Traceback of the rank where the first cause lies."""

    def find_cause(self) -> str | None:
        """Return the first cause, after a look for ranks that are gone, which takes seconds; None if all is well."""


class FailureReporter:
    """Context of one training, whose failure is told.

    An error that leaves it gets a note on the rank that speaks. Of several ranks, none shows the traceback of an error
    that says all by itself.

    SIGTERM is told too, by a handler, as long as nobody else handles it. It ends the process still. Without a handler
    a killed rank would have no cause: its launcher ends the other ranks by this signal before they can raise an error.
    The handler runs when the main thread returns to Python. Where that waits for another rank, a thread says why and
    ends the process after `SECONDS_TO_HANDLE`.
    """

    def __init__(
        self,
        output_dir: str,
        events_file: str,
        is_resumed: bool,
        faults: Faults,
        find_checkpoint: FindCheckpoint,
        handles_sigterm: bool = True,
    ) -> None:
        self._output_dir = output_dir
        self._events_file = events_file
        self._is_resumed = is_resumed
        self._faults = faults
        self._find_checkpoint = find_checkpoint
        # Python lets no other thread set a handler.
        self._handles_sigterm = handles_sigterm and threading.current_thread() is threading.main_thread()
        self._pid = os.getpid()
        self._is_handled = threading.Event()
        self._wakes: int | None = None
        self._thread: threading.Thread | None = None
        self._is_active = False

    def __enter__(self) -> None:
        _remove_record()
        self._is_active = True
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._end)
            self._watch()

    def _watch(self) -> None:
        """Start the thread that ends a process whose main thread does not return to Python."""
        _leave_signals_to_children()
        signaled, self._wakes = os.pipe()
        # Required of a wakeup descriptor: a signal must not wait in its handler until a full pipe is read.
        os.set_blocking(self._wakes, False)
        before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        if before != -1:
            # An event loop needs it: its main thread returns to Python.
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            self._stop_watching()
        self._thread = threading.Thread(target=self._end_if_not_handled, args=(signaled,), daemon=True)
        self._thread.start()

    def _stop_watching(self) -> None:
        if self._wakes is not None:
            with contextlib.suppress(ValueError):  # It belongs to another thread's interpreter state.
                if (now := signal.set_wakeup_fd(-1)) not in (-1, self._wakes):
                    signal.set_wakeup_fd(now)
            os.close(self._wakes)  # The thread reads the end of the pipe.
            self._wakes = None
        if self._thread is not None:
            self._thread.join(SECONDS_TO_HANDLE)

    def _end_if_not_handled(self, signaled: int) -> None:
        with open(signaled, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                is_ours = number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == self._end
                if is_ours and not self._is_handled.wait(SECONDS_TO_HANDLE):
                    with contextlib.suppress(Exception):
                        self._say_why_it_ends()
                    os._exit(128 + signal.SIGTERM)  # As a shell counts it: only the main thread may set a handler.

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # SystemExit is no failure: `plan_only` ends a run by it.
        is_told = isinstance(error, (Exception, KeyboardInterrupt))
        try:
            if error is None:
                _remove_record()
            elif is_told:
                # The first error is what counts, and it is recorded whatever a note of it needs.
                for tell in (self._add_notes, _record_error):
                    with contextlib.suppress(Exception):
                        tell(error)
        finally:
            self._is_active = False
            self._stop_watching()
            if signal.getsignal(signal.SIGTERM) == self._end:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if error is not None and is_told and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if isinstance(error, Exception):
                _end_soon_after(error)
            if not _needs_traceback(error):
                raise error.with_traceback(None) from None

    def _add_notes(self, error: BaseException) -> None:
        note_space(error, self._output_dir, self._find_checkpoint)
        cause_of_others = str(error).partition(_FIRST_CAUSE)[2]
        if _speaks(cause_of_others):
            for note in filter(None, [self._details() if cause_of_others else "", self._way_on()]):
                error.add_note(note)

    def _details(self) -> str:
        """Return the traceback of the rank where the cause lies; empty on one node, where that rank shows it."""
        is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        return "" if is_one_node else self._faults.details.rstrip()

    def _way_on(self) -> str:
        """Return where to go on from, and where the run's events are."""
        newest, says = None, []
        # A folder may be rotated away or unreadable meanwhile. And another run may have left one in the same place.
        with contextlib.suppress(Exception):
            found = self._find_checkpoint(self._output_dir)
            newest = found if found is not None and (self._is_resumed or _is_of_this_launch(found[0])) else None
        if newest is not None:
            says.append(
                f"Resume from the newest whole checkpoint by trainer.train(resume_from_checkpoint={newest[0]!r}), or "
                f"by --resume_from_checkpoint {shlex.quote(newest[0])} if the script reads it."
            )
        else:
            says.append(f"The run has saved no whole checkpoint in {self._output_dir}.")
        if os.path.isfile(self._events_file):  # Rank 0 writes them; each node may have an `output_dir` of its own.
            says.append(f"Its events: {self._events_file}")
        return " ".join(says)

    def _end(self, number: int, _frame: Any) -> None:
        """Say why the process ends, and end it by the signal."""
        self._is_handled.set()
        if self._is_active and signal.getsignal(number) != self._end:
            return  # A handler that was set in the training has called the one before it, and goes on.
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == self._pid:  # Not a forked worker.
            with contextlib.suppress(Exception):
                self._say_why_it_ends()
        # By the signal again, so that the launcher sees the exit code that it expects.
        os.kill(os.getpid(), number)

    def _say_why_it_ends(self) -> None:
        cause = self._faults.find_cause()
        cause = cause or f"rank {_rank()} was ended by SIGTERM, which launchers, schedulers and users send."
        if _speaks(cause):
            text = "\n".join(filter(None, [self._details(), f"The run failed: {cause}", self._way_on()]))
            _record(cause, text)
            os.write(2, f"\n{text}\n".encode())  # The signal may have come amid a write to `sys.stderr`.


@cache
def _leave_signals_to_children() -> None:
    """Let forked processes write no signals of theirs into a pipe of this one; such a hook stays, and does no more."""

    def forget() -> None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)


def is_of_users(error: BaseException) -> bool:
    """Return True for an error of the user's code or of another library, whose traceback is of use."""
    is_own = type(error).__module__.startswith("hf_pipetransformer.")
    if not isinstance(error, Exception) or is_own or says_disk_is_full(error):
        return False
    if type(error).__name__ == "OutOfMemoryError":  # torch's; the options to set stand below it.
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    # A ValueError of this package says what to change; of one that only passes through it, the place is needed.
    is_raised_here = last is not None and last.tb_frame.f_code.co_filename.startswith(_PACKAGE)
    return not (isinstance(error, ValueError) and is_raised_here)


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _needs_traceback(error: BaseException) -> bool:
    return is_of_users(error) or logger.isEnabledFor(logging.DEBUG)


def _rank() -> int:
    # Not once at import: scripts and `notebook_launcher` set them later.
    return int(os.environ.get("RANK", "0"))


def _speaks(cause: str) -> bool:
    """Return True on the rank that says more than its own error: the first, or the next ones where that is lost."""
    is_next = _rank() == 1 or os.environ.get("LOCAL_RANK") == "0"
    return _rank() == 0 or (is_next and bool(_FIRST_RANK_IS_LOST.search(cause)))


def _is_of_this_launch(path: str) -> bool:
    """Return True if a folder is no older than this process."""
    return os.stat(path).st_mtime >= psutil.Process().create_time()


def _end_soon_after(error: BaseException) -> None:
    """End the process without its destructors, once all else that runs at exit has run, if the script ends by `error`.

    Those of process groups wait for peers that are gone: of NCCL's for longer than its timeout (measured).
    """

    # A reference would keep alive what the frames of the error hold, for a script that catches it and goes on.
    with contextlib.suppress(Exception):  # A class of the user's may be frozen.
        error._ends_rank = True  # type: ignore[attr-defined]
    atexit.unregister(_end_if_uncaught)
    # Anew, so that it is the last: these run in reverse order, and this one runs the others before it ends.
    atexit.register(_end_if_uncaught)


def _end_if_uncaught() -> None:
    # Python sets it for an error that nobody caught, before it calls what is registered here.
    if getattr(getattr(sys, "last_value", None), "_ends_rank", False):
        atexit.unregister(_end_if_uncaught)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


# ---- the error file of torch's agent ----


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Write an error that leaves this into the file which torch's elastic agent shows, if there is an agent."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        with contextlib.suppress(Exception):  # The first error is what counts.
            _record_error(error)
        raise


def _record_error(error: BaseException) -> None:
    shown = traceback_of(error) if _needs_traceback(error) else "".join(traceback.format_exception_only(error))
    _record(f"{type(error).__name__}: {error}", shown.rstrip())


def _record(message: str, shown: str) -> None:
    """Write the file in torch's format; `shown` is what the agent prints. torch's own writer would follow a link."""
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


def _remove_record() -> None:
    """Take back the record of an error that the script has handled: it is not the cause of a later one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and os.path.isfile(path):
        with contextlib.suppress(OSError):
            os.remove(path)
