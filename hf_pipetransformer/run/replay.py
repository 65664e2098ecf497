"""The layouts of an earlier run, for one that replays them."""

from __future__ import annotations

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.report.events import read_layouts
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.startup import check_agreement


def read_plan(args: PipeTransformerArguments, structure: Structure, topology: Topology) -> dict[int, Layout] | None:
    """The layouts of an earlier run, by step; None if the user does not want them again. A collective call.

    Raises:
        ValueError: they are of another model, another number of processes or another schedule.
    """
    path = args.layout_plan
    if path is None:
        return None
    layouts = read_layouts(path)
    check_agreement(topology, "layout plans", {f"step {s}": str(layouts[s].as_event()) for s in layouts})
    for step, layout in layouts.items():
        found = (layout.num_layers, layout.pipeline_size * layout.num_replicas)
        expected = (structure.num_layers, topology.world_size)
        on_cuts = set(layout.boundaries) <= set(structure.cut_positions())
        if found != expected or not on_cuts:
            raise ValueError(
                f"layout_plan={path!r} holds at step {step} a layout for {found[0]} layers on {found[1]} "
                f"processes with boundaries {layout.boundaries}: expected {expected[0]} layers on {expected[1]} "
                "processes. Replay a plan with the model and the number of processes that it was made with."
            )
        if layout.schedule != args.pipeline_schedule:
            raise ValueError(
                f"layout_plan={path!r} holds at step {step} a layout under {layout.schedule!r}, but "
                f"pipeline_schedule={args.pipeline_schedule!r}: set pipeline_schedule={layout.schedule!r}."
            )
    if min(layouts) != 0:
        raise ValueError(f"layout_plan={path!r} begins at step {min(layouts)}: expected a plan from step 0 on.")
    return layouts
