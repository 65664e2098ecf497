"""The transfers between the computations of a table."""

from __future__ import annotations

from collections.abc import Sequence

from hf_pipetransformer.pipeline.schedules.actions import GIVES, NEEDS, Action, Op, Table, source_of
from hf_pipetransformer.placement import Placement


def add_transfers(rows: Sequence[Sequence[Action]], placement: Placement, first_active_stage: int = 0) -> Table:
    """Add to each rank's computations what it receives and sends.

    The receive for a computation is posted one computation ahead, before the send that follows the current one, so
    that two neighbours that send to each other have both posted their receives. Where a rank would wait at a send and
    nobody could go on, the receive is posted as much earlier as it takes: no table deadlocks even if a send blocks
    until its receive is posted. The order of messages of each pair of stages and direction is the order of the
    computations on both sides. Between stages on one rank, and into frozen stages, nothing is sent.

    Raises:
        ValueError: the computations themselves wait for each other.
    """
    return _Laying(rows, placement, first_active_stage).table()


class _Laying:
    """Runs the computations by rendezvous and writes down the transfers that take place.

    A result is named by the stage that gives it, the send that would carry it, and the micro-batch.
    """

    def __init__(self, rows: Sequence[Sequence[Action]], placement: Placement, first_active_stage: int) -> None:
        self.rows = rows
        self.placement = placement
        self.first_active_stage = first_active_stage
        self.stages = [placement.stages_of(rank) for rank in range(len(rows))]
        self.laid: list[list[Action]] = [[] for _ in rows]
        self.position = [0] * len(rows)
        self.num_posted = [0] * len(rows)
        self.leaving: list[Action | None] = [None] * len(rows)
        self.awaited: set[tuple[int, Op, int]] = set()
        self.given: set[tuple[int, Op, int]] = set()

    def table(self) -> Table:
        """Lay all rows to their ends."""
        ranks = range(len(self.rows))
        while any(self.position[rank] < len(self.rows[rank]) or self.leaving[rank] for rank in ranks):
            moved = [self._advance(rank) for rank in ranks]
            if not any(moved):
                self._post_for(next((rank for rank in ranks if self.leaving[rank]), None))
        return tuple(map(tuple, self.laid))

    def _advance(self, rank: int) -> bool:
        """Lay the send that is due, or else the next computation; False if the rank has to wait."""
        if leaving := self.leaving[rank]:
            if self._result(rank, leaving) not in self.awaited:
                return False
            self.laid[rank].append(leaving)
            self.leaving[rank] = None
            return True
        position = self.position[rank]
        if position == len(self.rows[rank]):
            return False
        action = self.rows[rank][position]
        # Two computations ahead: the one about to run, and the one whose data may arrive while it runs.
        self._post(rank, position + 2)
        source = self._source(rank, action)
        if source is not None and (source, GIVES[action.op], action.micro_batch) not in self.given:
            return False
        self.laid[rank].append(action)
        self.position[rank] += 1
        self._post(rank, position + 3)
        if action.op in GIVES:
            given = action._replace(op=GIVES[action.op])
            self.given.add(self._result(rank, given))
            self.leaving[rank] = given if self._is_sent(rank, given) else None
        return True

    def _result(self, rank: int, send: Action) -> tuple[int, Op, int]:
        return self.stages[rank][send.chunk], send.op, send.micro_batch

    def _source(self, rank: int, action: Action) -> int | None:
        return source_of(action.op, self.stages[rank][action.chunk], self.placement.num_stages)

    def _is_sent(self, rank: int, send: Action) -> bool:
        stage = self.stages[rank][send.chunk]
        if send.op is Op.SEND_FORWARD:
            return self.placement.is_crossed(stage)
        return stage > self.first_active_stage and self.placement.is_crossed(stage - 1)

    def _post(self, rank: int, until: int) -> None:
        """Post the receives of this rank's first `until` computations."""
        for action in self.rows[rank][self.num_posted[rank] : until]:
            source = self._source(rank, action)
            if source is not None and self.placement.rank_of(source) != rank:
                self.awaited.add((source, GIVES[action.op], action.micro_batch))
                self.laid[rank].append(action._replace(op=NEEDS[action.op]))
        self.num_posted[rank] = max(self.num_posted[rank], until)

    def _post_for(self, rank: int | None) -> None:
        """Post the receive that `rank` waits for with its send; None: everybody waits for a computation."""
        if rank is None or (leaving := self.leaving[rank]) is None:
            waiting = [str(row[at]) for row, at in zip(self.rows, self.position, strict=True) if at < len(row)]
            raise ValueError(f"Computations that wait for each other: {waiting}.")
        stage, send, i = self._result(rank, leaving)
        target = stage + (1 if send is Op.SEND_FORWARD else -1)
        receiver, chunk = self.placement.rank_of(target), self.placement.chunk_of(target)
        taking = [GIVES.get(each.op) is send and each[1:] == (i, chunk) for each in self.rows[receiver]]
        self._post(receiver, taking.index(True) + 1)
