"""All schedules by their names; GPipe, interleaved 1F1B, token slices, and the forwards of an evaluation."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hf_pipetransformer.schedules.abilities import ABILITIES, MAX_CHUNKS, Abilities, abilities_of
from hf_pipetransformer.schedules.actions import Action, Op
from hf_pipetransformer.schedules.asynchronous import ASYNC_1F1B
from hf_pipetransformer.schedules.placement import PLACEMENTS, Placement
from hf_pipetransformer.schedules.schedule import ONE_F_ONE_B, Computations, Schedule
from hf_pipetransformer.schedules.zero_bubble import ZB_H1, ZB_V


def _lay_gpipe(placement: Placement, num_microbatches: int, _first_active_stage: int) -> Computations:
    """Run all forwards, then all backwards in reverse order (GPipe; PipeTransformer, Figure 6).

    K=2, M=3, computation only, time from left to right:

        rank 0   F0 F1 F2 .  .  B2 B1 B0
        rank 1   .  F0 F1 F2 B2 B1 B0 .
    """
    forwards = [Action(Op.FORWARD, i) for i in range(num_microbatches)]
    backwards = [Action(Op.BACKWARD, i) for i in reversed(range(num_microbatches))]
    return [forwards + backwards for _ in range(placement.pipeline_size)]


GPIPE = Schedule("gpipe", _lay_gpipe, ABILITIES["gpipe"])


def _lay_interleaved(placement: Placement, num_microbatches: int, first_active_stage: int) -> Computations:
    """Run interleaved 1F1B: groups of micro-batches pass through the chunks of a rank one after the other.

    The bubble is that of 1F1B divided by V; activations of about K - 1 more chunk forwards are held (Narayanan et al.,
    Efficient Large-Scale Language Model Training, SC 2021, section 2.2). Groups have K micro-batches; if K does not
    divide M, some are larger, so a group always returns to rank 0 without a wait. K=2, V=2, M=2, computation only:

        rank 0   F0   F1   F0.1 F1.1 .    B0.1 .    B1.1 B0   B1
        rank 1   .    F0   F1   F0.1 B0.1 F1.1 B1.1 B0   B1   .
    """
    size, num_chunks = placement.pipeline_size, placement.num_chunks
    if size == 1:
        return ONE_F_ONE_B.lay(placement, num_microbatches, first_active_stage)
    # With fewer micro-batches than ranks one group has them all, and ranks wait for it to come round.
    num_groups = max(1, num_microbatches // size)
    # As even as can be: group sizes differ by one at most.
    sizes = [(num_microbatches + later) // num_groups for later in reversed(range(num_groups))]
    groups = [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
    chunks = range(num_chunks)
    forwards = [Action(Op.FORWARD, i, chunk) for group in groups for chunk in chunks for i in group]
    backwards = [Action(Op.BACKWARD, i, chunk) for group in groups for chunk in reversed(chunks) for i in group]
    action_lists = []
    for rank in range(size):
        # Forwards until the first gradient can be back: the first group passes through all chunks but the last, and
        # then each rank on the way up to the last one and down again takes the time of one more.
        warmup = min(len(forwards), (num_chunks - 1) * sizes[0] + 2 * (size - 1 - rank))
        # After the last forward as many backwards are left as the warm-up had forwards.
        # Not strict: the warm-up has taken forwards, so that backwards are left over.
        alternating = [each for pair in zip(forwards[warmup:], backwards, strict=False) for each in pair]
        action_lists.append([*forwards[:warmup], *alternating, *backwards[len(forwards) - warmup :]])
    return action_lists


INTERLEAVED_1F1B = Schedule("interleaved_1f1b", _lay_interleaved, ABILITIES["interleaved_1f1b"])


TOKEN = Schedule("token", ONE_F_ONE_B.lay, ABILITIES["token"])
"""1F1B over the batch's micro-batches, each cut into token slices (Li et al., ICML 2021; the paper does not cut the
batch). K=2, one micro-batch, S=3, computation only; and two micro-batches, S=2:

    rank 0   F0 F1 F2 .  .  .  B2 B1 B0         rank 0   F0 F1 F2 F3 .  B1 B0 .  B3 B2
    rank 1   .  F0 F1 F2 B2 B1 B0 .  .          rank 1   .  F0 F1 B1 B0 F2 F3 B3 B2 .
"""


def _lay_forward_only(placement: Placement, num_microbatches: int, _first_active_stage: int) -> Computations:
    """Run all forwards on every rank, K micro-batches at a time through all chunks of the rank.

    K=2, M=3; and K=2, M=4 with two chunks per rank:

        rank 0   F0 F1 F2 .          rank 0   F0   F1   F0.1 F1.1 F2   F3   F2.1 F3.1 .
        rank 1   .  F0 F1 F2         rank 1   .    F0   F1   F0.1 F1.1 F2   F3   F2.1 F3.1
    """
    # K at a time: the first of them is back at rank 0 just when the rank has run the last one.
    starts = range(0, num_microbatches, placement.pipeline_size)
    actions = [
        Action(Op.FORWARD, i, chunk)
        for start in starts
        for chunk in range(placement.num_chunks)
        for i in range(start, min(start + placement.pipeline_size, num_microbatches))
    ]
    return [actions] * placement.pipeline_size


FORWARD_ONLY = {
    kind: Schedule("forward_only", _lay_forward_only, Abilities(max_chunks=MAX_CHUNKS, placement=kind))
    for kind in PLACEMENTS
}
"""Evaluation schedule for each kind of placement."""


_SCHEDULES = {
    schedule.name: schedule for schedule in (GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, ZB_H1, ZB_V, TOKEN, ASYNC_1F1B)
}


def find_schedule(name: str) -> Schedule:
    """Return the training schedule with this name; raises ValueError as `abilities_of`."""
    abilities_of(name)
    return _SCHEDULES[name]
