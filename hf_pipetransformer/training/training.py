"""One call of `train()`, from the creation of the optimizer to the end of the last step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grads_with_norm_

from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.engine.reduction import share_values
from hf_pipetransformer.report import logger
from hf_pipetransformer.training.metrics import MetricAccumulator, Summary
from hf_pipetransformer.training.progress import Progress, Tracer


if TYPE_CHECKING:
    from hf_pipetransformer.cache.training import TrainingCache
    from hf_pipetransformer.data.loader import PipelineLoader
    from hf_pipetransformer.elastic.controller import LayoutController
    from hf_pipetransformer.elastic.transition import Transitions
    from hf_pipetransformer.runtime.optimizer_state import OptimizerState
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.state.resumption import Resumption
    from hf_pipetransformer.state.saving import Checkpoints
    from hf_pipetransformer.training.context import TrainingContext
    from hf_pipetransformer.training.steps import Steps


@dataclass
class Training:
    """Parts of a training, called at the moments of Trainer's loop.

    Args:
        loader: None for a loader of the user's own.
        cache: None if no activations may be stored.
        make_steps: makes the steps for the layout in force.
    """

    context: TrainingContext
    pipeline: Pipeline
    loader: PipelineLoader | None
    optimizer: OptimizerState
    controller: LayoutController
    transitions: Transitions
    cache: TrainingCache | None
    checkpoints: Checkpoints
    metrics: MetricAccumulator
    make_steps: Callable[[], Steps]
    steps: Steps = field(init=False)
    resumption: Resumption | None = field(default=None, init=False)
    """Run that goes on, until the end of the epoch in which it does."""
    summary: Summary = field(default_factory=Summary, init=False)
    progress: Progress = field(init=False)
    tracer: Tracer = field(init=False)
    _shown: Layout | None = field(default=None, init=False)
    _first_loss: torch.Tensor | None = field(default=None, init=False)
    _is_first_checked: bool = field(default=False, init=False)
    _has_looked: bool = field(default=False, init=False)
    """True if the parameters of the model were looked through in this epoch."""
    _reported: dict[str, float] = field(default_factory=dict, init=False)
    _norm: torch.Tensor | None = field(default=None, init=False)
    """Norm that Trainer was given for the last step."""
    _update: ExitStack = field(default_factory=ExitStack, init=False)
    """What ends with the optimizer's step while it runs."""

    def __post_init__(self) -> None:
        self.steps = self.make_steps()
        self.progress = Progress(self.context, self.controller)
        self.tracer = Tracer(self.context)
        self.pipeline.steps = self
        optimizer = self.optimizer.optimizer
        # Hooks, as Trainer calls the optimizer itself, and a loss scaler may skip its step.
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        )

    @contextmanager
    def epoch(self, arguments: dict[str, Any]) -> Iterator[bool]:
        """Wrap Trainer's loop over one epoch, if True is yielded; `arguments` are that loop's."""
        self.checkpoints.epoch = arguments["epoch"]
        if self.resumption is not None:
            trainer_compat.restore_loss(self.context.trainer, self.context.topology, **vars(self.resumption.numbers))
            if not self.resumption.begin_epoch(arguments):
                yield False
                return
        self.context.timeouts.rest()
        self._has_looked = False
        if self.cache is not None:
            self.cache.begin_epoch()
        try:
            yield True
            self.pipeline.settle()  # An epoch that was stopped early may have read ahead.
            if self.cache is not None:
                self.cache.check_end()
        finally:
            self.steps.end_epoch()
        self.context.timeouts.rest()
        if self.cache is not None:
            self.summary.add_reads(*self.cache.report())
        self.resumption = None

    def begin_step(self, epoch_iterator: Any, num_batches: int) -> tuple[list[Any], torch.Tensor | None]:
        """Change the layout if it is due, then fetch the batches of an optimizer step and count their items."""
        if self.steps.are_over(epoch_iterator):
            return [], None
        if self.resumption is not None and self.loader is not None:
            # Before the first batches, so that what collators draw and a transition seeds is not undone.
            self.resumption.set_random_numbers()
        moved = self.transitions.before_step()
        if moved is not None:
            # New steps begin with an empty queue, and batches read under the old layout are cut for its replicas.
            if self.steps.num_read_ahead:
                raise RuntimeError("The layout changes although steps were read ahead, which would be lost.")
            self.progress.report(self.pipeline.stage)
            self.steps = self.make_steps()
            if scalars := self.take_scalars():
                self.context.trainer.log(scalars)
        self.summary.predicted = None if moved is None else moved.predicted
        self.controller.meter.begin_step()
        self.progress.begin_step()
        self.tracer.begin_step(self.pipeline.stage)
        batches = self.steps.begin(epoch_iterator, num_batches)
        if self.resumption is not None:
            # Reading a user's own loader up to here drew what the checkpoint has drawn.
            self.resumption.set_random_numbers()
        self._check_left_out()
        # Behind the reading of batches, which may take longer than any step.
        self.context.timeouts.enter_step()
        return batches

    def _check_left_out(self) -> None:
        """Raise if the script lets a parameter train that the optimizer does not have any more."""
        left_out = self.optimizer.left_out
        named = self.pipeline.stage.store.named() if left_out else {}
        for name in left_out:
            if named[name].requires_grad:
                raise ValueError(
                    f"{name} was frozen when training started, and requires_grad is True now: the optimizer that the "
                    "trainer was given has lost it, and would not train it. Leave it trainable until training starts "
                    "and freeze it in a callback (on_train_begin), or train with one stage and no freezing."
                )

    def _check_added(self) -> None:
        """Raise if the script has put layers, or parameters that ask for gradients, into the model meanwhile."""
        # Not in each step: walking through the modules takes a millisecond.
        self._has_looked = True
        stage = self.pipeline.stage
        structure, present = stage.view.structure, set(map(id, stage.view.model.modules()))
        is_divided = stage.layout.pipeline_size > 1 or stage.layout.cache_level > 0
        if is_divided and not present >= {id(each) for each in (*structure.layers, *structure.entries)}:
            raise ValueError(
                "A layer of the model, or its embeddings, was replaced by another module after training started, "
                "which no stage knows. Change what it has inside, or replace it before train()."
            )
        known = set(map(id, stage.store.named().values()))
        for name, parameter in stage.view.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ValueError(
                    f"{name} came into the model after training started, and asks for gradients, which stages and "
                    "micro-batches would neither add nor clip. Put adapters and new modules in before train(), or "
                    "train on one process without micro-batches."
                )

    def run_batch(self, inputs: dict[str, Any], num_items: Any) -> torch.Tensor:
        """Run forward and backward of one loader batch; the last one of an accumulation also reduces the gradients.

        Returns a scalar whose mean over all ranks is the batch's loss.
        """
        write, steps = None, self.steps
        if not self._has_looked:
            self._check_added()
        if self.cache is not None:
            inputs, write = self.cache.current(inputs), self.cache.write
        batch = steps.next_batch(inputs, num_items, write)
        loss = steps.loss_of_all(steps.run(batch, self.context.trainer.accelerator.sync_gradients))
        if self._first_loss is None:
            # Looked at with the first log entry: its value now would make the host wait for the device.
            self._first_loss = loss.detach().clone()
        return loss

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients, and return the scalar norm before: the norm to clip by, which may be of another step.

        Collective: call once per step on every rank.
        """
        meter = self.pipeline.settings.meter
        with meter.part("optimizer"), meter.tracing("clip gradients"):
            norm = self.steps.gradient_norm()
            # Trainer gives an infinite limit to get the norm alone.
            if max_norm < math.inf:
                clip_grads_with_norm_(self.pipeline.runner.norms.parameters(), max_norm, norm)
        self._norm = norm
        return norm

    def _before_update(self, *_: Any) -> None:
        self._update = ExitStack()  # The last step may have raised: then its values are not shared.
        meter = self.pipeline.settings.meter
        self._update.enter_context(meter.part("optimizer"))
        self._update.enter_context(meter.tracing("update"))
        # Entered before `updating`, so it runs after it: the other users of a shared weight get its final value.
        self._update.callback(share_values, self.pipeline.stage.shared)
        self._update.enter_context(self.steps.updating())

    def _after_update(self, *_: Any) -> None:
        self._update.close()

    def end_step(self, logs: bool, saves_or_evaluates: bool) -> None:
        """Finish a step, and choose the timeout for what Trainer does next."""
        self.steps.end_step(is_counted=logs)
        if saves_or_evaluates:
            self._check_added()
        if self.cache is not None and (saves_or_evaluates or self.loader is None or self.loader.is_at_end):
            self.cache.check_end()  # Trainer comes here twice at the end of an epoch.
        if self.controller.end_step():
            seconds = self.controller.meter.host_seconds
            self.summary.add_step(self.pipeline.layout, seconds)
            self.progress.add_step(self.pipeline.stage, seconds)
        self.tracer.end_step(self.pipeline.stage)
        if logs:
            self._check_first_loss()
            if self._norm is not None and (norm := self.steps.norm_of_stages()) is not None:
                self._norm.copy_(norm)  # Trainer reads what it was given when it logs.
            self._reported |= self.steps.report() | self.progress.report(self.pipeline.stage)
            self.metrics.publish("train", self.pipeline.stage.groups)
            # Trainer first gathers the loss, under a step's timeout; `log` then switches to the long one.
            self.context.timeouts.is_resting = True
        elif saves_or_evaluates:
            self.context.timeouts.rest()

    def _check_first_loss(self) -> None:
        """Warn once if the first loss is not finite: the start-up checks run a few layers, and this all of them.

        Collective: call on every rank, where Trainer gathers the loss too.
        """
        if self._is_first_checked or self._first_loss is None:
            return
        self._is_first_checked = True
        # Read here, where Trainer waits for the device as well; in the first step it would be one more wait.
        losses = self.context.topology.gather(float(self._first_loss))
        if self.context.topology.rank == 0 and not all(map(math.isfinite, losses)):
            logger.warning(
                f"The loss of the first batch is {sum(losses) / len(losses)}, expected a finite number: look at the "
                "data and the weights. With logging_nan_inf_filter=True the log leaves such losses out."
            )

    def settle(self) -> None:
        """Bring all stages to the same step, nothing in flight. Collective: call on every rank."""
        self.steps.settle()

    def take_scalars(self) -> dict[str, float]:
        """Return a layout's scalars for Trainer's log, once per layout, and what the steps reported last."""
        layout = self.pipeline.layout
        scalars = {} if layout is self._shown else layout.as_scalars()
        self._shown, self._reported, scalars = layout, {}, scalars | self._reported
        return scalars

    def end(self) -> None:
        """Remove the hooks from the optimizer, which may be the user's, and close the cache. Also after an error."""
        for hook in self._hooks:
            hook.remove()
        self.steps.end()
        if self.cache is not None:
            self.cache.close()
