"""Construction of a rank's stage under a layout: its engine, links to neighboring stages, and gradient reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_pipetransformer.comm.transfers import broadcast, digest_of
from hf_pipetransformer.engine.embeddings import EmbeddingGradients, embeddings_of
from hf_pipetransformer.engine.engine import Engine, Link, Local, StageLinks, Wire
from hf_pipetransformer.engine.head import HeadPlan, HeadProgram
from hf_pipetransformer.engine.linear_layers import SharedCasts, WeightGradients, linear_layers
from hf_pipetransformer.engine.program import ModelProgram, StageProgram
from hf_pipetransformer.engine.reduction import GradientReducer, GradientSums, SharedParameter
from hf_pipetransformer.engine.wrappers import CachedEntryProgram, RecomputingProgram
from hf_pipetransformer.runtime.gathering import check_state_dicts, check_whole
from hf_pipetransformer.runtime.ownership import ParameterStore, frozen_names
from hf_pipetransformer.runtime.stage import Stage, StageSettings
from hf_pipetransformer.splitters.adapters import has_adapters
from hf_pipetransformer.splitters.masters import cast_masters, master_names
from hf_pipetransformer.splitters.quantized import named_scales
from hf_pipetransformer.splitters.view import StageView


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.splitters.base import Splitter


def start_stage(
    model: nn.Module, splitter: Splitter, layout: Layout, settings: StageSettings, is_training: bool
) -> Stage:
    """Build this rank's stage from a model that is whole on every rank. Collective: call on every rank.

    Where parameters or buffers differ, all ranks get rank 0's. In training, what this stage does not use is freed
    before the rest moves to its device, cast to float32 if the settings say so. Otherwise all stay on the host as they
    were loaded.
    """
    # First of all, as ranks compare whole models: below, each frees what its stages do not use.
    send_model_from_first_rank(model, settings.topology)
    structure, by_layer = settings.probe.structure, settings.recompute == "layers"
    view = StageView(model, splitter, structure, settings.compiled, recomputes_layers=by_layer)
    stage = make_stage(view, ParameterStore(model), layout, settings)
    if is_training:
        masters = master_names(model) if settings.masters_in_float32 else set()
        stage.store.release(keep=stage.own_names())
        stage.store.is_divided = True
        if not has_adapters(model):  # PEFT saves adapters through `state_dict`, of which it takes those alone.
            check_state_dicts(model)
        cast_masters(model, masters, settings.device)
        # `cast_masters` has put those on the device already.
        stage.store.move(stage.own_names() - masters, settings.device)
        prepare_training(stage)
    return stage


def make_stage(view: StageView, store: ParameterStore, layout: Layout, settings: StageSettings) -> Stage:
    """Build this rank's stage under a layout; `store` may still hold the parameters of another one."""
    groups = settings.topology.groups(layout.places)
    # A loss that calls autograd itself runs on the stage with the head, where nothing is kept back. Steps that overlap
    # mostly have one micro-batch, and those of more give the bits of one process that delays its updates.
    keeps = layout.num_stages > 1 and groups.is_first and not layout.abilities.overlaps_steps
    embeddings = EmbeddingGradients(embeddings_of(view.model, view.structure.layers) if keeps else [])
    stage = Stage(layout, groups, settings, view, store, embeddings, HeadPlan(settings.head_slices))
    programs = _Programs(stage)
    own = layout.places.stages_of(groups.position)
    stage.engine = Engine([programs.of(each) for each in own], [_links(stage, each) for each in own], settings.meter)
    return stage


def prepare_training(stage: Stage) -> None:
    """Freeze parameters and set up gradient reduction, which only training needs."""
    groups, store = stage.groups, stage.store
    store.freeze(frozen_names(stage.view.structure, stage.layout))
    stage.shared = _shared_parameters(stage)
    shared_ids = {id(entry.parameter) for entry in stage.shared}
    # Shared ones have a sum of their own, over stages and replicas at once.
    own = [p for p in store.held().values() if id(p) not in shared_ids]
    # Before the reducer, whose hooks must find the sums complete: hooks run in the order of registration.
    sums = GradientSums(store.held().values()) if stage.settings.sums_in_float32 else None
    stage.reducer = GradientReducer(own, groups.replica_group, stage.settings.timeout, groups.replicas, sums)


def _shared_parameters(stage: Stage) -> list[SharedParameter]:
    groups, named = stage.groups, stage.store.named()
    shared = []
    for name, positions in stage.owners.items():
        if len(positions) < 2 or not stage.store.is_active(name):
            continue
        # On every rank, also one that does not use the parameter: making a group is collective.
        group, pipeline_group = stage.settings.topology.shared_groups(groups.pipeline_size, positions)
        if groups.position in positions:
            owner = groups.pipeline_ranks[positions[0]]
            is_owner = groups.position == positions[0]
            shared.append(SharedParameter(name, named[name], group, pipeline_group, owner, is_owner))
    return shared


def send_model_from_first_rank(model: nn.Module, topology: Topology) -> None:
    """Make parameters and buffers those of rank 0, such as a head that was initialized without a seed.

    On the CPU only what differs is sent: weights that every rank mapped from the same file stay shared memory. A model
    that is on a device on every rank is broadcast whole, over the device's own backend.
    """
    check_whole(model)
    if topology.world_size == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tensors += [(name, scale) for _, name, scale in named_scales(model)]
    is_on_cpu = torch.tensor(float(any(tensor.is_cpu for _, tensor in tensors)))
    # Ranks must take the same way, so a tensor on the CPU of one of them decides for all.
    topology.largest(is_on_cpu)
    group = topology.control if is_on_cpu else None
    if is_on_cpu:
        digests = topology.gather([digest_of(tensor) for _, tensor in tensors])
        tensors = [pair for pair, *found in zip(tensors, *digests, strict=True) if len(set(found)) > 1]
    with torch.no_grad():
        for name, tensor in tensors:
            value = (tensor.data.cpu() if is_on_cpu else tensor.data).contiguous()
            broadcast(value, 0, group, name)
            if topology.rank != 0:
                tensor.data.copy_(value)


class _Programs:
    """Programs of a rank's stages. Passes that see different weights share no casts and no head."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.layout, self.settings = stage, stage.layout, stage.settings
        self.num_blocks = stage.view.structure.num_blocks
        self.shares = not self.layout.abilities.overlaps_steps
        # Compiled layers hold their own casts.
        casts = self.shares and self.settings.is_mixed and self.settings.compiled is None
        # One for all stages of the rank and its head apart, so that a weight is cast once for all of them.
        self.casts = SharedCasts(stage.view.model if casts else None)

    def _dtype_out(self, last_block: int) -> torch.dtype:
        # The last block, the head, has no boundary above it.
        dtypes = self.settings.probe.boundary_dtypes
        return dtypes[min(last_block, len(dtypes) - 1)]

    def of(self, stage: int) -> StageProgram:
        blocks, entry_block = self.layout.blocks_of(stage), self.layout.entry_block
        whole = self._with_head(stage, blocks)
        if entry_block <= blocks.start:
            return whole
        # Stored activations enter amid this stage: records that are read skip the blocks below.
        below, above = range(blocks.start, min(blocks.stop, entry_block)), range(entry_block, blocks.stop)
        return CachedEntryProgram(
            self.stage.view,
            below,
            entry_block,
            above=self._with_head(stage, above) if above else None,
            program=whole,
            dtype_entry=self.settings.probe.boundary_dtypes[entry_block - 1],
            dtype_out=self._dtype_out(blocks[-1]),
            device=self.settings.device,
        )

    def _with_head(self, stage: int, own: range) -> StageProgram:
        if own.stop < self.num_blocks or not self.shares:
            return self._layers(stage, own)
        layers = self._layers(stage, own[:-1]) if own[:-1] else None
        alone = self._bare(own[-1:], sends_gradient=True)
        self.stage.head.program = alone
        dtype, is_above_active = self.settings.probe.boundary_dtypes[-1], stage > self.layout.first_active_stage
        return HeadProgram(self.stage.head, self._layers(stage, own), layers, alone, dtype, is_above_active)

    def _layers(self, stage: int, own: range) -> StageProgram:
        program: StageProgram = self._bare(own, stage > self.layout.first_active_stage)
        if self.layout.abilities.cuts_tokens:
            from hf_pipetransformer.engine.token_program import TokenSliceProgram

            program = TokenSliceProgram(program, self.layout.num_layers)
        recompute = self.settings.recompute
        # The view recomputes by layers, within the forward of a stage.
        if recompute in ("never", "layers"):
            return program
        return RecomputingProgram(program, recompute, self.layout.places.chunk_of(stage), self.settings.device)

    def _bare(self, own: range, sends_gradient: bool) -> ModelProgram:
        # Only a split backward puts the gradients of weights off.
        view = self.stage.view
        linears = linear_layers(view.model) if self.layout.abilities.splits_backward else []
        later, kept = WeightGradients(linears, self.casts), self.stage.embeddings if 0 in own else None
        return ModelProgram(view, own, self._dtype_out(own[-1]), sends_gradient, later, kept)


def _links(own: Stage, stage: int) -> StageLinks:
    """Return the links of one of this rank's stages."""
    layout, groups, settings = own.layout, own.groups, own.settings

    def link(lower: int, direction: str, what: str) -> Link | Local | None:
        """Return the link between stage `lower` and the one above it; `stage` is one of the two."""
        if not 0 <= lower < layout.num_stages - 1:
            return None
        peer = lower if lower < stage else lower + 1
        if layout.places.rank_of(peer) == groups.position:
            return Local(layout.places.chunk_of(peer))
        rank = groups.pipeline_ranks[layout.places.rank_of(peer)]
        dtype = settings.probe.boundary_dtypes[layout.blocks_of(lower)[-1]]
        group, where = groups.links[lower, direction], f"{what} stage {peer} (rank {rank})"
        return Wire(rank, group, where, dtype, settings.device, settings.timeout)

    return StageLinks(
        forward_in=link(stage - 1, "forward", "an activation from"),
        backward_out=link(stage - 1, "backward", "a gradient to"),
        forward_out=link(stage, "forward", "an activation to"),
        backward_in=link(stage, "backward", "a gradient from"),
    )
