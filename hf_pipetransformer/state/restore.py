"""Restoring checkpoint state other than the model, and entering the epoch that a run resumes in."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers.trainer as stock
from transformers import Trainer

from hf_pipetransformer import trainer_compat
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.node_shares import Arrangement
from hf_pipetransformer.data.rng import SharedRngState, States, of_name, random_state, set_random_state, under_name
from hf_pipetransformer.data.sampler import EpochStart
from hf_pipetransformer.elastic.controller import ACTIVATIONS, SAMPLES, WEIGHTS
from hf_pipetransformer.report import announce
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.state import checkpoint
from hf_pipetransformer.state.description import check_same_kinds
from hf_pipetransformer.state.plain_checkpoint import (
    read_plain_optimizer,
    read_plain_scheduler,
    set_plain_random_state,
    trainers_groups,
)
from hf_pipetransformer.state.resumption import Remainder, Resumption
from hf_pipetransformer.state.saving import AHEAD, NUM_AHEAD, ORDER, POSITION, SHARED, Checkpoints


@dataclass(frozen=True)
class RandomNumbers:
    """RNG states of a rank, and its loss since the last log entry."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]

    @property
    def order(self) -> torch.Tensor | None:
        """RNG state that the sample order is drawn from; None draws a new order."""
        return self.tensors.get(ORDER)

    @property
    def shared(self) -> States | None:
        """RNG states of the emulated single process; None where one process trained."""
        return of_name(SHARED, self.tensors, self.values)

    @property
    def ahead(self) -> tuple[States, int] | None:
        """RNG states before the batches that were read ahead, and how many batches; None without."""
        states = of_name(AHEAD, self.tensors, self.values)
        return None if states is None else (states, self.values.get(NUM_AHEAD, 1))

    def set(self, shared: SharedRngState | None, device: torch.device) -> None:
        """Restore the RNG states of this rank, and of `shared`, the emulated single process."""
        set_random_state(self.tensors, self.values, device)
        if shared is not None and self.shared is not None:
            shared.states = self.shared


def restore(resumption: Resumption, into: Checkpoints) -> RandomNumbers:
    """Restore optimizer, schedulers, decisions and counts; model and layout are restored already.

    Collective: call on every rank. `into` has the parts of this training, as for saving.

    Raises:
        ValueError: on every rank, if a part of this run is of another class.
    """
    return (_restore_plain if resumption.is_plain else _restore_own)(resumption, into)


def _restore_own(resumption: Resumption, into: Checkpoints) -> RandomNumbers:
    state, together, scaler = resumption.state, into.context.topology.together, into.context.trainer.accelerator.scaler
    together(lambda: check_same_kinds(resumption.folder, state, into.kinds()))
    together(lambda: _read_optimizer(resumption, into))
    into.context.seeds.num_starts, into.context.seeds.num_transitions = state["num_starts"], state["num_transitions"]
    numbers = together(lambda: _read_random_numbers(resumption, into))
    with _taking("learning-rate schedule", resumption):
        into.context.trainer.lr_scheduler.load_state_dict(state["scheduler"])
    if scaler is not None and state["scaler"] is not None:
        with _taking("grad scaler", resumption):
            scaler.load_state_dict(state["scaler"])
    recall = partial(_read_last_decision, resumption, into)
    with _taking("freeze policy", resumption):
        into.controller.load_state(state["decisions"], recall, resumption.is_elsewhere, resumption.has_same_policy)
    if into.context.topology.rank == 0:
        announce(f"Resumed from {resumption.folder} at step {resumption.step}: {into.pipeline.layout}.")
    return numbers


@contextmanager
def _taking(what: str, resumption: Resumption) -> Iterator[None]:
    """Wrap errors of `load_state_dict` and the like: the object may be the user's, with any format."""
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{resumption.folder!r}: the state of the {what} in {checkpoint.STATE_FILE} cannot be taken up "
            f"({type(error).__name__}: {error}). Resume from another checkpoint."
        ) from error


def _restore_plain(resumption: Resumption, into: Checkpoints) -> RandomNumbers:
    """Restore plain Trainer's optimizer, scheduler and, if one process trained, RNG states."""
    folder, stage, own, together = (
        resumption.folder,
        into.pipeline.stage,
        into.optimizer_state,
        into.context.topology.together,
    )
    trained, store = stage.trained_here(), stage.store
    active = [name for name in store.named() if store.is_active(name)]
    groups = trainers_groups(active, into.description.fields["decaying"])
    shapes = {name: tuple(parameter.shape) for name, parameter in store.named().items()}
    states, options = together(
        lambda: read_plain_optimizer(folder, groups, shapes, checkpoint.group_options(own.optimizer))
    )
    own.hold(trained, {name: state for name, state in states.items() if name in trained})
    checkpoint.set_group_options(own.optimizer, options)
    into.context.trainer.lr_scheduler.load_state_dict(together(lambda: read_plain_scheduler(folder)))
    shared = into.pipeline.shared_rng
    with nullcontext() if shared is None else shared.drawing():
        are_set = together(lambda: set_plain_random_state(folder))
    if shared is not None or not are_set:
        into.context.seeds.part(stage)
    tensors, values = random_state(into.context.trainer.args.device)
    if into.context.topology.rank == 0:
        announce(f"Resumed from plain Trainer's {folder} at step {resumption.step}: {stage.layout}.")
    return RandomNumbers(tensors, values | {"unlogged_loss": 0.0, "last_logged_step": resumption.step})


def _read_optimizer(resumption: Resumption, into: Checkpoints) -> None:
    """Read the optimizer state; what this rank trains may be in any stage's file."""
    folder, own, store = resumption.folder, into.optimizer_state, into.pipeline.stage.store
    trained = into.pipeline.stage.trained_here()
    states: dict[str, dict[str, Any]] = {}
    for position in range(resumption.layout.pipeline_size):
        name = checkpoint.optimizer_file(position)
        tensors, header = checkpoint.read_part(folder, name, lambda key: key.rpartition("|")[0] in trained)
        strangers = [name for name in header["names"] if not store.is_active(name)]
        if strangers:
            raise ValueError(
                f"{folder!r} has optimizer state for {strangers[0]} (one of {len(strangers)}), which this run does "
                "not train: resume with the optimizer of the run that was saved."
            )
        values = {key: value for key, value in header["values"].items() if key.rpartition("|")[0] in trained}
        states |= checkpoint.join_optimizer_state(tensors, values)
    own.hold(trained, states)
    checkpoint.set_group_options(own.optimizer, header["groups"])


def _read_last_decision(resumption: Resumption, into: Checkpoints) -> dict[str, torch.Tensor]:
    """Read the tensors that the policy kept: this rank's weights at the last decision, and all activations."""
    found: dict[str, torch.Tensor] = {}
    weights = {f"{WEIGHTS}|{name}" for name in into.pipeline.stage.trained_here()}
    for position in range(resumption.layout.pipeline_size):
        name = checkpoint.decisions_file(position)
        if checkpoint.has_part(resumption.folder, name):
            tensors, _ = checkpoint.read_part(
                resumption.folder, name, lambda key: key in weights or key.startswith((ACTIVATIONS, SAMPLES))
            )
            found |= tensors
    return {
        key: value.to(into.context.trainer.args.device) if key in weights else value for key, value in found.items()
    }


def _read_random_numbers(resumption: Resumption, into: Checkpoints) -> RandomNumbers:
    """Read this rank's RNG states; under another K or R, seed new ones, except those that data are read with."""
    layout, there, rank = into.pipeline.layout, resumption.layout, into.context.topology.rank
    if (layout.pipeline_size, layout.num_replicas) == (there.pipeline_size, there.num_replicas):
        return RandomNumbers(*checkpoint.read_part(resumption.folder, checkpoint.random_file(rank)))
    first = RandomNumbers(*checkpoint.read_part(resumption.folder, checkpoint.random_file(0)))
    seed = into.context.trainer.args.seed + 1_000_003 * (1 + rank) + 7_919 * (1 + resumption.step)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensors, values = random_state(into.context.trainer.args.device)
    # States that one process has only once: for sample orders, and for data that draw random numbers.
    common = first.shared or (
        {name: first.tensors[name] for name in ("torch", "numpy")},
        {name: first.values[name] for name in ("python", "numpy")},
    )
    taken = [common if into.context.topology.world_size == 1 else under_name(SHARED, common)]
    if first.ahead is not None:
        taken.append(under_name(AHEAD, first.ahead[0]))
    for more_tensors, more_values in taken:
        tensors |= more_tensors
        values |= more_values
    if ORDER in first.tensors:
        tensors[ORDER] = first.tensors[ORDER]
    values |= {key: value for key, value in first.values.items() if key in (POSITION, NUM_AHEAD, "last_logged_step")}
    return RandomNumbers(tensors, values | {"unlogged_loss": resumption.state["unlogged_loss"]})


@dataclass
class FirstEpoch:
    """Leads Trainer's loop to the checkpoint's position in the data; `loader` is None for a user's own."""

    trainer: Trainer
    topology: Topology
    pipeline: Pipeline
    loader: PipelineLoader | None
    resumption: Resumption
    numbers: RandomNumbers
    _are_set: bool = field(default=False, init=False)
    _corrected_epoch: float | None = field(default=None, init=False)

    def set_random_numbers(self) -> None:
        """Restore this rank's RNG state, once: Trainer asks for it in two places."""
        if not self._are_set:
            self._are_set = True
            self.numbers.set(self.pipeline.shared_rng, self.trainer.args.device)

    @contextmanager
    def running(self, arguments: dict[str, Any]) -> Iterator[bool]:
        """Wrap Trainer's loop over the epoch, to run if True is yielded; adapts the loop's `arguments` to the rest."""
        trainer_compat.restore_loss(self.trainer, self.topology, **self.numbers.values)
        if self.trainer.state.global_step >= self.trainer.state.max_steps:
            # Trainer's loop checks for the end only after a step, so it would run one too many.
            self.set_random_numbers()
            self.trainer.control.should_training_stop = True
            yield False
            return
        rest = self.resumption.remainder
        if rest is not None:
            self._begin_remainder(rest, arguments)
        elif self.loader is not None:
            # For a start at the beginning of an epoch; inside one, Trainer calls `skip_first_batches`.
            self.loader.starting_at(EpochStart(0, order_state=self.numbers.order))
        with self._skipping_batches():
            yield True

    def _begin_remainder(self, rest: Remainder, arguments: dict[str, Any]) -> None:
        place = self.resumption.place or {}
        is_same_epoch = rest.epoch == place["epoch"] and rest.num_done == place["samples"]
        if self.loader is not None:
            order = self.numbers.order if is_same_epoch else None
            began_as = Arrangement.from_json(place) if rest.num_done else None
            self.loader.starting_at(EpochStart(rest.first, rest.num_done, order, began_as))
        arguments |= {"steps_in_epoch": rest.num_batches, "num_update_steps_per_epoch": rest.num_updates}

    def correct_epoch(self) -> None:
        """Correct Trainer's epoch fraction after a step in the rest of an epoch."""
        state, rest = self.trainer.state, self.resumption.remainder
        if rest is not None and state.epoch != self._corrected_epoch:
            state.epoch = self._corrected_epoch = rest.epoch_at(state.epoch - rest.epoch)

    @contextmanager
    def _skipping_batches(self) -> Iterator[None]:
        """Make Trainer's batch skipping work with `PipelineLoader`.

        Accelerate's function would build a new torch loader. There is no method to override, so the name
        `skip_first_batches` in `transformers.trainer` is patched for the one call.
        """
        original = stock.skip_first_batches

        def skip(loader: Any, num_batches: int = 0) -> Any:
            stock.skip_first_batches = original
            if not isinstance(loader, PipelineLoader):
                return original(loader, num_batches)
            # Without a known epoch length, Trainer counts from the first step of the run; the saved position is right.
            position = self.numbers.values.get(POSITION, num_batches)
            began_as = Arrangement.from_json(self.resumption.place or {})
            start = EpochStart(position, None, self.numbers.order, began_as, self.numbers.ahead)
            return loader.starting_at(start)

        stock.skip_first_batches = skip
        try:
            yield
        finally:
            stock.skip_first_batches = original
