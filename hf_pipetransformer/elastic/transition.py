"""Transition of a run from one layout to another (PipeTransformer sections 3.2 and 3.3).

A transition lies between two optimizer steps and changes no bit of the weights: frozen parameters leave the optimizer,
each rank receives what its new stage needs from a rank that has it, and the engine and gradient reduction are rebuilt.
A run starts by broadcasting the whole model from rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.elastic.migration import (
    Bundle,
    Move,
    OptimizerState,
    check_replicas,
    digests,
    exchange,
    plan_moves,
)
from hf_pipetransformer.engine.reduction import GradientReducer, SharedParameter
from hf_pipetransformer.runtime.gathering import check_whole
from hf_pipetransformer.runtime.ownership import ParameterStore, frozen_names
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.runtime.wiring import StageSettings, make_engine
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.structure import Probe, Structure
from hf_pipetransformer.splitters.view import StageView


def apply_layout(
    model: nn.Module,
    splitter: Splitter,
    probe: Probe,
    topology: Topology,
    layout: Layout,
    settings: StageSettings,
    is_training: bool,
) -> Stage:
    """Bring this rank into `layout`, from a model that is whole on every rank. Collective: call on every rank.

    Rank 0's parameters and buffers are broadcast to all ranks. What this stage uses moves to its device; in training
    the rest is freed.
    """
    send_model_from_first_rank(model, topology)
    view = StageView(model, splitter, probe.structure, settings.compiled)
    store = ParameterStore(model)
    stage = _make_stage(view, store, probe, topology, layout, settings)
    if is_training:
        store.release(keep=stage.own_names())
    store.move(stage.own_names(), settings.device)
    if is_training:
        _prepare_training(stage, topology, settings)
    return stage


def change_layout(
    stage: Stage, layout: Layout, probe: Probe, topology: Topology, settings: StageSettings, optimizer: OptimizerState
) -> tuple[Stage, int]:
    """Move a training run to another layout, between two optimizer steps. Collective: call on every rank.

    Returns:
        This rank's stage under `layout`, and the bytes that moved between all ranks.

    Raises:
        PipelineError: replicas that must be bit-identical are not.
    """
    check_replicas_agree(stage, optimizer)
    assert stage.reducer is not None, "only a run in training changes its layout"
    stage.reducer.remove()
    stage.reducer = None  # Frees its flat buffers before the parameters of the new stage arrive.
    new = _make_stage(stage.view, stage.store, probe, topology, layout, settings)
    bundles = _bundles(probe.structure)
    moves = plan_moves(list(bundles), stage.layout, layout)
    # Newly frozen parameters move without optimizer state, see `plan_moves`.
    stage.store.freeze(frozen_names(probe.structure, layout))
    arrivals = _Arrivals(new, bundles, settings.device, optimizer)
    num_bytes = exchange(
        moves, lambda own: _collect(stage, bundles, own, optimizer), arrivals.take_in, topology, settings.device
    )
    arrivals.finish()
    _prepare_training(new, topology, settings)
    if stage.view.is_installed:
        new.view.install(*layout.blocks_of_rank(new.groups.position))
    return new, num_bytes


def _make_stage(
    view: StageView, store: ParameterStore, probe: Probe, topology: Topology, layout: Layout, settings: StageSettings
) -> Stage:
    groups = topology.groups(layout.places)
    engine = make_engine(view, probe, layout, groups, settings)
    owners = {name: layout.ranks_of(blocks) for name, blocks in probe.structure.blocks_of_parameter.items()}
    return Stage(layout, groups, settings, view, store, engine, owners, shared=[], reducer=None)


def _prepare_training(stage: Stage, topology: Topology, settings: StageSettings) -> None:
    """Freeze parameters and set up gradient reduction, which only training needs."""
    groups, store = stage.groups, stage.store
    store.freeze(frozen_names(stage.view.structure, stage.layout))
    stage.shared = _shared_parameters(stage, topology)
    shared_ids = {id(entry.parameter) for entry in stage.shared}
    own = [p for p in store.held().values() if id(p) not in shared_ids]
    stage.reducer = GradientReducer(own, groups.replica_group, settings.timeout, groups.replicas)


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


class _Arrivals:
    """Installs what arrives for a new stage and frees what it no longer needs, round by round.

    Args:
        stage: the new stage, whose store still contains the parameters of the old one.
    """

    def __init__(self, stage: Stage, bundles: Bundles, device: torch.device, optimizer: OptimizerState) -> None:
        self.stage = stage
        self.bundles = bundles
        self.device = device
        self.optimizer = optimizer
        self._states: dict[str, dict[str, Any]] = {}

    def take_in(self, done: Sequence[Bundle], contents: list[dict[str, Any]]) -> None:
        """Install the contents of a round, and free bundles that no rank needs from here any more."""
        store = self.stage.store
        gone = {name for bundle in done for name in self.bundles[bundle][0]} - self.stage.own_names()
        self._let_go(gone & set(store.held()))
        buffers = dict(self.stage.view.model.named_buffers())
        arrived: dict[str, torch.Tensor] = {}
        for content in contents:
            arrived.update({name: value.to(self.device) for name, value in content["parameters"].items()})
            self._states.update(content["state"])
            for name, value in content["buffers"].items():
                buffers[name].data.copy_(value)
        store.fill(arrived)

    def finish(self) -> None:
        """Make the optimizer train what the stage has, after all rounds."""
        store, stage = self.stage.store, self.stage
        self._let_go(set(store.held()) - stage.own_names())
        self.optimizer.hold(stage.trained_here(), self._states)

    def _let_go(self, names: set[str]) -> None:
        if names:
            held = self.stage.store.held()
            self.optimizer.let_go([held[name] for name in names])
            self.stage.store.release(keep=set(held) - names)


def check_replicas_agree(stage: Stage, optimizer: OptimizerState) -> None:
    """Compare the replicas of every block, weights and optimizer state. Collective: call on every rank.

    Raises:
        PipelineError: replicas are not bit-identical.
    """
    if stage.groups.num_replicas == 1:
        return
    compared = {}
    for name, parameter in stage.store.held().items():
        if parameter.requires_grad:
            state = [value for value in optimizer.state_of(parameter).values() if isinstance(value, torch.Tensor)]
            compared[name] = [parameter.data, *state]
    check_replicas(digests(compared), stage.groups)


def send_model_from_first_rank(model: nn.Module, topology: Topology) -> None:
    """Broadcast all parameters and buffers from rank 0: a head initialized without a seed becomes the same.

    Uses the device's own backend if the model is on a device on every rank, else the control group.
    """
    check_whole(model)
    if topology.world_size == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    is_on_cpu = torch.tensor(float(any(tensor.is_cpu for _, tensor in tensors)))
    topology.largest(is_on_cpu)
    group = topology.control if is_on_cpu else None
    with torch.no_grad():
        for name, tensor in tensors:
            value = (tensor.data.cpu() if is_on_cpu else tensor.data).contiguous()
            call = partial(dist.broadcast, value, src=0, group=group)
            guarded(call, f"receiving {name} from rank 0")
            if topology.rank != 0:
                tensor.data.copy_(value)


def _shared_parameters(stage: Stage, topology: Topology) -> list[SharedParameter]:
    groups, named = stage.groups, stage.store.named()
    shared = []
    for name, positions in stage.owners.items():
        if len(positions) < 2 or not stage.store.is_active(name):
            continue
        group, pipeline_group = topology.shared_groups(groups.pipeline_size, positions)
        if groups.position in positions:
            owner = groups.pipeline_ranks[positions[0]]
            is_owner = groups.position == positions[0]
            shared.append(SharedParameter(name, named[name], group, pipeline_group, owner, is_owner))
    return shared
