"""What a layout costs: seconds and bytes of an optimizer step, from what each unit costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.schedules import find_schedule
from hf_pipetransformer.simulator import Durations, simulate
from hf_pipetransformer.units import first_above


GRADIENT_BYTES = 4
"""Bytes of one parameter's gradient in an all-reduce: gradients are fp32."""

Shared = tuple[tuple[tuple[int, ...], int], ...]
"""Parameters that several units use: the units, in increasing order, and the number of elements."""


@dataclass(frozen=True)
class UnitCosts:
    """What each unit of the model costs, one entry a unit.

    Args:
        forward: seconds per sample of the forward.
        backward: seconds per sample of the whole backward.
        edge_backward: seconds per sample of the backward if the unit's input needs no gradient, as that of the first
            active unit.
        parameters: elements; what several units use is counted at the first.
        activation_bytes: bytes per sample that the unit keeps from its forward for its backward.
        shared: what several units use, not by unit: stages that share it hold a copy each.

    Raises:
        ValueError: the entries are not as many everywhere.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    edge_backward: tuple[float, ...]
    parameters: tuple[int, ...]
    activation_bytes: tuple[float, ...]
    shared: Shared = ()

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self) if field.name != "shared"}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"Unit costs need one entry a unit in every field, found {lengths}.")

    def scaled(self, forward: float, backward: float) -> UnitCosts:
        """The same units with the times of forwards and of backwards multiplied by a factor each."""
        return replace(
            self,
            forward=tuple(forward * seconds for seconds in self.forward),
            backward=tuple(backward * seconds for seconds in self.backward),
            edge_backward=tuple(backward * seconds for seconds in self.edge_backward),
        )


@dataclass(frozen=True)
class Overheads:
    """What a step costs beside the computation of its samples.

    Args:
        hop: seconds that a message between neighbouring stages takes.
        per_microbatch: seconds that each forward and each backward of a stage costs beside its samples.
        reduction_per_byte: seconds per byte of gradient of the all-reduce over R=2 replicas, as far as the backward
            does not hide it; over R replicas it is `2 (R - 1) / R` times that (a ring).
        optimizer_per_parameter: seconds per trained parameter of the optimizer step.
        per_step: seconds of everything else: loader, logging, callbacks.
    """

    hop: float = 0.0
    per_microbatch: float = 0.0
    reduction_per_byte: float = 0.0
    optimizer_per_parameter: float = 0.0
    per_step: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one optimizer step, and their parts.

    Args:
        seconds: the whole step; the sum of the four that follow.
        pipeline: forwards, backwards and the bubble, of all batches of the step.
        reduction: all-reduce over the replicas.
        optimizer: the optimizer step.
        other: everything else.
        stage_seconds: seconds that each stage computes in the step.
    """

    seconds: float
    pipeline: float
    reduction: float
    optimizer: float
    other: float
    stage_seconds: tuple[float, ...]


def unit_backwards(costs: UnitCosts, num_frozen_layers: int) -> list[float]:
    """Seconds per sample of each unit's backward with `num_frozen_layers` frozen: none below the first active unit."""
    first = first_above(num_frozen_layers)
    return [0.0] * first + [costs.edge_backward[first], *costs.backward[first + 1 :]]


def unit_forwards(costs: UnitCosts, cache_level: int) -> list[float]:
    """Seconds per sample of each unit's forward with the activations after `cache_level` layers stored."""
    first = first_above(cache_level)
    return [0.0] * first + list(costs.forward[first:])


def unit_loads(costs: UnitCosts, num_frozen_layers: int, cache_level: int = 0) -> list[float]:
    """Seconds per sample that each unit costs: what a partition evens out.

    A frozen unit only runs its forward, and not even that for a sample whose activation is stored.
    """
    forwards, backwards = unit_forwards(costs, cache_level), unit_backwards(costs, num_frozen_layers)
    return [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]


def predict_step(
    layout: Layout, costs: UnitCosts, overheads: Overheads, samples_per_pipeline: int, accumulation: int = 1
) -> Prediction:
    """How long one optimizer step takes: the schedule's table, simulated, and what comes after it.

    The all-reduce and the optimizer take as long as they take on the stage with the most trained parameters.

    Args:
        layout: how the model lies on the ranks.
        costs: of the model's units, on one of the devices.
        overheads: of this machine.
        samples_per_pipeline: samples of one batch of one pipeline.
        accumulation: batches per optimizer step.
    """
    microbatches = _num_microbatches(layout, samples_per_pipeline)
    samples = samples_per_pipeline / microbatches
    forward = [samples * seconds for seconds in _by_stage(layout, unit_forwards(costs, layout.cache_level))]
    backward = [samples * seconds for seconds in _by_stage(layout, unit_backwards(costs, layout.num_frozen_layers))]
    durations = Durations(
        forward=tuple(seconds + overheads.per_microbatch for seconds in forward),
        backward=tuple(seconds + overheads.per_microbatch for seconds in backward),
        hop=overheads.hop,
    )
    schedule = find_schedule(layout.schedule)
    table = schedule.table(layout.num_stages, microbatches, first_active_stage=layout.first_active_stage)
    timeline = simulate(table, durations)
    trained = max(_by_stage(layout, _active(layout, costs.parameters)))
    ring = 2 * (layout.num_replicas - 1) / layout.num_replicas
    pipeline = accumulation * timeline.end
    reduction = overheads.reduction_per_byte * trained * GRADIENT_BYTES * ring
    optimizer = overheads.optimizer_per_parameter * trained
    return Prediction(
        seconds=pipeline + reduction + optimizer + overheads.per_step,
        pipeline=pipeline,
        reduction=reduction,
        optimizer=optimizer,
        other=overheads.per_step,
        stage_seconds=tuple(accumulation * busy for busy in timeline.busy),
    )


def stage_bytes(
    layout: Layout,
    costs: UnitCosts,
    samples_per_pipeline: int,
    state_bytes_per_parameter: float = 16,
    weight_bytes: float = 4,
) -> list[float]:
    """Bytes that each stage needs for training.

    With replicas the gradients that a stage reduces lie in flat buffers too, beside those that the backward makes. A
    stage that shares a parameter with an earlier one holds its own copy and gradient, without optimizer state.

    Args:
        layout: how the model lies on the ranks.
        costs: of the model's units; their parameters and activation bytes are read.
        samples_per_pipeline: samples of one batch of one pipeline.
        state_bytes_per_parameter: bytes of a trained parameter; 16 are fp32 weight, gradient and two moments of Adam.
        weight_bytes: bytes of a frozen parameter.
    """
    microbatches = _num_microbatches(layout, samples_per_pipeline)
    parameters = _by_stage(layout, costs.parameters)
    trained = _by_stage(layout, _active(layout, costs.parameters))
    kept = _by_stage(layout, _active(layout, costs.activation_bytes))
    copies, reduced = _shared_bytes(layout, costs, weight_bytes), _reduced(layout, costs)
    schedule = find_schedule(layout.schedule)
    held = schedule.in_flight(layout.num_stages, microbatches, first_active_stage=layout.first_active_stage)
    loads = []
    for stage in range(layout.num_stages):
        samples_held = held[stage] * samples_per_pipeline / microbatches
        weights = trained[stage] * state_bytes_per_parameter + (parameters[stage] - trained[stage]) * weight_bytes
        buffers = GRADIENT_BYTES * reduced[stage] if layout.num_replicas > 1 else 0
        loads.append(weights + copies[stage] + buffers + kept[stage] * samples_held)
    return loads


def _shared_bytes(layout: Layout, costs: UnitCosts, weight_bytes: float) -> list[float]:
    """Bytes of the copies that each stage holds of what an earlier stage uses too."""
    copies = [0.0] * layout.num_stages
    for units, elements in costs.shared:
        is_trained = units[0] >= layout.first_active_unit
        for stage in _stages_of(layout, units)[1:]:
            copies[stage] += elements * (weight_bytes + (GRADIENT_BYTES if is_trained else 0))
    return copies


def _reduced(layout: Layout, costs: UnitCosts) -> list[float]:
    """Elements whose gradients each stage sums in its buffers: all that it trains and shares with no other stage."""
    reduced = _by_stage(layout, _active(layout, costs.parameters))
    for units, elements in costs.shared:
        stages = _stages_of(layout, units)
        if len(stages) > 1 and units[0] >= layout.first_active_unit:
            reduced[stages[0]] -= elements
    return reduced


def _stages_of(layout: Layout, units: Sequence[int]) -> list[int]:
    """The stages that hold any of `units`, first user first."""
    return list(dict.fromkeys(layout.stage_of(unit) for unit in units))


def _num_microbatches(layout: Layout, samples_per_pipeline: int) -> int:
    """A micro-batch has at least one sample."""
    return max(1, min(layout.num_microbatches, samples_per_pipeline))


def _active(layout: Layout, values: Sequence[float]) -> list[float]:
    """`values` with nothing for the frozen units."""
    first = layout.first_active_unit
    return [0.0] * first + list(values[first:])


def _by_stage(layout: Layout, values: Sequence[float]) -> list[float]:
    """Sum of `values` over the units of each stage."""
    return [sum(values[unit] for unit in layout.units_of(stage)) for stage in range(layout.num_stages)]
