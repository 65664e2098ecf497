"""Two runs with one `output_dir`: the second is refused at once; one that is gone stands in nobody's way."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE
from hf_pipetransformer.state import only_run as module
from hf_pipetransformer.state.only_run import LOCK_FILE
from tests.support.models import build_model, collate, make_dataset
from tests.support.mutations import NO_FILES


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


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        yield process
        process.kill()


def lock_of(folder: Path, **changes: Any) -> Path:
    path = folder / LOCK_FILE
    path.write_text(json.dumps({**module._describe_process(), **changes}))
    return path


@pytest.mark.parametrize("options", [{}, FREEZES], ids=["left to Trainer", "freezing"])
def test_a_second_run_is_refused_until_the_first_is_gone(
    tmp_path: Path, other: subprocess.Popen[bytes], options: dict[str, Any]
) -> None:
    path = lock_of(tmp_path, pid=other.pid, started=module._start_of(other.pid))
    trainer = make(tmp_path, **options)
    with pytest.raises(ValueError, match=f"{LOCK_FILE}: another run .process {other.pid} on .*set another output_dir"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE], "the events are the other run's"
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # It is gone, and nobody has asked yet how it ended.
    trainer.train()
    assert not path.exists() and list(tmp_path.glob("checkpoint-*"))


def test_a_number_that_another_process_has_now_is_nobodys(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    lock_of(tmp_path, pid=other.pid, started=module._start_of(other.pid) - 5)
    look = Looks()
    make(tmp_path, look).train()
    assert look.seen[0]["pid"] != other.pid


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
        assert [owner["pid"] for owner in look.seen] == [module._describe_process()["pid"]]
        assert not list(tmp_path.glob("_pipetransformer_run*"))


def test_who_saves_nothing_needs_no_lock(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    lock_of(tmp_path, pid=other.pid, started=module._start_of(other.pid))
    look = Looks()
    trainer = make(tmp_path, look, save_strategy="no")
    trainer.evaluate(trainer.train_dataset)
    trainer.train()
    assert [owner["pid"] for owner in look.seen] == [other.pid]  # The other's stays.


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"host": "elsewhere pid:[1]"}, "a run on elsewhere .* cannot be seen from here.*Remove this file"),
        ("", "cannot be read: expected the lock of a run. Remove this file"),
        ("[[", "cannot be read: expected the lock of a run. Remove this file"),
        ({"pid": "x"}, "cannot be read: expected the lock of a run. Remove this file"),
    ],
)
def test_a_lock_of_which_nothing_can_be_known_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    path = lock_of(tmp_path, **(content if isinstance(content, dict) else {}))
    if isinstance(content, str):
        path.write_text(content)
    with pytest.raises(ValueError, match=f"{path}.*{said}"):
        make(tmp_path).train()
    assert path.exists()


def test_a_lock_of_another_machine_of_the_same_name_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ID, which nobody has here, says nothing: initial PID namespaces have one number on all machines."""
    monkeypatch.setattr(module, "host_name", lambda: f"{platform.node()} of-another-boot")
    lock_of(tmp_path, pid=2**22 + 1)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"a run on {platform.node()} .* cannot be seen from here"):
        module._take(str(tmp_path), module._describe_process())


def test_of_many_that_find_the_lock_of_a_dead_run_one_gets_it(tmp_path: Path) -> None:
    for _ in range(60):
        lock_of(tmp_path, pid=2**22 + 1)  # Linux has no such process.
        begin, taken, refused = threading.Barrier(8), [], []

        def take(begin: Any = begin, taken: list[str] = taken, refused: list[str] = refused) -> None:
            own = module._describe_process()
            begin.wait()
            try:
                assert module._take(str(tmp_path), own)
                taken.append(own["run"])
            except ValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(taken), len(refused)) == (1, 7)
        assert json.loads((tmp_path / LOCK_FILE).read_text())["run"] == taken[0]
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_a_folder_in_which_nothing_can_be_made_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def create(path: str, draft: str, own: Any) -> bool:
        raise PermissionError("planted")

    monkeypatch.setattr(module, "_create", create)
    assert not module._take(str(tmp_path), module._describe_process())
    assert "make sure that no other run uses this output_dir" in caplog.text


def test_a_lock_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lock_of(tmp_path)
    original = os.open

    def refuse(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name) == str(path):
            raise PermissionError(13, "planted", name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ValueError, match=f"{path} cannot be read: expected the lock of a run"):
        module._take(str(tmp_path), module._describe_process())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_no_lock(tmp_path: Path, what: str) -> None:
    """None is waited for, followed or read."""
    path, before = tmp_path / LOCK_FILE, Path(__file__).read_bytes()
    NO_FILES[what](path)
    with pytest.raises(ValueError, match=f"{path} cannot be read: expected the lock of a run. Remove this file"):
        make(tmp_path).train()
    assert [each.name for each in tmp_path.iterdir()] == [LOCK_FILE] and Path(__file__).read_bytes() == before


def test_a_lock_without_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / LOCK_FILE
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(ValueError, match=f"{path} cannot be read: expected the lock of a run"):
        module._take(str(tmp_path), module._describe_process())


def test_a_lock_that_a_stopped_process_holds_is_not_waited_for(tmp_path: Path) -> None:
    with lock_of(tmp_path, pid=2**22 + 1).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="comes and goes, or stays locked: other runs begin in this output_dir"):
            module._take(str(tmp_path), module._describe_process())


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
