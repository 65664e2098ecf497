"""What a user sees when a run fails: the cause last, in at most five lines, and all of it in a file.

The lines of the launcher are told apart by `--tee`, which marks those of the ranks.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_pipetransformer.report.failure import FAILURE_FILE
from tests.distributed.failure_worker import PLANTED, READY, SAVE_STEPS, train_and_fail
from tests.distributed.launcher import LaunchResult, accelerate_launch
from tests.distributed.scenarios import WORKER, arguments_of, start


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

MOST_LINES = 5
# torch marks tracebacks with the rank, too.
_OF_A_RANK = re.compile(r"\[default(\d)\]:(\[rank\d\]:)?")
# What saving a checkpoint shows, also while it fails.
_PROGRESS = re.compile(r"Writing model shards")


def fail(how: str, folder: Path, rank: int = 1) -> LaunchResult:
    """Fail under the real launcher."""
    result = accelerate_launch(
        WORKER,
        arguments_of(train_and_fail, folder, {"how": how, "rank": rank}),
        num_processes=2,
        timeout=100,
        check=False,
        launcher_args=["--tee", "3"],
        env={"TMPDIR": str(folder.parent)},
    )
    assert not result.timed_out
    return result


def last_lines(result: LaunchResult) -> list[tuple[int, str]]:
    """Rank and text of each line that the ranks printed after the failure."""
    found, ready = [], set()
    for line in result.output.splitlines():
        mark = _OF_A_RANK.match(line)
        text = line[mark.end() :].strip() if mark else ""
        if mark and text == READY:
            ready.add(mark[1])
        elif mark and text and mark[1] in ready and not _PROGRESS.search(text):
            found.append((int(mark[1]), text))
    assert ready == {"0", "1"}, result.output
    return found


def check_message(result: LaunchResult, folder: Path, cause: str, has_checkpoint: bool = True, rank: int = 0) -> None:
    """Check that one rank says the cause and where to go on, nobody anything else, and that the file has it too."""
    found = last_lines(result)
    assert {speaker for speaker, _ in found} == {rank}, result.output
    lines = [line for _, line in found]
    assert len(lines) <= MOST_LINES, lines
    checkpoint = folder / f"checkpoint-{SAVE_STEPS}"
    assert re.match(cause, lines[0])
    if has_checkpoint:
        assert lines[1] == f"Newest whole checkpoint: {checkpoint}"
        assert f"trainer.train(resume_from_checkpoint='{checkpoint}')" in lines[2]
    else:
        assert lines[1] == f"The run has saved no whole checkpoint in {folder}."
    path = Path(lines[-1].removeprefix("All of it: "))
    assert path.read_text().splitlines()[: len(lines) - 1] == lines[:-1]
    # On a disk that is full to the last byte there is no place for it.
    assert path == folder / FAILURE_FILE or (path.parent == folder.parent and "no space" in lines[0])


def code_of(result: LaunchResult, rank: int) -> int:
    """Status of a rank, as the launcher reports it."""
    match = re.search(rf"rank +: {rank} .*\n +exitcode +: (-?\d+)", result.output)
    assert match is not None, result.output
    return int(match[1])


def test_a_wrong_option_is_answered_once(tmp_path: Path) -> None:
    result = fail("option", tmp_path)
    check_message(result, tmp_path, r"The run failed: ValueError: freeze_policy .*Did you mean", has_checkpoint=False)
    assert result.returncode == 1
    assert code_of(result, 0) in (1, -signal.SIGTERM)


def test_a_killed_rank_is_named_with_the_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    result = fail("kill", tmp_path)
    check_message(result, tmp_path, "The run failed: rank 1 does not answer: killed")
    assert result.returncode == 1
    assert code_of(result, 1) == -signal.SIGKILL
    assert code_of(result, 0) in (1, -signal.SIGTERM)


@pytest.mark.slow
def test_where_the_first_rank_is_killed_another_one_speaks(tmp_path: Path) -> None:
    result = fail("kill", tmp_path, rank=0)
    check_message(result, tmp_path, "The run failed: rank 0 does not answer: killed", rank=1)


@pytest.mark.slow
def test_ctrl_c_is_answered_once(tmp_path: Path) -> None:
    result = fail("interrupt", tmp_path)
    check_message(result, tmp_path, "The run was interrupted")
    assert result.returncode == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that takes one checkpoint and not two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this user may make no file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_named_with_what_is_free(small_disk: Path) -> None:
    result = fail("full disk", small_disk)
    left = r"[\d.]+ kB of [\d.]+ kB free, a checkpoint takes [\d.]+ kB; "
    check_message(result, small_disk, rf"The run failed: .*\(no space in {small_disk}\S*: {left}")
    assert result.returncode == 1


@pytest.mark.slow
def test_an_error_of_the_users_code_on_another_rank_is_shown_by_the_first(tmp_path: Path) -> None:
    result = fail("error", tmp_path)
    found = last_lines(result)
    assert {rank for rank, _ in found} == {0}
    lines = [line for _, line in found]
    assert lines[0] == "Traceback (most recent call last):"
    assert any("failure_worker.py" in line and "on_step_end" in line for line in lines)
    assert lines[-4] == f"The run failed: rank 1: RuntimeError: {PLANTED}"
    assert "failure_worker.py" in (tmp_path / FAILURE_FILE).read_text()


def test_an_error_that_the_script_handles_gets_no_message(tmp_path: Path) -> None:
    result = start(train_and_fail, tmp_path, 2, {"how": "handled error"}, timeout=100, grace=20)
    for rank, text in enumerate(result.outputs):
        assert text.endswith(f"rank {rank} goes on\n")
        assert "The run failed" not in text
    assert not (tmp_path / FAILURE_FILE).exists()
