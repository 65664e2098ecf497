"""Zero-bubble schedules ZB-H1 and ZB-V, and the greedy list scheduler behind ZB-V. Pure.

The greedy scheduler covers the numbers of micro-batches and frozen stages that do not fit the fixed pattern. It
assumes duration 1 for a forward, an input gradient and a weight gradient, and 2 for a whole backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_pipetransformer.schedules.abilities import ABILITIES
from hf_pipetransformer.schedules.actions import Action, Op, source_of
from hf_pipetransformer.schedules.schedule import ONE_F_ONE_B, Computations, Schedule, drop_frozen, in_phases


if TYPE_CHECKING:
    from hf_pipetransformer.schedules.placement import Placement


def lay_greedily(placement: Placement, num_microbatches: int, first_active_stage: int, limit: int) -> Computations:
    """Let each rank always run its most urgent ready computation: input gradients, forwards, then weight gradients.

    The last chunk comes first. A frozen stage runs at most two micro-batches ahead of the next stage. A rank holds at
    most `limit` activations.
    """
    queues = []
    for rank in range(placement.pipeline_size):
        stages = placement.stages_of(rank)
        queues.append(
            [
                [Action(op, i, chunk) for i in range(num_microbatches)]
                # By urgency: others wait for input gradients, then for forwards, and nobody for weight gradients.
                for op in (Op.BACKWARD_INPUT, Op.FORWARD, Op.BACKWARD_WEIGHT)
                for chunk in reversed(range(placement.num_chunks))
                if op is Op.FORWARD or stages[chunk] >= first_active_stage
            ]
        )
    return _Run(placement, first_active_stage, queues, limit).action_lists


def shortest(placement: Placement, first_active_stage: int, candidates: Sequence[Computations]) -> Computations:
    """Return the candidate that ends first if a message takes a tenth of a forward, which rewards slack."""

    def end(action_lists: Computations) -> float:
        return max(_Run(placement, first_active_stage, [[actions] for actions in action_lists], hop=0.1).free)

    return min(candidates, key=end)


class _Run:
    """Simulated execution: a rank takes from the first of its queues whose next computation can start soonest."""

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
        self.action_lists: Computations = [[] for _ in queues]
        self.free = [0.0] * len(queues)
        self.held = [0] * len(queues)
        self.ends: dict[tuple[int, bool, int], float] = {}
        starts = {rank: self._next(rank) for rank in range(len(queues))}
        # Equal starts go to the lower rank and its first queue: every rank lays the same table.
        while chosen := min(filter(None, starts.values()), default=None):
            stage = self._take(*chosen)
            # Only this stage and its neighbors can depend on what just started, so only their ranks are checked again.
            for neighbour in range(max(0, stage - 1), min(stage + 2, placement.num_stages)):
                rank = placement.rank_of(neighbour)
                starts[rank] = self._next(rank)

    def _next(self, rank: int) -> tuple[float, int, int] | None:
        """Return the start, rank and queue of the next computation of `rank`; None if no input is scheduled yet."""
        starts = []
        for position, queue in enumerate(self.queues[rank]):
            if queue and (ready := self._ready(rank, queue[0])) is not None:
                starts.append((max(ready, self.free[rank]), rank, position))
        return min(starts, default=None)

    def _ready(self, rank: int, action: Action) -> float | None:
        """Return when the input of `action` is there; None if unknown, or if a full rank cannot start a forward."""
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
        """Return True if the stage may hold micro-batch i: each later chunk keeps one reserved place, so none gets
        stuck.
        """
        if self.limit is None:
            return True
        if stage < self.first_active_stage:
            # It keeps nothing for a backward, so that only what waits for the next stage has to be bounded.
            return i < 2 or (stage + 1, True, i - 2) in self.ends
        # If early chunks took all places, later ones could never run the backwards that free them.
        later = self.placement.num_chunks - 1 - self.placement.chunk_of(stage)
        return self.held[rank] < self.limit - later

    def _take(self, start: float, rank: int, position: int) -> int:
        action = self.queues[rank][position].popleft()
        stage = self.stages[rank][action.chunk]
        self.action_lists[rank].append(action)
        self.free[rank] = start + (2 if action.op is Op.BACKWARD else 1)
        if action.op is Op.FORWARD:
            self.held[rank] += stage >= self.first_active_stage
        # An input gradient frees nothing: the weight gradient needs the activations still.
        elif action.op is not Op.BACKWARD_INPUT:
            self.held[rank] -= 1
        if action.op is not Op.BACKWARD_WEIGHT:
            self.ends[stage, action.op is Op.FORWARD, action.micro_batch] = self.free[rank]
        return stage


def _lay_zb_h1(placement: Placement, num_microbatches: int, first_active_stage: int) -> Computations:
    """Run 1F1B with a split backward; on rank `k` weight gradients lag `k` micro-batches behind input gradients.

    The input gradient is sent before the weight gradient is computed, so the first backward reaches rank 0 sooner, and
    the remaining weight gradients fill the end. Every rank holds up to K micro-batches, as rank 0 does under 1F1B (Qi
    et al., Zero Bubble Pipeline Parallelism, ICLR 2024: ZB-H1). K=3, M=4, all durations equal:

        rank 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    size = placement.pipeline_size
    if size == 1:
        # No other rank waits for an input gradient, so that a split backward gains nothing.
        return ONE_F_ONE_B.lay(placement, num_microbatches, first_active_stage)
    action_lists = []
    for rank in range(size):
        # The lag is counted from the first trained rank, below which nobody waits for an input gradient.
        warmup, behind = size - 1 - rank, max(0, rank - first_active_stage)
        steady = max(0, num_microbatches - warmup - behind)
        phases = ("F", warmup), ("F I", behind), ("F I W", steady), ("I W", warmup), ("W", behind)
        action_lists.append(in_phases(num_microbatches, *phases))
    return action_lists


ZB_H1 = Schedule("zb_h1", _lay_zb_h1, ABILITIES["zb_h1"])


def _lay_zb_v(placement: Placement, num_microbatches: int, first_active_stage: int) -> Computations:
    """Run the V-schedule of Qi et al. (Zero Bubble Pipeline Parallelism, ICLR 2024, section 6).

    With equal durations no rank waits once it has started. A rank holds up to 2 K activations of half its layers, as
    much as rank 0 under 1F1B. The pattern needs 2 K - 1 micro-batches and no chunk that is frozen on all ranks;
    otherwise the greedy schedule may end sooner, and the shorter of the two is used. K=2, M=3:

        rank 0   F0   F1   F2   F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0   W0   F2.1 I2.1 W2.1 I1   W1   I2   W2   .
        rank 1   .    F0   F0.1 F1   F1.1 I0.1 W0.1 F2   I0   W0   F2.1 I1.1 W1.1 I1   I2.1 I2   W1   W2.1 W2
    """
    size = placement.pipeline_size
    if size == 1:
        return ONE_F_ONE_B.lay(placement, num_microbatches, first_active_stage)
    # With fewer micro-batches the pattern is that of a longer run, whose last ones `in_phases` leaves out.
    wanted = max(num_microbatches, 2 * size - 1)
    pattern = [
        in_phases(
            num_microbatches,
            *(("F", 2 * (size - rank) - 1), ("F1 F", rank), ("F1 I1 W1", size - rank)),
            *(("F I W F1 I1 W1", wanted - 2 * size + 1 + rank), ("I W F1 I1 W1", size - 1 - rank)),
            *(("I I1", rank), ("I W", size - rank), ("W1", rank), ("W", rank)),
        )
        for rank in range(size)
    ]
    if num_microbatches == wanted and first_active_stage < size:
        return pattern
    # What the pattern holds at most, so that the choice below changes the time and not the memory.
    greedy = lay_greedily(placement, num_microbatches, first_active_stage, limit=2 * size)
    return shortest(placement, first_active_stage, [drop_frozen(pattern, placement, first_active_stage), greedy])


ZB_V = Schedule("zb_v", _lay_zb_v, ABILITIES["zb_v"])
