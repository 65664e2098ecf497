"""Looking at a model before its first step. What is found is rank 0's; the structure must be the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.loader import CommonLength
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.batches import batch_size, take_rows
from hf_pipetransformer.pipeline.losses import FoundRule, LossDoesNotDecomposeError, LossRule, Parts, find_loss_rule
from hf_pipetransformer.report.events import logger, read_unfit
from hf_pipetransformer.samples import with_two_labels
from hf_pipetransformer.splitters.check import Probe, gradient_norms, gradients_discarded, probe_model, undisturbed
from hf_pipetransformer.splitters.precision import in_float32, in_full_precision
from hf_pipetransformer.startup.costs import (
    ReadBatch,
    affordable_sequences,
    measure_costs,
    moved,
    smallest_device_bytes,
)
from hf_pipetransformer.startup.inspection import Inspection
from hf_pipetransformer.startup.model import Subject, has_dropout, num_frozen_by_user
from hf_pipetransformer.startup.padding import hangs_on_length, hangs_on_padding
from hf_pipetransformer.startup.planner import RunPlanner, memory_conditions
from hf_pipetransformer.startup.slicing import check_slices, measure_slices


@dataclass(frozen=True)
class StartUp:
    """What was found out about a model before its first step, the same on every rank.

    Args:
        probe: of the model.
        loss_rule: how losses of parts add up.
        common_length: the length that replicas must pad alike to; None where padding changes no loss.
        sees_padding: whether what stands at masked positions changes the loss.
        pad_token_id: what text is padded with.
        main_dtype: of the main input.
        samples: the tiny batch that was looked at.
        plans: plans the layouts.
    """

    probe: Probe
    loss_rule: FoundRule
    common_length: CommonLength | None
    sees_padding: bool
    pad_token_id: int
    main_dtype: torch.dtype
    samples: dict[str, Any]
    plans: RunPlanner


def look_at(
    given: Subject,
    args: PipeTransformerArguments,
    topology: Topology,
    device: torch.device,
    is_training: bool,
    read: ReadBatch | None = None,
    events: str | None = None,
) -> StartUp:
    """Check on a tiny batch that a model can be split and that its loss can, and measure it. A collective call.

    Checks are made in full precision, whatever the run computes in.

    Args:
        given: the model and the batch.
        args: the options.
        topology: the ranks.
        device: where this rank computes.
        is_training: whether the model says so when it is asked.
        read: gives the batch that the units are measured with, called by rank 0 alone; None measures the tiny batch.
        events: the file with what happened to earlier runs in this folder, for training; on rank 0.

    Raises:
        UnsupportedModelError: on every rank, the split model gives other numbers, or what looks at it raised.
        LossDoesNotDecomposeError: the loss is no mean or sum over samples or tokens.
        ValueError: the models of the ranks differ, or slices of sequences, if they are asked for, give other numbers.
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
            most = min(args.train_samples_per_device, affordable_sequences(costs.units, device, topology))
            slices = measure_slices(subject, probe.structure, rule.rule, inspection, read, most)
            costs = replace(costs, units=replace(costs.units, slices=slices))
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


def check_agreement(topology: Topology, what: str, values: dict[str, Any]) -> None:
    """Compare `values` over all ranks before anything depends on them.

    Raises:
        ValueError: on every rank, names the rank that differs from rank 0, and both values.
    """
    answers = topology.gather(values)
    for rank, answer in enumerate(answers):
        for key in sorted({*answer, *answers[0]}):
            found, expected = answer.get(key), answers[0].get(key)
            if found != expected:
                raise ValueError(
                    f"The {what} differ between ranks: {key} is {found} on rank {rank} and {expected} on rank 0. "
                    "Every process must run the same script with the same arguments and data."
                )


def _move_to_probe(model: nn.Module, device: torch.device, topology: Topology) -> None:
    """To the ranks' devices if the whole model with its gradients fits on each, else to the CPU."""
    fits = True
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Beside the weights: float32 ones, two sets of gradients.
        fits = sum(p.numel() * (p.element_size() + 3 * 4) for p in model.parameters()) < free / 2
    model.to(device if all(topology.gather(fits)) else "cpu")


def _check_same_model(topology: Topology, model: nn.Module, probe: Probe) -> None:
    """All ranks make the same transfers and the same collective calls only with the same model."""
    facts: dict[str, Any] = {
        "places to cut": probe.structure.cut_positions(),
        "dtypes between the units": [str(dtype) for dtype in probe.boundary_dtypes],
        "shape between the units": list(probe.activation.hidden_shape),
        "frozen layers": num_frozen_by_user(model, probe.structure),
        "dropout": has_dropout(model),
    }
    check_agreement(topology, "models", facts)


def _padding(exact: Subject, args: PipeTransformerArguments, topology: Topology, probe: Probe) -> tuple[bool, bool]:
    """Whether replicas must pad alike, and whether stored rows keep their padding."""
    pads_alike = topology.world_size > 1 and hangs_on_length(exact)
    return pads_alike, args.activation_cache == "off" or hangs_on_padding(exact, probe)


def _loss_rule(
    exact: Subject, args: PipeTransformerArguments, topology: Topology, inspection: Inspection
) -> FoundRule:
    inputs, is_whole = exact.inputs, topology.world_size == 1 and args.num_microbatches in (None, 1)
    is_alone = batch_size(inputs) == 1
    if is_alone:
        # Two of them with gradients may not fit into memory: then the losses alone are compared.
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
            # Whatever the rule is: its gradients leave no weight that is a number.
            logger.warning("Weights of the model are nan before the first step, so everything that follows is.")
            refusal = None
        return [found.rule.value, found.ignores_num_items, refusal]

    rule, ignores_num_items, refusal = inspection.on_first_rank(find)
    if refusal is not None and not is_whole:
        raise LossDoesNotDecomposeError(refusal)
    return FoundRule(LossRule(rule), ignores_num_items, refusal)
