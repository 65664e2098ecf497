"""Two runs with one `output_dir`: the second is refused at once; one that is gone stands in nobody's way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.comm.topology import host_name
from hf_pipetransformer.report.events import EVENTS_FILE
from hf_pipetransformer.state import only_run as module
from hf_pipetransformer.state.only_run import LOCK_FILE
from tests.support.models import build_model, collate, make_dataset
from tests.support.mutations import NO_FILES
from tests.support.one_process import together


class Looks(TrainerCallback):
    """Notes the owner of the lock in a step, and fails if it is to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / LOCK_FILE
        self.seen.append(json.loads(path.read_text()) if path.exists() else None)
        if self.fails:
            raise KeyboardInterrupt


def make(folder: Path, look: Looks | None = None, **options: Any) -> PipeTransformerTrainer:
    args = PipeTransformerArguments(
        output_dir=str(folder), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        **{"freeze_policy": "none", **options},
    )  # fmt: skip
    data = make_dataset("bert_sequence", 8)
    callbacks = [] if look is None else [look]
    model = build_model("bert_sequence")
    return PipeTransformerTrainer(model, args, train_dataset=data, data_collator=collate, callbacks=callbacks)


FREEZES = {"freeze_policy": "fixed", "freeze_at": "0:1", "activation_cache": "off"}


HOLD = """
import os, sys, time
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print(flush=True)
time.sleep(300)
"""
FORKED = HOLD.replace("print(flush=True)", "worker = os.fork()\nif worker: print(f'\\n{worker}', flush=True)")


@contextmanager
def held(folder: Path, script: str = HOLD) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which has the lock of a folder, and has written nothing into its file."""
    command = [sys.executable, "-c", script, str(folder / LOCK_FILE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


def name_owner(folder: Path, pid: int, host: str = "elsewhere 1-2") -> Path:
    path = folder / LOCK_FILE
    path.write_text(json.dumps({"host": host, "pid": pid}))
    return path


@pytest.mark.parametrize("options", [{}, FREEZES], ids=["left to Trainer", "freezing"])
def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = make(tmp_path, **options)
    with held(tmp_path) as other:
        path = name_owner(tmp_path, other.pid)
        said = f"another run .process {other.pid} on elsewhere. .*set another output_dir"
        with pytest.raises(ValueError, match=said):
            trainer.train()
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE], "the events are the other run's"
        assert json.loads(path.read_text())["pid"] == other.pid
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # It is gone, and nobody has asked yet how it ended.
        trainer.train()
    assert not path.exists() and list(tmp_path.glob("checkpoint-*"))


def test_workers_that_outlive_their_run_do_not_keep_its_lock(tmp_path: Path) -> None:
    with held(tmp_path, FORKED) as other:
        worker = int(other.stdout.readline())  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="another run is training"):
            module._RunLock(str(tmp_path)).take()
        other.kill()
        other.wait()
        lock = module._RunLock(str(tmp_path))
        assert lock.take()
        os.kill(worker, signal.SIGKILL)
    with pytest.raises(ValueError, match=f"another run .process {os.getpid()} on {platform.node()}. is training"):
        module._RunLock(str(tmp_path)).take()
    lock.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, FREEZES], ids=["left to Trainer", "freezing"])
def test_trainings_that_follow_each_other_may_share_a_folder(tmp_path: Path, options: dict[str, Any]) -> None:
    for fails in (False, True, False):
        look = Looks(fails)
        trainer = make(tmp_path, look, **options)
        if fails:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        else:
            trainer.train()
        trainer.evaluate(trainer.train_dataset)
        assert [owner["pid"] for owner in look.seen] == [os.getpid()]
        assert not list(tmp_path.glob("_pipetransformer_run*"))


def test_who_saves_nothing_needs_no_lock(tmp_path: Path) -> None:
    look = Looks()
    trainer = make(tmp_path, look, save_strategy="no")
    with held(tmp_path) as other:
        name_owner(tmp_path, other.pid)
        trainer.evaluate(trainer.train_dataset)
        trainer.train()
        assert [owner["pid"] for owner in look.seen] == [other.pid]  # The other's stays.


@pytest.mark.parametrize("content", ["", "[[", '{"pid": "x"}', "\0" * 100, '{"host": "h", "pid": 5, "run": "older"}'])
def test_what_nobody_holds_is_no_lock_whatever_it_says(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    look = Looks()
    make(tmp_path, look).train()
    assert [owner["pid"] for owner in look.seen] == [os.getpid()]


@pytest.mark.parametrize("boot", ["of-another-boot", None])
def test_what_a_run_of_another_machine_left_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, boot: str | None
) -> None:
    """A lock of one machine alone, as some file systems have, would not show that it trains."""
    name_owner(tmp_path, 12, host_name() if boot is None else f"{platform.node()} {boot}")
    lock = module._RunLock(str(tmp_path))
    assert lock.take()
    said = f"a run on {platform.node()} (process 12) did not end in order. Make sure that it is over"
    assert (said in caplog.text) == (boot is not None)
    lock.release()


def test_of_many_that_begin_at_once_one_gets_the_lock(tmp_path: Path) -> None:
    for _ in range(5):
        (tmp_path / LOCK_FILE).touch()
        begin = threading.Barrier(8)

        def take(begin: threading.Barrier = begin) -> Any:
            lock = module._RunLock(str(tmp_path))
            begin.wait()
            try:
                assert lock.take()
            except ValueError:
                return None
            return lock

        (taken,) = filter(None, together([take] * 8))
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
        taken.release()
        assert not list(tmp_path.iterdir())


def test_runs_that_follow_each_other_closely_never_hold_it_together(tmp_path: Path) -> None:
    """Each removes the file, which another one may have opened just before."""
    holders, most, failed = [0], [0], []

    def take() -> None:
        for _ in range(40):
            lock = module._RunLock(str(tmp_path))
            try:
                assert lock.take()
            except ValueError:
                continue  # A whole second without luck.
            holders[0] += 1
            most[0] = max(most[0], holders[0])
            if not (tmp_path / LOCK_FILE).exists():
                failed.append("the file is gone")
            time.sleep(0.001)
            holders[0] -= 1
            lock.release()

    together([take] * 4)
    assert most == [1] and not failed and not list(tmp_path.iterdir())


def test_a_file_that_took_the_place_of_the_locked_one_stays(tmp_path: Path) -> None:
    lock = module._RunLock(str(tmp_path))
    assert lock.take()
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / LOCK_FILE).write_text("of another run")
    lock.release()
    assert (tmp_path / LOCK_FILE).read_text() == "of another run"


def test_a_folder_in_which_nothing_can_be_made_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def acquire(_lock: FileLock) -> None:
        raise PermissionError(errno.EACCES, "planted")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    assert not module._RunLock(str(tmp_path)).take()
    assert "make sure that no other run uses this output_dir" in caplog.text


@pytest.mark.parametrize("number", module._NO_LOCKS)
def test_a_file_system_without_locks_is_told_of_and_keeps_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    look = Looks()
    make(tmp_path, look).train()
    assert look.seen == [None] and list(tmp_path.glob("checkpoint-*")) and not list(tmp_path.glob("_pipe*"))
    assert f"{LOCK_FILE} cannot be locked ([Errno {number}]" in caplog.text
    assert "make sure that no other run uses this output_dir" in caplog.text


def test_a_lock_that_may_not_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = name_owner(tmp_path, 12)
    original = os.open

    def refuse(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name) == str(path):
            raise PermissionError(13, "planted", name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ValueError, match=f"{path} cannot be read: expected the lock of a run"):
        module._RunLock(str(tmp_path)).take()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_no_lock(tmp_path: Path, what: str) -> None:
    """None is waited for, followed or read."""
    path, before = tmp_path / LOCK_FILE, Path(__file__).read_bytes()
    NO_FILES[what](path)
    with pytest.raises(ValueError, match=f"{path} cannot be read: expected the lock of a run. Remove this file"):
        make(tmp_path).train()
    assert [each.name for each in tmp_path.iterdir()] == [LOCK_FILE] and Path(__file__).read_bytes() == before


def test_a_lock_with_another_name_is_not_written(tmp_path: Path) -> None:
    """What the other name holds would be lost."""
    other = tmp_path / "other"
    other.write_text("kept")
    os.link(other, tmp_path / LOCK_FILE)
    with pytest.raises(ValueError, match="cannot be read: expected the lock of a run"):
        module._RunLock(str(tmp_path)).take()
    assert other.read_text() == "kept"


def test_a_lock_without_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    with held(tmp_path):
        os.truncate(path, 2**40)
        with pytest.raises(ValueError, match=f"{path}: another run is training in this output_dir"):
            module._RunLock(str(tmp_path)).take()
    lock = module._RunLock(str(tmp_path))
    assert lock.take() and path.stat().st_size < 1000
    lock.release()


def test_a_lock_that_a_stopped_process_holds_is_not_waited_for(tmp_path: Path) -> None:
    with held(tmp_path) as other:
        os.kill(other.pid, signal.SIGSTOP)
        with pytest.raises(ValueError, match="another run is training in this output_dir"):
            module._RunLock(str(tmp_path)).take()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_events_file_is_refused_before_the_first_step(tmp_path: Path, what: str) -> None:
    path, before = tmp_path / EVENTS_FILE, Path(__file__).read_bytes()
    NO_FILES[what](path)
    look = Looks()
    with pytest.raises(ValueError, match=f"{path} cannot be written .*expected the events file of a run, or none"):
        make(tmp_path, look, **FREEZES).train()
    assert not look.seen and [each.name for each in tmp_path.iterdir()] == [EVENTS_FILE]
    assert Path(__file__).read_bytes() == before
