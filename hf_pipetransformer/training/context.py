"""Context of a training: the trainer itself, and the view of it that the rooms below get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import Trainer, TrainerControl, TrainerState

from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.data.batches import for_model
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.runtime.context import Context


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.training.gains import LossGains


@dataclass(frozen=True)
class TrainerView:
    """See `runtime.context.RunView`."""

    trainer: Trainer

    @property
    def args(self) -> PipeTransformerArguments:
        return cast(PipeTransformerArguments, self.trainer.args)

    @property
    def state(self) -> TrainerState:
        return self.trainer.state

    @property
    def control(self) -> TrainerControl:
        return self.trainer.control

    @property
    def model(self) -> nn.Module:
        return self.trainer.model

    @property
    def train_dataset(self) -> Any:
        return self.trainer.train_dataset

    @property
    def lr_scheduler(self) -> Any:
        return self.trainer.lr_scheduler

    @property
    def scaler(self) -> Any:
        return self.trainer.accelerator.scaler

    @property
    def learning_rate(self) -> float:
        return trainer_compat.learning_rate(self.trainer)

    @property
    def decaying(self) -> list[str]:
        return list(self.trainer.get_decay_parameter_names(self.trainer.model))

    def log(self, logs: dict[str, float]) -> None:
        self.trainer.log(logs)

    def loss_of(self, model: Any, batch: Mapping[str, Any]) -> Callable[[], Any]:
        trainer = self.trainer
        given = trainer_compat.preparation(trainer)(for_model(batch))
        passes = "labels" in batch and trainer_compat.takes_num_items(trainer)
        items = torch.tensor(trainer_compat.items_of(trainer, batch), device=trainer.args.device) if passes else None

        def compute() -> Any:
            with trainer.compute_loss_context_manager():
                # A copy, since a loss may take entries out of what it is given, and this one is called several times.
                return trainer.compute_loss(model, dict(given), num_items_in_batch=items)

        return compute

    def hides_batches_of(self, dataset: Any) -> bool:
        trainer, own = self.trainer, self.trainer.eval_dataset
        sets = own.values() if isinstance(own, dict) else [own]
        is_plain = trainer_compat.has_plain_loss(trainer)
        is_plain &= not trainer_compat.is_overridden(trainer, "prediction_step")
        return is_plain and any(each is dataset for each in sets)

    def unlogged_loss(self) -> dict[str, Any]:
        return trainer_compat.unlogged_loss(self.trainer)

    def restore_loss(self, topology: Topology, unlogged_loss: float, last_logged_step: int) -> None:
        trainer_compat.restore_loss(self.trainer, topology, unlogged_loss, last_logged_step)


@dataclass(frozen=True)
class TrainingContext(Context):
    """A `Context` with the trainer itself."""

    trainer: Trainer
    gains: LossGains
