"""What a user sees when a run fails: the cause and where to go on, last and in torch's box, and few lines before it.

The lines of the launcher are told apart by `--tee`, which marks those of the ranks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE
from tests.distributed.launcher import LaunchResult, accelerate_launch
from tests.distributed.scenarios import RANK, WORKER, arguments_of, scenario, start
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import our_arguments


MODEL = "bert_sequence"
SAVE_STEPS = 2
READY = "== the failure follows =="
PLANTED = "planted failure"


class Fail(TrainerCallback):
    """Ends the run amid two checkpoints, in one of several ways."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank = how, rank

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == SAVE_STEPS + 1:
            print(READY, file=sys.stderr, flush=True)
        # A step later all ranks have said so, and nothing more is saved.
        if state.global_step != SAVE_STEPS + 2 or self.rank != RANK:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "interrupt":
            # As a terminal does: the launcher leads a group without its workers.
            os.killpg(os.getpgid(os.getppid()), signal.SIGINT)
        if self.how in ("error", "handled error"):
            raise RuntimeError(PLANTED)


@scenario
def train_and_fail(folder: Path, how: str, *, rank: int = 1) -> None:
    """Train until it fails on `rank`, or without end where the test ends it."""
    if how == "option":
        print(READY, file=sys.stderr, flush=True)
    args = our_arguments(
        folder,
        2,
        max_steps=1_000_000,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        logging_strategy="no",
        pipeline_timeout=15,
        freeze_policy="gradnorm" if how == "option" else "none",
    )
    trainer = PipeTransformerTrainer(
        model=build_model(MODEL),
        args=args,
        train_dataset=make_dataset(MODEL, 53),
        data_collator=collate,
        callbacks=[Fail(how, rank)],
    )
    try:
        trainer.train()
    except RuntimeError:
        if how != "handled error":
            raise
        print(f"rank {RANK} goes on", flush=True)
        os._exit(0)  # The ranks can no longer meet, as the worker lets them at its end.


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

MOST_LINES = 17
"""Lines of a rank, most of them a traceback of the script."""
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


def check_message(result: LaunchResult, folder: Path, cause: str, rank: int = 0) -> None:
    """Check that a rank says the cause and where to go on last, and that the box of the launcher has it too."""
    found = last_lines(result)
    for each in range(2):
        assert sum(speaker == each for speaker, _ in found) <= MOST_LINES, result.output
    lines = [line for speaker, line in found if speaker == rank]
    checkpoint = folder / f"checkpoint-{SAVE_STEPS}"
    resume = re.escape(f"trainer.train(resume_from_checkpoint='{checkpoint}')")
    says = rf"Resume from the newest whole checkpoint by {resume}.* Its events: {re.escape(str(folder / EVENTS_FILE))}"
    said = "\n".join(lines[-2:])
    assert re.fullmatch(f"{cause}\n{says}", said), said
    if "Failures:" in result.output:  # Not after Ctrl-C.
        box = result.output.rpartition("Failures:")[2]
        assert re.search(rf"traceback : {cause}\n +{says}", box), box
    assert not list(folder.glob("*failure*"))


def code_of(result: LaunchResult, rank: int) -> int:
    """Status of a rank, as the launcher reports it."""
    match = re.search(rf"rank +: {rank} .*\n +exitcode +: (-?\d+)", result.output)
    assert match is not None, result.output
    return int(match[1])


def test_a_wrong_option_is_in_the_box(tmp_path: Path) -> None:
    result = fail("option", tmp_path)
    box = result.output.rpartition("Failures:")[2]
    assert re.search(r"traceback : ValueError: freeze_policy .*Did you mean", box.partition("Root Cause")[2])
    assert result.returncode == 1
    assert code_of(result, 0) in (1, -signal.SIGTERM)


def test_a_killed_rank_is_named_with_the_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    result = fail("kill", tmp_path)
    check_message(result, tmp_path, "The run failed: rank 1 does not answer: killed.*")
    assert result.returncode == 1
    assert code_of(result, 1) == -signal.SIGKILL
    assert code_of(result, 0) in (1, -signal.SIGTERM)


@pytest.mark.slow
def test_where_the_first_rank_is_killed_another_one_speaks(tmp_path: Path) -> None:
    result = fail("kill", tmp_path, rank=0)
    check_message(result, tmp_path, "The run failed: rank 0 does not answer: killed.*", rank=1)


@pytest.mark.slow
def test_ctrl_c_is_answered_by_every_rank(tmp_path: Path) -> None:
    result = fail("interrupt", tmp_path)
    check_message(result, tmp_path, "KeyboardInterrupt")
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
    # Of the first cause on rank 0, it is a note below the error.
    check_message(result, small_disk, rf"(.*\n *)?.*\(no space in {small_disk}\S*: {left}.*")
    assert result.returncode == 1


@pytest.mark.slow
def test_an_error_of_the_users_code_is_the_root_cause_in_the_box(tmp_path: Path) -> None:
    result = fail("error", tmp_path)
    cause = result.output.rpartition("Root Cause")[2]
    assert "test_failure.py" in cause and "on_step_end" in cause and f"RuntimeError: {PLANTED}" in cause
    assert re.search(rf"First cause: rank 1: RuntimeError: {PLANTED}\n +Resume from the newest whole", result.output)
    assert code_of(result, 1) == 1


def test_an_error_that_the_script_handles_gets_no_message(tmp_path: Path) -> None:
    result = start(train_and_fail, tmp_path, 2, {"how": "handled error"}, timeout=100, grace=20)
    for rank, text in enumerate(result.outputs):
        assert text.endswith(f"rank {rank} goes on\n")
        assert "The run failed" not in text
