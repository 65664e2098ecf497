"""The last message of a process that failed: once, after everything else, and by one rank.

Each test is a process of its own: an error that nobody handles ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_pipetransformer.report.failure import FAILURE_FILE


BEGIN = """
import atexit, os, signal, sys, time
from hf_pipetransformer.report import failure
from hf_pipetransformer.options.reading import choice
failure._PATIENCE = 0.3
"""
INSTALL = """
atexit.register(lambda: print("another library's last line", file=sys.stderr))
failure.install(sys.argv[1])
checkpoint = sys.argv[1] + "/checkpoint-4"
os.makedirs(checkpoint, exist_ok=True); os.utime(checkpoint)
failure.find_checkpoints_with(lambda folder: (checkpoint, 2_000_000))
atexit.register(lambda: print("a tracker's summary", file=sys.stderr))
"""
REFUSED = "choice(('a', 'b'))('letter', 'c')"


def run(folder: Path, end: str, before: str = "", **environment: str) -> tuple[int, list[str]]:
    """Run a script that ends with `end`; return its status, and the lines it printed."""
    process = subprocess.run(
        [sys.executable, "-c", BEGIN + before + INSTALL + end, str(folder)],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}, **environment},
        # A shell without job control starts its background with SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return process.returncode, [line for line in process.stderr.splitlines() if line]


def message(folder: Path, cause: str) -> list[str]:
    return [
        f"The run {cause}",
        f"Newest whole checkpoint: {folder}/checkpoint-4",
        f"Resume: trainer.train(resume_from_checkpoint='{folder}/checkpoint-4'), or the same command with "
        f"--resume_from_checkpoint {folder}/checkpoint-4 if the script reads it.",
        f"All of it: {folder}/{FAILURE_FILE}",
    ]


def test_a_refusal_is_said_last_without_a_traceback(tmp_path: Path) -> None:
    code, lines = run(tmp_path, REFUSED)
    expected = message(tmp_path, "failed: ValueError: letter must be one of ('a', 'b'), found 'c'.")
    assert code == 1
    # Nothing but what ended before this library was set up comes later.
    assert lines == ["a tracker's summary", *expected, "another library's last line"]
    text = (tmp_path / FAILURE_FILE).read_text()
    assert text.splitlines()[:3] == expected[:3]
    assert "Traceback" in text and "reading.py" in text and "Script, on rank 0: -c" in text


def test_a_checkpoint_of_an_earlier_run_is_not_named_unless_this_one_resumes(tmp_path: Path) -> None:
    cause = "failed: ValueError: letter must be one of ('a', 'b'), found 'c'."
    for is_resumed in (False, True):
        folder = tmp_path / str(is_resumed)
        folder.mkdir()
        training = f"with failure.training(sys.argv[1], {is_resumed}): {REFUSED}"
        _, lines = run(folder, f"os.utime(checkpoint, (1, 1))\n{training}")
        expected = message(folder, cause)
        if not is_resumed:
            expected[1:3] = [f"The run has saved no whole checkpoint in {folder}."]
        assert lines[1:-1] == expected


def test_an_error_of_the_users_code_keeps_its_traceback(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "1 / 0")
    assert code == 1
    assert lines[0].startswith("Traceback") and "ZeroDivisionError: division by zero" in lines
    assert lines[-5:-1] == message(tmp_path, "failed: ZeroDivisionError: division by zero")


def test_debugging_shows_all_tracebacks(tmp_path: Path) -> None:
    _, lines = run(tmp_path, REFUSED, before="failure.logger.setLevel('DEBUG')")
    assert lines[0].startswith("Traceback")


def test_a_signal_that_a_handler_of_the_training_took_does_not_end_the_process_late(tmp_path: Path) -> None:
    """Trainer's checkpoint upon a signal gives the handler back at the end; the thread may read the signal later."""
    end = """
taken, get = [], signal.getsignal
def late(number):
    if threading.current_thread().name == 'last-words':
        time.sleep(0.5)
    return get(number)
before = signal.signal(signal.SIGTERM, lambda *_: taken.append(1))
signal.getsignal = late
with failure.training(sys.argv[1], False):
    os.kill(os.getpid(), signal.SIGTERM)
    while not taken:
        time.sleep(0.001)
    signal.signal(signal.SIGTERM, before)
time.sleep(1)
print('it went on', file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
    code, lines = run(tmp_path, end, before="import threading\n")
    assert "it went on" in lines
    assert code == -signal.SIGTERM, "the next one is no training's"


def test_a_signal_after_the_trainings_own_handler_has_gone_ends_the_process(tmp_path: Path) -> None:
    """A callback at the end of the training may take long, and be told to end."""
    end = """
before = signal.signal(signal.SIGTERM, lambda *_: print('taken', file=sys.stderr))
with failure.training(sys.argv[1], False):
    signal.signal(signal.SIGTERM, before)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""
    code, lines = run(tmp_path, end)
    assert code == -signal.SIGTERM and "taken" not in lines


def test_a_handler_of_the_training_may_call_the_one_before_it(tmp_path: Path) -> None:
    end = """
def own(*given):
    print('asked to stop', file=sys.stderr, flush=True)
    before(*given)
before = signal.signal(signal.SIGTERM, own)
with failure.training(sys.argv[1], False):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    print('it saves', file=sys.stderr, flush=True)
"""
    code, lines = run(tmp_path, end)
    assert code == 0 and lines[:2] == ["asked to stop", "it saves"]


def test_ctrl_c_is_told_by_the_status_still(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)")
    assert code == -signal.SIGINT
    assert lines[1:-1] == message(tmp_path, "was interrupted (KeyboardInterrupt: Ctrl-C or SIGINT).")


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("", id="no error"),
        pytest.param("sys.exit(3)", id="exit"),
        pytest.param(f"try:\n    {REFUSED}\nexcept ValueError:\n    failure.note_cause('x')", id="handled"),
    ],
)
def test_what_is_no_unhandled_error_gets_no_message(tmp_path: Path, end: str) -> None:
    code, lines = run(tmp_path, end)
    assert code == (3 if "exit" in end else 0)
    assert lines == ["a tracker's summary", "another library's last line"]
    assert not (tmp_path / FAILURE_FILE).exists()


def test_a_hook_of_the_users_is_called_first(tmp_path: Path) -> None:
    hook = "sys.excepthook = lambda kind, *_: print('own hook:', kind.__name__, file=sys.stderr)\n"
    _, lines = run(tmp_path, REFUSED, before=hook)
    assert lines[0] == "own hook: ValueError"
    assert lines[-2].startswith("All of it:")


def test_a_hook_of_the_users_that_comes_later_replaces_it(tmp_path: Path) -> None:
    end = f"sys.excepthook = lambda kind, *_: print('own hook:', kind.__name__, file=sys.stderr)\n{REFUSED}"
    code, lines = run(tmp_path, end)
    assert (code, lines[0], len(lines)) == (1, "own hook: ValueError", 3)


def test_a_full_disk_is_named_with_its_folder(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "raise OSError(28, 'No space left on device', sys.argv[1] + '/checkpoint-6/model')")
    (cause,) = [line for line in lines if line.startswith("The run failed")]
    assert not any(line.startswith("Traceback") for line in lines)
    assert f"(no space in {tmp_path}: " in cause
    assert "free, a checkpoint takes 2.0 MB; make space" in cause


def test_a_disk_is_full_where_torch_cannot_write_and_little_is_left(tmp_path: Path) -> None:
    """Its error says nothing of the disk."""
    left = "import shutil; found = shutil._ntuple_diskusage(3_000_000, 0, {}); shutil.disk_usage = lambda _: found\n"
    end = "raise RuntimeError('basic_ios::clear: iostream error')"
    _, lines = run(tmp_path, end, before=left.format(100_000))
    assert lines[1].endswith("100 kB of 3.0 MB free, a checkpoint takes 2.0 MB; make space, lower save_total_limit or "
                             "set another output_dir)")  # fmt: skip
    _, lines = run(tmp_path, end, before=left.format(2_500_000))
    assert lines[0].startswith("Traceback")
    assert "no space" not in "".join(lines)


def test_where_output_dir_cannot_be_written_the_file_lies_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file, and no folder")
    _, lines = run(tmp_path / "out", REFUSED, TMPDIR=str(tmp_path))
    (found,) = tmp_path.glob("pipetransformer_failure_*.txt")
    assert lines[-2] == f"All of it: {found}"


TERMINATED = "with failure.training(sys.argv[1], False):\n    os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"


def test_a_training_that_is_told_to_end_says_so_and_ends_by_the_signal(tmp_path: Path) -> None:
    code, lines = run(tmp_path, TERMINATED)
    assert code == -signal.SIGTERM
    cause = "failed: rank 0 was ended by SIGTERM, which launchers, schedulers and users send."
    assert lines == message(tmp_path, cause)


def test_outside_of_a_training_the_signal_does_what_it_does_by_default(tmp_path: Path) -> None:
    assert run(tmp_path, "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)") == (-signal.SIGTERM, [])


def test_a_handler_of_the_users_stays(tmp_path: Path) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
    assert run(tmp_path, TERMINATED, before=handler)[0] == 5
    assert run(tmp_path, handler + TERMINATED)[0] == 5


def test_a_forked_child_ends_by_the_signal_alone(tmp_path: Path) -> None:
    """As workers of data loaders and of `map` do."""
    end = """
with failure.training(sys.argv[1], False):
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(1)
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    time.sleep(0.3)
"""
    assert run(tmp_path, end) == (0, ["a tracker's summary", "another library's last line"])


def test_the_cause_is_asked_for_where_the_process_is_told_to_end_with_others(tmp_path: Path) -> None:
    end = "failure.ask_with(lambda: 'rank 1 does not answer')\n" + TERMINATED
    code, lines = run(tmp_path, end, RANK="0", WORLD_SIZE="2")
    assert code == -signal.SIGTERM
    assert lines == message(tmp_path, "failed: rank 1 does not answer")


AGENT = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


def test_another_rank_leaves_the_first_one_to_speak(tmp_path: Path) -> None:
    """It sees its message as a file; without a launcher's agent it says one line for its own log."""
    said = "open(sys.argv[1] + '/pipetransformer_failure.txt', 'w').write('said')\n"
    assert run(tmp_path, said + REFUSED, **AGENT)[1][:-1] == ["a tracker's summary"]
    own = "hf-pipetransformer, rank 1: ValueError: letter must be one of ('a', 'b'), found 'c'."
    assert run(tmp_path, said + REFUSED, RANK="1", WORLD_SIZE="2")[1][0] == own


def test_another_rank_speaks_where_the_first_one_does_not(tmp_path: Path) -> None:
    stale = tmp_path / FAILURE_FILE
    stale.write_text("of an earlier launch")
    os.utime(stale, (1.0, 1.0))
    _, lines = run(tmp_path, REFUSED, **AGENT)
    assert lines[1:-1] == message(tmp_path, "failed: ValueError: letter must be one of ('a', 'b'), found 'c'.")


def test_another_rank_speaks_at_once_where_the_first_one_is_lost(tmp_path: Path) -> None:
    end = "failure.note_cause('rank 0 does not answer: killed (rank 1: Lost contact)')\n" + TERMINATED
    assert run(tmp_path, end, **AGENT)[1][0].startswith("The run failed: rank 0 does not answer")
    end = end.replace("rank 0 does", "rank 2 does")
    (tmp_path / FAILURE_FILE).unlink()
    assert run(tmp_path, end, **AGENT) == (-signal.SIGTERM, [])


def test_a_training_removes_the_message_of_an_earlier_launch(tmp_path: Path) -> None:
    stale = tmp_path / FAILURE_FILE
    stale.write_text("of an earlier launch")
    os.utime(stale, (1.0, 1.0))
    assert run(tmp_path, "pass")[0] == 0
    assert stale.exists()
    assert run(tmp_path, "with failure.training(sys.argv[1], False): pass")[0] == 0
    assert not stale.exists()
