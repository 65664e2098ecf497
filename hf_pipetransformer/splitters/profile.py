"""Time and memory of single units, measured on one micro-batch. Layers are uniform, so one layer stands for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.check import gradients_discarded
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.splitters.view import StageExit, StageView
from hf_pipetransformer.units import attention_of, mlp_of


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
