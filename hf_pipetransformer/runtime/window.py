"""Window of asynchronous training: optimizer steps that follow each other without draining the pipeline."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from hf_pipetransformer.comm.transfers import gather_rows
from hf_pipetransformer.engine.engine import Engine
from hf_pipetransformer.engine.weights.stage import StageWeights, VersionedProgram
from hf_pipetransformer.runtime.execution import OnDevice
from hf_pipetransformer.schedules.actions import COMPUTATIONS, Action, ActionList, Op
from hf_pipetransformer.schedules.asynchronous import step_actions


if TYPE_CHECKING:
    from hf_pipetransformer.engine.program import MicroBatch
    from hf_pipetransformer.runtime.execution import LoaderBatch, StageRunner


class Window:
    """Executor of the steps between two drains of the pipeline.

    Ranks run at different paces but in the same order, and have one stage each. Micro-batches and steps are numbered
    from the beginning of the window.
    """

    def __init__(self, runner: StageRunner, weights: StageWeights) -> None:
        self.runner, stage = runner, runner.stage
        self.groups = groups = stage.groups
        self.first_active_stage = stage.layout.first_active_stage
        self.weights = weights
        self._placement = stage.layout.places
        self._steps: deque[list[OnDevice]] = deque()
        self._num_added = 0
        self._before: deque[int] = deque()
        self._micro_batches: dict[int, OnDevice] = {}
        """Batch of each micro-batch, by its number."""
        self._num_micro_batches = 0
        self._first_micro_batch = 0
        self._action_lists: deque[ActionList] = deque()
        (program,) = stage.engine.programs
        weights.begin()
        # Weights of a frozen stage have one version only.
        if groups.position >= self.first_active_stage:
            program = VersionedProgram(program, weights)
        # An engine of its own, as versions of the weights are kept within the window only.
        own = Engine([program], stage.engine.links, stage.engine.meter)
        self._run = own.begin((), _Lookup(self._micro_batches))

    def add(self, batches: Iterable[LoaderBatch]) -> None:
        """Append the batches of the next step. Steps added early let forwards run ahead into them."""
        self._steps.append([self._cut(batch) for batch in batches])
        self._num_added += 1

    def _cut(self, batch: LoaderBatch) -> OnDevice:
        runner, groups, layout = self.runner, self.groups, self.runner.stage.layout
        cut, start = runner.cut(batch, runner.loss_rule, layout.num_microbatches), self._num_micro_batches
        parts = [replace(part, index=start + part.index, step=self._num_added) for part in cut]
        self._num_micro_batches += len(parts)
        has_backward = groups.position >= layout.first_active_stage
        # Lookups of a micro-batch: the forward, the backward, and one receive for each if a neighbor sends.
        num_uses = 1 + (not groups.is_first) + has_backward + (has_backward and not groups.is_last)
        uses = Counter(dict.fromkeys((part.index for part in parts), num_uses))
        own = OnDevice(parts, uses, batch.prepare, runner.copies)
        self._micro_batches |= dict.fromkeys(own.parts, own)
        return own

    @property
    def num_known(self) -> int:
        """Number of steps added and not ended, including a running one."""
        return len(self._steps)

    def train(self, num_items: int, is_last_batch: bool) -> torch.Tensor:
        """Run the next batch, with `num_items` items over all replicas. Result as of `StageRunner.train`."""
        if not self._action_lists:
            self._action_lists.extend(self._actions_of_step())
        # With forwards of later batches.
        actions = self._action_lists.popleft()
        self._run.extend(actions)
        for stop in self.runner.stops(actions, is_last_batch):
            self._run.advance(before=stop)
        shares = self._run.take_results()
        if is_last_batch:
            self.runner.reduce_gradients()
        if shares:
            return torch.stack(shares).sum()
        is_nan = num_items == 0 and self.groups.is_last
        return torch.full((), float("nan") if is_nan else 0.0, device=self.runner.stage.settings.device)

    def end_step(self) -> None:
        """Remove the oldest step. Call after the stage's optimizer step."""
        gone = [number for batch in self._steps.popleft() for number in batch.parts]
        size = len(gone)
        self._before.append(size)
        # Micro-batches of older steps have no influence on the next actions, see `step_actions`.
        while sum(self._before) - self._before[0] >= self.groups.pipeline_size:
            self._before.popleft()
        for number in gone:
            del self._micro_batches[number]
        self._first_micro_batch += size

    def _actions_of_step(self) -> Iterator[ActionList]:
        """Yield the step's action list, cut after each batch's last backward; on a frozen stage all in one part."""
        (present, *later), rank = self._steps, self.groups.position
        sizes = [len(batch.parts) for batch in present]
        actions = step_actions(
            self._placement,
            self.first_active_stage,
            rank,
            tuple(self._before),
            sum(sizes),
            tuple(sum(len(batch.parts) for batch in batches) for batches in later),
        )
        shifted = [
            action._replace(micro_batch=action.micro_batch + self._first_micro_batch)
            for action in actions
            # An update is no action of the engine: it follows at the end of the list.
            if action.op is not Op.UPDATE
        ]
        start = 0
        for end in list(accumulate(sizes))[:-1]:
            stop = _behind(shifted, Action(Op.BACKWARD, self._first_micro_batch + end - 1), start)
            yield tuple(shifted[start:stop])
            start = stop
        yield tuple(shifted[start:])

    def drain(self) -> None:
        """End the window after its last step, once all sends are complete."""
        self._run.drain()
        self.weights.end()

    def abandon(self) -> None:
        """End the window after the current batch. Forwards that ran ahead into later batches must run again.

        Collective: call on every rank of the pipeline, after the same batch.
        """
        # Ranks have run ahead by different numbers of steps: what one has sent, its neighbor must still receive.
        posted = self._run.num_posted
        transfers = (Op.SEND_FORWARD, Op.RECEIVE_FORWARD, Op.SEND_BACKWARD, Op.RECEIVE_BACKWARD)
        own = torch.tensor([posted[op] for op in transfers])
        counts, what = [len(own)] * self.groups.pipeline_size, "agreeing on what is under way between stages"
        everyone = gather_rows(own, counts, self.groups.pipeline_control, what)
        # A receive of this rank matches a send of its neighbor, and a send matches a receive.
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
        self._run.abandon(neighbours, lambda number: self._micro_batches[number].parts[number].activation_shape)
        self.weights.end()


class _Lookup:
    """Lookup of micro-batches by number in their batches."""

    def __init__(self, batches: dict[int, OnDevice]) -> None:
        self.batches = batches

    def __getitem__(self, number: int) -> MicroBatch:
        return self.batches[number][number]


def _behind(actions: Sequence[Action], last: Action, start: int) -> int:
    """Return the position of the first computation after `last`, searching from `start`.

    If it is not found, return `start` (the batch is empty), or the end of a list without backwards (a frozen stage).
    """
    if last not in actions[start:]:
        return start if any(action.op is Op.BACKWARD for action in actions) else len(actions)
    position = actions.index(last, start) + 1
    # The transfers behind it are still the batch's: a neighbor waits for the gradient while this rank updates.
    while position < len(actions) and actions[position].op not in COMPUTATIONS:
        position += 1
    return position
