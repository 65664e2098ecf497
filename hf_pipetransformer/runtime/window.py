"""A window of asynchronous training: optimizer steps that follow each other through the pipeline without a flush."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist

from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.comm.topology import PipelineGroups
from hf_pipetransformer.engine.engine import Engine
from hf_pipetransformer.engine.program import MicroBatch, MicroBatches
from hf_pipetransformer.engine.weights.stage import StageWeights, VersionedProgram
from hf_pipetransformer.schedules import COMPUTATIONS, Action, Op, Row
from hf_pipetransformer.schedules.asynchronous import enough, step_row
from hf_pipetransformer.schedules.placement import Placement


@dataclass(frozen=True)
class Batch:
    """A batch of a step, cut into units.

    Args:
        parts: the units, as they will be asked for.
        shapes: of their activations.
    """

    parts: MicroBatches
    shapes: Sequence[tuple[int, ...]]


class Window:
    """Runs the steps between two drains; all ranks of a pipeline at their own pace, each in the same order.

    A unit is a micro-batch, numbered from the beginning of the window on, as the steps are.

    Args:
        engine: of this rank's one stage.
        groups: its place.
        first_active_stage: stages below it run forwards only.
        weights: what forwards and backwards see of the stage's.
    """

    def __init__(self, engine: Engine, groups: PipelineGroups, first_active_stage: int, weights: StageWeights) -> None:
        self.groups = groups
        self.first_active_stage = first_active_stage
        self.weights = weights
        self._placement = Placement(groups.pipeline_size)
        self._steps: deque[list[Batch]] = deque()
        self._num_added = 0
        self._before: deque[int] = deque()
        self._units = _Units()
        self._first_unit = 0
        self._rows: deque[Row] = deque()
        (program,) = engine.programs
        weights.begin()
        if groups.position >= first_active_stage:
            program = VersionedProgram(program, weights)
        own = Engine([program], engine.links, engine.meter)
        self.run = own.begin((), self._units)

    def add(self, batches: Sequence[Batch]) -> None:
        """Another step is known, and those before it."""
        for batch in batches:
            self._units.add(batch, self._num_added)
        self._steps.append(list(batches))
        self._num_added += 1

    @property
    def num_known(self) -> int:
        """Steps that are under way or have not begun."""
        return len(self._steps)

    def begin_batch(self) -> Row:
        """This rank's part in the next batch: `advance` runs it, and what of later ones belongs between its units."""
        if not self._rows:
            self._rows.extend(self._rows_of_step())
        row = self._rows.popleft()
        self.run.extend(row)
        return row

    def end_step(self) -> None:
        """The stage has updated its weights."""
        size = _num_units(self._steps.popleft())
        self._before.append(size)
        while sum(self._before) - self._before[0] >= enough(self.groups.pipeline_size):
            self._before.popleft()
        self._units.forget(range(self._first_unit, self._first_unit + size))
        self._first_unit += size

    def _rows_of_step(self) -> Iterator[Row]:
        """The step's row, cut behind the last backward of each batch; a frozen stage runs all of it first."""
        (present, *later), rank = self._steps, self.groups.position
        sizes = [len(batch.shapes) for batch in present]
        row = step_row(
            self._placement,
            self.first_active_stage,
            rank,
            tuple(self._before),
            sum(sizes),
            tuple(map(_num_units, later)),
        )
        shifted = [
            action._replace(micro_batch=action.micro_batch + self._first_unit)
            for action in row
            if action.op is not Op.UPDATE
        ]
        start = 0
        for end in list(accumulate(sizes))[:-1]:
            stop = _behind(shifted, Action(Op.BACKWARD, self._first_unit + end - 1), start)
            yield tuple(shifted[start:stop])
            start = stop
        yield tuple(shifted[start:])

    def drain(self) -> None:
        """The last step of the window is done: all that was sent has left this rank."""
        self.run.drain()
        self.weights.end()

    def abandon(self) -> None:
        """End the window after the present batch, the same on all ranks of the pipeline; a collective call of them.

        Forwards that ran ahead are for nothing: their units have to run again.
        """
        posted = self.run.num_posted
        transfers = (Op.SEND_FORWARD, Op.RECEIVE_FORWARD, Op.SEND_BACKWARD, Op.RECEIVE_BACKWARD)
        own = torch.tensor([posted[op] for op in transfers])
        everyone = [torch.zeros_like(own) for _ in range(self.groups.pipeline_size)]
        group = self.groups.pipeline_control
        guarded(lambda: dist.all_gather(everyone, own, group=group), "agreeing on what is under way between stages")
        nothing = [0] * len(transfers)
        rank, last = self.groups.position, self.groups.pipeline_size - 1
        below = everyone[rank - 1].tolist() if rank else nothing
        above = everyone[rank + 1].tolist() if rank < last else nothing
        neighbours = {
            Op.RECEIVE_FORWARD: below[0],
            Op.SEND_FORWARD: above[1],
            Op.RECEIVE_BACKWARD: above[2],
            Op.SEND_BACKWARD: below[3],
        }
        self.run.abandon(neighbours, self._units.shape)
        self.weights.end()


class _Units:
    """The units of a window by their number."""

    def __init__(self) -> None:
        self._where: dict[int, tuple[Batch, int, int]] = {}
        self._num = 0

    def add(self, batch: Batch, step: int) -> None:
        """Those of a batch of `step`."""
        for position in range(len(batch.shapes)):
            self._where[self._num] = batch, position, step
            self._num += 1

    def __getitem__(self, number: int) -> MicroBatch:
        batch, position, step = self._where[number]
        return replace(batch.parts[position], index=number, step=step)

    def shape(self, number: int) -> tuple[int, ...]:
        """Of a unit's activation."""
        batch, position, _ = self._where[number]
        return batch.shapes[position]

    def forget(self, numbers: range) -> None:
        """What has run on this rank."""
        for number in numbers:
            del self._where[number]


def _num_units(batches: Sequence[Batch]) -> int:
    return sum(len(batch.shapes) for batch in batches)


def _behind(row: Sequence[Action], last: Action, start: int) -> int:
    """Before the first computation behind `last`; the end of the row if `last` is not there from `start` on."""
    if last not in row[start:]:
        return start if any(action.op is Op.BACKWARD for action in row) else len(row)
    position = row.index(last, start) + 1
    while position < len(row) and row[position].op not in COMPUTATIONS:
        position += 1
    return position
