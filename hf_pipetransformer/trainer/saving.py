"""Saving the state of a run in its checkpoints, beside the model."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, has_length

from hf_pipetransformer import checkpoint
from hf_pipetransformer.fingerprint import describe_data
from hf_pipetransformer.manifest import Entry
from hf_pipetransformer.refusals import TOLD_ARGUMENTS, comparable
from hf_pipetransformer.trainer.adapting import AdaptingTrainer
from hf_pipetransformer.transition import check_replicas_agree


T = TypeVar("T")

ORDER = "order"
"""Key of the state that the order of the samples was drawn from."""

POSITION = "position"
"""Key of the batches that were read of this pass over a stream without length."""

SHARED = "shared generator"
"""Key of the state of the generator that stands for the global one of one process."""

_CPU = torch.device("cpu")


class SavingTrainer(AdaptingTrainer):
    """Saves all of a run in its checkpoints."""

    optimizer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run_description: dict[str, Any] = {}
        self._data_description: dict[str, Any] | None = None
        self._written: dict[str, Entry] = {}
        self._unlogged_loss = 0.0
        self._epoch_index = 0

    # ---- what a run says of itself ----

    def _described_run(self) -> dict[str, Any]:
        """What must be equal for a run to go on; see `check_same_run`."""
        model, arguments = self.model, self.args.to_dict()
        return {
            "world_size": self.topology.world_size,
            "arguments": comparable({name: arguments[name] for name in TOLD_ARGUMENTS}),
            "has_plan": self.args.layout_plan is not None,
            "policy": self.run.policy.describe(),
            "decaying": list(self.get_decay_parameter_names(model)),
            "model": type(model).__name__,
            "parameters": {
                name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
                for name, p in model.named_parameters()
            },
        }

    def _described_data(self) -> dict[str, Any]:
        """By what the training data are known. Some are read, when it is first needed and by rank 0 alone.

        It leaves no trace in the random numbers of the run.
        """
        if self._data_description is None:
            states = checkpoint.random_state(_CPU)
            try:
                self._data_description = describe_data(self.train_dataset)
            finally:
                checkpoint.set_random_state(*states, _CPU)
        return self._data_description

    def _refused_alike(self, call: Callable[[], T]) -> T:
        """Run a call on every rank; what one rank refuses is refused on all, in the same words."""
        value, refusal = None, None
        try:
            value = call()
        except ValueError as error:
            refusal = str(error)
        for text in self.topology.gather(refusal):
            if text is not None:
                raise ValueError(text)
        return cast(T, value)

    def _check_shared_folder(self) -> None:
        """Whether all nodes see one output folder: each rank writes a part of a checkpoint.

        Raises:
            ValueError: on every rank, names the first that sees another folder.
        """
        saves = self.args.save_strategy != SaveStrategy.NO and not self.args.save_only_model
        if not saves or self.topology.local_world_size >= self.topology.world_size:
            return
        token = self.topology.decide(lambda: checkpoint.leave_token(self.args.output_dir))
        own = {"sees": checkpoint.sees_token(self.args.output_dir, token), "host": socket.gethostname()}
        answers = self.topology.gather({**own, "output_dir": os.path.abspath(self.args.output_dir)})
        if self.topology.rank == 0:
            checkpoint.remove_token(self.args.output_dir, token)
        for rank, answer in enumerate(answers):
            if not answer["sees"]:
                raise ValueError(
                    f"output_dir is {answers[0]['output_dir']} on rank 0 ({answers[0]['host']}) and another folder, "
                    f"{answer['output_dir']}, on rank {rank} ({answer['host']}): every node would hold a part of each "
                    "checkpoint, and no resume could find the whole. Set output_dir to a folder that all nodes share, "
                    "or save_only_model=True or save_strategy='no'."
                )

    # ---- saving ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = os.path.join(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.is_world_process_zero():
            # Before the model: `save_model` ends at a barrier, behind it the others write their parts.
            (checkpoint.clear if self.args.save_only_model else checkpoint.begin)(folder)
        self._written = {}
        with nullcontext() if self.args.save_only_model else self._sealing(folder):
            super()._save_checkpoint(model, trial)

    @contextmanager
    def _sealing(self, folder: str) -> Iterator[None]:
        """Inside, Trainer's last file of a checkpoint, `trainer_state.json`, is followed by `state.json`.

        Only then are older checkpoints removed, and the new one pushed to the hub: Trainer does both right after.
        """
        state, last = self.state, os.path.join(folder, TRAINER_STATE_NAME)

        def save(path: str) -> None:
            type(state).save_to_json(state, path)
            if path == last and self.is_world_process_zero():
                checkpoint.write_state(folder, self._state_of_run(), self._written)

        state.save_to_json = save
        try:
            yield
        finally:
            del state.save_to_json

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._stage is not None and self._optimizer_state is not None
        stage, own = self._stage, self._optimizer_state
        check_replicas_agree(stage, own)
        if stage.groups.replica == 0:
            states = {name: own.state_of(parameter) for name, parameter in self._trained_here().items()}
            tensors, values = checkpoint.split_optimizer_state(states)
            header = {
                "names": [name for name, state in states.items() if state],
                "values": values,
                "groups": checkpoint.group_options(own.optimizer),
            }
            self._written |= checkpoint.write_part(
                output_dir, checkpoint.optimizer_file(stage.groups.position), tensors, header
            )
            weights = {} if self._controller is None else self._controller.weights()
            if weights:
                self._written |= checkpoint.write_part(
                    output_dir, checkpoint.weights_file(stage.groups.position), weights, {}
                )

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing here: it is in `state.json`."""

    def _save_rng_state(self, output_dir: str) -> None:
        """The last of Trainer's savings but `trainer_state.json`: all ranks have written when it returns."""
        tensors, values = checkpoint.random_state(self.args.device)
        order = None if self._train_loader is None else self._train_loader.order_state()
        if order is not None:
            tensors[ORDER] = order
        if self.run.pipeline.shared_generator is not None:
            tensors[SHARED] = self.run.pipeline.shared_generator.get_state()
        if self._train_loader is not None and not has_length(self._train_loader):
            values[POSITION] = self._train_loader.position
        values |= {"unlogged_loss": self._tr_loss.item(), "last_logged_step": self._globalstep_last_logged}
        self._written |= checkpoint.write_part(output_dir, checkpoint.random_file(self.topology.rank), tensors, values)
        answers = self.topology.gather({"written": self._written, "loss": values["unlogged_loss"]})
        for answer in answers:
            self._written |= answer["written"]
        self._unlogged_loss = sum(answer["loss"] for answer in answers) / self.topology.world_size

    def _state_of_run(self) -> dict[str, Any]:
        assert self._stage is not None and self._controller is not None
        return {
            "step": self.state.global_step,
            "epoch": self.state.epoch,
            "place": self._place(),
            "unlogged_loss": self._unlogged_loss,
            "layout": self._stage.layout.as_event(),
            "first_layout": self._layout_of_first_step().as_event(),
            "num_starts": self.run.seeds.num_starts,
            "num_transitions": self.run.seeds.num_transitions,
            "decisions": self._controller.state(),
            **self._schedules(),
            **self._kinds(),
            **self._run_description,
            "data": self._described_data(),
        }

    def _place(self) -> dict[str, Any] | None:
        """Where the run is in its data; None where the loader is the user's own."""
        loader = self._train_loader
        if loader is None:
            return None
        is_at_end = loader.is_at_end or (has_length(loader) and loader.position >= len(loader))
        return {
            "epoch": self._epoch_index + is_at_end,
            "samples": 0 if is_at_end else loader.num_done,
            "global_batch": loader.total_batch_size,
            "group_size": loader.group_size,
        }

    def _check_savable(self) -> None:
        """Raises ValueError for an optimizer or schedule that no checkpoint can hold."""
        assert self._stage is not None and self._optimizer_state is not None
        optimizer = self._optimizer_state.optimizer
        self._schedules()
        if self._controller is not None:
            self._controller.state()
        checkpoint.group_options(optimizer)
        known = {id(parameter) for parameter in self._stage.store.held().values()}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if foreign:
            raise ValueError(
                f"The optimizer trains {len(foreign)} parameters that are not the model's, and a checkpoint holds the "
                "model's only: make them parameters of the model, or set save_only_model=True."
            )

    def _schedules(self) -> dict[str, Any]:
        """State of the schedules as JSON values."""
        scaler, name = self.accelerator.scaler, type(self.lr_scheduler).__name__
        return {
            "scheduler": checkpoint.plain(self.lr_scheduler.state_dict(), f"The state of {name}"),
            "scaler": None
            if scaler is None
            else checkpoint.plain(scaler.state_dict(), "The state of the grad scaler"),
        }

    def _kinds(self) -> dict[str, str]:
        assert self._optimizer_state is not None
        return {
            "optimizer_class": type(self._optimizer_state.optimizer).__name__,
            "scheduler_class": type(self.lr_scheduler).__name__,
        }

    def _trained_here(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose optimizer state this stage keeps."""
        assert self._stage is not None
        stage = self._stage
        return {name: p for name, p in stage.store.held().items() if p.requires_grad and stage.owns_state_of(name)}
