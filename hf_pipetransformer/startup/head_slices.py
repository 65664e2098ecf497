"""Slices of the head that a run takes by itself, with `pipeline_head_slices="auto"`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from hf_pipetransformer.engine.losses import LossScope
from hf_pipetransformer.planning.memory import MEMORY_RESERVE


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.startup.planner import RunPlanner


NUMBERS = (2, 4, 8, 16, 32, 64)
"""Slices that are tried. Of 64, one holds so few logits that more would save nothing beside the rest of a stage."""


def why_whole_by_options(args: PipeTransformerArguments, scope: LossScope) -> str | None:
    """Return why the options leave the head no slices; None if they do not."""
    if not args.schedule.abilities.runs_steps_whole:
        return f"pipeline_schedule={args.pipeline_schedule!r} runs its head in other ways"
    return None if scope is LossScope.PARTS else f"one call of the loss sees the samples of a whole {scope.value}"


def choose_head_slices(
    planner: RunPlanner,
    first: Callable[[RunPlanner], Layout],
    unfit: Callable[[RunPlanner], int] = lambda _planner: 0,
) -> tuple[RunPlanner, str]:
    """Return the planner with the fewest slices of the head with which the first layout fits, and a line that says so.

    Args:
        planner: planner of a run whose options leave the number open.
        first: returns the first layout of a planner.
        unfit: returns the largest pipeline length that ran out of memory with the slices of a planner.
    """
    # Whole sequences first: the head is sliced only where no number of stages fits without.
    whole = replace(planner, head_slices=1)
    layout = first(whole)
    budget = f"of {planner.device_bytes * (1 - MEMORY_RESERVE) / 1e9:.3g} GB"
    needed = f"The fullest device is expected to need {whole.needed_bytes(layout) / 1e9:.3g} GB {budget}"
    said = "pipeline_head_slices='auto': the head runs"
    if _has_room(whole, layout):
        return whole, f"{said} on whole sequences. {needed}."
    if planner.why_whole_head is not None:
        return whole, f"{said} on whole sequences. {needed}, but {planner.why_whole_head}."
    sliced = whole
    for number in NUMBERS:
        sliced = replace(planner, head_slices=number)
        # What ran out of memory with whole sequences is tried again.
        sliced = replace(sliced, unfit=unfit(sliced))
        layout = first(sliced)
        # Where none has room, the most slices stay, which come nearest.
        if _has_room(sliced, layout):
            break
    so = f"{sliced.needed_bytes(layout) / 1e9:.3g} GB so, with K={layout.pipeline_size}"
    return sliced, f"{said} in {sliced.head_slices} slices. {needed} with whole sequences, and {so}."


def _has_room(planner: RunPlanner, layout: Layout) -> bool:
    return planner.fits(layout) and layout.pipeline_size > planner.unfit
