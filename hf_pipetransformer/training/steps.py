"""Optimizer steps of a training: reading their batches, running them, and their gradient norms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import Trainer

from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.data.batches import SampleBatch, note_samples
from hf_pipetransformer.runtime.execution import LoaderBatch
from hf_pipetransformer.splitters.base import main_input_of


if TYPE_CHECKING:
    from hf_pipetransformer.data.loader import PipelineLoader
    from hf_pipetransformer.elastic.controller import LayoutController
    from hf_pipetransformer.engine.program import Forward, Write
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.training.context import TrainingContext
    from hf_pipetransformer.training.metrics import MetricAccumulator


@dataclass
class StepBatches:
    """Batches of an optimizer step.

    Args:
        items: per batch, the number of items summed over all replicas.
        num_items: divisor for the loss; None where the loss takes none.
    """

    batches: list[Any] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    num_items: torch.Tensor | None = None


@dataclass
class Steps(ABC):
    """Optimizer steps under one layout, as Trainer's loop asks for them.

    `loader` is None for a loader of the user's own. A subclass says in which order the stages run the steps.
    """

    context: TrainingContext
    pipeline: Pipeline
    loader: PipelineLoader | None
    metrics: MetricAccumulator
    controller: LayoutController
    _iterator: Any = field(default=None, init=False)
    _is_short: bool = field(default=False, init=False)
    _present: StepBatches = field(default_factory=StepBatches, init=False)
    _num_run: int = field(default=0, init=False)
    """Number of batches of the present step that have run."""

    @property
    def trainer(self) -> Trainer:
        return self.context.trainer

    @cached_property
    def _main_input(self) -> str:
        return main_input_of(self.trainer.model)

    @cached_property
    def _reference(self) -> Forward | None:
        return trl_compat.reference(self.trainer, self.pipeline.shell)

    @cached_property
    def _prepare(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return trainer_compat.preparation(self.trainer)

    @staticmethod
    def check(layout: Layout, users: Mapping[str, tuple[int, ...]], args: PipeTransformerArguments) -> None:
        """Refuse what does not work if steps run so; `users` has the blocks that use each trained parameter.

        Raises:
            ValueError: stages are at different steps, and share a parameter or have too few micro-batches.
        """
        return None

    @property
    def num_read_ahead(self) -> int:
        """Number of steps that were read but have not begun."""
        return 0

    @abstractmethod
    def _read_step(self, num_batches: int) -> StepBatches:
        """Return the batches of the next step, `num_batches` if the epoch has as many."""

    @abstractmethod
    def run(self, batch: LoaderBatch, is_last_batch: bool) -> torch.Tensor:
        """Run forward and backward of what `next_batch` gave; see `StageRunner.train`."""

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of the gradients to clip by. Collective: call once per step on every rank."""

    def norm_of_stages(self) -> torch.Tensor | None:
        """Return the whole model's gradient norm to log; None if `gradient_norm` has returned it."""
        return None

    def updating(self) -> AbstractContextManager[None]:
        """Wrap the optimizer's step."""
        return nullcontext()

    def end_step(self, is_counted: bool) -> None:  # noqa: B027
        """Finish the optimizer step. `is_counted`: all ranks have finished this step, because Trainer logs here."""

    def report(self) -> dict[str, float]:
        """Return scalars to log and write them to the events file. Collective: call on every rank."""
        return {}

    def settle(self) -> None:  # noqa: B027
        """Bring all stages to the same step and data position, nothing in flight. Collective: call on every rank."""

    def end(self) -> None:  # noqa: B027
        """Drop what is in flight, also after an error."""

    def are_over(self, epoch_iterator: Any) -> bool:
        """Return True at the end of an epoch's iterator: Trainer asks for batches up to its own number of steps."""
        return epoch_iterator is self._iterator and self._has_ended and not self.num_read_ahead

    def begin(self, epoch_iterator: Any, num_batches: int) -> tuple[list[Any], torch.Tensor | None]:
        """Read the batches of one step, and count the items of their losses over all replicas."""
        self._iterator = epoch_iterator
        self._present, self._num_run = self._read_step(num_batches), 0
        return self._present.batches, self._present.num_items

    def _fetch(self, num_batches: int) -> StepBatches:
        # `range` comes first: the other way round, `zip` would take one batch more and drop it.
        batches = [batch for _, batch in zip(range(num_batches), self._iterator, strict=False)]
        if self.loader is None:
            rows = trl_compat.rows_of_sample(self.trainer)
            batches = [note_samples(batch, None, rows) for batch in batches]
        counts = [trainer_compat.items_of(self.trainer, batch) for batch in batches]
        if self.loader is None:
            items = self._items_of_users(counts, num_batches)
        else:
            items = self.pipeline.runner.over_replicas(counts)
        self._is_short = len(batches) < num_batches
        # A replica's batch may be empty, so `has_labels` says what the data set showed at the start.
        passes = self.pipeline.has_labels and trainer_compat.takes_num_items(self.trainer)
        device = self.trainer.args.device
        return StepBatches(batches, items, torch.full((), float(sum(items)), device=device) if passes else None)

    def _items_of_users(self, counts: list[int], num_batches: int) -> list[int]:
        """Sum the item counts of the user's own loaders; every replica must deliver the same number of batches."""
        given = len(counts)
        # Padded to the same length on all replicas, so that a different number shows in the sum and not as a deadlock.
        *items, total = self.pipeline.runner.over_replicas([*counts, *[0] * (num_batches - given), given])
        if total != given * self.pipeline.layout.num_replicas:
            raise ValueError(
                f"The loader that get_train_dataloader returned gave {given} batches for a step on rank "
                f"{self.context.topology.rank} and another number on others, {total} together: give every rank as "
                "many."
            )
        return items[:given]

    @property
    def _has_ended(self) -> bool:
        return self._is_short or (self.loader is not None and self.loader.is_at_end)

    def end_epoch(self) -> None:
        """Drop the epoch's iterator, which closes the loader's generator and its workers."""
        self._iterator, self._is_short = None, False
        self.end()
        if self.loader is not None:
            self.loader.num_ahead = self.loader.num_under_way = 0

    def next_batch(self, inputs: dict[str, Any], num_items: Any, write: Write | None) -> LoaderBatch:
        """Make everything ready for the next batch of the step, which is returned with the loss that Trainer computes.

        `write` stores the activations that enter the entry block.
        """
        trainer, args, pipeline = self.trainer, self.trainer.args, self.pipeline
        step, number = self._present, self._num_run
        self._num_run += 1
        # A method of the script's may have made a dict of its own of it.
        batch: SampleBatch = step.batches[number].like(inputs)
        pipeline.shell.training = True  # A loss may read the shell's flag, and an evaluation has cleared it.
        pipeline.stage.set_modes()
        value = batch.get(self._main_input)
        num_tokens = value.numel() if isinstance(value, torch.Tensor) else 0
        pipeline.settings.meter.count(batch.size, num_tokens)
        # In place of Trainer's `training_step`, where optimizers change their mode and the device's cache is emptied.
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        if args.torch_empty_cache_steps and trainer.state.global_step % args.torch_empty_cache_steps == 0:
            clear_device_cache()

        # One rank per pipeline counts tokens: the others have copies of what it reads.
        self.metrics.begin_batch(batch, counts_tokens=pipeline.stage.groups.is_first)
        return self._loader_batch(batch, number, step, num_items, write)

    def loss_of_all(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a scalar whose mean over all ranks is the loss of the batch, from what `run` returned."""
        # Trainer takes the mean over all ranks, of which only those of the last stage have a loss.
        share = self._share(self._present) * self.context.topology.world_size
        return loss.detach().to(self.trainer.args.device) * share

    def _loader_batch(
        self, inputs: SampleBatch, number: int, step: StepBatches, num_items: Any, write: Write | None = None
    ) -> LoaderBatch:
        """Return batch `number` of a step with the loss that Trainer would compute."""
        trainer, shell, reference = self.trainer, self.pipeline.shell, self._reference
        gains = self.context.gains
        watching = gains.watching if gains.is_of_script else nullcontext

        def forward(micro_batch: dict[str, Any]) -> torch.Tensor:
            reads = trl_compat.reading_reference(trainer, micro_batch)
            with trainer.compute_loss_context_manager(), self.metrics.record_part(micro_batch), reads, watching():
                loss: torch.Tensor = trainer.compute_loss(shell, micro_batch, num_items_in_batch=num_items)
            return loss

        share = self._share(step)
        scale: float | torch.Tensor = share
        # From the loss on, as accelerate does: stages send gradients in half precision, where small ones would vanish.
        if trainer.accelerator.scaler is not None:
            scale = trainer.accelerator.scaler.scale(torch.full((), share, device=trainer.args.device))
        shared = self.pipeline.shared_rng
        return LoaderBatch(inputs, forward, step.items[number], self._prepare, scale, write, reference, shared)

    def _share(self, step: StepBatches) -> float:
        """Return the weight of a batch's loss in its step's loss."""
        return 1.0 if trainer_compat.is_divided(self.trainer, step.num_items) else 1.0 / len(step.batches)
