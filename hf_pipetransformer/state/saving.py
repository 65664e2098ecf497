"""Saving the training state in checkpoints, next to the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length

from hf_pipetransformer import trainer_compat
from hf_pipetransformer.comm.transfers import plain
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.rng import random_state, under_name
from hf_pipetransformer.elastic.controller import LayoutController
from hf_pipetransformer.elastic.migration import OptimizerState, check_replicas_agree
from hf_pipetransformer.runtime.context import Context
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.state import checkpoint
from hf_pipetransformer.state.description import RunDescription
from hf_pipetransformer.state.manifest import Entry
from hf_pipetransformer.state.plain_checkpoint import is_split_by_node
from hf_pipetransformer.state.resumption import find_remainder


ORDER = "order"
"""Key of the RNG state that the sample order was drawn from."""

POSITION = "position"
"""Key of the number of batches read in this pass over a stream without length."""

SHARED = "shared"
"""Prefix of the RNG states of the emulated single process."""

AHEAD = "ahead"
"""Prefix of the RNG states from before the batches that were read ahead."""

NUM_AHEAD = "num_ahead"
"""Key of the number of batches that were read ahead."""


@dataclass
class Checkpoints:
    """Saves all stateful parts of a training; each rank writes its own.

    `loader` is None for a loader of the user's own; `first_layout` is the layout that the run began under.
    """

    context: Context
    pipeline: Pipeline
    loader: PipelineLoader | None
    optimizer_state: OptimizerState
    controller: LayoutController
    description: RunDescription
    first_layout: Layout
    epoch: int = 0
    _written: dict[str, Entry] = field(default_factory=dict, init=False)
    _unlogged_loss: float = field(default=0.0, init=False)

    @contextmanager
    def saving(self, folder: str) -> Iterator[None]:
        """Wrap Trainer's saving of a checkpoint, and complete it on disk.

        `state.json` must follow Trainer's last file, `trainer_state.json`, but Trainer deletes old checkpoints and
        pushes to the hub right after that. There is no method to override in between, so `save_to_json` of the
        trainer's state is replaced for the one call.
        """
        only_model, state = self.context.args.save_only_model, self.context.trainer.state
        if self.context.topology.rank == 0:
            # Before the model is saved: `save_model` ends at a barrier, after which the other ranks write their parts.
            (checkpoint.clear if only_model else checkpoint.begin)(folder)
        self._written = {}

        def save(path: str) -> None:
            type(state).save_to_json(state, path)
            if path == os.path.join(folder, TRAINER_STATE_NAME) and self.context.topology.rank == 0:
                checkpoint.write_state(folder, self._state(), self._written)

        if not only_model:
            state.save_to_json = save
        try:
            yield
        finally:
            vars(state).pop("save_to_json", None)
        self.context.journal.write("checkpoint", content="model" if only_model else "full")

    @property
    def are_trainers_too(self) -> bool:
        """True if plain Trainer could resume too: the optimizer is whole, and it finds the position in the data."""
        stage = self.pipeline.stage
        if stage.layout.pipeline_size > 1 or not stage.store.trains_all:
            return False
        return self._is_counted and not is_split_by_node(self._place())

    def save_optimizer(self, folder: str) -> None:
        """Write the optimizer state of this stage, from the first replica after checking that all replicas agree."""
        stage, own = self.pipeline.stage, self.optimizer_state
        check_replicas_agree(stage, own)
        if stage.groups.replica != 0:
            return
        states = {name: own.state_of(parameter) for name, parameter in stage.trained_here().items()}
        tensors, values = checkpoint.split_optimizer_state(states)
        header = {
            "names": [name for name, state in states.items() if state],
            "values": values,
            "groups": checkpoint.group_options(own.optimizer),
        }
        position = stage.groups.position
        self._written |= checkpoint.write_part(folder, checkpoint.optimizer_file(position), tensors, header)
        then = self.controller.measurements.tensors()
        if then:
            self._written |= checkpoint.write_part(folder, checkpoint.decisions_file(position), then, {})

    def save_random_numbers(self, folder: str) -> None:
        """Write this rank's RNG states, and wait for all ranks' files; the last call before `trainer_state.json`."""
        trainer, loader = self.context.trainer, self.loader
        tensors, values = random_state(trainer.args.device)
        order = None if loader is None else loader.order_state()
        if order is not None:
            tensors[ORDER] = order
        shared = None if self.pipeline.shared_rng is None else self.pipeline.shared_rng.states
        ahead, values[NUM_AHEAD] = (None if loader is None else loader.ahead()) or (None, 0)
        for name, states in ((SHARED, shared), (AHEAD, ahead)):
            if states is not None:
                named_tensors, named_values = under_name(name, states)
                tensors |= named_tensors
                values |= named_values
        if loader is not None and not has_length(loader):
            values[POSITION] = loader.position
        values |= trainer_compat.unlogged_loss(trainer)
        self._written |= checkpoint.write_part(
            folder, checkpoint.random_file(self.context.topology.rank), tensors, values
        )
        answers = self.context.topology.gather({"written": self._written, "loss": values["unlogged_loss"]})
        for answer in answers:
            self._written |= answer["written"]
        self._unlogged_loss = sum(answer["loss"] for answer in answers) / self.context.topology.world_size

    def _state(self) -> dict[str, Any]:
        state = self.context.trainer.state
        return {
            "step": state.global_step,
            "epoch": state.epoch,
            "place": self._place(),
            "is_counted": self._is_counted,
            "unlogged_loss": self._unlogged_loss,
            "layout": self.pipeline.layout.as_event(),
            "first_layout": self.first_layout.as_event(),
            "num_starts": self.context.seeds.num_starts,
            "num_transitions": self.context.seeds.num_transitions,
            "decisions": self.controller.state(),
            "slots": None if self.loader is None or self.loader.slots is None else self.loader.slots.state(),
            **self._schedules(),
            **self.kinds(),
            **self.description.fields,
            "data": self.description.data(),
        }

    def _place(self) -> dict[str, Any] | None:
        """Return the position in the data; None if the loader is the user's own."""
        loader = self.loader
        if loader is None:
            return None
        is_at_end = not loader.num_ahead and (
            loader.is_at_end or (has_length(loader) and loader.position >= len(loader))
        )
        return {
            "epoch": self.epoch + is_at_end,
            "samples": 0 if is_at_end else loader.num_done,
            "global_batch": loader.total_batch_size,
            # Of an epoch: a user's sampler may draw more than the data set has.
            "num_samples": loader.num_samples if has_length(loader) else None,
            **loader.arrangement.as_json(),
        }

    @property
    def _is_counted(self) -> bool:
        """True if the position in the data follows from the number of steps, as Trainer assumes.

        False after a resume with batches of another size, or one that did not skip the samples that were done.
        """
        place, loader, args = self._place(), self.loader, self.context.args
        if place is None or loader is None:
            return True
        sizes = (
            loader.num_samples,
            loader.total_batch_size,
            args.dataloader_drop_last,
            args.gradient_accumulation_steps,
        )
        return find_remainder(place, self.context.trainer.state.global_step, *sizes, skips=True) is None

    def check_savable(self) -> None:
        """Raise ValueError for an optimizer or scheduler that a checkpoint cannot hold."""
        optimizer = self.optimizer_state.optimizer
        self._schedules()
        self.controller.state()
        checkpoint.group_options(optimizer)
        known = {id(parameter) for parameter in self.pipeline.stage.store.held().values()}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if foreign:
            raise ValueError(
                f"The optimizer trains {len(foreign)} parameters that are not the model's, and a checkpoint holds the "
                "model's only: make them parameters of the model, or set save_only_model=True."
            )

    def _schedules(self) -> dict[str, Any]:
        schedule, scaler = self.context.trainer.lr_scheduler, self.context.trainer.accelerator.scaler
        return {
            "scheduler": plain(schedule.state_dict(), f"The state of {type(schedule).__name__}"),
            "scaler": scaler and plain(scaler.state_dict(), "The state of the grad scaler"),
        }

    def kinds(self) -> dict[str, str]:
        """Return the classes of optimizer and scheduler; no other class could load their state."""
        return {
            "optimizer_class": type(self.optimizer_state.optimizer).__name__,
            "scheduler_class": type(self.context.trainer.lr_scheduler).__name__,
        }
