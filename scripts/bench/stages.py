"""A stage of a model in each process, without a trainer around it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import batch_size
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.planning.planner import PipelineShape, plan_layout
from hf_pipetransformer.runtime.stage import Stage, StageSettings
from hf_pipetransformer.runtime.wiring import start_stage
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import Probe
from hf_pipetransformer.startup.check import probe_model
from hf_pipetransformer.startup.model import ProbeTarget


CPU = torch.device("cpu")
SECONDS = 300
"""Time limit of a transfer."""


class Split(NamedTuple):
    """This rank's stage of a model, and what the self-check found."""

    stage: Stage
    model: nn.Module
    found: Probe


def make_topology() -> Topology:
    """The groups of this launch."""
    return Topology(timeout=SECONDS, local_world_size=dist.get_world_size())


def check_model(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Probe:
    """The self-check of a start on three short samples."""
    tiny = {key: value[:3, :32] if value.ndim == 2 else value[:3] for key, value in inputs.items()}
    return probe_model(
        ProbeTarget(model, find_splitter(model), tiny, lambda batch, _: model(**batch).loss, batch_size)
    )


def split_model(model: nn.Module, found: Probe, topology: Topology) -> Split:
    """Keep this rank's part of as many stages as there are processes."""
    shape = PipelineShape(topology.world_size, 1, 1, "1f1b")
    layout = plan_layout(found.block_flops, found.structure.cut_positions(), shape)
    settings = StageSettings(found, topology, CPU, SECONDS, "never", StepMeter(CPU))
    return Split(start_stage(model, find_splitter(model), layout, settings, is_training=True), model, found)


def require_equal_losses(stage: Stage, losses: dict[str, Any]) -> None:
    """Fail if contenders compute different losses; the last stage has them."""
    if stage.groups.is_last:
        values = [float(loss) for loss in losses.values()]
        assert max(values) - min(values) <= 1e-5 * max(values), f"the contenders compute different losses: {losses}"
