"""Restoring checkpoint state other than the model, and entering the epoch that a run resumes in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import skip_first_batches

from hf_pipetransformer.data.node_shares import Arrangement
from hf_pipetransformer.data.rng import random_state, set_random_state
from hf_pipetransformer.data.sampler import EpochStart
from hf_pipetransformer.report import announce
from hf_pipetransformer.state import checkpoint
from hf_pipetransformer.state.description import check_same_kinds
from hf_pipetransformer.state.plain_checkpoint import (
    read_plain_optimizer,
    read_plain_scheduler,
    set_plain_random_state,
    trainers_groups,
)
from hf_pipetransformer.state.run_state import RankState


if TYPE_CHECKING:
    from hf_pipetransformer.state.resumption import Resumption
    from hf_pipetransformer.state.run_state import Remainder
    from hf_pipetransformer.state.saving import Checkpoints


def restore(resumption: Resumption, into: Checkpoints) -> RankState:
    """Restore optimizer, schedulers, decisions and counts; model and layout are restored already.

    Collective: call on every rank. `into` has the parts of this training, as for saving.

    Raises:
        ValueError: on every rank, if a part of this run is of another class.
    """
    numbers = (_restore_plain if resumption.is_plain else _restore_own)(resumption, into)
    if into.context.topology.rank == 0:
        folder = f"plain Trainer's {resumption.folder}" if resumption.is_plain else resumption.folder
        announce(f"Resumed from {folder} at step {resumption.progress.step}: {into.pipeline.layout}.")
    return numbers


def _restore_own(resumption: Resumption, into: Checkpoints) -> RankState:
    state, together, run = resumption.state, into.context.topology.together, into.context.run
    # Each part on all ranks together: where one rank refuses, none waits for it in the next collective.
    together(lambda: check_same_kinds(resumption.folder, state, into.kinds()))
    together(lambda: _restore_optimizer(resumption, into))
    into.context.seeds.num_starts, into.context.seeds.num_transitions = state.num_starts, state.num_transitions
    numbers = together(lambda: _read_rank_state(resumption, into))
    with _restoring("learning-rate schedule", resumption):
        run.lr_scheduler.load_state_dict(state.scheduler)
    # A run that was saved without fp16 has none: the scaler then begins as in a new run.
    if run.scaler is not None and state.scaler is not None:
        with _restoring("grad scaler", resumption):
            run.scaler.load_state_dict(state.scaler)
    has_same_policy = state.policy_class == into.description.identity.policy_class
    with _restoring("freeze policy", resumption):
        into.controller.load_state(state.decisions, resumption.is_elsewhere, has_same_policy)
    return numbers


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


def _restore_plain(resumption: Resumption, into: Checkpoints) -> RankState:
    """Restore plain Trainer's optimizer, scheduler and, if one process trained, RNG states."""
    folder, context, own, stage = resumption.folder, into.context, into.optimizer_state, into.pipeline.stage
    together, trained, store = context.topology.together, stage.trained_here(), stage.store
    active = [name for name in store.named() if store.is_active(name)]
    groups = trainers_groups(active, into.description.identity.decaying)
    shapes = {name: tuple(parameter.shape) for name, parameter in store.named().items()}
    states, options = together(lambda: read_plain_optimizer(folder, groups, shapes, own.options()))
    own.hold(trained, {name: state for name, state in states.items() if name in trained})
    own.set_options(options)
    context.run.lr_scheduler.load_state_dict(together(lambda: read_plain_scheduler(folder)))
    shared = into.pipeline.shared_rng
    with nullcontext() if shared is None else shared.drawing():
        are_set = together(lambda: set_plain_random_state(folder))
    # The states of the single process go on in what reads data; ranks draw dropout from states of their own.
    if shared is not None or not are_set:
        context.seeds.part(stage.groups)
    return RankState(random_state(context.args.device), 0.0, resumption.progress.step)


def _restore_optimizer(resumption: Resumption, into: Checkpoints) -> None:
    """Read the optimizer state; what this rank trains may be in any stage's file."""
    folder, own, store = resumption.folder, into.optimizer_state, into.pipeline.stage.store
    trained = into.pipeline.stage.trained_here()
    states: dict[str, dict[str, Any]] = {}
    # The stages of the saved layout, which need not be those of this run.
    for position in range(resumption.state.layout.pipeline_size):
        found, header = checkpoint.read_optimizer(folder, position, trained.__contains__)
        strangers = [name for name in header["names"] if not store.is_active(name)]
        if strangers:
            raise ValueError(
                f"{folder!r} has optimizer state for {strangers[0]} (one of {len(strangers)}), which this run does "
                "not train: resume with the optimizer of the run that was saved."
            )
        states |= found
    own.hold(trained, states)
    own.set_options(header["groups"])


def _read_rank_state(resumption: Resumption, into: Checkpoints) -> RankState:
    """Read this rank's state; under another K or R, seed new RNG states, except those that data are read with."""
    layout, there, topology = into.pipeline.layout, resumption.state.layout, into.context.topology
    if (layout.pipeline_size, layout.num_replicas) == (there.pipeline_size, there.num_replicas):
        return checkpoint.read_rank_state(resumption.folder, topology.rank)
    first = checkpoint.read_rank_state(resumption.folder, 0)
    # With the step, so that a run which resumes twice does not draw the same again.
    seed = into.context.args.seed + 1_000_003 * (1 + topology.rank) + 7_919 * (1 + resumption.state.step)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    own = random_state(into.context.args.device)
    # States that one process has only once: for sample orders, and for data that draw random numbers.
    tensors, values = first.shared or first.own
    common = ({name: tensors[name] for name in ("torch", "numpy")}, values)
    return replace(
        first,
        own=({**own[0], **common[0]}, common[1]) if topology.world_size == 1 else own,
        shared=None if topology.world_size == 1 else common,
        unlogged_loss=resumption.state.unlogged_loss,
    )


@dataclass
class ResumedEpoch:
    """Leads Trainer's loop to the checkpoint's position in the data."""

    checkpoints: Checkpoints
    resumption: Resumption
    numbers: RankState
    _are_set: bool = field(default=False, init=False)
    _skipped: tuple[int, int] | None = field(default=None, init=False)
    """Batches of the epoch that were skipped, and all of its batches; None at its beginning, or in a remainder."""

    def set_random_numbers(self) -> None:
        """Restore this rank's RNG state, once."""
        if self._are_set:
            return
        self._are_set = True
        set_random_state(*self.numbers.own, self.checkpoints.context.args.device)
        # Only where several ranks emulate one process; one process has just got these states as its own.
        shared = self.checkpoints.pipeline.shared_rng
        if shared is not None and self.numbers.shared is not None:
            shared.states = self.numbers.shared

    def begin(self, arguments: dict[str, Any]) -> bool:
        """Adapt the `arguments` of Trainer's loop over the epoch to what is left of it; return False if nothing is."""
        context, numbers, loader = self.checkpoints.context, self.numbers, self.checkpoints.loader
        run = context.run
        run.restore_loss(context.topology, numbers.unlogged_loss, numbers.last_logged_step)
        if run.state.global_step >= run.state.max_steps:
            # Trainer's loop checks for the end only after a step, so it would run one too many.
            self.set_random_numbers()
            run.control.should_training_stop = True
            return False
        num_done, rest = arguments["steps_trained_in_current_epoch"], self.resumption.remainder
        if rest is None and num_done:
            self._skip(num_done, arguments)
            return True
        if rest is not None:
            self._begin_remainder(rest, arguments)
        elif loader is not None:
            loader.starting_at(EpochStart(0, order_state=numbers.order))
        self.set_random_numbers()
        return True

    def _begin_remainder(self, rest: Remainder, arguments: dict[str, Any]) -> None:
        place, loader = self.resumption.progress.place, self.checkpoints.loader
        assert place is not None and loader is not None
        is_same_epoch = rest.epoch == place["epoch"] and rest.num_done == place["samples"]
        began_as = Arrangement.from_json(place) if rest.num_done else None
        order = self.numbers.order if is_same_epoch else None
        loader.starting_at(EpochStart(rest.first, rest.num_done, order, began_as))
        arguments |= {"steps_in_epoch": rest.num_batches, "num_update_steps_per_epoch": rest.num_updates}

    def _skip(self, num_done: int, arguments: dict[str, Any]) -> None:
        """Go on after the first `num_done` batches of the epoch, which has as many batches less for Trainer."""
        numbers, loader = self.numbers, self.checkpoints.loader
        if loader is None:
            arguments["train_dataloader"] = skip_first_batches(arguments["train_dataloader"], num_done)
        else:
            # Without a known epoch length, Trainer counts from the first step of the run; the saved position is right.
            position = num_done if numbers.position is None else numbers.position
            began_as = Arrangement.from_json(self.resumption.progress.place or {})
            loader.starting_at(EpochStart(position, None, numbers.order, began_as, numbers.ahead))
        num_batches, accumulation = (
            arguments["steps_in_epoch"],
            self.checkpoints.context.args.gradient_accumulation_steps,
        )
        self._skipped = num_done, num_batches
        arguments["steps_in_epoch"] = num_batches - num_done
        arguments["num_update_steps_per_epoch"] -= num_done // accumulation

    def correct_epoch(self) -> None:
        """Correct Trainer's epoch fraction after a step: it counts the batches that are left as a whole epoch."""
        state, rest = self.checkpoints.context.run.state, self.resumption.remainder
        if rest is not None:
            state.epoch = rest.epoch_at(state.epoch - rest.epoch)
        elif self._skipped is not None:
            num_done, num_batches = self._skipped
            epoch = self.checkpoints.epoch
            num_done += round((state.epoch - epoch) * (num_batches - num_done))
            state.epoch = epoch + num_done / num_batches
