"""Base class of schedules, and 1F1B, which others begin with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hf_pipetransformer.schedules.abilities import ABILITIES, Abilities
from hf_pipetransformer.schedules.actions import GRADIENTS_ARE_WHOLE, Action, Op, Table, add_transfers
from hf_pipetransformer.schedules.placement import Placement


Computations = list[list[Action]]
"""Computations of each rank, in order; `add_transfers` derives the sends and receives."""


def drop_frozen(action_lists: Computations, placement: Placement, first_active_stage: int) -> Computations:
    """Remove the backwards of stages below `first_active_stage`."""
    return [
        [
            each
            for each in actions
            if each.op is Op.FORWARD or placement.stages_of(rank)[each.chunk] >= first_active_stage
        ]
        for rank, actions in enumerate(action_lists)
    ]


# Compared by identity: hashing all values of one would take longer than to look its table up.
@dataclass(frozen=True, eq=False)
class Schedule:
    """Order of the forwards and backwards of micro-batches.

    `lay` maps the placement, the number of micro-batches M and the first active stage to each rank's computations.
    """

    name: str
    lay: Callable[[Placement, int, int], Computations]
    abilities: Abilities = Abilities()

    @lru_cache(maxsize=256)  # noqa: B019  # There are a handful of schedules, and they live as long as the program.
    def table(
        self,
        pipeline_size: int,
        num_microbatches: int,
        num_chunks: int = 1,
        first_active_stage: int = 0,
        num_token_slices: int = 1,
    ) -> Table:
        """Return the action list of each of K ranks, for M micro-batches and V stages (chunks) per rank.

        Stages below `first_active_stage` contain only frozen blocks. They run forwards only and get no gradient. With
        S token slices per micro-batch, the table's micro-batches are these M S slices in order.

        Raises:
            ValueError: unsupported number of ranks, micro-batches, stages or slices, or no such active stage.
        """
        if pipeline_size < 1 or num_microbatches < 1:
            raise ValueError(
                f"A table needs at least one rank and one micro-batch, found {pipeline_size} and {num_microbatches}."
            )
        # On one rank there is one stage, whatever the schedule is able to do on more.
        able = self.abilities.on(pipeline_size)
        fewest, most = able.min_chunks, able.max_chunks
        if not fewest <= num_chunks <= most:
            expected = (
                f"{fewest} to {most} stages" if fewest < most else "one stage" if most == 1 else f"{most} stages"
            )
            where = f"{pipeline_size} ranks" if pipeline_size > 1 else "one rank"
            raise ValueError(f"{self.name} takes {expected} a rank on {where}, found {num_chunks}.")
        placement = Placement(pipeline_size, num_chunks, self.abilities.placement)
        if not 0 <= first_active_stage < placement.num_stages:
            raise ValueError(
                f"The first active stage must be one of the {placement.num_stages} stages, 0 to "
                f"{placement.num_stages - 1}, found {first_active_stage}."
            )
        action_lists = self.lay(placement, num_microbatches, first_active_stage)
        if num_token_slices != 1:
            if not able.cuts_tokens or num_token_slices < 1:
                raise ValueError(f"{self.name} cannot cut sequences into {num_token_slices} slices.")
            action_lists = in_token_slices(action_lists, num_token_slices)
        # Frozen stages lose their backwards before the transfers are laid: nothing may be sent for them.
        return add_transfers(drop_frozen(action_lists, placement, first_active_stage), placement, first_active_stage)

    def fullest_table(
        self, pipeline_size: int, num_microbatches: int, num_chunks: int = 1, first_active_stage: int = 0
    ) -> Table:
        """Return a table in which ranks hold as much as they ever do; arguments as of `table`."""
        return self.table(pipeline_size, num_microbatches, num_chunks, first_active_stage)

    def peaks(
        self,
        sizes: Sequence[float],
        pipeline_size: int,
        num_microbatches: int,
        num_chunks: int = 1,
        first_active_stage: int = 0,
    ) -> tuple[float, ...]:
        """Return the peak size of activations held on each rank, from forward to the end of the matching backward.

        `sizes` gives the activation size of one micro-batch for each stage; frozen stages count as 0.
        """
        placement, found = Placement(pipeline_size, num_chunks, self.abilities.placement), []
        shape = pipeline_size, num_microbatches, num_chunks, first_active_stage
        for rank, actions in enumerate(self.fullest_table(*shape)):
            stages = placement.stages_of(rank)
            held = most = 0.0
            for op, _, chunk in actions:
                if op is Op.FORWARD and stages[chunk] >= first_active_stage:
                    held += sizes[stages[chunk]]
                    most = max(most, held)
                # Not after a backward of the input alone: the gradient of the weights reads the activations still.
                elif op in GRADIENTS_ARE_WHOLE:
                    held -= sizes[stages[chunk]]
            found.append(most)
        return tuple(found)

    def in_flight(
        self, pipeline_size: int, num_microbatches: int, num_chunks: int = 1, first_active_stage: int = 0
    ) -> tuple[int, ...]:
        """Return the peak number of micro-batches whose activations each stage holds; arguments as of `table`."""
        stages = range(pipeline_size * num_chunks)
        # Activations of one stage that weigh 1 and of all others 0: the peak is the number of that stage's
        # micro-batches.
        counted = ([float(stage == other) for other in stages] for stage in stages)
        where = pipeline_size, num_microbatches, num_chunks, first_active_stage
        return tuple(int(max(self.peaks(sizes, *where))) for sizes in counted)


def in_phases(num_microbatches: int, *phases: tuple[str, int]) -> list[Action]:
    """Build one rank's computations from phases of a pattern and a repeat count.

    `("F I1", 3)` repeats a forward of chunk 0 and an input gradient of chunk 1 three times. Each kind of computation
    of a chunk takes the micro-batches in order, up to `num_microbatches`.
    """
    actions, taken = [], Counter[str]()
    # Numbers go past `num_microbatches` where a phase is longer than what is left; the filter below drops those.
    for pattern, times in phases:
        for word in pattern.split() * times:
            actions.append(Action(Op(word[0]), taken[word], int(word[1:] or 0)))
            taken[word] += 1
    return [action for action in actions if action.micro_batch < num_microbatches]


def _lay_one_f_one_b(placement: Placement, num_microbatches: int, _first_active_stage: int) -> Computations:
    """Run synchronous 1F1B: after a warm-up of `K - 1 - k` forwards, rank `k` alternates forward and backward.

    Computes the same as `gpipe`, but rank `k` holds the activations of at most `K - k` micro-batches instead of M.
    K=2, M=3, computation only; and K=3, M=3 with stage 0 frozen:

        rank 0   F0 F1 .  B0 F2 B1 .  B2         rank 0   F0 F1 F2 .  .  .  .  .  .
        rank 1   .  F0 B0 F1 B1 F2 B2 .          rank 1   .  F0 F1 .  B0 F2 B1 .  B2
                                                 rank 2   .  .  F0 B0 F1 B1 F2 B2 .
    """
    warmups = [min(placement.pipeline_size - 1 - rank, num_microbatches) for rank in range(placement.pipeline_size)]
    return [
        in_phases(num_microbatches, ("F", warmup), ("F B", num_microbatches - warmup), ("B", warmup))
        for warmup in warmups
    ]


ONE_F_ONE_B = Schedule("1f1b", _lay_one_f_one_b, ABILITIES["1f1b"])


def in_token_slices(action_lists: Computations, num_token_slices: int) -> Computations:
    """Replace each micro-batch `i` by S token slices, numbered from `S i`: forwards ascending, backwards descending.

    A slice reads keys and values of earlier slices, so their gradients are complete only after all later backwards.
    """
    forwards = range(num_token_slices)
    return [
        [
            action._replace(micro_batch=action.micro_batch * num_token_slices + number)
            for action in actions
            for number in (forwards if action.op is Op.FORWARD else reversed(forwards))
        ]
        for actions in action_lists
    ]
