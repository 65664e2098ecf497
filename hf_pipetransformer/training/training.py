"""One call of `train()`, from the creation of the optimizer to the end of the last step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_pipetransformer.cache.training import TrainingCache
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.elastic.controller import LayoutController
from hf_pipetransformer.elastic.migration import OptimizerState
from hf_pipetransformer.elastic.transitions import Transitions
from hf_pipetransformer.runtime.context import CollectiveTimeouts
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.state.description import saves_state
from hf_pipetransformer.state.restore import FirstEpoch, restore
from hf_pipetransformer.state.resumption import Resumption
from hf_pipetransformer.state.saving import Checkpoints
from hf_pipetransformer.training.metrics import Summary
from hf_pipetransformer.training.steps import StepHooks, Steps
from hf_pipetransformer.training.windows import Windows


@dataclass
class Training:
    """Parts of a training, called at the moments of Trainer's loop.

    `loader` is None for a loader of the user's own; `cache` is None if no activations may be stored.
    """

    pipeline: Pipeline
    timeouts: CollectiveTimeouts
    loader: PipelineLoader | None
    optimizer: OptimizerState
    hooks: StepHooks
    steps: Steps
    controller: LayoutController
    transitions: Transitions
    cache: TrainingCache | None
    checkpoints: Checkpoints
    first_epoch: FirstEpoch | None = field(default=None, init=False)
    summary: Summary = field(default_factory=Summary, init=False)
    _shown: Layout | None = field(default=None, init=False)
    _errors: dict[str, float] = field(default_factory=dict, init=False)

    def begin(self, resumption: Resumption | None) -> None:
        """Restore a checkpoint's state, if any, and check that this run's state can be saved.

        Raises:
            ValueError: on every rank, if one of them fails.
        """
        checkpoints = self.checkpoints
        trainer, topology = checkpoints.context.trainer, checkpoints.context.topology
        if self.cache is not None:
            self.cache.follow()
        if resumption is not None:
            self.first_epoch = FirstEpoch(checkpoints, resumption, restore(resumption, checkpoints))
        if saves_state(trainer.args):
            # Fail now instead of at the first checkpoint.
            topology.together(checkpoints.check_savable)

    @contextmanager
    def epoch(self, arguments: dict[str, Any]) -> Iterator[bool]:
        """Wrap Trainer's loop over one epoch, if True is yielded; `arguments` are that loop's."""
        self.checkpoints.epoch = arguments["epoch"]
        with nullcontext(True) if self.first_epoch is None else self.first_epoch.running(arguments) as goes_on:
            if not goes_on:
                yield False
                return
            self.timeouts.rest()
            try:
                yield True
                self.pipeline.settle()  # An epoch that was stopped early may have read ahead.
            finally:
                self.steps.end_epoch()
            self.timeouts.rest()
            if self.cache is not None:
                self.summary.add_reads(*self.cache.report())
        self.first_epoch = None

    def set_random_numbers(self) -> None:
        """Restore the checkpoint's RNG states, once."""
        if self.first_epoch is not None:
            self.first_epoch.set_random_numbers()

    def begin_step(self, epoch_iterator: Any, num_batches: int) -> tuple[list[Any], torch.Tensor | None]:
        """Change the layout if it is due, then fetch the batches of an optimizer step and count their items."""
        if self.steps.are_over(epoch_iterator):
            return [], None
        if self.loader is not None:
            # Inside an epoch, Trainer restores RNG states only after fetching the first step's batches, and would undo
            # what collators drew and a transition seeded.
            self.set_random_numbers()
        moved = self.transitions.before_step()
        if moved is not None and (scalars := self.take_scalars()):
            self.transitions.context.trainer.log(scalars)
        self.summary.begin_step(None if moved is None else moved.predicted)
        batches = self.steps.begin(epoch_iterator, num_batches)
        self.timeouts.enter_step()
        return batches

    def run_batch(self, model: Any, inputs: dict[str, Any], num_items: Any) -> torch.Tensor:
        write = None
        if self.cache is not None:
            inputs, write = self.cache.current(inputs), self.cache.write
        return self.steps.run(model, inputs, num_items, write)

    def gradient_norm(self) -> torch.Tensor:
        """Return the gradients' L2 norm, or the norm to clip by. Collective: call once per step on every rank."""
        if self.windows.is_on:
            return self.windows.norms.add()
        squares = self.steps.gradient_squares()
        # The embeddings' norm belongs to no layer, but 0 times inf or nan marks a step that they overflow in.
        self.controller.watch_gradients(squares[:-1] + 0 * squares[-1])
        return squares.sum().sqrt().float()

    def clip_gradients(self) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`; return the scalar norm before clipping."""
        with self.pipeline.settings.meter.part("optimizer"):
            norm = self.gradient_norm()
            self.steps.clip(norm)
        return norm

    def end_step(self, logs: bool, saves_or_evaluates: bool) -> None:
        """Finish a step, and choose the timeout for what Trainer does next."""
        if self.first_epoch is not None:
            self.first_epoch.correct_epoch()
        self.windows.end_step(is_counted=logs)
        self.controller.end_step()
        self.summary.end_step(self.pipeline.layout)
        if logs:
            self._note_errors()
            self.steps.noted.note("train")
            # Trainer first gathers the loss, under a step's timeout; `log` then switches to the long one.
            self.timeouts.is_resting = True
        elif saves_or_evaluates:
            self.timeouts.rest()

    def logged_norm(self, norm: Any) -> Any:
        """Return the gradient norm to log: the whole model's, even if a step has only the stage's own."""
        return self.windows.norms.norm if self.windows.is_on else norm

    @property
    def windows(self) -> Windows:
        return self.steps.windows

    def take_scalars(self) -> dict[str, float]:
        """Return a layout's scalars for Trainer's log, once per layout, and the latest prediction errors."""
        layout = self.pipeline.layout
        scalars = {} if layout is self._shown else layout.as_scalars()
        self._shown, self._errors, scalars = layout, {}, scalars | self._errors
        return scalars

    def _note_errors(self) -> None:
        """Collect each stage's weight prediction errors for log and events. Collective: call on every rank."""
        if not self.windows.is_on:
            return
        topology, size = self.checkpoints.context.topology, self.pipeline.layout.pipeline_size
        groups = self.pipeline.stage.groups
        own = self.windows.errors() if groups.replica == 0 else None
        by_stage = {
            each["stage"]: each["errors"]
            for each in topology.gather({"stage": groups.position, "errors": own})
            if each["errors"] is not None
        }
        for stage, errors in sorted(by_stage.items()):
            self._errors |= {
                f"stage_{stage}_updates_ahead": errors["s"],
                f"stage_{stage}_prediction_error": errors["error"],
                f"stage_{stage}_staleness": errors["error_unpredicted"],
            }
        if by_stage:
            stages = [{"stage": stage, **by_stage[stage]} for stage in range(size) if stage in by_stage]
            self.transitions.context.journal.write("profile", what="prediction", stages=stages)

    def end(self) -> None:
        """Remove the hooks and close the cache, also after an error."""
        self.hooks.remove()
        self.windows.end()
        if self.cache is not None:
            self.cache.close()
