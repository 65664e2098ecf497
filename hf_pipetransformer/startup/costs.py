"""What a step costs on this machine, measured by rank 0 while the others wait: they may share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.autopipe.costs import Overheads, UnitCosts
from hf_pipetransformer.autopipe.planner import choose_num_microbatches
from hf_pipetransformer.batches import batch_size
from hf_pipetransformer.splitters.profile import (
    MEMORY_SHARE,
    UnitProfile,
    affordable_samples,
    middle_layer,
    profile_units,
    trained_as_given,
    units_run_alone,
)
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.startup.inspection import Inspection
from hf_pipetransformer.startup.model import Subject


ReadBatch = Callable[[int], dict[str, Any]]
"""A batch of so many samples, with which the run begins."""


@dataclass(frozen=True)
class MeasuredCosts:
    """What plans start from.

    Args:
        units: of the model.
        overheads: of the machine.
        num_samples: of the micro-batch that the units were measured with.
    """

    units: UnitCosts
    overheads: Overheads
    num_samples: int


def measure_costs(
    subject: Subject,
    structure: Structure,
    args: PipeTransformerArguments,
    topology: Topology,
    inspection: Inspection,
    read: ReadBatch | None,
) -> MeasuredCosts:
    """Rank 0's measurement, on every rank. A collective call.

    Args:
        inspection: makes it.
        read: gives the batch that the units are measured with; None measures with the subject's.
    """

    def measure() -> dict[str, Any]:
        with trained_as_given(subject.model, structure):
            found, num_samples = _measure_units(subject, structure, samples_per_microbatch(args), topology, read)
        return {
            "forward": found.forward,
            "backward": found.backward,
            "edge_backward": found.edge_backward,
            "activation_bytes": found.activation_bytes,
            "boundary_bytes": found.boundary_bytes,
            "num_samples": num_samples,
        }

    costs = inspection.on_first_rank(measure)
    num_samples = int(costs["num_samples"])
    message_bytes = int(costs["boundary_bytes"] * num_samples)
    hop, reduction = topology.measure(message_bytes)
    parameters, kept, trained_bytes, kept_bytes = ([0] * structure.num_units for _ in range(4))
    shared: dict[bool, list[tuple[tuple[int, ...], int]]] = {True: [], False: []}
    for name, parameter in subject.model.named_parameters():
        units = structure.units_of_parameter[name]
        # Of tied weights the first user keeps the state and takes the step.
        parameters[units[0]] += parameter.numel()
        kept[units[0]] += 0 if parameter.requires_grad else parameter.numel()
        sizes = trained_bytes if parameter.requires_grad else kept_bytes
        sizes[units[0]] += parameter.numel() * parameter.element_size()
        if len(units) > 1:
            shared[parameter.requires_grad].append((units, parameter.numel()))
    return MeasuredCosts(
        UnitCosts(
            parameters=tuple(parameters),
            shared=tuple(shared[True]),
            kept=tuple(kept),
            kept_shared=tuple(shared[False]),
            trained_bytes=tuple(trained_bytes),
            kept_bytes=tuple(kept_bytes),
            forward=tuple(costs["forward"]),
            backward=tuple(costs["backward"]),
            edge_backward=tuple(costs["edge_backward"]),
            activation_bytes=tuple(costs["activation_bytes"]),
        ),
        Overheads(hop=hop, reduction_per_byte=reduction),
        num_samples,
    )


def _measure_units(
    subject: Subject,
    structure: Structure,
    wanted: int,
    topology: Topology,
    read: ReadBatch | None,
) -> tuple[UnitProfile, int]:
    """What the units cost, and with how many samples that was measured.

    That many are in the run's largest micro-batch, or fewer where it is too much work or memory.
    """
    inputs, size = subject.inputs, batch_size(subject.inputs)
    measure = partial(profile_units, subject.model, subject.splitter, structure, subject.loss)
    if read is None:
        return measure(inputs, size), size
    device = next(subject.model.parameters()).device
    if wanted > size:
        pilot = measure(inputs, size, num_repeats=1)
        free = _free_bytes(device, topology.num_ranks_here)
        num_units_run = len(units_run_alone(structure, middle_layer(subject.model, structure)))
        wanted = max(size, affordable_samples(wanted, pilot, num_units_run, free))
    batch = {key: moved(value, device) for key, value in read(wanted).items()}
    size = batch_size(batch)
    return measure(batch, size), size


def affordable_sequences(units: UnitCosts, device: torch.device, topology: Topology) -> int:
    """Samples that the whole model may be run with in the memory that is free here; at least 1."""
    kept = sum(units.activation_bytes)
    return max(1, int(MEMORY_SHARE * _free_bytes(device, topology.num_ranks_here) / kept)) if kept else 1


def samples_per_microbatch(args: PipeTransformerArguments) -> int:
    """Samples of the largest micro-batch that the first layout has; with K to be chosen, that of the shortest."""
    size = args.pipeline_size or 1
    samples = args.train_samples_per_device * size
    return -(-samples // num_microbatches_at_start(args, size, samples))


def num_microbatches_at_start(args: PipeTransformerArguments, pipeline_size: int, pipeline_batch_size: int) -> int:
    """M of the first layout: the user's, or the rule's."""
    rule = (args.pipeline_schedule, args.gradient_accumulation_steps, args.pipeline_weights)
    return args.num_microbatches or choose_num_microbatches(pipeline_size, pipeline_batch_size, *rule)


def moved(value: Any, device: torch.device) -> Any:
    """A batch's entry on a device."""
    return value.to(device) if isinstance(value, torch.Tensor) else value


def smallest_device_bytes(device: torch.device, topology: Topology) -> float:
    """Memory of the smallest device of the run, which every plan is for. A collective call."""
    return min(topology.gather(_device_bytes(device, topology.num_ranks_here)))


def _free_bytes(device: torch.device, num_ranks_here: int) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free)
    return float(psutil.virtual_memory().available) / num_ranks_here


def _device_bytes(device: torch.device, num_ranks_here: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total) / num_ranks_here
