"""What the ranks tell each other of a fault, over a store in this process."""

from __future__ import annotations

import torch.distributed as dist

from hf_pipetransformer.autodp import faults
from hf_pipetransformer.autodp.faults import FaultBoard


def board_over(store: dist.Store) -> FaultBoard:
    board = FaultBoard(0, 1)
    board._stores = [store, store]
    return board


def test_a_fault_that_was_caught_is_no_cause_of_the_next(monkeypatch):
    monkeypatch.setattr(faults, "_BEAT_SECONDS", 0.01)
    board = board_over(dist.HashStore())
    for cause in ("no sound checkpoint", "another thing"):
        board.begin()
        assert board.report(cause, is_first_hand=True) == f"rank 0: {cause}"
        board.end()


def test_the_first_cause_is_everybodys(monkeypatch):
    monkeypatch.setattr(faults, "_BEAT_SECONDS", 0.01)
    board = board_over(dist.HashStore())
    board.begin()
    assert board.report("the first", is_first_hand=True) == board.report("a second", is_first_hand=True)
    board.end()
