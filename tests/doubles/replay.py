"""Carries out the notes of all ranks under the rules of NCCL, and says who would wait for whom.

The rules for a device group, stricter than NCCL where it depends on the version:

- The first operation on a group makes its communicator and blocks the host of every member until all are at one.
- The first batched transfer of a pair in one direction blocks the host of both until both are at it; an unbatched one
  does so on a communicator that the pair makes for itself. The first collective of a kind blocks all members, too.
- Operations of one communicator run in the order in which a rank issued them; one that waits for another rank occupies
  the stream. The transfers of one batch run together. There are no tags.
- A host that waits for an operation is blocked until it is done.
- Two ranks issue the collectives of all groups that both are in, in one order: devices may not run two at a time.

Control groups are gloo's: operations run together, collectives match by their order, transfers by the order of each
pair and direction.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


Note = dict[str, Any]
_TRANSFERS = ("batch", "unbatched")
_OPPOSITE = {"send": "receive", "receive": "send"}


class ReplayError(AssertionError):
    """What would hang, or get something else than was meant, on NCCL."""


def read_notes(folder: Path) -> list[list[Note]]:
    """The notes of every rank; a last line that was cut by the end of its process is left out."""
    ranks = []
    for rank in range(len(list(folder.glob("rank*.jsonl")))):
        lines = (folder / f"rank{rank}.jsonl").read_text().splitlines(keepends=True)
        ranks.append([json.loads(line) for line in lines if line.endswith("\n")])
    return ranks


@dataclass
class Operation:
    """One operation of one rank."""

    rank: int
    note: Note
    members: tuple[int, ...]
    is_device: bool
    left: list[list[Any]] = field(default_factory=list)
    is_done: bool = False

    @property
    def is_collective(self) -> bool:
        return self.note["kind"] not in _TRANSFERS

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be alike on all members."""
        note = self.note
        content = note.get("content")
        return note["kind"], note.get("root"), note.get("reduction"), tuple(content) if content else None

    def __str__(self) -> str:
        note = self.note
        what = note["kind"]
        if not self.is_collective:
            parts = [f"{way} {'to' if way == 'send' else 'from'} rank {peer}" for way, peer, *_ in note["parts"]]
            what = f"{what} {', '.join(parts)}"
        elif note.get("content"):
            what += " of {} {}".format(*note["content"])
        group = "device" if self.is_device else "control"
        return f"operation {note['post']}, {what} on the {group} group of ranks {list(self.members)}, {note['at']}"


class Replay:
    """One execution of the notes.

    Args:
        notes: of every rank.

    Raises:
        ReplayError: the notes of two ranks do not fit together, or somebody would wait for ever.
    """

    def __init__(self, notes: Sequence[Sequence[Note]]) -> None:
        self.groups: dict[str, tuple[tuple[int, ...], bool]] = {}
        self.programs: dict[tuple[int, int], list[Note]] = defaultdict(list)
        self.operations: dict[tuple[int, int], Operation] = {}
        self.arrived: dict[Hashable, set[int]] = defaultdict(set)
        self.issued: set[tuple[int, int]] = set()
        self.streams: dict[tuple[Hashable, int], deque[Operation]] = defaultdict(deque)
        self.last: dict[tuple[int, str], Operation] = {}
        self.num_arrivals = 0
        for rank, lines in enumerate(notes):
            for note in lines:
                self._read(rank, note)
        self.position = dict.fromkeys(self.programs, 0)

    def _read(self, rank: int, note: Note) -> None:
        if "group" in note:
            known = self.groups.setdefault(note["group"], (tuple(note["ranks"]), note["is_device"]))
            if known != (tuple(note["ranks"]), note["is_device"]):
                raise ReplayError(f"Rank {rank} made a group of ranks {note['ranks']}, another of {list(known[0])}.")
            return
        if "post" in note:
            members, is_device = self.groups[note["on"]]
            left = [list(part) for part in note.get("parts", [])]
            self.operations[rank, note["post"]] = Operation(rank, note, members, is_device, left)
        self.programs[rank, note["thread"]].append(note)

    def run(self) -> int:
        """Carry everything out; returns the number of operations."""
        moved = True
        while moved:
            before = self.num_arrivals
            num_advanced = sum(self._advance(program) for program in self.programs)
            moved = num_advanced > 0 or self.num_arrivals > before
        blocked = [program for program, lines in self.programs.items() if self.position[program] < len(lines)]
        undone = [operation for operation in self.operations.values() if not operation.is_done]
        if blocked or undone:
            raise ReplayError("\n".join(self._complaint(blocked, undone)))
        self._check_order_between_groups()
        return len(self.operations)

    def _check_order_between_groups(self) -> None:
        orders: dict[tuple[int, int], dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
        for operation in self.operations.values():
            if operation.is_device and operation.is_collective:
                for other in operation.members:
                    pair = (min(operation.rank, other), max(operation.rank, other))
                    orders[pair][operation.rank].append(operation)
        for (first, second), found in orders.items():
            for mine, theirs in zip(found[first], found[second], strict=True):
                if mine.note["on"] != theirs.note["on"]:
                    raise ReplayError(f"Collectives in another order.\n{self._who(mine)}\n{self._who(theirs)}")

    def _advance(self, program: tuple[int, int]) -> bool:
        lines, start = self.programs[program], self.position[program]
        while self.position[program] < len(lines) and self._step(program[0], lines[self.position[program]]):
            self.position[program] += 1
        return self.position[program] > start

    def _step(self, rank: int, note: Note) -> bool:
        """Carry out one note of a host; False if it is blocked."""
        if "wait" in note:
            return self.operations[rank, note["wait"]].is_done
        operation = self.operations[rank, note["post"]]
        if operation.is_device and self._closed_door(operation) is not None:
            return False
        self.issued.add((rank, note["post"]))
        self.last[rank, note["on"]] = operation
        for stream in self._streams(operation):
            self.streams[stream].append(operation)
        self._progress(operation)
        return True

    def _doors(self, operation: Operation) -> Iterator[tuple[Hashable, tuple[int, ...]]]:
        """What an operation on a device group may have to be the first for, and who has to be there."""
        rank, group = operation.rank, operation.note["on"]
        if operation.note["kind"] == "unbatched":
            for _, peer, *_ in operation.note["parts"]:
                pair = (min(rank, peer), max(rank, peer))
                yield ("pair", group, pair), pair
            return
        yield ("communicator", group), operation.members
        if operation.is_collective:
            yield ("kind", group, operation.note["kind"]), operation.members
        for way, peer, *_ in operation.note.get("parts", []):
            link = (rank, peer) if way == "send" else (peer, rank)
            yield ("link", group, link), link

    def _closed_door(self, operation: Operation) -> tuple[Hashable, tuple[int, ...]] | None:
        """Where an operation waits for another rank's first use."""
        doors = list(self._doors(operation))
        is_communicator = [key[0] == "communicator" for key, _ in doors]  # type: ignore[index]
        for step in (True, False):
            now = [door for door, first in zip(doors, is_communicator, strict=True) if first is step]
            for key, _ in now:
                self.num_arrivals += operation.rank not in self.arrived[key]
                self.arrived[key].add(operation.rank)
            for key, needed in now:
                if not self.arrived[key] >= set(needed):
                    return key, needed
        return None

    def _streams(self, operation: Operation) -> list[tuple[Hashable, int]]:
        """Where an operation stands: one queue on a device; on gloo one a direction, and one of collectives."""
        rank, group = operation.rank, operation.note["on"]
        if operation.is_device and operation.note["kind"] == "unbatched":
            peer = operation.note["parts"][0][1]
            return [((group, "pair", min(rank, peer), max(rank, peer)), rank)]
        if operation.is_device or operation.is_collective:
            return [((group, "stream"), rank)]
        return [((group, *self._link(rank, part)), rank) for part in operation.left]

    @staticmethod
    def _link(rank: int, part: list[Any]) -> tuple[int, int]:
        return (rank, part[1]) if part[0] == "send" else (part[1], rank)

    def _progress(self, operation: Operation) -> None:
        """Finish what can be finished now that `operation` stands in its queues."""
        touched = deque(name for name, _ in self._streams(operation))
        while touched:
            name = touched.popleft()
            heads = {rank: queue[0] for rank in operation.members if (queue := self.streams[name, rank])}
            for head in heads.values():
                if self._try(head, name, heads):
                    touched.append(name)
                    break

    def _try(self, head: Operation, name: Hashable, heads: dict[int, Operation]) -> bool:
        """Finish a collective, or a part of a transfer, at the head of its queue."""
        if head.is_collective:
            return self._try_collective(head, name, heads)
        for part in head.left:
            peer = heads.get(part[1])
            if peer is None or peer.is_collective or (not head.is_device and name[1:] != self._link(head.rank, part)):  # type: ignore[index]
                continue
            answers = [p for p in peer.left if p[0] == _OPPOSITE[part[0]] and p[1] == head.rank]
            first = next(p for p in head.left if p[:2] == part[:2])
            if answers and first is part:
                if part[2:] != answers[0][2:]:
                    raise ReplayError(
                        f"Transfers do not match.\n{self._who(head)}: {part[2:]}\n{self._who(peer)}: {answers[0][2:]}"
                    )
                head.left.remove(part)
                peer.left.remove(answers[0])
                for operation in (head, peer):
                    if not head.is_device or not operation.left:
                        self.streams[name, operation.rank].popleft()
                    operation.is_done = not operation.left
                return True
        return False

    def _try_collective(self, head: Operation, name: Hashable, heads: dict[int, Operation]) -> bool:
        others = [heads[rank] for rank in head.members if rank in heads and heads[rank].is_collective]
        for other in others:
            if other.signature != head.signature:
                raise ReplayError(f"Collectives differ.\n{self._who(head)}\n{self._who(other)}")
        if len(others) < len(head.members):
            return False
        for other in others:
            other.is_done = True
            self.streams[name, other.rank].popleft()
        return True

    def _who(self, operation: Operation) -> str:
        return f"  rank {operation.rank}: {operation}"

    def _complaint(self, blocked: list[tuple[int, int]], undone: list[Operation]) -> Iterator[str]:
        yield "On NCCL this would hang:"
        involved: set[str] = set()
        shown: set[tuple[int, int]] = set()
        for program in blocked:
            note = self.programs[program][self.position[program]]
            rank = program[0]
            operation = self.operations[rank, note["wait" if "wait" in note else "post"]]
            yield f"  rank {rank} waits at {operation}{self._reason(operation)}"
            involved.add(operation.note["on"])
            shown.add((rank, operation.note["post"]))
        issued = [o for o in undone if (o.rank, o.note["post"]) in self.issued - shown]
        for operation in issued[:4]:
            yield f"  rank {operation.rank} has issued {operation}{self._reason(operation)}"
            involved.add(operation.note["on"])
        for (rank, group), last in sorted(self.last.items()):
            if group in involved:
                yield f"  the last that rank {rank} issued there: {last}"

    def _reason(self, operation: Operation) -> str:
        if (operation.rank, operation.note["post"]) not in self.issued:
            door = self._closed_door(operation)
            missing = sorted(set(door[1]) - self.arrived[door[0]]) if door else []
            return f": the first use blocks the host until rank {missing} comes"
        for stream in self._streams(operation):
            queue = self.streams[stream]
            if queue and queue[0] is not operation and operation in queue:
                return f": behind {queue[0]}"
        return ": not answered"


def check_notes(folder: Path) -> int:
    """Carry out the notes in a folder; returns the number of operations.

    Raises:
        ReplayError: see `Replay`.
    """
    return Replay(read_notes(folder)).run()
