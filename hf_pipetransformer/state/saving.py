"""Saving the state of a training in its checkpoints, beside the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length

from hf_pipetransformer import trainer_compat as host
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.comm.transfers import plain
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.rng import random_state, under_name
from hf_pipetransformer.elastic.controller import LayoutController
from hf_pipetransformer.elastic.migration import OptimizerState
from hf_pipetransformer.elastic.transition import check_replicas_agree
from hf_pipetransformer.runtime.context import Journal, Seeds
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.state import checkpoint
from hf_pipetransformer.state.description import RunDescription
from hf_pipetransformer.state.manifest import Entry
from hf_pipetransformer.state.plain_checkpoint import is_dealt_to_nodes
from hf_pipetransformer.state.resumption import find_remainder


ORDER = "order"
"""Key of the state that the order of the samples was drawn from."""

POSITION = "position"
"""Key of the batches that were read of this pass over a stream without length."""

SHARED = "shared"
"""Name of the states that stand for the generators of one process."""

AHEAD = "ahead"
"""Name of the states that the batches which were read ahead were drawn from."""

NUM_AHEAD = "num_ahead"
"""Key of their number."""


@dataclass
class Checkpoints:
    """Saves a training, of which it knows all parts with a state, in checkpoints; each rank writes its part.

    Args:
        loader: of the training samples; None for one of the user's own.
        first_layout: under which the run began.
        epoch: the one that is under way.
    """

    trainer: Trainer
    pipeline: Pipeline
    journal: Journal
    seeds: Seeds
    loader: PipelineLoader | None
    optimizer_state: OptimizerState
    controller: LayoutController
    description: RunDescription
    first_layout: Layout
    epoch: int = 0
    _written: dict[str, Entry] = field(default_factory=dict, init=False)
    _unlogged_loss: float = field(default=0.0, init=False)

    @property
    def topology(self) -> Topology:
        """The ranks."""
        return self.seeds.topology

    @contextmanager
    def saving(self, folder: str) -> Iterator[None]:
        """Trainer saves a checkpoint inside; at its end it is whole on the disk.

        Trainer's last file, `trainer_state.json`, is followed by `state.json`. Only then are older checkpoints
        removed, and the new one pushed to the hub: Trainer does both right after. There is no method to override
        between, so the state's own method is lent for the one call.
        """
        only_model, state = self.trainer.args.save_only_model, self.trainer.state
        if self.topology.rank == 0:
            # Before the model: `save_model` ends at a barrier, behind it the others write their parts.
            (checkpoint.clear if only_model else checkpoint.begin)(folder)
        self._written = {}

        def save(path: str) -> None:
            type(state).save_to_json(state, path)
            if path == os.path.join(folder, TRAINER_STATE_NAME) and self.topology.rank == 0:
                checkpoint.write_state(folder, self._state(), self._written)

        if not only_model:
            state.save_to_json = save
        try:
            yield
        finally:
            vars(state).pop("save_to_json", None)
        self.journal.write("checkpoint", content="model" if only_model else "full")

    @property
    def are_trainers_too(self) -> bool:
        """Whether Trainer could go on from here: the optimizer is whole, and it finds the place in the data."""
        stage = self.pipeline.stage
        if stage.layout.pipeline_size > 1 or not stage.store.trains_all:
            return False
        return self._is_counted and not is_dealt_to_nodes(self._place())

    def save_optimizer(self, folder: str) -> None:
        """The state of what this rank trains; replicas agree on it, the first one writes."""
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
        then = self.controller.tensors()
        if then:
            self._written |= checkpoint.write_part(folder, checkpoint.decisions_file(position), then, {})

    def save_random_numbers(self, folder: str) -> None:
        """The last of Trainer's savings but `trainer_state.json`: all ranks have written when it returns."""
        trainer, loader = self.trainer, self.loader
        tensors, values = random_state(trainer.args.device)
        order = None if loader is None else loader.order_state()
        if order is not None:
            tensors[ORDER] = order
        shared = None if self.pipeline.shared_draws is None else self.pipeline.shared_draws.states
        ahead, values[NUM_AHEAD] = (None if loader is None else loader.ahead()) or (None, 0)
        for name, states in ((SHARED, shared), (AHEAD, ahead)):
            if states is not None:
                named_tensors, named_values = under_name(name, states)
                tensors |= named_tensors
                values |= named_values
        if loader is not None and not has_length(loader):
            values[POSITION] = loader.position
        values |= host.unlogged_loss(trainer)
        self._written |= checkpoint.write_part(folder, checkpoint.random_file(self.topology.rank), tensors, values)
        answers = self.topology.gather({"written": self._written, "loss": values["unlogged_loss"]})
        for answer in answers:
            self._written |= answer["written"]
        self._unlogged_loss = sum(answer["loss"] for answer in answers) / self.topology.world_size

    def _state(self) -> dict[str, Any]:
        state = self.trainer.state
        return {
            "step": state.global_step,
            "epoch": state.epoch,
            "place": self._place(),
            "is_counted": self._is_counted,
            "unlogged_loss": self._unlogged_loss,
            "layout": self.pipeline.layout.as_event(),
            "first_layout": self.first_layout.as_event(),
            "num_starts": self.seeds.num_starts,
            "num_transitions": self.seeds.num_transitions,
            "decisions": self.controller.state(),
            "views": None if self.loader is None or self.loader.views is None else self.loader.views.state(),
            **self._schedules(),
            **self.kinds(),
            **self.description.fields,
            "data": self.description.data(),
        }

    def _place(self) -> dict[str, Any] | None:
        """Where the run is in its data; None where the loader is the user's own."""
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
            **loader.arrangement.as_json(),
        }

    @property
    def _is_counted(self) -> bool:
        """Whether the number of steps tells the place in the data, as Trainer believes.

        Not where a run has gone on with batches of another size, or did not skip what had been done.
        """
        place, loader, args = self._place(), self.loader, self.trainer.args
        if place is None or loader is None:
            return True
        sizes = (
            loader.num_samples,
            loader.total_batch_size,
            args.dataloader_drop_last,
            args.gradient_accumulation_steps,
        )
        return find_remainder(place, self.trainer.state.global_step, *sizes, skips=True) is None

    def check_savable(self) -> None:
        """Raises ValueError for an optimizer or schedule that no checkpoint can hold."""
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
        """State of the schedules as JSON values."""
        schedule, scaler = self.trainer.lr_scheduler, self.trainer.accelerator.scaler
        return {
            "scheduler": plain(schedule.state_dict(), f"The state of {type(schedule).__name__}"),
            "scaler": scaler and plain(scaler.state_dict(), "The state of the grad scaler"),
        }

    def kinds(self) -> dict[str, str]:
        """Classes whose state no other class can take up."""
        return {
            "optimizer_class": type(self.optimizer_state.optimizer).__name__,
            "scheduler_class": type(self.trainer.lr_scheduler).__name__,
        }
