"""Slices of sequences and of the head: whether a model computes the same in them, what they cost, which a run takes.

Functions of a `ProbeTarget` without communication. The checks compare in deterministic float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from hf_pipetransformer.data.batches import IGNORED_LABEL, cut_tokens, take_samples
from hf_pipetransformer.engine.head import HeadPlan, HeadProgram, HeadSlices
from hf_pipetransformer.engine.losses import LossScope
from hf_pipetransformer.engine.program import MicroBatch, ModelProgram, TokenSpan
from hf_pipetransformer.engine.timing import settled_seconds
from hf_pipetransformer.planning.memory import MEMORY_RESERVE
from hf_pipetransformer.planning.token_slices import SliceTime, TokenCosts, fit_token_costs
from hf_pipetransformer.schedules.tables import GPIPE
from hf_pipetransformer.splitters.view import StageView
from hf_pipetransformer.startup.check import SPLIT_LOSS_TOLERANCE, Result, run_whole
from hf_pipetransformer.startup.costs import PROFILE_SECONDS, trained_as_given
from hf_pipetransformer.startup.model import ProbeTarget, gradient_norms, gradients_discarded


if TYPE_CHECKING:
    from hf_pipetransformer.engine.losses import LossRule
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.splitters.structure import Structure
    from hf_pipetransformer.startup.planner import RunPlanner


_TOKEN_REMEDY = "Token slices are for models in which no token reads a later one. Set pipeline_schedule='1f1b'."

NUM_SLICE_REPEATS = 3
SLICE_COUNTS = (1, 2, 4, 8)
"""Numbers of equal slices that sequences are cut into for measuring."""
MOST_SEQUENCES = 4


def run_slices(
    target: ProbeTarget, structure: Structure, rule: LossRule, bounds: Sequence[int], note: Callable[[int], None]
) -> float:
    """Run the whole model, as a pipeline of one stage, over token slices; accumulate gradients and return the loss.

    Args:
        bounds: token positions where slices begin, and the sequence length at the end.
        note: called with a slice's number after its forward and after its backward.
    """
    from hf_pipetransformer.engine.token_program import TokenSliceProgram

    total, slices = target.count(target.inputs), cut_tokens(target.inputs, bounds)
    # All forwards first: a slice's backward needs what later slices add to the gradients of its keys.
    (actions,) = GPIPE.table(1, len(slices))
    view, blocks = StageView(target.model, target.splitter, structure), range(structure.num_blocks)
    whole = ModelProgram(view, blocks, torch.float32, sends_gradient=False)
    program = TokenSliceProgram(whole, structure.num_layers)

    def forward(given: dict[str, Any]) -> Any:
        return target.compute(given, total)

    parts = [
        MicroBatch(
            number, own, rule.weight(target.count(own), total), (), forward,
            place=TokenSpan(0, start, stop, bounds[-1]),
        )
        for number, (own, (start, stop)) in enumerate(zip(slices, pairwise(bounds), strict=True))
    ]  # fmt: skip
    program.extend(actions)
    losses = []
    for part in parts:
        losses.append(float(program.forward(part, None)))
        note(part.index)
    # Later slices first: they add to the gradients of the keys and values of earlier ones.
    for part in reversed(parts):
        program.backward(part, None)
        note(part.index)
    return sum(losses)


def why_unsliceable(target: ProbeTarget, structure: Structure, rule: LossRule) -> str | None:
    """Return why token slices do not reproduce the loss and gradients of whole sequences; None if they do."""
    model, value, name = target.model, target.inputs[target.main_input], type(target.model).__name__
    if value.dim() < 2:
        return f"{name} reads {target.main_input!r} of shape {tuple(value.shape)}, not (batch, seq). {_TOKEN_REMEDY}"
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        # With gradient checkpointing, transformers silently drops the key/value cache, but only in training mode.
        return f"{name} recomputes its layers itself: leave that to pipeline_checkpoint='layers'."
    if target.inputs.sequences is not None:
        return (
            "the collator puts several samples into one row, and a slice would hold tokens of several. Use a collator "
            "that pads, or set pipeline_schedule='1f1b'."
        )
    length = value.shape[1]
    half = -(-length // 2)
    bounds = sorted({0, half, min(length, half + max(1, length // 4)), length})
    expected = run_whole(target)
    with gradients_discarded(model):
        try:
            loss = run_slices(target, structure, rule, bounds, lambda _: None)
        # A model that cannot take cached keys and values may raise anything.
        except Exception as error:
            return f"{name} does not run on slices of a sequence ({type(error).__name__}: {error}). {_TOKEN_REMEDY}"
        found = Result(loss, gradient_norms(target.parameters))
    if found.agrees_with(expected, SPLIT_LOSS_TOLERANCE):
        return None
    return (
        f"{name} gives the loss {found.loss:.8g} for slices of {[b - a for a, b in pairwise(bounds)]} tokens and "
        f"{expected.loss:.8g} for whole sequences (gradient norms {found.total_norm:.8g} and "
        f"{expected.total_norm:.8g}). {_TOKEN_REMEDY}"
    )


def why_no_head_slices(target: ProbeTarget, structure: Structure, slices: HeadSlices) -> str | None:
    """Return why head and loss in slices of a sequence do not give what whole ones do, without a period, or None."""
    name = type(target.model).__name__
    if not target.has_padded_texts:
        return f"{name} is not given rows of tokens, each of one text"
    labels, tokens = target.inputs.get("labels"), target.inputs[target.main_input]
    if isinstance(labels, torch.Tensor) and labels.shape == tokens.shape:
        # Every token is a target, those at the ends of slices, too.
        target = replace(target, inputs=target.inputs | {"labels": labels.where(labels != IGNORED_LABEL, tokens)})
    expected = run_whole(target)
    whole, blocks = MicroBatch(0, target.inputs, 1.0, (), target.loss), range(structure.num_blocks)
    with target.view(structure) as view, gradients_discarded(target.model):
        together, layers, head = (
            ModelProgram(view, each, torch.float32, sends_gradient=True) for each in (blocks, blocks[:-1], blocks[-1:])
        )
        program = HeadProgram(HeadPlan(slices), together, layers, head, torch.float32, sends_gradient=False)
        try:
            loss = program.forward(whole, None)
            program.backward_input(whole, None)
        except torch.OutOfMemoryError:
            raise
        # A model that reads another form of labels may raise anything.
        except Exception as error:
            return f"the head of {name} does not run on slices of a sequence ({type(error).__name__}: {error})"
        found = Result(float(loss), gradient_norms(target.parameters))
    if found.agrees_with(expected, SPLIT_LOSS_TOLERANCE):
        return None
    return (
        f"{name} gives the loss {found.loss:.8g} in slices of the sequence and {expected.loss:.8g} for whole ones "
        f"(gradient norms {found.total_norm:.8g} and {expected.total_norm:.8g})"
    )


# ---- costs ----


def measure_slices(target: ProbeTarget, structure: Structure, rule: LossRule, share: float = 1.0) -> TokenCosts:
    """Fit the costs of token slices to measurements with one sequence and with all of the target's.

    `share` is the twin's share of the whole model's time, to which the measured times are scaled.
    """
    with trained_as_given(target.model, structure):
        times = slice_times(target, structure, rule)
    return fit_token_costs([replace(each, seconds=each.seconds / share) for each in times])


def slice_times(target: ProbeTarget, structure: Structure, rule: LossRule) -> list[SliceTime]:
    """Time slices of one sequence and of the whole batch, cut in a few ways."""
    # One deadline for all settings: each is measured once at least.
    deadline = time.perf_counter() + PROFILE_SECONDS
    one = replace(target, inputs=take_samples(target.inputs, slice(0, 1)))
    settings = [(one, count) for count in SLICE_COUNTS]
    settings += [(target, count) for count in SLICE_COUNTS[::2] if target.inputs.size > 1]
    return [each for part, count in settings for each in _times_of(part, structure, rule, count, deadline)]


def _times_of(
    target: ProbeTarget, structure: Structure, rule: LossRule, count: int, deadline: float
) -> list[SliceTime]:
    """Return the seconds of forward plus backward of each of `count` equal slices: the minimum over a few runs."""
    length = target.inputs[target.main_input].shape[1]
    bounds = sorted({length * number // count for number in range(count + 1)})
    least = [float("inf")] * (len(bounds) - 1)
    for repeat in range(NUM_SLICE_REPEATS + 1):
        seconds = [0.0] * len(least)
        clock = settled_seconds(target.device)

        def note(number: int) -> None:
            nonlocal clock
            before, clock = clock, settled_seconds(target.device)
            seconds[number] += clock - before  # noqa: B023

        with gradients_discarded(target.model):
            run_slices(target, structure, rule, bounds, note)
        is_late = time.perf_counter() > deadline
        # The first run warms up; it counts only where there is no time for another.
        if repeat or is_late:
            least = [min(pair) for pair in zip(least, seconds, strict=True)]
        if is_late:
            break
    size = target.inputs.size
    return [
        SliceTime(size, start, end - start, each) for (start, end), each in zip(pairwise(bounds), least, strict=True)
    ]


NUMBERS = (2, 4, 8, 16, 32, 64)
"""Slices that are tried. Of 64, one holds so few logits that more would save nothing beside the rest of a stage."""


def why_whole_by_options(args: PipeTransformerArguments, scope: LossScope) -> str | None:
    """Return why the options leave the head no slices; None if they do not."""
    if (why := args.abilities.refuses.get("pipeline_head_slices")) is not None:
        return f"pipeline_schedule={args.pipeline_schedule!r} {why}"
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
