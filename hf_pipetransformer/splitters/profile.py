"""Time and memory of single units, measured on a tiny batch. Layers are uniform, so one layer stands for all."""

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
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.splitters.view import StageExit, StageView


NUM_REPEATS = 5

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


def profile_units(
    model: nn.Module, splitter: Splitter, structure: Structure, compute: Compute, inputs: dict[str, Any], size: int
) -> UnitProfile:
    """Run the embeddings, one middle layer and the head alone, a few times each.

    Args:
        compute: runs the whole model on inputs and returns a scalar to differentiate.
        inputs: a tiny batch on the model's device.
        size: its number of samples.
    """
    num_units = structure.num_units
    zeros = [0.0] * num_units
    profile = UnitProfile(list(zeros), list(zeros), list(zeros), list(zeros))
    cuts = structure.cut_positions()
    view = StageView(model, splitter, structure)
    runner = _Runner(view, compute, inputs, next(model.parameters()).device)
    attention = 2 * (structure.num_layers // 2) + 1
    try:
        for start, end in zip(cuts, cuts[1:], strict=False):
            stands_for_all = start in (0, attention, attention + 1, num_units - 1)
            if not stands_for_all:
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


class _Runner:
    """Runs single units of a model."""

    def __init__(self, view: StageView, compute: Compute, inputs: dict[str, Any], device: torch.device) -> None:
        self.view = view
        self.compute = compute
        self.inputs = inputs
        self.device = device

    def hidden_before(self, unit: int) -> torch.Tensor | None:
        """The activation that enters `unit`; None before the embeddings."""
        if unit == 0:
            return None
        with torch.no_grad():
            return self._run(range(unit), None).detach()

    def time(self, units: range, hidden: torch.Tensor | None, needs_input_gradient: bool) -> _Times:
        """Seconds of forward and backward, the first run left out."""
        times = _Times()
        for repeat in range(NUM_REPEATS + 1):
            received = None if hidden is None else hidden.clone().requires_grad_(needs_input_gradient)
            start = self._now()
            output = self._run(units, received)
            middle = self._now()
            if output.requires_grad:
                torch.autograd.backward(output, torch.ones_like(output))
            if repeat:
                times.forward.append(middle - start)
                times.backward.append(self._now() - middle)
        return times

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


@contextmanager
def trainable(model: nn.Module) -> Iterator[None]:
    """Every parameter is trainable inside, also those that the user froze; gradients are dropped."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    gradients = {parameter: parameter.grad for parameter in flags}
    for parameter in flags:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
            parameter.grad = gradients[parameter]
