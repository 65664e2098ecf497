"""Whether sequences may be cut into slices of their tokens, and what slices cost on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from hf_pipetransformer.autopipe.token_costs import SliceTime, TokenCosts, fit_token_costs
from hf_pipetransformer.batches import batch_size, cut_tokens, take_samples
from hf_pipetransformer.pipeline.losses import LossRule
from hf_pipetransformer.pipeline.program import MicroBatch, ModelProgram, Place
from hf_pipetransformer.pipeline.schedules import find_schedule
from hf_pipetransformer.pipeline.token_program import TokenSliceProgram
from hf_pipetransformer.splitters.check import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    gradient_norms,
    gradients_discarded,
)
from hf_pipetransformer.splitters.profile import PROFILE_SECONDS, trained_as_given
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.splitters.view import StageView
from hf_pipetransformer.startup.costs import ReadBatch, moved
from hf_pipetransformer.startup.inspection import Inspection
from hf_pipetransformer.startup.model import Subject


NUM_REPEATS = 3
SLICE_COUNTS = (1, 2, 4, 8)
"""Into so many equal slices are sequences cut for measuring."""

MOST_SEQUENCES = 4

_REMEDY = "Token slices are for models in which no token reads a later one. Set pipeline_schedule='1f1b'."


class SlicedModel:
    """Runs a whole model on the slices of one batch, the last of one pipeline.

    Args:
        subject: the model, and how its loss is computed.
        structure: of the model.
        rule: how losses of parts add up.
    """

    def __init__(self, subject: Subject, structure: Structure, rule: LossRule) -> None:
        self.subject = subject
        self.rule = rule
        self.view = StageView(subject.model, subject.splitter, structure)
        units = range(structure.num_units)
        plain = ModelProgram(self.view, units, torch.float32, sends_gradient=False)
        self.program = TokenSliceProgram(plain, structure.num_layers)

    def run(self, inputs: dict[str, Any], bounds: Sequence[int], note: Callable[[int], None]) -> float:
        """The loss; its gradients are added up.

        Args:
            inputs: the batch, on the model's device.
            bounds: of the slices.
            note: told the number of each slice whose forward or backward is done.
        """
        total, slices = self.subject.count(inputs), cut_tokens(inputs, bounds)
        (row,) = find_schedule("token").table(1, 1, num_token_slices=len(slices))

        def forward(given: dict[str, Any]) -> Any:
            return self.subject.compute(given, total)

        parts = [
            MicroBatch(
                number, own, self.rule.weight(self.subject.count(own), total), (), forward,
                place=Place(0, start, stop, bounds[-1]),
            )
            for number, (own, (start, stop)) in enumerate(zip(slices, pairwise(bounds), strict=True))
        ]  # fmt: skip
        self.program.begin(row)
        losses = []
        for part in parts:
            losses.append(float(self.program.forward(part, None)))
            note(part.index)
        for part in reversed(parts):
            self.program.backward(part, None)
            note(part.index)
        return sum(losses)


def check_slices(exact: Subject, structure: Structure, rule: LossRule, inspection: Inspection) -> None:
    """Compare slices of the tiny batch's sequences with whole ones, in full precision. A collective call.

    Raises:
        ValueError: on every rank, their loss or gradients differ.
    """
    refusal = inspection.on_first_rank(lambda: refusal_of_slices(exact, structure, rule))
    if refusal is not None:
        raise ValueError(f"pipeline_schedule='token': {refusal}")


def refusal_of_slices(exact: Subject, structure: Structure, rule: LossRule) -> str | None:
    """Why slices do not give what whole sequences give, in full precision; None if they do."""
    value, name = exact.inputs[exact.main_input], type(exact.model).__name__
    if value.dim() < 2:
        return f"{name} reads {exact.main_input!r} of shape {tuple(value.shape)}, not (batch, seq). {_REMEDY}"
    if any(getattr(module, "gradient_checkpointing", False) for module in exact.model.modules()):
        # Only in training, and without a word, it drops the keys and values that it is given.
        return f"{name} recomputes its layers itself: leave that to pipeline_checkpoint='always'."
    length = value.shape[1]
    half = -(-length // 2)
    bounds = sorted({0, half, min(length, half + max(1, length // 4)), length})
    with gradients_discarded(exact.model):
        loss = exact.loss(dict(exact.inputs))
        loss.backward()
        expected = float(loss.detach())
        norms = gradient_norms(exact.model)
    with gradients_discarded(exact.model):
        try:
            found = SlicedModel(exact, structure, rule).run(exact.inputs, bounds, lambda _: None)
        # Whatever a model says to keys and values that it does not know.
        except Exception as error:
            return f"{name} does not run on slices of a sequence ({type(error).__name__}: {error}). {_REMEDY}"
        found_norms = gradient_norms(exact.model)
    far = abs(found - expected) > LOSS_TOLERANCE * max(abs(expected), 1e-3)
    if far or float((found_norms - norms).norm()) > GRADIENT_TOLERANCE * max(float(norms.norm()), 1e-3):
        lengths = [stop - start for start, stop in pairwise(bounds)]
        return (
            f"{name} gives the loss {found:.8g} for slices of {lengths} tokens and {expected:.8g} for whole "
            f"sequences (gradient norms {float(found_norms.norm()):.8g} and {float(norms.norm()):.8g}). {_REMEDY}"
        )
    return None


def measure_slices(
    subject: Subject, structure: Structure, rule: LossRule, inspection: Inspection, read: ReadBatch | None, most: int
) -> TokenCosts:
    """What slices cost on rank 0, for one sequence and for a few. A collective call.

    Args:
        read: gives the sequences that are measured; None measures the subject's.
        most: sequences that the whole model may be run with.
    """
    device = next(subject.model.parameters()).device

    def measure() -> dict[str, Any]:
        given = subject.inputs if read is None else read(min(most, MOST_SEQUENCES))
        batch = {key: moved(value, device) for key, value in given.items()}
        with trained_as_given(subject.model, structure):
            return fit_token_costs(measured_times(subject, structure, rule, batch)).as_event()

    return TokenCosts(**inspection.on_first_rank(measure))


def measured_times(subject: Subject, structure: Structure, rule: LossRule, batch: dict[str, Any]) -> list[SliceTime]:
    """Of the slices of one sequence and of all in a batch on the model's device, cut in a few ways."""
    size, deadline = batch_size(batch), time.perf_counter() + PROFILE_SECONDS
    one = take_samples(batch, slice(0, 1))
    settings = [(one, count) for count in SLICE_COUNTS] + [(batch, count) for count in SLICE_COUNTS[::2] if size > 1]
    return [each for part, count in settings for each in _times_of(subject, structure, rule, part, count, deadline)]


def _times_of(
    subject: Subject, structure: Structure, rule: LossRule, inputs: dict[str, Any], count: int, deadline: float
) -> list[SliceTime]:
    """Seconds of forward and backward of each of `count` equal slices: the least of a few runs."""
    device = next(subject.model.parameters()).device
    length = inputs[subject.main_input].shape[1]
    bounds = sorted({length * number // count for number in range(count + 1)})
    least = [float("inf")] * (len(bounds) - 1)
    for repeat in range(NUM_REPEATS + 1):
        seconds = [0.0] * len(least)
        clock = _now(device)

        def note(number: int) -> None:
            nonlocal clock
            before, clock = clock, _now(device)
            seconds[number] += clock - before  # noqa: B023

        with gradients_discarded(subject.model):
            SlicedModel(replace(subject, inputs=inputs), structure, rule).run(inputs, bounds, note)
        is_late = time.perf_counter() > deadline
        if repeat or is_late:
            least = [min(pair) for pair in zip(least, seconds, strict=True)]
        if is_late:
            break
    size = batch_size(inputs)
    return [
        SliceTime(size, start, stop - start, each) for (start, stop), each in zip(pairwise(bounds), least, strict=True)
    ]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
