"""Asynchronous training without flushes: when windows open, which steps run in them, and when they drain."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_pipetransformer import trainer_compat
from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.engine.weights.rates import coming_rates
from hf_pipetransformer.engine.weights.stage import StageWeights
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.runtime.execution import StageRunner
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.runtime.window import Batch, Window
from hf_pipetransformer.schedules.asynchronous import micro_batches_ahead
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.weight_kinds import find_weights


@dataclass
class Fetched:
    """Optimizer step whose batches have been read.

    Args:
        items: per batch, the number of items summed over all replicas.
        num_items: divisor for the loss; None where the loss takes none.
    """

    batches: list[Any] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    num_items: torch.Tensor | None = None
    is_short: bool = False

    def pairs(self) -> Iterator[tuple[Any, int]]:
        return zip(self.batches, self.items, strict=True)


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
    return max(min(ends), step + 1)


def _multiple(step: int, every: float) -> int:
    """Return the first multiple of `every` after `step`."""
    return int(every) * (step // int(every) + 1)


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
        self.runner = runner
        self.clips_by_last = clips_by_last
        self.record = record
        self.norm: torch.Tensor | None = None
        """Norm of the whole model in the last step that `settle` has seen."""
        self._own: list[torch.Tensor] = []
        self._summed: deque[tuple[torch.Tensor, Any]] = deque()

    def add(self) -> torch.Tensor:
        """Add the squares of the current step; return the norm to clip by, a scalar."""
        squares, groups = self.runner.own_gradient_squares(), self.runner.stage.groups
        own = squares.sum().sqrt().float()
        self._own.append(squares)
        if not self.clips_by_last:
            return own
        total = squares.clone()
        work = guarded(lambda: dist.all_reduce(total, group=groups.pipeline_group, async_op=True), WHAT)
        self._summed.append((total, work))
        if len(self._summed) < groups.pipeline_size:
            return own
        complete, work = self._summed.popleft()
        guarded(work.wait, WHAT)
        return complete.sum().sqrt().float()

    def settle(self, is_drained: bool) -> None:
        """Sum and record the squares of all stages, which must be at the same step. Collective over one pipeline."""
        if self._own:
            squares = self.runner.summed_over_stages(torch.stack(self._own))
            self._own.clear()
            for each in squares.unbind():
                # The embeddings' norm belongs to no layer, but where it is inf or nan, 0 times it makes all entries
                # nan: the step overflowed and counts nowhere.
                self.record(each[:-1] + 0 * each[-1])
            self.norm = squares[-1].sum().sqrt().float()
        if is_drained:
            for _, work in self._summed:
                guarded(work.wait, WHAT)
            self._summed.clear()


Cut = Callable[[dict[str, Any], int, Fetched], Batch]
"""Makes a window's batch from a batch, its items over all replicas, and its step."""


def micro_batches_per_step(layout: Layout, args: PipeTransformerArguments) -> int:
    """Return the micro-batches per optimizer step of full batches; no micro-batch is empty."""
    samples = args.train_samples_per_device * layout.pipeline_size
    return min(layout.num_microbatches, samples) * args.gradient_accumulation_steps


def check_stages(
    layout: Layout, micro_batches_of_parameter: Mapping[str, tuple[int, ...]], args: PipeTransformerArguments
) -> None:
    """Refuse parameters and weight kinds that do not work when stages are at different steps.

    Raises:
        ValueError: a trained parameter is used on several stages, or the weight kind needs more micro-batches.
    """
    if not layout.abilities.overlaps_steps:
        return
    for name, users in micro_batches_of_parameter.items():
        stages = sorted({layout.stage_of(micro_batch) for micro_batch in users})
        if len(stages) > 1:
            raise ValueError(
                f"pipeline_schedule={layout.schedule!r}: {name} is used on stages {', '.join(map(str, stages))}, "
                "which update themselves at different times. Untie it (config.tie_word_embeddings=False), freeze it, "
                "or use pipeline_schedule='1f1b'."
            )
    find_weights(args.pipeline_weights).check(layout.num_stages, micro_batches_per_step(layout, args))


@dataclass(frozen=True)
class _Parts:
    """Objects built for one stage and layout; a stage can get a layout with another number of micro-batches."""

    stage: Stage
    layout: Layout
    weights: StageWeights
    norms: StageNorms


@dataclass
class Windows:
    """Steps that follow each other without a flush; does nothing under a synchronous schedule.

    `decisions` returns the steps before which the layout may change; `record` receives the whole model's squared
    gradient norms of each step.
    """

    trainer: Trainer
    pipeline: Pipeline
    decisions: Callable[[], Iterable[int]]
    record: Callable[[torch.Tensor], None]
    queue: deque[Fetched] = field(default_factory=deque, init=False)
    """Steps that were read but have not begun."""
    _step: int = field(default=0, init=False)
    _drains_at: int = field(default=0, init=False)
    _window: Window | None = field(default=None, init=False)
    _present: Fetched = field(default_factory=Fetched, init=False)
    _num_run: int = field(default=0, init=False)
    _made: _Parts | None = field(default=None, init=False)

    @property
    def is_on(self) -> bool:
        """True if the stages update themselves independently."""
        return self.pipeline.layout.abilities.overlaps_steps

    @property
    def norms(self) -> StageNorms:
        """Gradient norms of the current stage."""
        return self._parts.norms

    def look(self) -> None:
        """Set the drain point before a step is read; all ranks compute the same one."""
        self._step, args = self.trainer.state.global_step, self.trainer.args
        if self._window is None:
            drains_at = next_drain(self.trainer, self.decisions(), args.pipeline_drain_interval)
            self._drains_at = max(drains_at, self._step + len(self.queue))

    def num_wanted(self, position: int) -> int:
        """Return how many steps a rank should have read, counting the one that begins or began last."""
        return min(1 + self.num_ahead(position), self._drains_at - self._step)

    def num_ahead(self, position: int) -> int:
        """Return how many steps a rank reads ahead.

        Earlier stages read further ahead, because a later stage reaches a step before them and needs its batches by
        then.
        """
        size, accumulation = self.pipeline.layout.pipeline_size, self.trainer.args.gradient_accumulation_steps
        needed = ceil(max(micro_batches_ahead(size, rank) for rank in range(size)) / accumulation)
        return needed + size - 1 - position + (position == 0)

    def read(self, step: Fetched, cut: Cut) -> None:
        self.queue.append(step)
        if self._window is not None:
            self._window.add(_batches(step, cut))

    def begin_step(self) -> Fetched:
        self._present, self._num_run = self.queue.popleft(), 0
        return self._present

    def run_batch(self, is_last_batch: bool, cut: Cut) -> torch.Tensor:
        """Run the next batch of the step; see `StageRunner.train`."""
        if self._window is None:
            self._window = self._opened(cut)
        items = self._present.items[self._num_run]
        self._num_run += 1
        return self.pipeline.runner.train_in(self._window, items, is_last_batch)

    def before_update(self) -> None:
        if self._window is not None:
            self._window.weights.before_update()

    def after_update(self) -> None:
        if self._window is not None:
            self._window.weights.after_update()

    def end_step(self, is_counted: bool) -> None:
        """Finish the optimizer step; drain the window after its last one.

        `is_counted`: all ranks have finished this step, because Trainer logs here.
        """
        if self._window is not None and self._num_run:
            self._num_run = 0
            self._window.end_step()
            if not self._window.num_known:
                self._window.drain()
                self._window = None
        if self._made is not None and (is_counted or self._window is None):
            self._made.norms.settle(is_drained=self._window is None)

    def errors(self) -> dict[str, float] | None:
        """Return the errors since the last call: this stage's weights at forward against those at backward."""
        found = self._parts.weights.take_errors()
        return None if found is None else asdict(found)

    def settle(self) -> None:
        """Bring all stages to the same step with nothing in flight. Collective: call on every rank."""
        window, self._window = self._window, None
        if window is not None:
            window.abandon()
        if self._made is not None:
            self._made.norms.settle(is_drained=True)

    def end(self) -> None:
        """Drop all state, also after an error."""
        window, self._window = self._window, None
        if window is not None:
            window.weights.end()
        self.queue.clear()
        self._present, self._num_run = Fetched(), 0

    def _opened(self, cut: Cut) -> Window:
        """Open a window with the rest of the current step and the steps read ahead."""
        window = self.pipeline.runner.open_window(self._parts.weights)
        window.add(_batches(self._present, cut)[self._num_run :])
        for step in self.queue:
            window.add(_batches(step, cut))
        return window

    @property
    def _parts(self) -> _Parts:
        """Parts of the present stage; rebuilt when a transition has changed the stage or its layout."""
        stage, trainer, made = self.pipeline.stage, self.trainer, self._made
        if made is not None and made.stage is stage and made.layout is stage.layout:
            return made
        optimizer, args, layout = trainer_compat.torch_optimizer(trainer), trainer.args, stage.layout

        def num_left() -> int:
            return int(trainer.state.max_steps - trainer.state.global_step)

        weights = StageWeights(
            find_weights(args.pipeline_weights),
            stage.groups.position,
            layout.num_stages,
            optimizer,
            coming_rates(trainer.lr_scheduler, optimizer, num_left),
            micro_batches_per_step(layout, args),
            casts=trainer.accelerator.native_amp,
            modules=stage.view.model.modules(),
        )
        norms = StageNorms(self.pipeline.runner, args.pipeline_clip == "last", self.record)
        self._made = made = _Parts(stage, layout, weights, norms)
        return made


def _batches(step: Fetched, cut: Cut) -> list[Batch]:
    return [cut(batch, items, step) for batch, items in step.pairs()]
