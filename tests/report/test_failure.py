"""What is said of a run that fails, by one rank, and where; and that nothing else of the process is changed.

Most tests are a process of their own: an error that nobody handles ends it.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.report import failure
from hf_pipetransformer.report.events import EVENTS_FILE


BEGIN = """
import os, signal, sys, time
from hf_pipetransformer.report import failure
from hf_pipetransformer.options.reading import choice
checkpoint = sys.argv[1] + "/checkpoint-4"
os.makedirs(checkpoint, exist_ok=True); os.utime(checkpoint)
class Faults:
    cause, details = None, ""
    def find_cause(self): return self.cause
find = lambda folder: (checkpoint, 2_000_000)
events = sys.argv[1] + "/pipetransformer_events.jsonl"
training = lambda is_resumed=False: failure.FailureReporter(sys.argv[1], events, is_resumed, Faults(), find)
"""
REFUSED = "choice(('a', 'b'))('letter', 'c')"
REFUSAL = "ValueError: letter must be one of ('a', 'b'), found 'c'."
TERMINATED = "with training():\n    os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"


def run(folder: Path, end: str, before: str = "", **environment: str) -> tuple[int, list[str]]:
    """Run a script that ends with `end`; return its status, and the lines it printed."""
    process = subprocess.run(
        [sys.executable, "-c", BEGIN + before + end, str(folder), "--hub_token", "secret"],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}, **environment},
        # A shell without job control starts its background with SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return process.returncode, [line for line in process.stderr.splitlines() if line]


def way_on(folder: Path) -> str:
    return (
        f"Resume from the newest whole checkpoint by trainer.train(resume_from_checkpoint='{folder}/checkpoint-4'), "
        f"or by --resume_from_checkpoint {folder}/checkpoint-4 if the script reads it."
    )


def reporter(folder: Path) -> failure.FailureReporter:
    faults = SimpleNamespace(details="", find_cause=lambda: None)
    return failure.FailureReporter(str(folder), str(folder / EVENTS_FILE), False, faults, lambda _folder: None)


def box_of(error_file: Path, status: int) -> str:
    """What torch's agent prints last of a process."""
    found = ProcessFailure(local_rank=0, pid=1, exitcode=status, error_file=str(error_file))
    return str(ChildFailedError("script.py", {0: found}))


def state_of_the_process() -> dict[str, Any]:
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "exception hooks": (sys.excepthook, threading.excepthook),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "wakeup descriptor": wakeup,
        "threads": threading.enumerate(),
        "exit hooks": atexit._ncallbacks(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def test_nothing_of_the_process_is_changed_but_in_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: forks.append(hooks))
    before = state_of_the_process()
    PipeTransformerArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match="freeze_policy must be"):
        PipeTransformerArguments(output_dir=str(tmp_path), freeze_policy="gradnorm")
    assert state_of_the_process() == before
    with reporter(tmp_path):
        inside = state_of_the_process()
        assert inside["SIGTERM"] != before["SIGTERM"] and inside["exception hooks"] == before["exception hooks"]
        with reporter(tmp_path):
            assert state_of_the_process() == inside
    assert state_of_the_process() == before
    with pytest.raises(RuntimeError), reporter(tmp_path):
        raise RuntimeError("planted")
    assert state_of_the_process() == before
    # A hook of forks cannot be taken back: one at most, which does nothing but leave signals to the child.
    assert [set(hooks) for hooks in forks] in ([], [{"after_in_child"}]) and not list(tmp_path.iterdir())


def test_below_an_error_stands_where_to_go_on(tmp_path: Path) -> None:
    for end in (REFUSED, "1 / 0"):
        code, lines = run(tmp_path, f"with training(): {end}")
        assert code == 1
        error = REFUSAL if end == REFUSED else "ZeroDivisionError: division by zero"
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[-2:] == [error, way_on(tmp_path)]


def test_a_checkpoint_of_an_earlier_run_is_not_named_unless_this_one_resumes(tmp_path: Path) -> None:
    for is_resumed in (False, True):
        _, lines = run(tmp_path, f"os.utime(checkpoint, (1, 1))\nwith training({is_resumed}): {REFUSED}")
        way = way_on(tmp_path) if is_resumed else f"The run has saved no whole checkpoint in {tmp_path}."
        assert lines[-2:] == [REFUSAL, way]


def test_the_events_file_is_named_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).touch()
    _, lines = run(tmp_path, f"with training(): {REFUSED}")
    assert lines[-2:] == [REFUSAL, f"{way_on(tmp_path)} Its events: {tmp_path / EVENTS_FILE}"]


def test_of_several_ranks_none_shows_a_traceback_that_says_no_more(tmp_path: Path) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2"}
    refused = f"with training():\n    try: 1 / 0\n    except ZeroDivisionError: {REFUSED}"
    _, lines = run(tmp_path, refused, **rank)
    assert lines[-2:] == [REFUSAL, way_on(tmp_path)]
    assert "reading.py" not in "".join(lines) and "ZeroDivisionError" not in "".join(lines)
    _, lines = run(tmp_path, refused, before="failure.logger.setLevel('DEBUG')\n", **rank)
    assert "reading.py" in "".join(lines)
    _, lines = run(tmp_path, "def users(): 1 / 0\nwith training(): users()", **rank)
    assert any(line.endswith("in users") for line in lines)


def test_another_rank_leaves_the_first_one_to_speak_unless_that_is_lost(tmp_path: Path) -> None:
    raised = "with training(): raise RuntimeError('The run ended on rank {}. First cause: rank {} does not answer')"
    details = "Faults.details = 'Traceback: of the other rank'\n"
    for rank, local_rank, lost, speaks in ((0, 0, 1, 1), (1, 1, 2, 0), (1, 1, 0, 1), (2, 2, 0, 0), (4, 0, 0, 1)):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
        _, lines = run(tmp_path, details + raised.format(rank, lost), **environment)
        error = f"RuntimeError: The run ended on rank {rank}. First cause: rank {lost} does not answer"
        assert lines[lines.index(error) + 1 :] == ["Traceback: of the other rank", way_on(tmp_path)] * speaks


@pytest.mark.parametrize(
    ("world_size", "is_handled", "ends"),
    [("1", False, ["hook", "destroyed"]), ("2", True, ["hook", "destroyed"]), ("2", False, ["hook"])],
)
def test_a_rank_whose_run_failed_ends_without_waiting_for_its_groups(
    tmp_path: Path, world_size: str, is_handled: bool, ends: list[str]
) -> None:
    """Destructors of groups wait for ranks that are gone; hooks of other libraries still run."""
    before = (
        "import atexit\nsay = lambda text: os.write(2, text.encode() + b'\\n')\natexit.register(say, 'hook')\n"
        "class Group:\n    def __del__(self, say=say): say('destroyed')\ngroup = Group()\n"
    )
    script = f"with training(): {REFUSED}"
    script = f"try:\n    {script}\nexcept ValueError: pass" if is_handled else script
    code, lines = run(tmp_path, script, before=before, RANK="0", WORLD_SIZE=world_size)
    assert code == (0 if is_handled else 1)
    assert [line for line in lines if line in ("hook", "destroyed")] == ends


def test_an_error_that_is_handled_keeps_nothing_alive(tmp_path: Path) -> None:
    """A script may catch an out-of-memory and try again with a smaller batch."""
    before = (
        "import gc, weakref\nclass Activations: pass\nrefs = []\n"
        "def fail():\n    held = Activations()\n    refs.append(weakref.ref(held))\n"
        "\n    raise RuntimeError('planted')\n"
    )
    script = "try:\n    with training(): fail()\nexcept RuntimeError: pass\ngc.collect()\nassert refs[0]() is None"
    assert run(tmp_path, script, before=before, RANK="0", WORLD_SIZE="2") == (0, [])


def test_ctrl_c_is_told_by_the_status_still(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "with training(): os.kill(os.getpid(), signal.SIGINT); time.sleep(30)")
    assert code == -signal.SIGINT
    assert lines[-2:] == ["KeyboardInterrupt", way_on(tmp_path)]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("with training(): pass", id="no error"),
        pytest.param("with training(): sys.exit(3)", id="exit"),
        pytest.param(f"try:\n    with training(): {REFUSED}\nexcept ValueError: pass", id="handled"),
    ],
)
def test_what_is_no_unhandled_error_gets_no_message(tmp_path: Path, end: str) -> None:
    assert run(tmp_path, end) == (3 if "exit" in end else 0, [])


def test_hooks_of_the_users_get_the_error(tmp_path: Path) -> None:
    hook = (
        "sys.excepthook = lambda kind, error, _: print(kind.__name__, *error.__notes__, sep='\\n', file=sys.stderr)\n"
    )
    _, lines = run(tmp_path, f"with training(): {REFUSED}", before=hook)
    assert lines == ["ValueError", way_on(tmp_path)]


def test_no_file_is_written_without_an_agent(tmp_path: Path) -> None:
    """A file in a folder of all could be somebody else's link, and the command may hold secrets."""
    folder = tmp_path / "out"
    folder.mkdir()
    for end in (f"with training(): {REFUSED}", TERMINATED):
        _, lines = run(folder, end, TMPDIR=str(tmp_path))
        assert "secret" not in "".join(lines)
    assert list(tmp_path.iterdir()) == [folder]
    assert [path.name for path in folder.iterdir()] == ["checkpoint-4"]


# ---- the file of torch's agent ----


def test_the_agent_shows_the_cause(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    for end, status in ((f"with training(): {REFUSED}", 1), (TERMINATED, -signal.SIGTERM)):
        error_file.unlink(missing_ok=True)
        assert run(tmp_path, end, TORCHELASTIC_ERROR_FILE=str(error_file))[0] == status
        cause = REFUSAL if end != TERMINATED else "The run failed: rank 0 was ended by SIGTERM"
        box = box_of(error_file, status)
        assert f"traceback : {cause}" in box and f"error_file: {error_file}" in box
        assert way_on(tmp_path) in box
        assert "secret" not in error_file.read_text() and error_file.stat().st_mode & 0o777 == 0o600


def test_the_agent_shows_the_traceback_of_an_error_of_the_users_code(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    run(tmp_path, "def users(): 1 / 0\nwith training(): users()", TORCHELASTIC_ERROR_FILE=str(error_file))
    box = box_of(error_file, 1)
    assert "in users" in box and "ZeroDivisionError: division by zero" in box and way_on(tmp_path) in box


def test_the_agent_shows_a_refused_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    with pytest.raises(ValueError, match="freeze_policy must be"):
        PipeTransformerArguments(output_dir=str(tmp_path), freeze_policy="gradnorm")
    assert "traceback : ValueError: freeze_policy must be one of" in box_of(error_file, 1)
    # The script has handled the error.
    with reporter(tmp_path):
        assert not error_file.exists()


def test_the_agents_file_follows_no_link_and_is_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious, error_file = tmp_path / "precious", tmp_path / "error.json"
    precious.write_text("kept")
    error_file.symlink_to(precious)
    for path in (str(error_file), os.devnull):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
        with pytest.raises(RuntimeError), failure.recorded():
            raise RuntimeError("planted")
    assert precious.read_text() == "kept" and "planted" in error_file.read_text()
    assert Path(os.devnull).is_char_device()


# ---- a full disk ----


def test_a_full_disk_is_named_with_its_folder(tmp_path: Path) -> None:
    error = "OSError(28, 'No space left on device', sys.argv[1] + '/checkpoint-6/model')"
    _, lines = run(tmp_path, f"with training(): raise {error}")
    assert lines[-2].startswith(f"(no space in {tmp_path}: ") and lines[-1] == way_on(tmp_path)
    assert "free, a checkpoint takes 2.0 MB; make space" in lines[-2]


def test_a_disk_is_full_where_torch_cannot_write_and_little_is_left(tmp_path: Path) -> None:
    """Its error says nothing of the disk."""
    left = "import shutil; found = shutil._ntuple_diskusage(3_000_000, 0, {}); shutil.disk_usage = lambda _: found\n"
    end = "with training(): raise RuntimeError('basic_ios::clear: iostream error')"
    _, lines = run(tmp_path, end, before=left.format(100_000))
    assert "100 kB of 3.0 MB free, a checkpoint takes 2.0 MB; make space, lower save_total_limit or set" in lines[-2]
    _, lines = run(tmp_path, end, before=left.format(2_500_000))
    assert "no space" not in "".join(lines)


# ---- SIGTERM ----


def test_a_training_that_is_told_to_end_says_so_and_ends_by_the_signal(tmp_path: Path) -> None:
    cause = "The run failed: rank 0 was ended by SIGTERM, which launchers, schedulers and users send."
    assert run(tmp_path, TERMINATED) == (-signal.SIGTERM, [cause, way_on(tmp_path)])


def test_a_training_that_fails_when_it_is_told_to_end_says_so_once(tmp_path: Path) -> None:
    """Its error does not leave it: the signal ends the process, as it would without a handler."""
    end = "with training(): os.kill(os.getpid(), signal.SIGTERM); 1 / 0"
    code, lines = run(tmp_path, end)
    assert code == -signal.SIGTERM
    assert lines[1:] == [way_on(tmp_path)] and lines[0].startswith("The run failed: rank 0 was ended by SIGTERM")


def test_outside_of_a_training_the_signal_does_what_it_does_by_default(tmp_path: Path) -> None:
    end = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
    assert run(tmp_path, end) == (-signal.SIGTERM, [])
    assert run(tmp_path, f"with training(): pass\n{end}") == (-signal.SIGTERM, [])


def test_a_second_signal_ends_the_search_for_the_cause(tmp_path: Path) -> None:
    before = "Faults.find_cause = lambda self: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(30)\n"
    assert run(tmp_path, TERMINATED, before=before) == (-signal.SIGTERM, [])


def test_where_the_main_thread_may_wait_without_end_there_is_no_handler(tmp_path: Path) -> None:
    before = "training = lambda: failure.FailureReporter(sys.argv[1], events, False, Faults(), find, False)\n"
    assert run(tmp_path, TERMINATED, before=before) == (-signal.SIGTERM, [])


def test_a_handler_of_the_users_stays(tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
    assert run(tmp_path, handler + TERMINATED) == (5, [])
    inside = f"with training():\n    {handler}    os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
    assert run(tmp_path, inside) == (5, [])


def test_a_handler_of_the_training_may_call_the_one_before_it(tmp_path: Path) -> None:
    end = """
def own(*given):
    print('asked to stop', file=sys.stderr, flush=True)
    before(*given)
with training():
    before = signal.signal(signal.SIGTERM, own)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    print('it saves', file=sys.stderr, flush=True)
"""
    assert run(tmp_path, end) == (0, ["asked to stop", "it saves"])


def test_a_forked_child_ends_by_the_signal_alone(tmp_path: Path) -> None:
    """As workers of data loaders and of `map` do."""
    end = """
with training():
    awake, wake = os.pipe()
    child = os.fork()
    if not child:
        os.write(wake, b'1')
        time.sleep(30)
        os._exit(1)
    os.read(awake, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    time.sleep(0.3)
"""
    assert run(tmp_path, end) == (0, [])


def test_the_cause_is_asked_for_where_the_process_is_told_to_end_with_others(tmp_path: Path) -> None:
    end = "Faults.cause = 'rank 1 does not answer'\n" + TERMINATED
    message = ["The run failed: rank 1 does not answer", way_on(tmp_path)]
    assert run(tmp_path, end, RANK="0", WORLD_SIZE="2") == (-signal.SIGTERM, message)
    assert run(tmp_path, end, RANK="1", WORLD_SIZE="2") == (-signal.SIGTERM, [])


def test_a_main_thread_that_waits_in_c_is_ended_all_the_same(tmp_path: Path) -> None:
    """A lock that nobody releases stands for a wait on a lost rank: Python's handlers do not run meanwhile."""
    script = (
        "with training():\n"
        "    import ctypes, threading\n"
        "    failure.SECONDS_TO_HANDLE = 0.5\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)\n"
        "    for _ in range(2): libc.pthread_mutex_lock(lock)"
    )
    code, lines = run(tmp_path, script, before="from hf_pipetransformer.report import failure\n")
    assert code == 128 + signal.SIGTERM
    assert any("was ended by SIGTERM" in line for line in lines)


def test_a_checkpoint_that_is_gone_costs_neither_the_note_nor_the_record(tmp_path: Path) -> None:
    before = "from hf_pipetransformer.report import failure\n"
    script = f"failure._is_of_this_launch = lambda path: 1 / 0\nwith training(): {REFUSED}"
    record = tmp_path / "error.json"
    code, lines = run(tmp_path, script, before=before, TORCHELASTIC_ERROR_FILE=str(record))
    assert code == 1 and REFUSAL in record.read_text()
    assert lines[-2:] == [REFUSAL, f"The run has saved no whole checkpoint in {tmp_path}."]
