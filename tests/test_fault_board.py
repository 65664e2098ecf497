"""What the ranks tell each other of a fault, over a store in this process."""

from __future__ import annotations

import torch.distributed as dist

from hf_pipetransformer.comm import errors
from hf_pipetransformer.comm.errors import FaultBoard


def board_over(store: dist.Store) -> FaultBoard:
    board = FaultBoard(0, 1)
    board._stores = [store, store]
    return board


def test_a_fault_that_was_caught_is_no_cause_of_the_next(monkeypatch):
    monkeypatch.setattr(errors, "_BEAT_SECONDS", 0.01)
    board = board_over(dist.HashStore())
    for cause in ("no sound checkpoint", "another thing"):
        board.begin(together=True)
        assert board.report(cause, is_first_hand=True) == f"rank 0: {cause}"
        board.end()


def test_the_first_cause_is_everybodys(monkeypatch):
    monkeypatch.setattr(errors, "_BEAT_SECONDS", 0.01)
    board = board_over(dist.HashStore())
    board.begin(together=True)
    assert board.report("the first", is_first_hand=True) == board.report("a second", is_first_hand=True)
    board.end()


def test_a_fault_that_one_rank_met_alone_is_no_cause_of_the_next(monkeypatch):
    """Rank 0 saves alone and fails; its script goes on, and both train again."""
    monkeypatch.setattr(errors, "_BEAT_SECONDS", 0.01)
    store = dist.HashStore()
    boards = [board_over(store), board_over(store)]
    for rank, board in enumerate(boards):
        board.rank, board._number = rank, 0
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


def test_who_acts_alone_is_not_told_of_a_fault_that_is_over(monkeypatch, caplog):
    """A training failed and the error was caught; `save_model()` comes next."""
    monkeypatch.setattr(errors, "_BEAT_SECONDS", 0.01)
    board = board_over(dist.HashStore())
    board.begin(together=True)
    board.report("no memory", is_first_hand=True)
    board.end()
    board.begin(together=False)
    assert not errors._wait(lambda: "The run ends" in caplog.text, 0.3)
    assert board.report("disk full", is_first_hand=True) == "rank 0: disk full"
    board.end()
