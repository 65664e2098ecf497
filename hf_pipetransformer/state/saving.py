"""Saving and restoring the state of a training next to its model, in folders that hold nothing of an earlier save.

In this order, of which the first and the last mark a checkpoint as incomplete and as whole:

    writing             rank 0 removes what an earlier save left, and makes the folder `pipetransformer`
    Trainer             the model (`training/weights.py`), and its own files where it could go on from them
    Checkpoints.save    every rank its part, of which rank 0 gets the hashes
    Trainer             `trainer_state.json`
    complete            rank 0 `state.json`, with the list of all files; after that old checkpoints go
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from transformers.trainer_utils import has_length

from hf_pipetransformer.comm.transfers import plain
from hf_pipetransformer.compat.trainer_compat import TRAINER_STATE_NAME
from hf_pipetransformer.data.rng import random_state
from hf_pipetransformer.report import announce
from hf_pipetransformer.runtime.optimizer_state import OptimizerState, check_replicas_agree
from hf_pipetransformer.state import checkpoint
from hf_pipetransformer.state.plain_checkpoint import (
    read_plain_optimizer,
    read_plain_scheduler,
    set_plain_random_state,
    trainers_groups,
)
from hf_pipetransformer.state.run_state import FileEntry, RankState, RunDescription, RunState, check_same_kinds


if TYPE_CHECKING:
    from hf_pipetransformer.data.loader import PipelineLoader
    from hf_pipetransformer.data.sampler import Position
    from hf_pipetransformer.runtime.context import Context
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.state.resumption import Resumption


class SavedDecisions(Protocol):
    """Whatever decides on layouts, as checkpoints see it."""

    def state(self) -> dict[str, Any]:
        """Return what later decisions depend on."""

    def load_state(self, state: Mapping[str, Any], is_elsewhere: bool, is_same_policy: bool) -> None:
        """Go on from what `state` returned."""


@dataclass
class Checkpoints:
    """Saves and restores all stateful parts of a training; each rank its own.

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

    # ---- saving ----

    @property
    def are_trainers_too(self) -> bool:
        """True if plain Trainer could resume too: the optimizer is whole, and it finds the position in the data."""
        stage, place = self.pipeline.stage, self._place()
        is_whole = stage.layout.pipeline_size == 1 and stage.store.trains_all
        return is_whole and self._is_counted(place) and (place is None or not place.is_split_by_node)

    def save(self, folder: str, unlogged: Mapping[str, Any]) -> None:
        """Write this rank's files, and wait for all ranks'; the last call before `trainer_state.json`.

        `unlogged` has `unlogged_loss` and `last_logged_step` of this rank.
        """
        context, place, stage = self.context, self._place(), self.pipeline.stage
        check_replicas_agree(stage, self.optimizer_state)
        # Replicas have the same bits, as has just been checked: one of them writes.
        written = self._write_optimizer(folder) if stage.groups.replica == 0 else {}
        state = RankState(
            own=random_state(context.args.device),
            **unlogged,
            order=None if place is None else place.order_state,
            shared=None if self.pipeline.shared_rng is None else self.pipeline.shared_rng.states,
            ahead=None if place is None else place.ahead,
            position=None if place is None or has_length(self.loader) else place.first,
        )
        written |= checkpoint.write_rank_state(folder, context.topology.rank, state)
        # Every rank's files are on disk before its answer, so that the gather is what rank 0 waits for.
        answers = context.topology.gather((written, state.unlogged_loss))
        self._written = {name: entry for entries, _loss in answers for name, entry in entries.items()}
        self._unlogged_loss = sum(loss for _entries, loss in answers) / context.topology.world_size

    def _write_optimizer(self, folder: str) -> dict[str, FileEntry]:
        stage, optimizer = self.pipeline.stage, self.optimizer_state
        states = {name: optimizer.state_of(parameter) for name, parameter in stage.trained_here().items()}
        pairs = {(name, key): value for name, state in states.items() for key, value in state.items()}
        tensors = {f"{name}|{key}": each for (name, key), each in pairs.items() if isinstance(each, torch.Tensor)}
        values = {
            f"{name}|{key}": plain(each, f"The optimizer's state {key!r} of {name}")
            for (name, key), each in pairs.items()
            if not isinstance(each, torch.Tensor)
        }
        names = [name for name, state in states.items() if state]
        header = {"names": names, "values": values, "groups": optimizer.options()}
        return checkpoint.write_part(folder, checkpoint.optimizer_file(stage.groups.position), tensors, header)

    def complete(self, folder: str) -> None:
        """Write the state and the list of all files. Call on rank 0, after `save` and all of Trainer's files."""
        progress, seeds, place = self.context.run.state, self.context.seeds, self._place()
        settings = self.pipeline.settings
        values: dict[str, Any] = {
            **vars(self.description.identity),
            # What is in force, where the options leave it open.
            "arguments": self.description.identity.arguments | {"pipeline_head_slices": settings.head_slices.number},
            **self.kinds(),
            **self._schedules(),
            "data": self.description.data,
            "step": progress.global_step,
            "epoch": progress.epoch,
            "place": place,
            "is_counted": self._is_counted(place),
            "unlogged_loss": self._unlogged_loss,
            "layout": self.pipeline.layout,
            "first_layout": self.first_layout,
            "sums_in_float32": settings.sums_in_float32,
            "num_starts": seeds.num_starts,
            "num_transitions": seeds.num_transitions,
            "decisions": self.controller.state(),
        }
        checkpoint.write_state(folder, RunState(**values), self._written)

    def _place(self) -> Position | None:
        """Return the position in the data; None if the loader is the user's own."""
        return None if self.loader is None else self.loader.position(self.epoch)

    def _is_counted(self, place: Position | None) -> bool:
        """Return True if the position in the data follows from the number of steps, as Trainer assumes.

        False after a resume with batches of another size, or one that did not skip the samples that were done.
        """
        order = None if self.loader is None else self.loader.order
        if place is None or order is None:
            return True
        step, accumulation = self.context.run.state.global_step, self.context.args.gradient_accumulation_steps
        return place.going_on(order).is_counted(step, order, accumulation)

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

    # ---- restoring ----

    def restore(self, resumption: Resumption) -> None:
        """Restore optimizer, schedulers, decisions and counts; model and layout are restored already.

        Collective: call on every rank.

        Raises:
            ValueError: on every rank, if a part of this run is of another class.
        """
        resumption.parts = self
        resumption.numbers = (self._restore_plain if resumption.is_plain else self._restore_own)(resumption)
        if self.context.topology.rank == 0:
            folder = f"plain Trainer's {resumption.folder}" if resumption.is_plain else resumption.folder
            announce(f"Resumed from {folder} at step {resumption.step}: {self.pipeline.layout}.")

    def _restore_own(self, resumption: Resumption) -> RankState:
        state, together, run = resumption.state, self.context.topology.together, self.context.run
        # Each part on all ranks together: where one rank refuses, none waits for it in the next collective.
        together(lambda: check_same_kinds(resumption.folder, state, self.kinds()))
        together(lambda: self._restore_optimizer(resumption))
        self.context.seeds.num_starts, self.context.seeds.num_transitions = state.num_starts, state.num_transitions
        numbers = together(lambda: self._read_rank_state(resumption))
        with _restoring("learning-rate schedule", resumption):
            run.lr_scheduler.load_state_dict(state.scheduler)
        # A run that was saved without fp16 has none: the scaler then begins as in a new run.
        if run.scaler is not None and state.scaler is not None:
            with _restoring("grad scaler", resumption):
                run.scaler.load_state_dict(state.scaler)
        has_same_policy = state.policy_class == self.description.identity.policy_class
        with _restoring("freeze policy", resumption):
            self.controller.load_state(state.decisions, resumption.is_elsewhere, has_same_policy)
        return numbers

    def _restore_plain(self, resumption: Resumption) -> RankState:
        """Restore plain Trainer's optimizer, scheduler and, if one process trained, RNG states."""
        folder, context, optimizer, stage = resumption.folder, self.context, self.optimizer_state, self.pipeline.stage
        together, trained, store = context.topology.together, stage.trained_here(), stage.store
        active = [name for name in store.named() if store.is_active(name)]
        groups = trainers_groups(active, self.description.identity.decaying)
        shapes = {name: tuple(parameter.shape) for name, parameter in store.named().items()}
        states, options = together(lambda: read_plain_optimizer(folder, groups, shapes, optimizer.options()))
        optimizer.hold(trained, {name: state for name, state in states.items() if name in trained})
        optimizer.set_options(options)
        context.run.lr_scheduler.load_state_dict(together(lambda: read_plain_scheduler(folder)))
        shared = self.pipeline.shared_rng
        with nullcontext() if shared is None else shared.drawing():
            are_set = together(lambda: set_plain_random_state(folder))
        # The states of the single process go on in what reads data; ranks draw dropout from states of their own.
        if shared is not None or not are_set:
            context.seeds.part(stage.groups)
        return RankState(random_state(context.args.device), 0.0, resumption.step)

    def _restore_optimizer(self, resumption: Resumption) -> None:
        """Read the optimizer state; what this rank trains may be in any stage's file."""
        folder, optimizer, stage = resumption.folder, self.optimizer_state, self.pipeline.stage
        trained = stage.trained_here()
        # The stages of the saved layout, which need not be those of this run.
        num_stages = resumption.state.layout.pipeline_size
        states, names, groups = checkpoint.read_optimizer(folder, num_stages, trained.__contains__)
        strangers = [name for name in names if not stage.store.is_active(name)]
        if strangers:
            raise ValueError(
                f"{folder!r} has optimizer state for {strangers[0]} (one of {len(strangers)}), which this run does "
                "not train: resume with the optimizer of the run that was saved."
            )
        optimizer.hold(trained, states)
        optimizer.set_options(groups)

    def _read_rank_state(self, resumption: Resumption) -> RankState:
        """Read this rank's state; under another K or R, seed new RNG states, except those that data are read with."""
        layout, there, topology = self.pipeline.layout, resumption.state.layout, self.context.topology
        if (layout.pipeline_size, layout.num_replicas) == (there.pipeline_size, there.num_replicas):
            return checkpoint.read_rank_state(resumption.folder, topology.rank)
        first = checkpoint.read_rank_state(resumption.folder, 0)
        # With the step, so that a run which resumes twice does not draw the same again.
        seed = self.context.args.seed + 1_000_003 * (1 + topology.rank) + 7_919 * (1 + resumption.step)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        own = random_state(self.context.args.device)
        # States that one process has only once: for sample orders, and for data that draw random numbers.
        tensors, values = first.shared or first.own
        common = ({name: tensors[name] for name in ("torch", "numpy")}, values)
        return replace(
            first,
            own=({**own[0], **common[0]}, common[1]) if topology.world_size == 1 else own,
            shared=None if topology.world_size == 1 else common,
            unlogged_loss=resumption.state.unlogged_loss,
        )


@contextmanager
def _restoring(what: str, resumption: Resumption) -> Iterator[None]:
    """Wrap errors of `load_state_dict` and the like: the object may be the user's, with any format."""
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{resumption.folder!r}: the state of the {what} in {checkpoint.STATE_FILE} cannot be restored "
            f"({type(error).__name__}: {error}). Resume from another checkpoint."
        ) from error


@contextmanager
def writing(folder: str, context: Context, own: Checkpoints | None) -> Iterator[Callable[[], None]]:
    """Wrap Trainer's saving of a checkpoint; yields what completes it, to be called after Trainer's last file.

    Args:
        own: what a pipeline saves of its training; None in a run that is left to Trainer.

    Raises:
        ValueError: something in the folder is a symbolic link.
    """
    topology, args = context.topology, context.args
    if own is None:
        # Not collective: one of Trainer's own callbacks may save on one process only, and each writes its RNG.
        check_unlinked(folder)
        if args.should_save:
            clear(folder, num_ranks=topology.world_size if topology.world_size > 1 else 0)
        yield lambda: None
        return
    topology.decide(lambda: check_unlinked(folder))
    if topology.rank == 0:
        # Before the model is saved: `save_model` ends at a barrier, after which the other ranks write their parts.
        (clear if args.save_only_model else begin)(folder)

    def complete() -> None:
        # A script's own method of saving may not come by the place where Trainer calls this.
        if topology.rank == 0 and not args.save_only_model and not checkpoint.is_complete(folder):
            own.complete(folder)

    yield complete
    complete()
    context.journal.write("checkpoint", content="model" if args.save_only_model else "full")


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


def rotate(output_dir: str, limit: int | None, best: str | None, step: int) -> None:
    """Delete the oldest checkpoints beyond `limit`, ordered by step.

    A copy, a backup or `touch` changes modification times, so they do not count. Checkpoints above `step`, the one
    saved last, are an earlier run's and go first. `step` and the folder `best` are kept; `limit` None or 0 keeps all.
    """
    if limit is None or limit <= 0:
        return
    # A link leads to a folder that is somebody else's: it neither counts nor goes.
    folders = [each for each in checkpoint.numbered_checkpoints(output_dir) if not os.path.islink(each[1])]
    kept = set() if best is None else {os.path.abspath(best)}
    old = sorted(
        (each for each in folders if each[0] != step and os.path.abspath(each[1]) not in kept),
        key=lambda each: (each[0] <= step, each[0]),
    )
    for _step, folder in old[: max(0, len(folders) - limit)]:
        # If the process is killed during the deletion, the rest must not look like a checkpoint of weights alone.
        with contextlib.suppress(OSError):
            os.remove(os.path.join(folder, TRAINER_STATE_NAME))
        shutil.rmtree(folder, ignore_errors=True)
