"""What a schedule is: a name, its tables, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hf_pipetransformer.pipeline.schedules.actions import GRADIENTS_ARE_WHOLE, Action, Op, Table
from hf_pipetransformer.pipeline.schedules.transfers import add_transfers
from hf_pipetransformer.pipeline.schedules.updates import add_updates
from hf_pipetransformer.placement import Placement


Computations = list[list[Action]]
"""What each rank computes, in this order; the transfers follow from it."""


def drop_frozen(rows: Computations, placement: Placement, first_active_stage: int) -> Computations:
    """`rows` without the backwards of the stages below `first_active_stage`."""
    return [
        [each for each in row if each.op is Op.FORWARD or placement.stages_of(rank)[each.chunk] >= first_active_stage]
        for rank, row in enumerate(rows)
    ]


@dataclass(frozen=True)
class Schedule:
    """An order of the micro-batches' forwards and backwards.

    Args:
        name: as `pipeline_schedule` takes it.
        lay: from where the stages lie, the number of micro-batches and the first stage that trains to what each rank
            computes.
        splits_backward: whether gradients of inputs and of weights are computed apart.
        placement: how stages lie on ranks, a kind of `Placement`.
        default_chunks: stages on each rank, V, unless the user says otherwise.
        min_chunks: the smallest V of two ranks or more; a pipeline of one rank has one stage.
        max_chunks: the largest V.
        in_token_slices: makes of what `lay` gives, and S, what is computed for S slices of the tokens of each
            micro-batch; None for a schedule that cuts batches alone.
        is_asynchronous: whether optimizer steps follow each other without a flush. A table is then that of M steps of
            a micro-batch each, with the updates of every rank, and what is in flight that of a window of any length.
    """

    name: str
    lay: Callable[[Placement, int, int], Computations]
    splits_backward: bool = False
    placement: str = "loop"
    default_chunks: int = 1
    min_chunks: int = 1
    max_chunks: int = 1
    in_token_slices: Callable[[Computations, int], Computations] | None = None
    is_asynchronous: bool = False

    @lru_cache(maxsize=256)  # noqa: B019  # There are a handful of schedules, and they live as long as the program.
    def table(
        self,
        pipeline_size: int,
        num_microbatches: int,
        num_chunks: int = 1,
        first_active_stage: int = 0,
        num_token_slices: int = 1,
    ) -> Table:
        """One row of actions a rank.

        Stages below `first_active_stage` hold frozen units only and run forwards only; no gradient is sent to them.

        Args:
            pipeline_size: ranks of the pipeline, K.
            num_microbatches: M.
            num_chunks: stages on each rank, V.
            first_active_stage: the first stage with something to train, 0 to K V - 1.
            num_token_slices: S, parts that the tokens of each micro-batch are cut into. The table's micro-batches are
                these M S slices, those of a micro-batch one after the other.

        Raises:
            ValueError: fewer than one rank or micro-batch, stages that this schedule does not know how to lay, or an
                active stage that does not exist.
        """
        if pipeline_size < 1 or num_microbatches < 1:
            raise ValueError(
                f"A table needs at least one rank and one micro-batch, found {pipeline_size} and {num_microbatches}."
            )
        fewest, most = (self.min_chunks, self.max_chunks) if pipeline_size > 1 else (1, 1)
        if not fewest <= num_chunks <= most:
            expected = (
                f"{fewest} to {most} stages" if fewest < most else "one stage" if most == 1 else f"{most} stages"
            )
            where = f"{pipeline_size} ranks" if pipeline_size > 1 else "one rank"
            raise ValueError(f"{self.name} takes {expected} a rank on {where}, found {num_chunks}.")
        placement = Placement(pipeline_size, num_chunks, self.placement)
        if not 0 <= first_active_stage < placement.num_stages:
            raise ValueError(
                f"The first active stage must be one of the {placement.num_stages} stages, 0 to "
                f"{placement.num_stages - 1}, found {first_active_stage}."
            )
        rows = self.lay(placement, num_microbatches, first_active_stage)
        if num_token_slices != 1:
            if self.in_token_slices is None or num_token_slices < 1:
                raise ValueError(f"{self.name} cannot cut sequences into {num_token_slices} slices.")
            rows = self.in_token_slices(rows, num_token_slices)
        table = add_transfers(drop_frozen(rows, placement, first_active_stage), placement, first_active_stage)
        return add_updates(table, (1,) * num_microbatches, first_active_stage) if self.is_asynchronous else table

    def peaks(
        self,
        sizes: Sequence[float],
        pipeline_size: int,
        num_microbatches: int,
        num_chunks: int = 1,
        first_active_stage: int = 0,
    ) -> tuple[float, ...]:
        """The most that each rank holds at a time between forwards and the ends of their backwards.

        Args:
            sizes: of what a micro-batch's forward keeps, by stage; frozen stages keep nothing.
            pipeline_size: as of `table`, like the others.
        """
        placement, found = Placement(pipeline_size, num_chunks, self.placement), []
        if self.is_asynchronous:
            # Those of the steps that follow come in before these are out.
            num_microbatches = max(num_microbatches, pipeline_size)
        for rank, row in enumerate(self.table(pipeline_size, num_microbatches, num_chunks, first_active_stage)):
            stages = placement.stages_of(rank)
            held = most = 0.0
            for op, _, chunk in row:
                if op is Op.FORWARD and stages[chunk] >= first_active_stage:
                    held += sizes[stages[chunk]]
                    most = max(most, held)
                elif op in GRADIENTS_ARE_WHOLE:
                    held -= sizes[stages[chunk]]
            found.append(most)
        return tuple(found)

    def in_flight(
        self, pipeline_size: int, num_microbatches: int, num_chunks: int = 1, first_active_stage: int = 0
    ) -> tuple[int, ...]:
        """Of how many micro-batches each stage holds the activations at most, for the arguments of `table`."""
        stages = range(pipeline_size * num_chunks)
        counted = ([float(stage == other) for other in stages] for stage in stages)
        where = pipeline_size, num_microbatches, num_chunks, first_active_stage
        return tuple(int(max(self.peaks(sizes, *where))) for sizes in counted)
