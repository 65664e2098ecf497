"""Laying computations by what is ready, for the numbers of micro-batches and frozen stages that fit no pattern. Pure.

Durations are alike: a forward, the gradient of an input and that of the weights take 1, a whole backward 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hf_pipetransformer.pipeline.schedules.actions import Action, Op, source_of
from hf_pipetransformer.pipeline.schedules.schedule import Computations
from hf_pipetransformer.placement import Placement


def lay_greedily(placement: Placement, num_microbatches: int, first_active_stage: int, limit: int) -> Computations:
    """Each rank always takes the most urgent of what is ready: gradients of inputs, forwards, gradients of weights.

    Of the chunks the last comes first. A frozen stage runs no more than two micro-batches ahead of the next stage.

    Args:
        placement: where the stages lie.
        num_microbatches: M.
        first_active_stage: stages below it run forwards only.
        limit: how many activations a rank may hold.
    """
    queues = []
    for rank in range(placement.pipeline_size):
        stages = placement.stages_of(rank)
        queues.append(
            [
                [Action(op, i, chunk) for i in range(num_microbatches)]
                for op in (Op.BACKWARD_INPUT, Op.FORWARD, Op.BACKWARD_WEIGHT)
                for chunk in reversed(range(placement.num_chunks))
                if op is Op.FORWARD or stages[chunk] >= first_active_stage
            ]
        )
    return _Run(placement, first_active_stage, queues, limit).rows


def shortest(placement: Placement, first_active_stage: int, candidates: Sequence[Computations]) -> Computations:
    """Those of `candidates` that end first if a message takes a tenth of a forward: slack for it counts."""

    def end(rows: Computations) -> float:
        return max(_Run(placement, first_active_stage, [[row] for row in rows], hop=0.1).free)

    return min(candidates, key=end)


class _Run:
    """One execution: a rank takes from the first of its queues whose next computation can start soonest."""

    def __init__(
        self,
        placement: Placement,
        first_active_stage: int,
        queues: Sequence[Sequence[Sequence[Action]]],
        limit: int | None = None,
        hop: float = 0.0,
    ) -> None:
        self.placement = placement
        self.first_active_stage = first_active_stage
        self.limit = limit
        self.hop = hop
        self.stages = [placement.stages_of(rank) for rank in range(placement.pipeline_size)]
        self.queues = [[deque(queue) for queue in own] for own in queues]
        self.rows: Computations = [[] for _ in queues]
        self.free = [0.0] * len(queues)
        self.held = [0] * len(queues)
        self.ends: dict[tuple[int, bool, int], float] = {}
        starts = {rank: self._next(rank) for rank in range(len(queues))}
        while chosen := min(filter(None, starts.values()), default=None):
            stage = self._take(*chosen)
            # What began may be waited for on this rank, by the next stage and by the one before.
            for neighbour in range(max(0, stage - 1), min(stage + 2, placement.num_stages)):
                rank = placement.rank_of(neighbour)
                starts[rank] = self._next(rank)

    def _next(self, rank: int) -> tuple[float, int, int] | None:
        """When `rank` can go on, and from which of its queues; None if it waits for what nobody has begun."""
        starts = []
        for position, queue in enumerate(self.queues[rank]):
            if queue and (ready := self._ready(rank, queue[0])) is not None:
                starts.append((max(ready, self.free[rank]), rank, position))
        return min(starts, default=None)

    def _ready(self, rank: int, action: Action) -> float | None:
        """When the input of `action` is there, None if that is not known yet; a full rank begins no forward."""
        op, i, chunk = action
        stage = self.stages[rank][chunk]
        if op is Op.BACKWARD_WEIGHT:
            return self.ends.get((stage, False, i))
        is_forward = op is Op.FORWARD
        if is_forward and not self._has_room(rank, stage, i):
            return None
        source = source_of(op, stage, self.placement.num_stages)
        if source is None:
            return 0.0 if is_forward else self.ends.get((stage, True, i))
        end = self.ends.get((source, is_forward, i))
        return end if end is None or self.placement.rank_of(source) == rank else end + self.hop

    def _has_room(self, rank: int, stage: int, i: int) -> bool:
        """Each later chunk has a place of its own, so that what is held can always come to its backward."""
        if self.limit is None:
            return True
        if stage < self.first_active_stage:
            return i < 2 or (stage + 1, True, i - 2) in self.ends
        later = self.placement.num_chunks - 1 - self.placement.chunk_of(stage)
        return self.held[rank] < self.limit - later

    def _take(self, start: float, rank: int, position: int) -> int:
        action = self.queues[rank][position].popleft()
        stage = self.stages[rank][action.chunk]
        self.rows[rank].append(action)
        self.free[rank] = start + (2 if action.op is Op.BACKWARD else 1)
        if action.op is Op.FORWARD:
            self.held[rank] += stage >= self.first_active_stage
        elif action.op is not Op.BACKWARD_INPUT:
            self.held[rank] -= 1
        if action.op is not Op.BACKWARD_WEIGHT:
            self.ends[stage, action.op is Op.FORWARD, action.micro_batch] = self.free[rank]
        return stage
