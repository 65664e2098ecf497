"""Measured costs: of the blocks of a model, of transfers, and the memory of the devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn

from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import batch_size
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.planning.costs import Overheads, UnitCosts
from hf_pipetransformer.planning.planner import choose_num_microbatches
from hf_pipetransformer.schedules.placement import attention_of, mlp_of
from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.splitters.view import StageExit, StageView
from hf_pipetransformer.startup.check import gradients_discarded
from hf_pipetransformer.startup.model import Inspection, Subject


NUM_REPEATS = 5
PROFILE_SECONDS = 10.0
"""What measuring may take: of a large micro-batch of a slow model only a part is measured."""
MEMORY_SHARE = 0.5
"""Share of the free memory that measuring may take."""

Compute = Callable[[dict[str, Any]], torch.Tensor]


@dataclass
class UnitProfile:
    """By unit, for one sample.

    Args:
        forward: seconds of the forward.
        backward: seconds of the whole backward.
        edge_backward: seconds of the backward if the unit's input needs no gradient.
        activation_bytes: bytes that the unit keeps for its backward, its weights not counted.
        boundary_bytes: bytes of the activation between two units.
    """

    forward: list[float]
    backward: list[float]
    edge_backward: list[float]
    activation_bytes: list[float]
    boundary_bytes: float = 0.0


@dataclass
class _Times:
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


def affordable_samples(wanted: int, pilot: UnitProfile, num_units_run: int, free_bytes: float) -> int:
    """How many samples to measure with: `wanted`, unless that takes too long or too much memory. Pure.

    Args:
        wanted: samples of the run's own micro-batch.
        pilot: measured on fewer samples.
        num_units_run: units that are run alone; before each runs the chain that leads to it.
        free_bytes: free memory of the device.
    """
    runs = 2 * (NUM_REPEATS + 1) + 1
    slowest = max(f + b for f, b in zip(pilot.forward, pilot.backward, strict=True))
    seconds = num_units_run * (sum(pilot.forward) + runs * slowest)
    # What a unit keeps, its gradients, and as much again for what it makes on the way.
    needed = 3 * max(pilot.activation_bytes)
    limits = [
        PROFILE_SECONDS / seconds if seconds else wanted,
        MEMORY_SHARE * free_bytes / needed if needed else wanted,
    ]
    return max(1, min(wanted, int(min(limits))))


def profile_units(
    model: nn.Module,
    splitter: Splitter,
    structure: Structure,
    compute: Compute,
    inputs: dict[str, Any],
    size: int,
    num_repeats: int = NUM_REPEATS,
) -> UnitProfile:
    """Run the embeddings, one middle layer and the head alone, a few times each.

    Args:
        compute: runs the whole model on inputs and returns a scalar to differentiate.
        inputs: a batch on the model's device.
        size: its number of samples.
        num_repeats: how often each is timed, after a first run that does not count.
    """
    num_units = structure.num_units
    zeros = [0.0] * num_units
    profile = UnitProfile(list(zeros), list(zeros), list(zeros), list(zeros))
    cuts = structure.cut_positions()
    view = StageView(model, splitter, structure)
    runner = _Runner(view, compute, inputs, next(model.parameters()).device, num_repeats)
    alone = units_run_alone(structure, middle_layer(model, structure))
    try:
        for start, end in zip(cuts, cuts[1:], strict=False):
            if start not in alone:
                continue
            hidden = runner.hidden_before(start)
            whole, edge = runner.time(range(start, end), hidden, True), runner.time(range(start, end), hidden, False)
            same = [unit for unit in cuts[:-1] if 0 < start < num_units - 1 and 0 < unit < num_units - 1]
            same = [unit for unit in same if (unit - start) % 2 == 0] or [start]
            saved = runner.saved_bytes(range(start, end), hidden)
            for unit in same:
                profile.forward[unit] = statistics.median(whole.forward) / size
                profile.backward[unit] = statistics.median(whole.backward) / size
                profile.edge_backward[unit] = statistics.median(edge.backward) / size
                profile.activation_bytes[unit] = saved / size
            if hidden is not None:
                profile.boundary_bytes = hidden.numel() * hidden.element_size() / size
    finally:
        view.remove()
    return profile


def middle_layer(model: nn.Module, structure: Structure) -> int:
    """The layer that stands for all: the middle one of those that are trained, of all if none is."""
    trained = _trained_layers(model, structure) or list(range(structure.num_layers))
    return trained[len(trained) // 2]


def units_run_alone(structure: Structure, layer: int) -> tuple[int, ...]:
    """The units that stand for all: embeddings, attention and MLP of `layer` (one piece if uncut), head."""
    middle = (attention_of(layer), mlp_of(layer)) if structure.cuts_inside_layers else (attention_of(layer),)
    return (0, *middle, structure.num_units - 1)


class _Runner:
    """Runs single units of a model."""

    def __init__(
        self, view: StageView, compute: Compute, inputs: dict[str, Any], device: torch.device, num_repeats: int
    ) -> None:
        self.view = view
        self.compute = compute
        self.inputs = inputs
        self.device = device
        self.num_repeats = num_repeats

    def hidden_before(self, unit: int) -> torch.Tensor | None:
        """The activation that enters `unit`; None before the embeddings."""
        if unit == 0:
            return None
        with torch.no_grad():
            return self._run(range(unit), None).detach()

    def time(self, units: range, hidden: torch.Tensor | None, needs_input_gradient: bool) -> _Times:
        """Seconds of forward and backward, the first run left out."""
        times = _Times()
        for repeat in range(self.num_repeats + 1):
            forward, backward = self.once(units, hidden, needs_input_gradient)
            if repeat:
                times.forward.append(forward)
                times.backward.append(backward)
        return times

    def once(self, units: range, hidden: torch.Tensor | None, needs_input_gradient: bool) -> tuple[float, float]:
        """Seconds of a forward and a backward."""
        received = None if hidden is None else hidden.clone().requires_grad_(needs_input_gradient)
        start = self._now()
        output = self._run(units, received)
        middle = self._now()
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))
        return middle - start, self._now() - middle

    def saved_bytes(self, units: range, hidden: torch.Tensor | None) -> float:
        """Bytes kept for the backward, each storage once, weights left out."""
        weights = {p.untyped_storage().data_ptr() for p in self.view.model.parameters()}
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            # The tensor itself may be the output of the node that keeps it: the graph would hold itself for ever.
            return tensor.detach()

        received = None if hidden is None else hidden.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self._run(units, received)
        del output
        return float(sum(storages.values()))

    def _run(self, units: range, received: torch.Tensor | None) -> torch.Tensor:
        self.view.install(units)
        self.view.received = received
        try:
            return self.compute(dict(self.inputs))
        except StageExit as stage_exit:
            stage_exit.__traceback__ = None
            return stage_exit.hidden

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _trained_layers(model: nn.Module, structure: Structure) -> list[int]:
    return [index for index, layer in enumerate(structure.layers) if any(p.requires_grad for p in layer.parameters())]


@contextmanager
def trained_as_given(model: nn.Module, structure: Structure) -> Iterator[None]:
    """Inside, layers train what their user trains of them; all there is, if no layer trains anything.

    Gradients are dropped.
    """
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    if not _trained_layers(model, structure):
        for parameter in flags:
            parameter.requires_grad_(parameter.is_floating_point())
    try:
        with gradients_discarded(model):
            yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


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
