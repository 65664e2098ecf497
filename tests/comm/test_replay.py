"""The rules of NCCL as `tests.doubles.replay` carries them out, on notes written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doubles.replay import Replay, ReplayError


Note = dict[str, Any]


class Rank:
    """Writes the notes of one rank of a world of `size`; every group holds all ranks."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.rank, self.size = rank, size
        self.notes: list[Note] = []
        self.number = 0

    def group(self, name: str, is_device: bool = True) -> Rank:
        self.notes.append({"group": name, "ranks": list(range(self.size)), "is_device": is_device, "thread": 0})
        return self

    def post(self, on: str, kind: str, waits: bool = True, **details: Any) -> Rank:
        note = {"post": self.number, "kind": kind, "on": on, "at": "here.py:1", "thread": 0, **details}
        self.notes += [note, {"wait": self.number, "thread": 0}] if waits else [note]
        self.number += 1
        return self

    def reduce(self, on: str, waits: bool = True, content: tuple[int, str] = (1, "float32"), by: str = "SUM") -> Rank:
        return self.post(on, "all_reduce", waits, reduction=by, content=list(content))

    def send(self, on: str, to: int, waits: bool = True, numel: int = 4, kind: str = "batch") -> Rank:
        return self.post(on, kind, waits, parts=[["send", to, numel, "float32"]])

    def receive(self, on: str, source: int, waits: bool = True, numel: int = 4, kind: str = "batch") -> Rank:
        return self.post(on, kind, waits, parts=[["receive", source, numel, "float32"]])

    def wait(self, number: int) -> Rank:
        self.notes.append({"wait": number, "thread": 0})
        return self


def warm_pair(is_device: bool = True) -> tuple[Rank, Rank]:
    """Two ranks on group `g`, which has had a collective and a transfer in both directions."""
    first, second = (Rank(rank).group("g", is_device).reduce("g") for rank in (0, 1))
    return first.send("g", 1).receive("g", 1), second.receive("g", 0).send("g", 0)


def outcome(*ranks: Rank) -> str:
    """What the replay complains of; empty if all is lawful."""
    try:
        Replay([rank.notes for rank in ranks]).run()
    except ReplayError as error:
        return str(error)
    return ""


def test_a_lawful_exchange_ends() -> None:
    assert outcome(*warm_pair()) == ""


def test_opposite_receives_on_one_communicator_hang_and_one_batch_does_not() -> None:
    first, second = warm_pair()
    first.receive("g", 1, waits=False).send("g", 1, waits=False).wait(3).wait(4)
    second.receive("g", 0, waits=False).send("g", 0, waits=False).wait(3).wait(4)
    assert "behind operation 3, batch receive from rank 1" in outcome(first, second)
    first, second = warm_pair()
    for rank, other in ((first, 1), (second, 0)):
        rank.post("g", "batch", parts=[["receive", other, 4, "float32"], ["send", other, 4, "float32"]])
    assert outcome(first, second) == ""


def test_gloo_carries_out_operations_of_one_group_together() -> None:
    first, second = warm_pair(is_device=False)
    first.receive("g", 1, waits=False).send("g", 1, waits=False).wait(3).wait(4)
    second.receive("g", 0, waits=False).send("g", 0, waits=False).wait(3).wait(4)
    assert outcome(first, second) == ""


@pytest.mark.parametrize("kind", ["batch", "unbatched"])
def test_the_first_transfer_of_a_pair_blocks_the_host(kind: str) -> None:
    ranks = [Rank(rank).group("f").group("b").reduce("f").reduce("b") for rank in (0, 1)]
    ranks[0].receive("b", 1, waits=False, kind=kind).send("f", 1, kind=kind).wait(2)
    ranks[1].receive("f", 0, kind=kind).send("b", 0, kind=kind)
    found = outcome(*ranks)
    assert "rank 0 waits at operation 2" in found
    assert "rank 1 waits at operation 2" in found
    assert found.count("the first use blocks the host") == 2


def test_a_group_that_only_some_of_its_ranks_use_first_hangs() -> None:
    ranks = [Rank(rank, size=3).group("g") for rank in range(3)]
    ranks[0].send("g", 1)
    ranks[1].receive("g", 0)
    assert "until rank [2] comes" in outcome(*ranks)


@pytest.mark.parametrize(
    "changed", [{"by": "MAX"}, {"content": (2, "float32")}, {"content": (1, "int64")}], ids=["op", "size", "dtype"]
)
@pytest.mark.parametrize("is_device", [True, False])
def test_collectives_that_differ_are_found(changed: dict[str, Any], is_device: bool) -> None:
    first, second = warm_pair(is_device)
    first.reduce("g")
    second.reduce("g", **changed)
    assert "Collectives differ" in outcome(first, second)


def test_a_collective_behind_a_receive_that_waits_for_it_hangs() -> None:
    first, second = warm_pair()
    first.receive("g", 1, waits=False).reduce("g").wait(3)
    second.reduce("g").send("g", 0)
    found = outcome(first, second)
    assert "all_reduce of 1 float32" in found
    assert "behind operation 3, batch receive from rank 1" in found


def test_messages_match_by_their_order_alone() -> None:
    first, second = warm_pair()
    first.send("g", 1, waits=False, numel=4).send("g", 1, numel=8)
    second.receive("g", 0, numel=8).receive("g", 0, numel=4)
    assert "Transfers do not match" in outcome(first, second)


def test_what_nobody_answers_is_found_though_nobody_waits() -> None:
    first, second = warm_pair()
    first.send("g", 1, waits=False)
    assert "rank 0 has issued operation 3, batch send to rank 1" in outcome(first, second)


def test_a_collective_that_one_rank_leaves_out_is_found() -> None:
    first, second = warm_pair()
    first.reduce("g", content=(5, "float32"))
    found = outcome(first, second)
    assert "rank 0 waits at operation 3, all_reduce of 5 float32" in found
    assert "the last that rank 1 issued there: operation 2, batch send to rank 0" in found


def test_collectives_of_two_groups_come_in_one_order() -> None:
    first, second = (Rank(rank).group("a").group("b").reduce("a").reduce("b") for rank in (0, 1))
    first.reduce("a", waits=False).reduce("b", waits=False).wait(2).wait(3)
    second.reduce("b", waits=False).reduce("a", waits=False).wait(2).wait(3)
    assert "Collectives in another order" in outcome(first, second)
