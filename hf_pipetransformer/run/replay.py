"""The layouts of an earlier run, for one that replays them."""

from __future__ import annotations

from collections.abc import Mapping

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.option_combinations import check_skipping
from hf_pipetransformer.report.events import SkipPhase, phase_at, read_layouts, read_skips
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


def read_replayed_skips(
    args: PipeTransformerArguments, layouts: Mapping[int, Layout] | None, topology: Topology
) -> list[SkipPhase]:
    """What the steps of an earlier run skipped, for one that replays it. A collective call.

    Args:
        layouts: of that run, by step, see `read_plan`.

    Raises:
        ValueError: they skipped something that the options exclude, or of other stages than there were.
    """
    path = args.layout_plan
    if path is None or layouts is None:
        return []
    phases = [
        SkipPhase(step, is_trial, tuple(shares))
        for step, is_trial, shares in topology.decide(
            lambda: [[phase.step, phase.is_trial, list(phase.shares)] for phase in read_skips(path)]
        )
    ]
    if any(phase.shares for phase in phases):
        check_skipping(args, f"layout_plan={path!r}, which skips weight gradients,")
    for step in sorted({*layouts, *(phase.step for phase in phases)}):
        found = phase_at(phases, step).shares
        expected = layouts[max(start for start in layouts if start <= step)].num_stages
        if found and len(found) != expected:
            raise ValueError(
                f"layout_plan={path!r} holds at step {step} shares of the weight gradients of {len(found)} stages, "
                f"{list(found)}, beside a layout of {expected}: expected one share a stage. Replay a plan as it was "
                "written, or the events of a run that was not resumed under another layout."
            )
    return phases
