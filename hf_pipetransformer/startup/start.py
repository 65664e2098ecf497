"""Start-up inspection of a model (`inspect_model`), including the check and measurement of token slices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.comm.topology import Topology, check_agreement
from hf_pipetransformer.data.batches import CommonLength, batch_size, cut_tokens, take_rows, take_samples
from hf_pipetransformer.engine.losses import FoundRule, LossDoesNotDecomposeError, LossRule, Parts, find_loss_rule
from hf_pipetransformer.engine.program import MicroBatch, ModelProgram, Place
from hf_pipetransformer.engine.token_program import TokenSliceProgram
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.planning.slice_costs import SliceTime, TokenCosts, fit_token_costs
from hf_pipetransformer.report import logger
from hf_pipetransformer.report.events import read_unfit
from hf_pipetransformer.schedules import find_schedule
from hf_pipetransformer.splitters.structure import Probe, Structure
from hf_pipetransformer.splitters.view import StageView
from hf_pipetransformer.startup.check import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    gradient_norms,
    gradients_discarded,
    in_float32,
    in_full_precision,
    probe_model,
    undisturbed,
)
from hf_pipetransformer.startup.costs import (
    PROFILE_SECONDS,
    ReadBatch,
    affordable_sequences,
    measure_costs,
    moved,
    smallest_device_bytes,
    trained_as_given,
)
from hf_pipetransformer.startup.first_samples import with_two_labels
from hf_pipetransformer.startup.model import (
    Inspection,
    ProbeTarget,
    hangs_on_length,
    hangs_on_padding,
    has_dropout,
    num_frozen_by_user,
)
from hf_pipetransformer.startup.planner import RunPlanner, StartUp, memory_conditions


NUM_REPEATS = 3
SLICE_COUNTS = (1, 2, 4, 8)
"""Numbers of equal slices that sequences are cut into for measuring."""

MOST_SEQUENCES = 4

_REMEDY = "Token slices are for models in which no token reads a later one. Set pipeline_schedule='1f1b'."


class SlicedModel:
    """Whole model run as a single-stage pipeline over the token slices of one batch."""

    def __init__(self, subject: ProbeTarget, structure: Structure, rule: LossRule) -> None:
        self.subject = subject
        self.rule = rule
        self.view = StageView(subject.model, subject.splitter, structure)
        blocks = range(structure.num_blocks)
        plain = ModelProgram(self.view, blocks, torch.float32, sends_gradient=False)
        self.program = TokenSliceProgram(plain, structure.num_layers)

    def run(self, inputs: dict[str, Any], bounds: Sequence[int], note: Callable[[int], None]) -> float:
        """Run forward and backward of all slices, accumulate gradients, and return the loss.

        Args:
            bounds: token positions where slices begin, and the sequence length at the end.
            note: called with a slice's number after its forward and after its backward.
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


def check_slices(exact: ProbeTarget, structure: Structure, rule: LossRule, inspection: Inspection) -> None:
    """Compare token slices of the tiny batch with whole sequences in float32. Collective: call on every rank.

    Raises:
        ValueError: on every rank, if loss or gradients differ.
    """
    refusal = inspection.on_first_rank(lambda: refusal_of_slices(exact, structure, rule))
    if refusal is not None:
        raise ValueError(f"pipeline_schedule='token': {refusal}")


def refusal_of_slices(exact: ProbeTarget, structure: Structure, rule: LossRule) -> str | None:
    """Return why slices do not reproduce the loss and gradients of whole sequences; None if they do."""
    value, name = exact.inputs[exact.main_input], type(exact.model).__name__
    if value.dim() < 2:
        return f"{name} reads {exact.main_input!r} of shape {tuple(value.shape)}, not (batch, seq). {_REMEDY}"
    if any(getattr(module, "gradient_checkpointing", False) for module in exact.model.modules()):
        # With gradient checkpointing, transformers silently drops the key/value cache, but only in training mode.
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
        # A model that cannot take cached keys and values may raise anything.
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
    subject: ProbeTarget,
    structure: Structure,
    rule: LossRule,
    inspection: Inspection,
    read: ReadBatch | None,
    most: int,
) -> TokenCosts:
    """Measure token slices of one and of up to `most` sequences on rank 0. Collective: call on every rank."""
    device = next(subject.model.parameters()).device

    def measure() -> dict[str, Any]:
        given = subject.inputs if read is None else read(min(most, MOST_SEQUENCES))
        batch = {key: moved(value, device) for key, value in given.items()}
        with trained_as_given(subject.model, structure):
            return fit_token_costs(measured_times(subject, structure, rule, batch)).as_event()

    return TokenCosts(**inspection.on_first_rank(measure))


def measured_times(
    subject: ProbeTarget, structure: Structure, rule: LossRule, batch: dict[str, Any]
) -> list[SliceTime]:
    """Time slices of one sequence and of the whole batch, cut in a few ways. `batch` is on the model's device."""
    size, deadline = batch_size(batch), time.perf_counter() + PROFILE_SECONDS
    one = take_samples(batch, slice(0, 1))
    settings = [(one, count) for count in SLICE_COUNTS] + [(batch, count) for count in SLICE_COUNTS[::2] if size > 1]
    return [each for part, count in settings for each in _times_of(subject, structure, rule, part, count, deadline)]


def _times_of(
    subject: ProbeTarget, structure: Structure, rule: LossRule, inputs: dict[str, Any], count: int, deadline: float
) -> list[SliceTime]:
    """Return the seconds of forward plus backward of each of `count` equal slices: the minimum over a few runs."""
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


def inspect_model(
    given: ProbeTarget,
    args: PipeTransformerArguments,
    topology: Topology,
    device: torch.device,
    is_training: bool,
    read: ReadBatch | None = None,
    events: str | None = None,
) -> StartUp:
    """Check on a tiny batch, in float32, that the model and its loss can be split, and measure the model's costs.

    Collective: call on every rank.

    Args:
        is_training: value of `model.training` during the checks.
        read: reads the batch that the blocks are measured with, called on rank 0 only; None measures the tiny batch.
        events: path of the event file of earlier runs in this output folder, for training; read on rank 0 only.

    Raises:
        UnsupportedModelError: on every rank, if the split model computes other numbers or the model raises.
        LossDoesNotDecomposeError: the loss is no mean or sum over samples or tokens.
        ValueError: the ranks' models differ, or token slices are requested and compute other numbers.
    """
    model = given.model
    _move_to_probe(model, device, topology)
    place = next(model.parameters()).device
    subject = replace(given, inputs={key: moved(value, place) for key, value in given.inputs.items()})
    inspection = Inspection(topology, type(model).__name__)
    read = None if read is None else inspection.reading(read)
    with undisturbed(model, is_training):
        probe = inspection.on_every_rank(
            lambda: probe_model(model, subject.splitter, subject.loss, subject.inputs, subject.main_input)
        )
        _check_same_model(topology, model, probe)
        probe = replace(probe, placeholders=frozenset(topology.decide(lambda: sorted(probe.placeholders))))
        with in_full_precision(model):
            exact = replace(subject, inputs=in_float32(subject.inputs))
            rule = _loss_rule(exact, args, topology, inspection)
            pads_alike, keeps_padding = inspection.on_first_rank(lambda: _padding(exact, args, topology, probe))
            if args.cuts_tokens:
                check_slices(exact, probe.structure, rule.rule, inspection)
        costs = measure_costs(subject, probe.structure, args, topology, inspection, read)
        if args.cuts_tokens:
            most = min(args.train_samples_per_device, affordable_sequences(costs.blocks, device, topology))
            slices = measure_slices(subject, probe.structure, rule.rule, inspection, read, most)
            costs = replace(costs, blocks=replace(costs.blocks, slices=slices))
    if args.pipeline_size != 1 and topology.world_size > 1:
        model.to("cpu")
    device_bytes = smallest_device_bytes(device, topology)
    return StartUp(
        probe=probe,
        loss_rule=rule,
        common_length=CommonLength(subject.main_input, subject.pad_token_id) if pads_alike else None,
        sees_padding=keeps_padding,
        pad_token_id=subject.pad_token_id,
        main_dtype=subject.inputs[subject.main_input].dtype,
        samples=given.inputs,
        plans=RunPlanner(
            args,
            topology,
            probe,
            costs,
            device_bytes,
            num_frozen_by_user(model, probe.structure),
            has_dropout(model),
            topology.decide(lambda: read_unfit(events, memory_conditions(args, probe, device_bytes))),
            batch_size(given.inputs),
        ),
    )


def _move_to_probe(model: nn.Module, device: torch.device, topology: Topology) -> None:
    """Move the model to the ranks' devices if it fits on each together with its gradients, else to the CPU."""
    fits = True
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Weights plus three float32 copies: full-precision weights and two sets of gradients.
        fits = sum(p.numel() * (p.element_size() + 3 * 4) for p in model.parameters()) < free / 2
    model.to(device if all(topology.gather(fits)) else "cpu")


def _check_same_model(topology: Topology, model: nn.Module, probe: Probe) -> None:
    """Check that all ranks have the same model; otherwise their transfers and collectives would not match."""
    facts: dict[str, Any] = {
        "places to cut": probe.structure.cut_positions(),
        "dtypes between the blocks": [str(dtype) for dtype in probe.boundary_dtypes],
        "shape between the blocks": list(probe.activation.hidden_shape),
        "multiple that lengths are padded to": probe.activation.multiple,
        "frozen layers": num_frozen_by_user(model, probe.structure),
        "dropout": has_dropout(model),
    }
    check_agreement(topology, "models", facts)


def _padding(
    exact: ProbeTarget, args: PipeTransformerArguments, topology: Topology, probe: Probe
) -> tuple[bool, bool]:
    """Return (replicas must pad to a common length, stored rows keep their padding)."""
    pads_alike = topology.world_size > 1 and hangs_on_length(exact)
    return pads_alike, args.activation_cache == "off" or hangs_on_padding(exact, probe)


def _loss_rule(
    exact: ProbeTarget, args: PipeTransformerArguments, topology: Topology, inspection: Inspection
) -> FoundRule:
    inputs, is_whole = exact.inputs, topology.world_size == 1 and args.num_microbatches in (None, 1)
    is_alone = batch_size(inputs) == 1
    if is_alone:
        # Only losses are compared then, since two samples with gradients may not fit into memory.
        inputs = take_rows(inputs, torch.tensor([0, 0]))

    def measure(parts: Parts, num_items: int) -> torch.Tensor:
        with gradients_discarded(exact.model), torch.set_grad_enabled(not is_alone):
            sum_of_losses = torch.zeros((), dtype=torch.float64)
            for part, weight in parts:
                if weight:
                    loss = exact.compute(dict(part), num_items) * weight
                    sum_of_losses += loss.detach().double().cpu()
                    if loss.requires_grad:
                        loss.backward()
            return torch.cat([sum_of_losses.reshape(1), gradient_norms(exact.model).double().cpu()])

    def find() -> list[Any]:
        found = find_loss_rule(measure, with_two_labels(inputs), exact.count, not is_whole)
        refusal = found.refusal
        if not found.is_finite and any(bool(p.isnan().any()) for p in exact.model.parameters()):
            # With nan weights no rule can be found, and none would matter.
            logger.warning("Weights of the model are nan before the first step, so everything that follows is.")
            refusal = None
        return [found.rule.value, found.ignores_num_items, refusal]

    rule, ignores_num_items, refusal = inspection.on_first_rank(find)
    if refusal is not None and not is_whole:
        raise LossDoesNotDecomposeError(refusal)
    return FoundRule(LossRule(rule), ignores_num_items, refusal)
