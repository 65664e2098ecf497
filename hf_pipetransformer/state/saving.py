"""Saving the training state in checkpoints next to the model, in folders that hold nothing of an earlier save."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from transformers.trainer_utils import has_length

from hf_pipetransformer.comm.transfers import plain
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.compat.trainer_compat import TRAINER_STATE_NAME
from hf_pipetransformer.data.rng import random_state
from hf_pipetransformer.runtime.optimizer_state import OptimizerState, check_replicas_agree
from hf_pipetransformer.state import checkpoint
from hf_pipetransformer.state.run_state import (
    DataPosition,
    Epoch,
    FileEntry,
    RankState,
    RunState,
    find_remainder,
    is_split_by_node,
)


if TYPE_CHECKING:
    from hf_pipetransformer.data.loader import PipelineLoader
    from hf_pipetransformer.runtime.context import Context
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.state.description import RunDescription


class SavedDecisions(Protocol):
    """Whatever decides on layouts, as checkpoints see it."""

    def state(self) -> dict[str, Any]:
        """Return what later decisions depend on."""

    def load_state(self, state: Mapping[str, Any], is_elsewhere: bool, is_same_policy: bool) -> None:
        """Go on from what `state` returned."""


@dataclass
class Checkpoints:
    """Saves all stateful parts of a training; each rank writes its own.

    `loader` is None for a loader of the user's own; `first_layout` is the layout that the run began under.
    """

    context: Context
    pipeline: Pipeline
    loader: PipelineLoader | None
    optimizer_state: OptimizerState
    controller: SavedDecisions
    description: RunDescription
    first_layout: Layout
    epoch: int = 0
    _written: dict[str, FileEntry] = field(default_factory=dict, init=False)
    _unlogged_loss: float = field(default=0.0, init=False)

    @contextmanager
    def saving(self, folder: str) -> Iterator[None]:
        """Wrap Trainer's saving of a checkpoint, and complete it on disk.

        `state.json` must follow Trainer's last file, `trainer_state.json`, but Trainer deletes old checkpoints and
        pushes to the hub right after that. There is no method to override in between, so `save_to_json` of the
        trainer's state is replaced for the one call.
        """
        only_model, state = self.context.args.save_only_model, self.context.run.state
        if self.context.topology.rank == 0:
            # Before the model is saved: `save_model` ends at a barrier, after which the other ranks write their parts.
            (clear if only_model else begin)(folder)
        # Entries of an earlier checkpoint would be taken for files of this one.
        self._written = {}

        def save(path: str) -> None:
            type(state).save_to_json(state, path)
            # A callback may save the trainer's state elsewhere, which ends no checkpoint.
            if path == os.path.join(folder, TRAINER_STATE_NAME) and self.context.topology.rank == 0:
                checkpoint.write_state(folder, self._state(), self._written)

        if not only_model:
            state.save_to_json = save
        try:
            yield
        finally:
            # The attribute of the object goes, and the method of its class is seen again.
            vars(state).pop("save_to_json", None)
        self.context.journal.write("checkpoint", content="model" if only_model else "full")

    @property
    def are_trainers_too(self) -> bool:
        """True if plain Trainer could resume too: the optimizer is whole, and it finds the position in the data."""
        stage = self.pipeline.stage
        if stage.layout.pipeline_size > 1 or not stage.store.trains_all:
            return False
        place = self._place()
        return self._is_counted(place) and not is_split_by_node(place)

    def save_optimizer(self, folder: str) -> None:
        """Write the optimizer state of this stage, from the first replica after checking that all replicas agree."""
        stage, own = self.pipeline.stage, self.optimizer_state
        check_replicas_agree(stage, own)
        # Replicas have the same bits, as has just been checked: one of them writes.
        if stage.groups.replica != 0:
            return
        states = {name: own.state_of(parameter) for name, parameter in stage.trained_here().items()}
        tensors, values = {}, {}
        for name, state in states.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}|{key}"] = value
                else:
                    values[f"{name}|{key}"] = plain(value, f"The optimizer's state {key!r} of {name}")
        names = [name for name, state in states.items() if state]
        header = {"names": names, "values": values, "groups": own.options()}
        position = stage.groups.position
        self._written |= checkpoint.write_part(folder, checkpoint.optimizer_file(position), tensors, header)

    def save_rank_state(self, folder: str) -> None:
        """Write this rank's `RankState`, and wait for all ranks' files; the last call before `trainer_state.json`."""
        context, loader = self.context, self.loader
        state = RankState(
            own=random_state(context.args.device),
            **context.run.unlogged_loss(),
            order=None if loader is None else loader.order_state(),
            shared=None if self.pipeline.shared_rng is None else self.pipeline.shared_rng.states,
            ahead=None if loader is None else loader.ahead(),
            position=None if loader is None or has_length(loader) else loader.position,
        )
        self._written |= checkpoint.write_rank_state(folder, context.topology.rank, state)
        # Every rank's files are on disk before its answer, so that the gather is what rank 0 waits for.
        answers = context.topology.gather((self._written, state.unlogged_loss))
        for written, _loss in answers:
            self._written |= written
        self._unlogged_loss = sum(loss for _written, loss in answers) / context.topology.world_size

    def _state(self) -> RunState:
        progress, seeds, place = self.context.run.state, self.context.seeds, self._place()
        values: dict[str, Any] = {
            **vars(self.description.identity),
            # What is in force, where the options leave it open.
            "arguments": self.description.identity.arguments
            | {"pipeline_head_slices": self.pipeline.settings.head_slices.number},
            **self.kinds(),
            **self._schedules(),
            "data": self.description.data(),
            "step": progress.global_step,
            "epoch": progress.epoch,
            "place": place,
            "is_counted": self._is_counted(place),
            "unlogged_loss": self._unlogged_loss,
            "layout": self.pipeline.layout,
            "first_layout": self.first_layout,
            "sums_in_float32": self.pipeline.settings.sums_in_float32,
            "num_starts": seeds.num_starts,
            "num_transitions": seeds.num_transitions,
            "decisions": self.controller.state(),
        }
        return RunState(**values)

    def _place(self) -> DataPosition | None:
        """Return the position in the data; None if the loader is the user's own."""
        loader = self.loader
        if loader is None:
            return None
        # The end of an epoch is the beginning of the next one, but not while batches that were read ahead are not
        # trained.
        is_at_end = not loader.num_ahead and (
            loader.is_at_end or (has_length(loader) and loader.position >= len(loader))
        )
        place = {
            "epoch": self.epoch + is_at_end,
            "samples": 0 if is_at_end else loader.num_done,
            "global_batch": loader.total_batch_size,
            "num_samples": loader.num_samples if has_length(loader) else None,
            **loader.arrangement.as_json(),
        }
        return cast(DataPosition, place)

    def _is_counted(self, place: DataPosition | None) -> bool:
        """Return True if the position in the data follows from the number of steps, as Trainer assumes.

        False after a resume with batches of another size, or one that did not skip the samples that were done.
        """
        if place is None or self.loader is None:
            return True
        epoch = Epoch.of(self.loader, self.context.args)
        return find_remainder(place, self.context.run.state.global_step, epoch, skips=True) is None

    def check_savable(self) -> None:
        """Raise ValueError for an optimizer or scheduler that a checkpoint cannot hold."""
        optimizer = self.optimizer_state.optimizer
        # For their errors alone: without this, the first checkpoint would fail, after hours.
        self._schedules()
        self.controller.state()
        self.optimizer_state.options()
        known = {id(parameter) for parameter in self.pipeline.stage.store.held().values()}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if foreign:
            raise ValueError(
                f"The optimizer trains {len(foreign)} parameters that are not the model's, and a checkpoint holds the "
                "model's only: make them parameters of the model, or set save_only_model=True."
            )

    def _schedules(self) -> dict[str, Any]:
        schedule, scaler = self.context.run.lr_scheduler, self.context.run.scaler
        return {
            "scheduler": plain(schedule.state_dict(), f"The state of {type(schedule).__name__}"),
            "scaler": scaler and plain(scaler.state_dict(), "The state of the grad scaler"),
        }

    def kinds(self) -> dict[str, str]:
        """Return the classes of optimizer and scheduler; no other class could load their state."""
        return {
            "optimizer_class": type(self.optimizer_state.optimizer).__name__,
            "scheduler_class": type(self.context.run.lr_scheduler).__name__,
        }


# ---- folders ----

_OF_TRAINER = re.compile(r"(optimizer|scheduler|scaler)\.pt|rng_state(_(?P<rank>\d+))?\.pth")


def begin(folder: str) -> None:
    """Mark `folder` as an incomplete checkpoint, until `checkpoint.write_state` completes it."""
    clear(folder)
    # A folder without a state in it: that of a checkpoint which was interrupted.
    os.makedirs(os.path.join(folder, checkpoint.STATE_FOLDER), exist_ok=True)


def clear(folder: str, num_ranks: int = 0) -> None:
    """Delete what an earlier run left in a checkpoint folder, as it will not match the weights about to be saved.

    Keeps Trainer's RNG files of the first `num_ranks` ranks, which these processes may already have written.
    """
    for mark in (os.path.join(checkpoint.STATE_FOLDER, checkpoint.STATE_FILE), TRAINER_STATE_NAME):
        # Remove the files that mark it complete first: the process may be killed at any moment.
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, mark))
    shutil.rmtree(os.path.join(folder, checkpoint.STATE_FOLDER), ignore_errors=True)
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        match = _OF_TRAINER.fullmatch(name)
        if match and not (match["rank"] and int(match["rank"]) < num_ranks):
            os.remove(os.path.join(folder, name))


def check_unlinked(folder: str) -> None:
    """Refuse to save where the folder is or contains a symbolic link: the link's target would be overwritten."""
    inner = [os.path.join(where, name) for where, *names in os.walk(folder) for name in [*names[0], *names[1]]]
    for path in (folder, *inner):
        if os.path.islink(path):
            raise ValueError(
                f"{path!r} is a link to {os.readlink(path)!r}: saving a checkpoint there would overwrite what it "
                "leads to. Remove the link, or set another output_dir."
            )


def rotate(output_dir: str, limit: int | None, step: int, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, ordered by step.

    A copy, a backup or `touch` changes modification times, so they do not count. Checkpoints above `step`, the one
    saved last, are an earlier run's and go first. `step` and the folder `best` are kept; `limit` None or 0 keeps all.
    """
    if limit is None or limit <= 0:
        return
    # A link leads to a folder that is somebody else's: it neither counts nor goes.
    folders = [each for each in checkpoint.numbered_checkpoints(output_dir) if not os.path.islink(each[1])]
    kept = set() if best is None else {os.path.abspath(best)}
    old = [each for each in folders if each[0] != step and os.path.abspath(each[1]) not in kept]
    old.sort(key=lambda each: (each[0] <= step, each[0]))
    for _step, folder in old[: max(0, len(folders) - limit)]:
        # If the process is killed during the deletion, the rest must not look like a checkpoint of weights alone.
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, TRAINER_STATE_NAME))
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def rotating_by_step(step: int) -> Iterator[None]:
    """Make Trainer delete old checkpoints by step instead of by modification time."""

    def by_step(
        output_dir: str, save_total_limit: int | None = None, best_model_checkpoint: str | None = None, **_: Any
    ) -> None:
        rotate(output_dir, save_total_limit, step, best_model_checkpoint)

    with trainer_compat.rotating_with(by_step):
        yield
