"""What the ranks tell each other of a fault, over a store in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_pipetransformer.comm import fault_board
from hf_pipetransformer.comm.errors import PipelineError, guarded, is_second_hand
from hf_pipetransformer.comm.fault_board import FaultBoard
from hf_pipetransformer.report.events import EVENTS_FILE, EventLog
from hf_pipetransformer.runtime.context import CollectiveTimeouts, Journal


def board_over(store: dist.Store, rank: int = 0, *calls: Callable[..., None]) -> FaultBoard:
    board = FaultBoard(rank, 1, *calls)
    board._stores, board._number = [store, store], 0
    return board


def test_what_a_signal_handler_raises_in_a_collective_is_its_own_cause() -> None:
    """As torch's does when a loader's worker dies, wherever the main thread waits then."""

    def handler(*_: Any) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    def collective() -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="^DataLoader worker") as caught:
            guarded(collective, "summing gradients")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not isinstance(caught.value, PipelineError) and not is_second_hand(caught.value)


def test_a_fault_that_was_caught_is_no_cause_of_the_next(monkeypatch):
    monkeypatch.setattr(fault_board, "_BEAT_SECONDS", 0.01)
    board = board_over(dist.HashStore())
    for cause in ("no sound checkpoint", "another thing"):
        board.begin(together=True)
        assert board.report(cause, is_first_hand=True) == f"rank 0: {cause}"
        board.end()


def test_the_first_cause_is_everybodys(monkeypatch):
    monkeypatch.setattr(fault_board, "_BEAT_SECONDS", 0.01)
    board = board_over(dist.HashStore())
    board.begin(together=True)
    assert board.report("the first", is_first_hand=True) == board.report("a second", is_first_hand=True)
    board.end()


def test_a_fault_that_one_rank_met_alone_is_no_cause_of_the_next(monkeypatch):
    """Rank 0 saves alone and fails; its script goes on, and both train again."""
    monkeypatch.setattr(fault_board, "_BEAT_SECONDS", 0.01)
    store = dist.HashStore()
    boards = [board_over(store), board_over(store, rank=1)]
    for board in boards:
        board.begin(together=True)
        board.end()
    for together in (False, True):
        boards[0].begin(together)
        assert boards[0].report("disk full", is_first_hand=True) == "rank 0: disk full"
        boards[0].end()
        if together:
            boards[1].begin(together)
            boards[1].end()
    for board in boards:
        board.begin(together=True)
    assert boards[1].report("bad sample", is_first_hand=True) == "rank 1: bad sample"
    assert boards[0].report("rank 1 is gone", is_first_hand=False) == "rank 1: bad sample"
    for board in boards:
        board.end()


def test_who_acts_alone_is_not_told_of_a_fault_that_is_over(monkeypatch):
    """A training failed and the error was caught; `save_model()` comes next."""
    monkeypatch.setattr(fault_board, "_BEAT_SECONDS", 0.01)
    recorded: list[str] = []
    board = board_over(dist.HashStore(), 0, lambda cause, _details: recorded.append(cause))
    board.begin(together=True)
    board.report("no memory", is_first_hand=True)
    board.end()
    board.begin(together=False)
    assert not fault_board._wait(lambda: bool(recorded), 0.3)
    assert board.report("disk full", is_first_hand=True) == "rank 0: disk full"
    board.end()


def timeouts_over(store: dist.Store, rank: int, folder: Path, abort: Callable[[], None]) -> CollectiveTimeouts:
    """Those of one of two ranks, of which rank 0 writes events."""
    args = SimpleNamespace(output_dir=str(folder))
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=3, epoch=0.5), args=args)
    topology: Any = SimpleNamespace(rank=rank, world_size=1, abort=abort, limit_waits=lambda _seconds: None)
    timeouts = CollectiveTimeouts(topology, Journal(trainer, EventLog(None if rank else str(folder))), 10, 10)
    board = timeouts._board
    board.world_size, board._stores, board._number = 2, [store, store], 0
    return timeouts


def faults_in(folder: Path) -> list[dict[str, Any]]:
    events = map(json.loads, (folder / EVENTS_FILE).read_text().splitlines())
    return [event for event in events if event["event"] == "fault"]


def test_a_rank_that_waits_for_its_device_writes_the_event_of_another_before_its_groups_are_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rank 1 runs out of memory. Rank 0 waits for a transfer on the device, which ends only with its communicator."""
    monkeypatch.setattr(fault_board, "_BEAT_SECONDS", 0.01)
    monkeypatch.setattr(fault_board, "_LEAVE_SECONDS", 0.2)
    store, aborted, found = dist.HashStore(), threading.Event(), []

    def abort() -> None:
        found.extend(faults_in(tmp_path))
        aborted.set()

    def rank_1() -> None:
        with (
            pytest.raises(torch.OutOfMemoryError),
            timeouts_over(store, 1, tmp_path, lambda: None).reporting_faults(),
        ):
            raise torch.OutOfMemoryError("planted")

    def rank_0() -> None:
        with timeouts_over(store, 0, tmp_path, abort).reporting_faults():
            other.start()
            assert aborted.wait(10)
            raise RuntimeError("NCCL communicator was aborted on rank 0.")

    other = threading.Thread(target=rank_1)
    with pytest.raises(PipelineError, match="First cause: rank 1: OutOfMemoryError: planted"):
        rank_0()
    other.join()
    (event,) = found
    assert event["out_of_memory"] and event["cause"].startswith("rank 1: OutOfMemoryError: planted")
    assert faults_in(tmp_path) == [event]


def test_the_failed_rank_waits_until_the_event_is_written(monkeypatch: pytest.MonkeyPatch):
    """Its end makes a launcher kill the others."""
    monkeypatch.setattr(fault_board, "_BEAT_SECONDS", 0.01)
    store, recorded = dist.HashStore(), []
    boards = [board_over(store, 0, lambda *told: recorded.append(told)), board_over(store, 1)]
    for board in boards:
        board.world_size = 2
        board.begin(together=True)
    boards[1].report("no memory", is_first_hand=True, details="where it was")
    assert recorded == [("rank 1: no memory", "where it was")]
    for board in boards:
        board.end()


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_killed_process_of_this_machine_is_found_at_once(monkeypatch: pytest.MonkeyPatch, is_reaped: bool):
    """Also where no wait fails, as on a device: the launcher ends this rank next, which has to know why."""
    monkeypatch.setattr(fault_board, "_LEAVE_SECONDS", 0.2)
    store, recorded, aborted = dist.HashStore(), [], threading.Event()
    board = board_over(store, 0, lambda cause, _details: recorded.append(cause), aborted.set)
    board._stores.append(store)
    board.world_size = 2
    board.begin(together=True)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as other:
        alive = f"{board._keys}/alive/1"
        store.set(alive, f"7 {other.pid} {fault_board._pid_namespace()}")
        assert not aborted.wait(1)
        store.set(alive, f"8 {other.pid} another machine")
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | (0 if is_reaped else os.WNOWAIT))
        assert not aborted.wait(1)
        store.set(alive, f"9 {other.pid} {fault_board._pid_namespace()}")
        assert aborted.wait(10)
    said = "killed, as when memory runs out, hanging, or cut off from the network"
    assert recorded == [f"rank 1 does not answer: {said} (rank 0: the process of rank 1 has ended)"]
    board.end()


def test_details_are_of_the_first_cause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fault_board, "_BEAT_SECONDS", 0.01)
    store = dist.HashStore()
    boards = [board_over(store, 0), board_over(store, 1)]
    for board in boards:
        board.begin(together=True)
    boards[1].report("bad sample", is_first_hand=True, details="in the collator")
    boards[0].report("rank 1 is gone", is_first_hand=False, details="in a transfer")
    assert [board.details for board in boards] == ["in the collator"] * 2
    for board in boards:
        board.end()


def test_a_rank_that_is_told_to_end_finds_the_one_that_is_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fault_board, "_BEAT_SECONDS", 0.01)
    monkeypatch.setattr(fault_board, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(fault_board, "_FIRST_HAND_SECONDS", 0.0)
    monkeypatch.setattr(fault_board, "_TOLD_SECONDS", 0.0)
    store = dist.HashStore()
    boards = [board_over(store, rank) for rank in range(3)]
    assert boards[0].find_lost() is None
    for board in boards:
        board.world_size = 3
        board.begin(together=True)
    assert boards[0].find_lost() is None
    assert boards[2]._watch is not None
    boards[2]._watch._store = SimpleNamespace(set=_hang)
    assert str(boards[0].find_lost()).startswith("rank 2 does not answer")
    for board in boards[:2]:
        board.end()


def test_groups_stay_whole_on_a_rank_that_leaves_by_itself(monkeypatch: pytest.MonkeyPatch):
    """The script may catch what all ranks raise alike, and train again."""
    monkeypatch.setattr(fault_board, "_BEAT_SECONDS", 0.01)
    store, aborted = dist.HashStore(), threading.Event()
    boards = [board_over(store, 0, fault_board._ignore, aborted.set), board_over(store, 1)]
    watches = []
    for board in boards:
        board.begin(together=True)
        watches.append(board._watch)
    boards[1].report("refused", is_first_hand=True)
    boards[0].report("refused", is_first_hand=True)
    for board in boards:
        board.end()
    for watch in watches:
        assert watch is not None
        watch.join(5)
    assert not aborted.is_set()


def boards_with_patience(monkeypatch: pytest.MonkeyPatch, stores: list[dist.Store]) -> tuple[list[FaultBoard], Any]:
    """Those of all ranks, begun, and the event that rank 0 is to have its waits ended."""
    for name, seconds in (("_BEAT", 0.01), ("_SHORTEST_PATIENCE", 0.5), ("_SILENT", 0.1)):
        monkeypatch.setattr(fault_board, name if "PATIENCE" in name else f"{name}_SECONDS", seconds)
    monkeypatch.setattr(fault_board, "_TOLD_SECONDS", 0.1)
    aborted = threading.Event()
    boards = [board_over(store, rank, fault_board._ignore, aborted.set) for rank, store in enumerate(stores)]
    for board in boards:
        board.world_size, board.patience = len(boards), 2.0  # A busy machine leaves threads out for long.
        board.begin(together=True)
    return boards, aborted


def test_ranks_without_a_heartbeat_end_the_run_though_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch):
    """One that has ended without a fault stands between them and the only other."""
    boards, aborted = boards_with_patience(monkeypatch, [dist.HashStore()] * 4)
    boards[1].end()
    assert not aborted.wait(4), "all are alive, or have ended as they should"
    for board in boards[2:]:
        assert board._watch is not None
        board._watch._store = SimpleNamespace(set=_hang)
    assert aborted.wait(15)
    cause = boards[0].report("Lost contact", is_first_hand=False)
    # Both are silent, and which of them is named first is up to the moment.
    assert cause.startswith(("rank 2", "rank 3")) and "not answer" in cause and "no heartbeat of rank" in cause
    boards[0].end()


def test_a_rank_that_waited_in_vain_for_one_that_is_alive_says_so(monkeypatch: pytest.MonkeyPatch):
    boards, _ = boards_with_patience(monkeypatch, [dist.HashStore()] * 2)
    cause = boards[0].report("Lost contact", is_first_hand=False)
    assert cause.startswith("rank 0: Lost contact (no process was lost") and "which you may raise" in cause
    for board in boards:
        board.end()


def test_a_store_that_does_not_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    boards, aborted = boards_with_patience(monkeypatch, [dist.HashStore()] * 2)
    assert boards[0]._watch is not None
    boards[0]._watch._store = SimpleNamespace(set=_hang)
    assert aborted.wait(15)
    assert "which hosts the ranks' store, does not answer (rank 0: no answer for 2 s)" in str(boards[0]._watch.cause)
    for board in boards:
        board.end()


def _hang(*_: object) -> None:
    threading.Event().wait(20)
    raise RuntimeError("The store is gone")
