"""Measurement of a model's blocks (seconds, bytes), of transfers between ranks, and of device memory."""

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
from hf_pipetransformer.planning.costs import BlockCosts, Overheads
from hf_pipetransformer.planning.planner import choose_num_microbatches
from hf_pipetransformer.schedules.placement import attention_of, mlp_of
from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.splitters.view import StageExit, StageView
from hf_pipetransformer.startup.check import gradients_discarded
from hf_pipetransformer.startup.model import Inspection, ProbeTarget


NUM_REPEATS = 5
PROFILE_SECONDS = 10.0
"""Time budget of a measurement; for slow models it is met by measuring with fewer samples."""
MEMORY_SHARE = 0.5
"""Share of the free memory that a measurement may use."""

Compute = Callable[[dict[str, Any]], torch.Tensor]


@dataclass
class BlockProfile:
    """Costs of each block for one sample, in seconds and bytes.

    Args:
        edge_backward: seconds of the backward if the block's input needs no gradient.
        activation_bytes: bytes saved for the backward, weights not counted.
        boundary_bytes: bytes of the activation between two blocks.
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


def affordable_samples(wanted: int, pilot: BlockProfile, num_blocks_run: int, free_bytes: float) -> int:
    """Return the number of samples to measure with: `wanted`, or fewer if that takes too much time or memory.

    Args:
        wanted: samples of the run's micro-batch.
        pilot: profile measured on fewer samples.
        num_blocks_run: number of blocks timed alone; the forward of all blocks below runs once before each.
    """
    runs = 2 * (NUM_REPEATS + 1) + 1
    slowest = max(f + b for f, b in zip(pilot.forward, pilot.backward, strict=True))
    seconds = num_blocks_run * (sum(pilot.forward) + runs * slowest)
    # Saved activations, their gradients, and as much again for temporaries.
    needed = 3 * max(pilot.activation_bytes)
    limits = [
        PROFILE_SECONDS / seconds if seconds else wanted,
        MEMORY_SHARE * free_bytes / needed if needed else wanted,
    ]
    return max(1, min(wanted, int(min(limits))))


def profile_blocks(
    model: nn.Module,
    splitter: Splitter,
    structure: Structure,
    compute: Compute,
    inputs: dict[str, Any],
    size: int,
    num_repeats: int = NUM_REPEATS,
) -> BlockProfile:
    """Time the embeddings, one middle layer and the head; the middle layer stands for all layers.

    Args:
        compute: runs the whole model on inputs and returns a scalar to differentiate.
        size: number of samples in `inputs`, which is on the model's device.
        num_repeats: timed runs of each, after one warm-up run.
    """
    num_blocks = structure.num_blocks
    zeros = [0.0] * num_blocks
    profile = BlockProfile(list(zeros), list(zeros), list(zeros), list(zeros))
    cuts = structure.cut_positions()
    view = StageView(model, splitter, structure)
    runner = _Runner(view, compute, inputs, next(model.parameters()).device, num_repeats)
    alone = blocks_run_alone(structure, middle_layer(model, structure))
    try:
        for start, end in zip(cuts, cuts[1:], strict=False):
            if start not in alone:
                continue
            hidden = runner.hidden_before(start)
            whole, edge = runner.time(range(start, end), hidden, True), runner.time(range(start, end), hidden, False)
            same = [block for block in cuts[:-1] if 0 < start < num_blocks - 1 and 0 < block < num_blocks - 1]
            same = [block for block in same if (block - start) % 2 == 0] or [start]
            saved = runner.saved_bytes(range(start, end), hidden)
            for block in same:
                profile.forward[block] = statistics.median(whole.forward) / size
                profile.backward[block] = statistics.median(whole.backward) / size
                profile.edge_backward[block] = statistics.median(edge.backward) / size
                profile.activation_bytes[block] = saved / size
            if hidden is not None:
                profile.boundary_bytes = hidden.numel() * hidden.element_size() / size
    finally:
        view.remove()
    return profile


def middle_layer(model: nn.Module, structure: Structure) -> int:
    """Return the layer to measure: the middle one of the trained layers, or of all layers if none is trained."""
    trained = _trained_layers(model, structure) or list(range(structure.num_layers))
    return trained[len(trained) // 2]


def blocks_run_alone(structure: Structure, layer: int) -> tuple[int, ...]:
    """Return the blocks to measure: embeddings, attention and MLP of `layer` (one piece if uncut), head."""
    middle = (attention_of(layer), mlp_of(layer)) if structure.cuts_inside_layers else (attention_of(layer),)
    return (0, *middle, structure.num_blocks - 1)


class _Runner:
    def __init__(
        self, view: StageView, compute: Compute, inputs: dict[str, Any], device: torch.device, num_repeats: int
    ) -> None:
        self.view = view
        self.compute = compute
        self.inputs = inputs
        self.device = device
        self.num_repeats = num_repeats

    def hidden_before(self, block: int) -> torch.Tensor | None:
        if block == 0:
            return None
        with torch.no_grad():
            return self._run(range(block), None).detach()

    def time(self, blocks: range, hidden: torch.Tensor | None, needs_input_gradient: bool) -> _Times:
        """Time the forward and backward of `blocks` repeatedly, without the first (warm-up) run."""
        times = _Times()
        for repeat in range(self.num_repeats + 1):
            forward, backward = self.once(blocks, hidden, needs_input_gradient)
            if repeat:
                times.forward.append(forward)
                times.backward.append(backward)
        return times

    def once(self, blocks: range, hidden: torch.Tensor | None, needs_input_gradient: bool) -> tuple[float, float]:
        received = None if hidden is None else hidden.clone().requires_grad_(needs_input_gradient)
        start = self._now()
        output = self._run(blocks, received)
        middle = self._now()
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))
        return middle - start, self._now() - middle

    def saved_bytes(self, blocks: range, hidden: torch.Tensor | None) -> float:
        """Return the bytes saved for the backward, each storage counted once, weights not counted."""
        weights = {p.untyped_storage().data_ptr() for p in self.view.model.parameters()}
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            # Detach: if a node saves its own output, the graph would reference itself and never be freed.
            return tensor.detach()

        received = None if hidden is None else hidden.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self._run(blocks, received)
        del output
        return float(sum(storages.values()))

    def _run(self, blocks: range, received: torch.Tensor | None) -> torch.Tensor:
        self.view.install(blocks)
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
    """Train what the user trains inside the context, or everything if no layer is trained; discard its gradients."""
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
"""Function from a number of samples to a batch of the first samples of the run."""


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured costs that plans start from; blocks were measured with a micro-batch of `num_samples`."""

    blocks: BlockCosts
    overheads: Overheads
    num_samples: int


def measure_costs(
    subject: ProbeTarget,
    structure: Structure,
    args: PipeTransformerArguments,
    topology: Topology,
    inspection: Inspection,
    read: ReadBatch | None,
) -> MeasuredCosts:
    """Measure block costs on rank 0 and transfers between ranks. Collective: call on every rank.

    Args:
        read: reads the batch to measure with; None uses the subject's.
    """

    def measure() -> dict[str, Any]:
        with trained_as_given(subject.model, structure):
            found, num_samples = _measure_blocks(subject, structure, samples_per_microbatch(args), topology, read)
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
    parameters, kept, trained_bytes, kept_bytes = ([0] * structure.num_blocks for _ in range(4))
    shared: dict[bool, list[tuple[tuple[int, ...], int]]] = {True: [], False: []}
    for name, parameter in subject.model.named_parameters():
        blocks = structure.blocks_of_parameter[name]
        # The first block that uses a tied weight owns its optimizer state and steps it.
        parameters[blocks[0]] += parameter.numel()
        kept[blocks[0]] += 0 if parameter.requires_grad else parameter.numel()
        sizes = trained_bytes if parameter.requires_grad else kept_bytes
        sizes[blocks[0]] += parameter.numel() * parameter.element_size()
        if len(blocks) > 1:
            shared[parameter.requires_grad].append((blocks, parameter.numel()))
    return MeasuredCosts(
        BlockCosts(
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


def _measure_blocks(
    subject: ProbeTarget,
    structure: Structure,
    wanted: int,
    topology: Topology,
    read: ReadBatch | None,
) -> tuple[BlockProfile, int]:
    """Return block costs and the samples measured with: the largest micro-batch, or fewer if too slow or too large."""
    inputs, size = subject.inputs, batch_size(subject.inputs)
    measure = partial(profile_blocks, subject.model, subject.splitter, structure, subject.loss)
    if read is None:
        return measure(inputs, size), size
    device = next(subject.model.parameters()).device
    if wanted > size:
        pilot = measure(inputs, size, num_repeats=1)
        free = _free_bytes(device, topology.num_ranks_here)
        num_blocks_run = len(blocks_run_alone(structure, middle_layer(subject.model, structure)))
        wanted = max(size, affordable_samples(wanted, pilot, num_blocks_run, free))
    batch = {key: moved(value, device) for key, value in read(wanted).items()}
    size = batch_size(batch)
    return measure(batch, size), size


def affordable_sequences(blocks: BlockCosts, device: torch.device, topology: Topology) -> int:
    """Return the number of samples, at least 1, that fit through the whole model in this device's free memory."""
    kept = sum(blocks.activation_bytes)
    return max(1, int(MEMORY_SHARE * _free_bytes(device, topology.num_ranks_here) / kept)) if kept else 1


def samples_per_microbatch(args: PipeTransformerArguments) -> int:
    """Return the size of the first layout's largest micro-batch; if the number of stages K is open, that of K=1."""
    size = args.pipeline_size or 1
    samples = args.train_samples_per_device * size
    return -(-samples // num_microbatches_at_start(args, size, samples))


def num_microbatches_at_start(args: PipeTransformerArguments, pipeline_size: int, pipeline_batch_size: int) -> int:
    """Return the first layout's number of micro-batches M: the user's value, or the rule's."""
    rule = (args.schedule.abilities, args.gradient_accumulation_steps, args.pipeline_weights)
    return args.num_microbatches or choose_num_microbatches(pipeline_size, pipeline_batch_size, *rule)


def moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def smallest_device_bytes(device: torch.device, topology: Topology) -> float:
    """Return the bytes of the run's smallest device, which plans must fit. Collective: call on every rank."""
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
