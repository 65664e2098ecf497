"""Transition of a run from one layout to another (PipeTransformer sections 3.2 and 3.3).

A transition lies between two optimizer steps and changes no bit of the weights: frozen parameters leave the optimizer,
each rank receives what its new stage needs from a rank that has it, and the engine and gradient reduction are rebuilt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_pipetransformer.elastic.migration import Bundle, Move, exchange, plan_moves
from hf_pipetransformer.report import announce, duration
from hf_pipetransformer.runtime.optimizer_state import OptimizerState, check_replicas_agree
from hf_pipetransformer.runtime.ownership import frozen_names
from hf_pipetransformer.runtime.wiring import make_stage, prepare_training
from hf_pipetransformer.schedules.layout import Layout, counted


if TYPE_CHECKING:
    from hf_pipetransformer.cache.training import TrainingCache
    from hf_pipetransformer.data.loader import PipelineLoader
    from hf_pipetransformer.elastic.controller import Change, LayoutController
    from hf_pipetransformer.freeze.policy import FreezePolicy
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.runtime.context import Context
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.runtime.stage import Stage
    from hf_pipetransformer.splitters.structure import Structure


def longest_pipeline(
    layout: Layout, first: Layout | None, policy: FreezePolicy, replay: Mapping[int, Layout] | None
) -> int:
    """Return the largest pipeline size K that a run may have from here on.

    Pipelines grow when layers unfreeze, or as the replayed run did.

    Args:
        layout: layout in force.
        first: layout under which the run began, if it was another; unfreezing may return to it.
        replay: layouts of an earlier run by the optimizer step from which they applied; the policy is then not asked.
    """
    coming = [] if replay is None else list(replay.values())
    if replay is None and policy.may_unfreeze and first is not None:
        coming = [first]
    return max(each.pipeline_size for each in (layout, *coming))


def check_unfreezing(
    args: PipeTransformerArguments, policy: FreezePolicy, replay: Mapping[int, Layout] | None, pipeline_size: int
) -> None:
    """Refuse to unfreeze layers under schedules with which that has not been verified.

    Raises:
        ValueError: layers may unfreeze under an asynchronous schedule or one that cuts sequences into slices.
    """
    counts = [] if replay is None else [layout.num_frozen_layers for _, layout in sorted(replay.items())]
    unfreezes = policy.may_unfreeze if replay is None else counts != sorted(counts)
    if unfreezes and pipeline_size > 1 and not args.abilities.runs_steps_whole:
        who = "layout_plan" if replay is not None else f"the freeze policy {policy.name!r}"
        raise ValueError(
            f"pipeline_schedule={args.pipeline_schedule!r} while {who} may unfreeze layers: that has not been "
            "verified. Use pipeline_schedule='1f1b', or let the number of frozen layers only grow."
        )


@dataclass
class Transitions:
    """Changes the layout of a training run as its controller decides; cache, loader and optimizer state follow."""

    context: Context
    pipeline: Pipeline
    controller: LayoutController
    optimizer: OptimizerState
    cache: TrainingCache | None
    loader: PipelineLoader | None

    def before_step(self) -> Change | None:
        """Ask the controller and apply its decision; return the move to another layout, if any."""
        step, pipeline, moved = self.context.run.state.global_step, self.pipeline, None
        if self.controller.decides_before(step):
            self.context.timeouts.rest()  # Rank 0 may measure the disk meanwhile: raise the timeouts of the others.
        # Two questions in a row, since the first change may only then show that nothing can be stored.
        for ask in (self.controller.change_before, self.controller.change_without_cache):
            change = ask(step, pipeline.stage)
            if change is not None and change.moves:
                self.context.timeouts.rest()
                self.move(change)
                moved = change
            elif change is not None:
                pipeline.stage.layout = change.layout
                self.context.journal.write("profile", what="trial", num_microbatches=change.layout.num_microbatches)
        return moved

    def move(self, change: Change) -> None:
        """Continue the run under another layout, with the same weights and the same next batch."""
        start, old, pipeline = time.perf_counter(), self.pipeline.layout, self.pipeline
        # First of all: under an asynchronous schedule stages are at different steps, and weights of one step have to
        # move.
        pipeline.settle()
        if self.cache is not None:
            self.cache.prepare_transition()
        # Noted before it is tried: if memory runs out in the move, the event names the new layout.
        self.context.journal.tried = pipeline.start_up.plans.trying(change.layout)
        stage, num_bytes = change_layout(pipeline.stage, change.layout, self.optimizer)
        pipeline.take(stage)
        if self.cache is not None:
            self.cache.follow()
        for loader in (self.loader, *pipeline.persistent_loaders.values()):
            if loader is not None:
                loader.follow(stage.groups)
        # Stages and replicas draw from other places from here on; the count is a part of the seed, so that they do not
        # draw the numbers of the first step again.
        self.context.seeds.num_transitions += 1
        self.context.seeds.part(stage.groups)
        self._report(change, old, time.perf_counter() - start, num_bytes)

    def _report(self, change: Change, old: Layout, seconds: float, num_bytes: int) -> None:
        new, predicted, measured = change.layout, change.predicted, change.measured
        self.context.journal.write(
            "transition",
            **{"from": old.as_event(), "to": new.as_event()},
            seconds=seconds,
            bytes_moved=num_bytes,
            measured_step_s=measured,
            predicted_step_s=predicted,
            alternatives=change.alternatives,
            reason=change.reason,
        )
        if self.context.topology.rank != 0:
            return
        gain = ""
        if measured and predicted:
            gain = (
                f" The latest steps took {duration(measured)} each, {duration(predicted)} are predicted from "
                f"here on ({measured / predicted:.2f}x)."
            )
        frozen = f"{new.num_frozen_layers} of {new.num_layers} layers frozen (before: {old.num_frozen_layers})"
        if new.num_frozen_layers < old.num_frozen_layers:
            count = old.num_frozen_layers - new.num_frozen_layers
            frozen = f"{counted(count, 'layer')} unfrozen, {frozen}"
        moved = ""
        if (old.places, old.boundaries) != (new.places, new.boundaries):
            shapes = " -> ".join(dict.fromkeys((old.shape_in_words, new.shape_in_words)))
            moved = f" {shapes}, moved {num_bytes / 2**20:.1f} MiB in {seconds:.2f} s."
        announce(
            f"Step {self.context.run.state.global_step}: {frozen}; {change.reason}.{moved}{gain}", is_decision=True
        )


def change_layout(stage: Stage, layout: Layout, optimizer: OptimizerState) -> tuple[Stage, int]:
    """Move a training run to another layout, between two optimizer steps. Collective: call on every rank.

    Returns:
        This rank's stage under `layout`, and the bytes that moved between all ranks.

    Raises:
        PipelineError: replicas that must be bit-identical are not.
    """
    settings = stage.settings
    structure = settings.probe.structure
    # Before anything moves: receivers take the bits of any replica, after which it could not be told which one was
    # wrong.
    check_replicas_agree(stage, optimizer)
    assert stage.reducer is not None, "only a run in training changes its layout"
    stage.reducer.remove()
    stage.reducer = None  # Frees its flat buffers before the parameters of the new stage arrive.
    new = make_stage(stage.view, stage.store, layout, settings)
    bundles = _bundles(structure)
    # Every rank makes the list by itself, from layouts that all of them share: nothing has to be agreed.
    moves = plan_moves(list(bundles), stage.layout, layout, settings.topology.machine_of)
    # Newly frozen parameters move without optimizer state, see `plan_moves`.
    stage.store.freeze(frozen_names(structure, layout))
    arrivals = _Arrivals(new, bundles, optimizer)
    num_bytes = exchange(
        moves,
        lambda own: _collect(stage, bundles, own, optimizer),
        arrivals.install,
        settings.topology,
        settings.device,
    )
    arrivals.finish()
    prepare_training(new)
    if stage.view.is_installed:
        new.install()
    return new, num_bytes


Bundles = dict[Bundle, tuple[list[str], list[str]]]
"""Names of the parameters and of the buffers of each bundle."""


def _bundles(structure: Structure) -> Bundles:
    bundles: Bundles = {}
    for kind, users in enumerate((structure.blocks_of_parameter, structure.blocks_of_buffer)):
        for name, blocks in users.items():
            bundles.setdefault(blocks, ([], []))[kind].append(name)
    return dict(sorted(bundles.items()))


def _collect(stage: Stage, bundles: Bundles, moves: Sequence[Move], optimizer: OptimizerState) -> list[dict[str, Any]]:
    named, buffers = stage.store.named(), dict(stage.view.model.named_buffers())
    contents = []
    for move in moves:
        names, buffer_names = bundles[move.bundle]
        contents.append(
            {
                "parameters": {name: named[name].data for name in names},
                "buffers": {name: buffers[name] for name in buffer_names},
                "state": {name: optimizer.state_of(named[name]) for name in names} if move.with_state else {},
            }
        )
    return contents


@dataclass
class _Arrivals:
    """Installs what arrives for a new stage and frees what it no longer needs, round by round.

    Args:
        stage: the new stage, whose store still contains the parameters of the old one.
    """

    stage: Stage
    bundles: Bundles
    optimizer: OptimizerState
    _states: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def install(self, done: Sequence[Bundle], contents: list[dict[str, Any]]) -> None:
        """Install the contents of a round, and free bundles that no rank needs from here any more."""
        store = self.stage.store
        gone = {name for bundle in done for name in self.bundles[bundle][0]} - self.stage.own_names()
        self._let_go(gone & set(store.held()))
        buffers = dict(self.stage.view.model.named_buffers())
        arrived: dict[str, torch.Tensor] = {}
        for content in contents:
            arrived.update(
                {name: value.to(self.stage.settings.device) for name, value in content["parameters"].items()}
            )
            self._states.update(content["state"])
            for name, value in content["buffers"].items():
                # In place: modules have the buffer itself, not its name in a store.
                buffers[name].data.copy_(value)
        store.fill(arrived)

    def finish(self) -> None:
        """Make the optimizer train what the stage has, after all rounds."""
        store, stage = self.stage.store, self.stage
        # Bundles that nobody had to receive were in no round.
        self._let_go(set(store.held()) - stage.own_names())
        self.optimizer.hold(stage.trained_here(), self._states)

    def _let_go(self, names: set[str]) -> None:
        if names:
            held = self.stage.store.held()
            self.optimizer.let_go([held[name] for name in names])
            self.stage.store.release(keep=set(held) - names)
