"""Context of a training: the trainer itself, and the view of it that the rooms below get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerControl, TrainerState

from hf_pipetransformer.comm.topology import Peers, ReplicaPeers, check_agreement, get_topology
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.options.refusals import comparable
from hf_pipetransformer.report.events import EventLog
from hf_pipetransformer.runtime.context import CollectiveTimeouts, Context, Journal, Seeds
from hf_pipetransformer.splitters.adapters import bare_model, entries_taken
from hf_pipetransformer.splitters.base import maximal_frozen
from hf_pipetransformer.state.checkpoint import newest_by_sizes
from hf_pipetransformer.training.gains import LossGains


if TYPE_CHECKING:
    from hf_pipetransformer.runtime.pipeline import Pipeline, PipelineShell


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

    def forward_of(self, shell: PipelineShell, batch: Mapping[str, Any]) -> Callable[[], Any]:
        given = entries_taken(shell.module, trainer_compat.preparation(self.trainer)(dict(batch)))
        # Past hooks on the model itself, as nobody but its layers is asked.
        return lambda: shell.called(shell.module.forward, given)

    def changer_of_batches(self, sees_parts: bool) -> str | None:
        if sees_parts and not trainer_compat.has_known_loss(self.trainer):
            return "the script's loss"
        return trainer_compat.changer_of_batches(self.trainer)

    def hides_batches_of(self, dataset: Any) -> bool:
        trainer, own = self.trainer, self.trainer.eval_dataset
        sets = own.values() if isinstance(own, dict) else [own]
        # Records are of a batch as it was read, which code of the user's may change before the model gets it.
        is_plain = trainer_compat.has_plain_loss(trainer)
        is_plain &= not trainer_compat.is_overridden(trainer, "prediction_step")
        return is_plain and any(known is dataset for known in sets)


@dataclass(frozen=True)
class TrainingContext(Context):
    """A `Context` with the trainer itself."""

    trainer: Trainer
    gains: LossGains


@dataclass(frozen=True)
class PartsOfTrainer(TrainerView):
    """See `cache.frozen_parts.serving.PartsRun`."""

    context: TrainingContext

    @property
    def topology(self) -> Peers:
        return self.context.topology

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        return maximal_frozen(bare_model(self.model))

    @property
    def eval_dataset(self) -> Any:
        return self.trainer.eval_dataset

    @property
    def train_loader(self) -> Any:
        return self.trainer.callback_handler.train_dataloader

    @property
    def is_whole(self) -> bool:
        trainer = self.trainer
        return self.args.n_gpu <= 1 and not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)

    @property
    def sends_buffers(self) -> bool:
        return isinstance(self.trainer.model_wrapped, DistributedDataParallel)

    @property
    def reads_loss_alone(self) -> bool:
        return trainer_compat.has_known_loss(self.trainer) and self.trainer.label_smoother is None

    def note(self, **fields: Any) -> None:
        self.context.journal.write("cache", **fields)

    def end_plan(self) -> NoReturn:
        self.context.end_plan()


@dataclass(frozen=True)
class PartsOfStage(PartsOfTrainer):
    """Frozen encoders of images, videos or sounds on the first stage; layers have the activation cache."""

    pipeline: Pipeline

    @property
    def topology(self) -> Peers:
        return ReplicaPeers(self.pipeline.stage.groups, self.context.topology.ranks_here)

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        media = self.pipeline.start_up.probe.structure.media
        if media is None:
            return {}
        path = next(name for name, found in bare_model(self.model).named_modules() if found is media.module)
        return {f"{path}.{name}".removeprefix("."): module for name, module in media.frozen.items()}

    @property
    def is_whole(self) -> bool:
        return self.pipeline.stage.groups.is_first and not self.pipeline.layout.abilities.overlaps_steps


def make_context(trainer: Trainer) -> TrainingContext:
    """Return the context of a trainer's runs. Collective: call on every rank.

    Raises:
        ValueError: the ranks were started with different options.
    """
    args = cast(PipeTransformerArguments, trainer.args)
    # Between two steps ranks save, evaluate or compile, which may take longer than any step.
    rest_seconds = max(args.pipeline_timeout, args.ddp_timeout)
    topology = get_topology(rest_seconds)
    topology.limit_waits(rest_seconds)  # An earlier trainer may have failed mid-step.
    if args.pipeline_size is not None:
        topology.check_pipeline_size(args.pipeline_size)
    check_agreement(topology, "training arguments", _shared(args))
    run = TrainerView(trainer)
    journal = Journal(run, EventLog(args.output_dir if trainer.is_world_process_zero() else None))
    # A batch of a new shape recompiles, so with torch_compile any step may take as long as the first one.
    step_seconds = rest_seconds if args.torch_compile else args.pipeline_timeout
    timeouts = CollectiveTimeouts(
        topology, journal, step_seconds, rest_seconds, args.pipeline_timeout, find_checkpoint=newest_by_sizes
    )
    seeds, gains = Seeds(topology, args.seed), LossGains(trainer, topology)
    return TrainingContext(run, topology, journal, timeouts, seeds, trainer, gains)


def _shared(args: PipeTransformerArguments) -> dict[str, Any]:
    """Return the arguments that must be equal on all ranks."""
    # Nodes may have paths of their own, and rank 0 often logs otherwise; none of these changes what is computed.
    local = ("output_dir", "run_name", "disable_tqdm", "log_level", "log_level_replica", "hub_token", "local_rank")
    return comparable({key: value for key, value in args.to_dict().items() if key not in local})
