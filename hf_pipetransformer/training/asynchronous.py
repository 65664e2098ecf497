"""Asynchronous steps without flushes: when windows open, which steps run in them, and when they drain."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import Trainer
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.engine.weights.rates import coming_rates
from hf_pipetransformer.engine.weights.stage import StageWeights
from hf_pipetransformer.runtime.window import Window
from hf_pipetransformer.schedules.asynchronous import micro_batches_ahead
from hf_pipetransformer.schedules.weight_kinds import find_weights
from hf_pipetransformer.training.steps import StepBatches, Steps


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.runtime.execution import LoaderBatch, StageRunner
    from hf_pipetransformer.schedules.layout import Layout


def next_drain(trainer: Trainer, decisions: Iterable[int], interval: int | None) -> int:
    """Return the number of optimizer steps done at the next drain; the same on all ranks.

    Unpredictable events, such as a callback that asks for a checkpoint, end a window when they occur. `decisions` has
    the steps before which the layout may change; `interval` is the largest number of steps between drains.
    """
    args, state = trainer.args, trainer.state
    step = state.global_step
    ends = [state.max_steps, *(decision for decision in decisions if decision > step)]
    if interval is not None:
        ends.append(step + interval)
    if args.eval_strategy == IntervalStrategy.STEPS and state.eval_steps:
        ends.append(_multiple(step, state.eval_steps))
    if args.save_strategy == SaveStrategy.STEPS and state.save_steps:
        ends.append(_multiple(step, state.save_steps))
    # A window has at least one step, also where an event is due at once.
    return max(min(ends), step + 1)


def _multiple(step: int, every: float) -> int:
    """Return the first multiple of `every` after `step`."""
    return int(every) * (step // int(every) + 1)


def micro_batches_per_step(layout: Layout, args: PipeTransformerArguments) -> int:
    """Return the micro-batches per optimizer step of full batches; no micro-batch is empty."""
    samples = args.train_samples_per_device * layout.pipeline_size
    return min(layout.num_microbatches, samples) * args.gradient_accumulation_steps


WHAT = "summing the gradient norms over the stages"


class StageNorms:
    """Squared gradient norms of a stage, summed over the stages once these have reached the same step.

    Args:
        clips_by_last: clip by the norm of the whole model `K - 1` steps ago, the last step that all stages have
            finished, so no stage waits for another. The first `K - 1` steps after a drain clip by the stage's own
            norm.
        record: receives the whole model's squares of each step, in order.
    """

    def __init__(self, runner: StageRunner, clips_by_last: bool, record: Callable[[torch.Tensor], None]) -> None:
        self.norms = runner.norms
        self.groups = runner.stage.groups
        self.clips_by_last = clips_by_last
        self.record = record
        self.norm: torch.Tensor | None = None
        """Norm of the whole model in the last step that `settle` has seen."""
        self._own: list[torch.Tensor] = []
        self._summed: deque[tuple[torch.Tensor, Any]] = deque()

    def add(self) -> torch.Tensor:
        """Add the squares of the current step; return the norm to clip by, a scalar."""
        squares = self.norms.own_squares()
        own = squares.sum().sqrt().float()
        self._own.append(squares)
        if not self.clips_by_last:
            return own
        # The reduction writes in place and runs on, and `settle` still needs the stage's own squares.
        total = squares.clone()
        work = guarded(lambda: dist.all_reduce(total, group=self.groups.pipeline_group, async_op=True), WHAT)
        self._summed.append((total, work))
        # Stages are up to `K - 1` steps apart: a newer sum would have to be waited for.
        if len(self._summed) < self.groups.pipeline_size:
            return own
        complete, work = self._summed.popleft()
        guarded(work.wait, WHAT)
        return complete.sum().sqrt().float()

    def settle(self, is_drained: bool) -> None:
        """Sum and record the squares of all stages, which must be at the same step. Collective over one pipeline."""
        if self._own:
            # One reduction for all steps since the last one, which no stage has to wait for within a step.
            squares = self.norms.sum_over_stages(torch.stack(self._own))
            self._own.clear()
            for each in squares.unbind():
                self.record(each)
            self.norm = squares[-1].sum().sqrt().float()
        if is_drained:
            # Nobody reads these sums any more, but behind a drain nothing may be under way.
            for _, work in self._summed:
                guarded(work.wait, WHAT)
            self._summed.clear()


@dataclass
class AsynchronousSteps(Steps):
    """Steps that follow each other without a flush: each stage updates its weights without waiting for the others."""

    _queue: deque[StepBatches] = field(default_factory=deque, init=False)
    _step: int = field(default=0, init=False)
    _drains_at: int = field(default=0, init=False)
    _window: Window | None = field(default=None, init=False)
    _made: tuple[Layout, StageWeights] | None = field(default=None, init=False)

    @staticmethod
    def check(layout: Layout, users: Mapping[str, tuple[int, ...]], args: PipeTransformerArguments) -> None:
        for name, blocks in users.items():
            stages = sorted({layout.stage_of(block) for block in blocks})
            if len(stages) > 1:
                raise ValueError(
                    f"pipeline_schedule={layout.schedule!r}: {name} is used on stages {', '.join(map(str, stages))}, "
                    "which update themselves at different times. Untie it (config.tie_word_embeddings=False), freeze "
                    "it, or use pipeline_schedule='1f1b'."
                )
        find_weights(args.pipeline_weights).check(layout.num_stages, micro_batches_per_step(layout, args))

    @property
    def num_read_ahead(self) -> int:
        return len(self._queue)

    # ---- reading ahead ----

    def _read_step(self, num_batches: int) -> StepBatches:
        self._step, args = self.trainer.state.global_step, self.trainer.args
        if self._window is None:
            # All ranks compute the same drain point.
            drains_at = next_drain(self.trainer, self.controller.coming_decisions(), args.pipeline_drain_interval)
            # Not before the steps that are read already: a drain may change the layout, for which they were cut.
            self._drains_at = max(drains_at, self._step + len(self._queue))
        self._read_ahead(self._num_wanted(self.pipeline.stage.groups.position), num_batches)
        return self._queue.popleft()

    def _read_ahead(self, num_wanted: int, num_batches: int) -> None:
        """Read until the queue has `num_wanted` steps or the epoch ends; the first step has `num_batches` batches."""
        accumulation = self.trainer.args.gradient_accumulation_steps
        if self.loader is not None:
            # Batches stay in transit until later stages, which read less far ahead, take them.
            self.loader.num_under_way = accumulation * (1 + self._num_ahead(0))
        for _ in range(num_wanted - len(self._queue)):
            if self._queue and self._has_ended:
                break
            step = self._fetch(num_batches)
            self._queue.append(step)
            if self._window is not None:
                self._window.add(self._batches(step))
            num_batches = accumulation

    def _num_wanted(self, position: int) -> int:
        """Return how many steps a rank should have read, counting the one that begins or began last."""
        return min(1 + self._num_ahead(position), self._drains_at - self._step)

    def _num_ahead(self, position: int) -> int:
        """Return how many steps a rank reads ahead.

        Earlier stages read further ahead, because a later stage reaches a step before them and needs its batches by
        then. So do ranks that pass batches on: the first of a pipeline, and over several nodes the first of each.
        """
        size, accumulation = self.pipeline.layout.pipeline_size, self.trainer.args.gradient_accumulation_steps
        needed = ceil(max(micro_batches_ahead(size, rank) for rank in range(size)) / accumulation)
        node_size = self.context.topology.local_world_size
        passes_on = (position == 0) + (size > node_size and position % node_size == 0)
        return needed + size - 1 - position + passes_on

    # ---- running ----

    def run(self, batch: LoaderBatch, is_last_batch: bool) -> torch.Tensor:
        if self._window is None:
            # The rest of the present step, and the steps read ahead.
            self._window = Window(self.pipeline.runner, self._weights)
            # `next_batch` has counted the batch that runs now, which belongs to the window too.
            self._window.add(self._batches(self._present, self._num_run - 1))
            for step in self._queue:
                self._window.add(self._batches(step))
        return self._window.train(batch.num_items, is_last_batch)

    def _batches(self, step: StepBatches, first: int = 0) -> list[LoaderBatch]:
        """Return the batches of a step from one on."""
        return [
            self._loader_batch(inputs, number, step, step.num_items)
            for number, inputs in enumerate(step.batches)
            if number >= first
        ]

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm to clip by, of this stage or of an earlier step."""
        return self._norms.add()

    def norm_of_stages(self) -> torch.Tensor | None:
        return self._norms.norm

    @contextmanager
    def updating(self) -> Iterator[None]:
        weights = None if self._window is None else self._window.weights
        if weights is not None:
            weights.before_update()
        yield
        if weights is not None:
            weights.after_update()

    def end_step(self, is_counted: bool) -> None:
        """Finish the optimizer step, and drain the window after its last one."""
        # Trainer calls once more at the end of an epoch, when no batch has run since.
        if self._window is not None and self._num_run:
            self._num_run = 0
            self._window.end_step()
            if not self._window.num_known:
                self._window.drain()
                self._window = None
        # Not in every step: the sum over the stages would make them wait for each other.
        if is_counted or self._window is None:
            self._norms.settle(is_drained=self._window is None)

    def report(self) -> dict[str, float]:
        """Return each stage's weight prediction errors since the last call, and write them as an event."""
        groups, size = self.pipeline.stage.groups, self.pipeline.layout.pipeline_size
        # Replicas of a stage have the same weights, and so the same errors.
        found = self._weights.take_errors() if groups.replica == 0 else None
        own = {"stage": groups.position, "errors": None if found is None else asdict(found)}
        by_stage = {
            each["stage"]: each["errors"] for each in self.context.topology.gather(own) if each["errors"] is not None
        }
        scalars: dict[str, float] = {}
        for stage, errors in sorted(by_stage.items()):
            scalars |= {
                f"stage_{stage}_updates_ahead": errors["s"],
                f"stage_{stage}_prediction_error": errors["error"],
                f"stage_{stage}_staleness": errors["error_unpredicted"],
            }
        if by_stage:
            stages = [{"stage": stage, **by_stage[stage]} for stage in range(size) if stage in by_stage]
            self.context.journal.write("profile", what="prediction", stages=stages)
        return scalars

    # ---- ending ----

    def settle(self) -> None:
        if self._iterator is not None:
            if not self._has_ended:
                # Every rank as far as the first, which reads furthest: so no batch is left on its way to a later one.
                self._read_ahead(self._num_wanted(0) - 1, self.trainer.args.gradient_accumulation_steps)
            if self.loader is not None:
                self.loader.num_ahead = sum(len(step.batches) for step in self._queue)
        window, self._window = self._window, None
        if window is not None:
            window.abandon()
        self._norms.settle(is_drained=True)

    def end(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.weights.end()
        self._queue.clear()
        self._present, self._num_run = StepBatches(), 0

    @cached_property
    def _norms(self) -> StageNorms:
        clips_by_last = self.trainer.args.pipeline_clip == "last"
        return StageNorms(self.pipeline.runner, clips_by_last, self.controller.watch_gradients)

    @property
    def _weights(self) -> StageWeights:
        """Versions of the stage's weights; others where only the number of micro-batches of its layout has changed."""
        stage, layout, trainer, args = self.pipeline.stage, self.pipeline.layout, self.trainer, self.trainer.args
        if self._made is not None and self._made[0] is layout:
            return self._made[1]
        optimizer = trainer_compat.torch_optimizer(trainer)
        weights = StageWeights(
            find_weights(args.pipeline_weights),
            stage.groups.position,
            layout.num_stages,
            optimizer,
            coming_rates(trainer.lr_scheduler, optimizer, lambda: trainer.state.max_steps - trainer.state.global_step),
            micro_batches_per_step(layout, args),
            casts=trainer.accelerator.native_amp,
            modules=stage.view.model.modules(),
        )
        self._made = layout, weights
        return weights
