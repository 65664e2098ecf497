"""Optimizer steps of a training: fetching batches, running them through the pipeline, clipping and updating."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch.nn.utils import clip_grads_with_norm_
from transformers import Trainer

from hf_pipetransformer import trainer_compat
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import batch_size
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.elastic.migration import keep_parameters
from hf_pipetransformer.engine.losses import agree_on_overflow
from hf_pipetransformer.engine.program import Forward, Write
from hf_pipetransformer.engine.reduction import share_values
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.runtime.window import Batch
from hf_pipetransformer.splitters.base import main_input_of
from hf_pipetransformer.training.metrics import MetricAccumulator
from hf_pipetransformer.training.windows import Fetched, Windows


def divide(optimizer: torch.optim.Optimizer, pipeline: Pipeline, names: Mapping[int, str]) -> dict[str, int]:
    """Restrict an optimizer to this stage's parameters, keeping its groups.

    The first stage that uses a shared parameter updates it; the others receive the value.

    Args:
        names: `id` of each parameter, from before the model was split, to its name.

    Returns:
        Parameter name to group index, for the whole model; empty for a single stage, which keeps everything.
    """
    if pipeline.layout.pipeline_size == 1:
        return {}
    stage = pipeline.stage
    now = {id(parameter): name for name, parameter in stage.view.model.named_parameters()}
    return keep_parameters(optimizer, {**names, **now}, stage.trained_here())


class StepHooks:
    """Hooks that time an optimizer's steps and send updated shared parameters to the other stages."""

    def __init__(self, optimizer: torch.optim.Optimizer, pipeline: Pipeline, windows: Windows) -> None:
        self.pipeline = pipeline
        self.windows = windows
        self._part = ExitStack()
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def remove(self) -> None:
        """Remove the hooks from the optimizer, which may be the user's own."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: Any) -> None:
        self._part.enter_context(self.pipeline.settings.meter.part("optimizer"))
        self.windows.before_update()

    def _end(self, *_: Any) -> None:
        self.windows.after_update()
        share_values(self.pipeline.stage.shared)
        self._part.close()


@dataclass
class Steps:
    """Optimizer steps of a training, run through its pipeline.

    `loader` is None for a loader of the user's own.
    """

    trainer: Trainer
    topology: Topology
    pipeline: Pipeline
    loader: PipelineLoader | None
    noted: MetricAccumulator
    windows: Windows
    _iterator: Any = field(default=None, init=False)
    _present: Fetched = field(default_factory=Fetched, init=False)
    _is_short: bool = field(default=False, init=False)
    _items: deque[int] = field(default_factory=deque, init=False)

    def are_over(self, epoch_iterator: Any) -> bool:
        """Return True at the end of an epoch's iterator: Trainer asks for batches up to its own number of steps."""
        is_at_end = self._is_short if self.loader is None else self.loader.is_at_end
        return epoch_iterator is self._iterator and is_at_end and not self.windows.queue

    def begin(self, epoch_iterator: Any, num_batches: int) -> tuple[list[Any], torch.Tensor | None]:
        """Fetch the batches of one step, and count the items of their losses over all replicas."""
        self._iterator, windows = epoch_iterator, self.windows
        if windows.is_on:
            windows.look()
            self._read_ahead(windows.num_wanted(self.pipeline.stage.groups.position), num_batches)
            step = windows.begin_step()
        else:
            step = self._fetch(epoch_iterator, num_batches)
        self._present, self._items = step, deque(step.items)
        return step.batches, step.num_items

    def _read_ahead(self, num_wanted: int, num_batches: int) -> None:
        """Read until the queue has `num_wanted` steps or the epoch ends; the first step has `num_batches` batches."""
        windows, accumulation = self.windows, self.trainer.args.gradient_accumulation_steps
        if self.loader is not None:
            # Batches stay in transit until later stages, which read less far ahead, take them.
            self.loader.num_under_way = accumulation * (1 + windows.num_ahead(0))
        for _ in range(num_wanted - len(windows.queue)):
            if windows.queue and self._has_ended:
                break
            windows.read(self._fetch(self._iterator, num_batches), self._cut)
            num_batches = accumulation

    def settle(self) -> None:
        """Bring all stages to the same step and data position, nothing in flight. Collective: call on every rank."""
        if self.windows.is_on and self._iterator is not None:
            if not self._has_ended:
                accumulation = self.trainer.args.gradient_accumulation_steps
                self._read_ahead(self.windows.num_wanted(0) - 1, accumulation)
            if self.loader is not None:
                self.loader.num_ahead = sum(len(step.batches) for step in self.windows.queue)
        self.windows.settle()

    @property
    def _has_ended(self) -> bool:
        return self._is_short or (self.loader is not None and self.loader.is_at_end)

    def _fetch(self, epoch_iterator: Any, num_batches: int) -> Fetched:
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        counts = [trainer_compat.items_of(self.trainer, batch) for batch in batches]
        if self.loader is None:
            items = self._items_of_users(counts, num_batches)
        else:
            items = self.pipeline.runner.over_replicas(counts)
        self._is_short = len(batches) < num_batches
        # A replica's batch may be empty, so `has_labels` says what the data set showed at the start.
        passes = self.pipeline.has_labels and trainer_compat.takes_num_items(self.trainer)
        device = self.trainer.args.device
        return Fetched(batches, items, torch.full((), float(sum(items)), device=device) if passes else None)

    def _items_of_users(self, counts: list[int], num_batches: int) -> list[int]:
        """Sum the item counts of the user's own loaders; every replica must deliver the same number of batches."""
        given = len(counts)
        *items, total = self.pipeline.runner.over_replicas([*counts, *[0] * (num_batches - given), given])
        if total != given * self.pipeline.layout.num_replicas:
            raise ValueError(
                f"The loader that get_train_dataloader returned gave {given} batches for a step on rank "
                f"{self.topology.rank} and another number on others, {total} together: give every rank as many."
            )
        return items[:given]

    def end_epoch(self) -> None:
        """Drop the epoch's iterator, which closes the loader's generator and its workers."""
        self._iterator, self._is_short = None, False
        self.windows.end()
        if self.loader is not None:
            self.loader.num_ahead = self.loader.num_under_way = 0

    def run(self, model: Any, inputs: dict[str, Any], num_items: Any, write: Write | None) -> torch.Tensor:
        """Run forward and backward of one loader batch; the last one of an accumulation also reduces the gradients.

        `write` stores the activations that enter the entry block. Returns a scalar whose mean over all ranks is the
        batch's loss.
        """
        trainer, args, pipeline = self.trainer, self.trainer.args, self.pipeline
        model.training = True  # A loss may read the shell's flag, and an evaluation has cleared it.
        pipeline.stage.set_modes()
        pipeline.settings.meter.count(batch_size(inputs), self._num_tokens(inputs))
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        if args.torch_empty_cache_steps and trainer.state.global_step % args.torch_empty_cache_steps == 0:
            clear_device_cache()

        self.noted.begin_batch(inputs if pipeline.stage.groups.is_first else None)
        step, is_last_batch = self._present, trainer.accelerator.sync_gradients
        if self.windows.is_on:
            loss = self.windows.run_batch(is_last_batch, self._cut)
        else:
            share = self._share(step)
            loss_scale: float | torch.Tensor = share
            if trainer.accelerator.scaler is not None:
                loss_scale = trainer.accelerator.scaler.scale(torch.full((), share, device=args.device))
            forward, items = self._forward(model, num_items), self._items.popleft()
            prepare = trainer_compat.preparation(trainer)
            loss = pipeline.runner.train(inputs, prepare, forward, items, loss_scale, is_last_batch, write)
        return loss.detach().to(args.device) * (self._share(step) * self.topology.world_size)

    def _cut(self, inputs: dict[str, Any], items: int, step: Fetched) -> Batch:
        """Cut a batch into micro-batches for a window."""
        prepare, forward = trainer_compat.preparation(self.trainer), self._forward(self.pipeline.shell, step.num_items)
        return self.pipeline.runner.blocks(inputs, prepare, forward, items, self._share(step))

    def _share(self, step: Fetched) -> float:
        """Return the weight of a batch's loss in its step's loss."""
        return 1.0 if trainer_compat.is_divided(self.trainer, step.num_items) else 1.0 / len(step.batches)

    def _forward(self, model: Any, num_items: Any) -> Forward:
        def forward(micro_batch: dict[str, Any]) -> torch.Tensor:
            with self.trainer.compute_loss_context_manager(), self.noted.of_part(micro_batch):
                loss: torch.Tensor = self.trainer.compute_loss(model, micro_batch, num_items_in_batch=num_items)
            return loss

        return forward

    def _num_tokens(self, inputs: dict[str, Any]) -> int:
        value = inputs.get(main_input_of(self.trainer.model))
        return value.numel() if isinstance(value, torch.Tensor) else 0

    def gradient_squares(self) -> torch.Tensor:
        """Return squared L2 gradient norms, see `StageRunner`; under fp16, first agree on overflow with all ranks."""
        scaler = self.trainer.accelerator.scaler
        if scaler is not None:
            optimizer = trainer_compat.torch_optimizer(self.trainer)
            agree_on_overflow(scaler, optimizer, self.trainer.args.device, self.topology.largest)
        return self.pipeline.runner.gradient_squares()

    def clip(self, norm: torch.Tensor) -> None:
        """Scale this rank's gradients to `max_grad_norm`, given the norm of the whole model."""
        parameters = self.pipeline.runner.parameters_with_gradient()
        clip_grads_with_norm_(parameters, self.trainer.args.max_grad_norm, norm)
