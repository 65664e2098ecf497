"""Construction of a rank's engine for a layout: its stage programs and their links to neighboring stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_pipetransformer.comm.topology import PipelineGroups
from hf_pipetransformer.engine.engine import Engine, Link, Local, StageLinks, Wire
from hf_pipetransformer.engine.program import ModelProgram, StageProgram
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.engine.token_program import TokenSliceProgram
from hf_pipetransformer.engine.weight_gradients import WeightGradients, linear_layers
from hf_pipetransformer.engine.wrappers import CachedEntryProgram, RecomputingProgram
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.splitters.structure import Probe
from hf_pipetransformer.splitters.view import Compile, StageView


@dataclass(frozen=True)
class StageSettings:
    """Settings of a rank's stages that do not depend on the layout.

    `timeout` is in seconds; `recompute` is a mode of `recomputed_micro_batches`.
    """

    device: torch.device
    timeout: float
    recompute: str
    meter: StepMeter
    compiled: Compile | None = None


def make_engine(
    view: StageView, probe: Probe, layout: Layout, groups: PipelineGroups, settings: StageSettings
) -> Engine:
    """Build the engine of this rank's stages under a layout."""
    stages = layout.places.stages_of(groups.position)
    programs = [_program(view, probe, layout, stage, settings) for stage in stages]
    links = [_links(probe, layout, groups, stage, settings) for stage in stages]
    return Engine(programs, links, settings.meter)


def _program(view: StageView, probe: Probe, layout: Layout, stage: int, settings: StageSettings) -> StageProgram:
    blocks, entry_block, dtypes = layout.blocks_of(stage), layout.entry_block, probe.boundary_dtypes
    dtype_out = dtypes[min(blocks[-1], len(dtypes) - 1)]
    splits = layout.abilities.splits_backward
    linears = linear_layers(view.model) if splits else []

    def program(own: range) -> StageProgram:
        is_above_active = stage > layout.first_active_stage
        plain: StageProgram = ModelProgram(view, own, dtype_out, is_above_active, WeightGradients(linears))
        if layout.token_slices:
            plain = TokenSliceProgram(plain, layout.num_layers)
        if settings.recompute == "never":
            return plain
        return RecomputingProgram(plain, settings.recompute, layout.places.chunk_of(stage), settings.device)

    whole = program(blocks)
    if entry_block <= blocks.start:
        return whole
    below, above = range(blocks.start, min(blocks.stop, entry_block)), range(entry_block, blocks.stop)
    return CachedEntryProgram(
        view,
        below,
        entry_block,
        above=program(above) if above else None,
        whole=whole,
        dtype_entry=dtypes[entry_block - 1],
        dtype_out=dtype_out,
        device=settings.device,
    )


def _links(probe: Probe, layout: Layout, groups: PipelineGroups, stage: int, settings: StageSettings) -> StageLinks:
    def link(lower: int, direction: str, what: str) -> Link | Local | None:
        """Return the link over the boundary between stage `lower` and the one above it; `stage` is one of the two."""
        if not 0 <= lower < layout.num_stages - 1:
            return None
        peer = lower if lower < stage else lower + 1
        if layout.places.rank_of(peer) == groups.position:
            return Local(layout.places.chunk_of(peer))
        rank = groups.pipeline_ranks[layout.places.rank_of(peer)]
        dtype = probe.boundary_dtypes[layout.blocks_of(lower)[-1]]
        group, where = groups.links[lower, direction], f"{what} stage {peer} (rank {rank})"
        return Wire(rank, group, where, dtype, settings.device, settings.timeout)

    return StageLinks(
        forward_in=link(stage - 1, "forward", "an activation from"),
        backward_out=link(stage - 1, "backward", "a gradient to"),
        forward_out=link(stage, "forward", "an activation to"),
        backward_in=link(stage, "backward", "a gradient from"),
    )
