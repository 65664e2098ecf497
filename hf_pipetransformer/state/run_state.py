"""State of a run as `state.json` has it, declared once: the annotations below are its JSON form and its schema.

A hash proves that a file is what was written, not that a run can have written it: `RunState.from_json` checks every
value against its annotation, and what several values say together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypedDict

import torch
import xxhash

from hf_pipetransformer.data.rng import States
from hf_pipetransformer.data.sampler import Position
from hf_pipetransformer.schedules.json_values import (
    MOST_SAMPLES,
    MOST_STEPS,
    Count,
    NumSamples,
    Positive,
    Scalar,
    read_as,
    whole_number,
)
from hf_pipetransformer.schedules.layout import MOST_MICROBATCHES, Layout


Microbatches = Annotated[int, 1, MOST_MICROBATCHES]
Epochs = Annotated[float, 0, MOST_STEPS]
# Far beyond any learning rate, so that a damaged number is refused.
Finite = Annotated[float, -1e30, 1e30]


class FileEntry(TypedDict):
    """Size and hash, in hexadecimal, of a checkpoint's file."""

    bytes: Annotated[int, 0, 2**62]
    xxh3_128: str


class Manifest(TypedDict):
    """Files of a checkpoint by relative path, and a hash of the model's tensors, whichever files they are in."""

    files: dict[str, FileEntry]
    weights: str | None


class DataDescription(TypedDict):
    """Description of a data set, each entry None if unknown; see `describe_data`."""

    num_samples: NumSamples | None
    fingerprint: str | None
    samples: str | None


class DecisionState(TypedDict):
    """State of `LayoutController`. A user's policy may want any number of layers."""

    num_wanted: Finite
    num_fruitless: Count
    policy: dict[str, Any]
    gradient_norms: list[float] | None
    known_microbatches: list[tuple[Microbatches, Microbatches, Microbatches]]


class SchedulerState(TypedDict, total=False):
    """Entries that torch's schedulers have in their state; a user's own may have others."""

    last_epoch: Annotated[int, -1, MOST_STEPS]
    _step_count: Annotated[int, -1, MOST_STEPS]
    base_lrs: list[Finite]
    _last_lr: list[Finite]


def read_json_file(path: str, folder: str) -> dict[str, Any]:
    """Read a JSON object from a file of the checkpoint `folder`, which is damaged if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError(f"found a {type(content).__name__}, expected an object")
        return content
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder!r} is damaged: {os.path.basename(path)} cannot be read ({type(error).__name__}: {error})."
        ) from error


def checksum_of(content: Mapping[str, Any]) -> str:
    """Hash JSON values, alike before and after a round trip through a file."""
    try:
        # Through JSON first, which turns numbers that are keys into text: these sort in another order.
        values = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    except RecursionError as error:
        raise ValueError("The values are nested too deep for a JSON file.") from error
    return xxhash.xxh3_128_hexdigest(values.encode())


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Identity of a run, besides its data, with which a resumed run is compared.

    `decaying` names the parameters with weight decay; `parameters` has shape and dtype of each, and if it is frozen.
    """

    world_size: Positive
    arguments: dict[str, Scalar]
    has_plan: bool
    policy: str
    policy_class: str
    decaying: list[str]
    model: str
    parameters: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class RunState(RunIdentity):
    """Everything that a resumed run needs besides tensors and the RNG states of the ranks.

    `place` is None for a user's own loader. `is_counted`: it follows from the number of steps, as Trainer assumes.
    `first_layout` is the layout that the run began under. With `sums_in_float32`, it adds gradients of half-precision
    weights in float32.
    """

    step: Count
    epoch: Epochs | None
    place: Position | None
    is_counted: bool
    unlogged_loss: float
    layout: Layout
    first_layout: Layout
    sums_in_float32: bool
    num_starts: Count
    num_transitions: Count
    decisions: DecisionState
    scheduler: SchedulerState
    scaler: dict[str, Any] | None
    optimizer_class: str
    scheduler_class: str
    data: DataDescription

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Read `as_json` of a state, ignoring other entries; ValueError for values that no run can have written."""
        state: Self = read_as(cls, values, "state")
        layout, place = state.layout, state.place
        num_ranks = layout.pipeline_size * layout.num_replicas
        if state.world_size != num_ranks:
            raise ValueError(
                f"found {state.world_size} as 'world_size', expected {num_ranks}, the ranks of its layout"
            )
        if state.first_layout.num_layers != layout.num_layers:
            raise ValueError(
                f"found a 'first_layout' of {state.first_layout.num_layers} layers, expected {layout.num_layers}"
            )
        if place is not None:
            # Every epoch that was entered has a step at least.
            whole_number(place.epoch, "epoch", most=state.step)
            lengths = (place.num_samples, state.data["num_samples"], MOST_SAMPLES)
            whole_number(place.samples, "samples", most=next(each for each in lengths if each is not None))
        return state


@dataclass(frozen=True)
class RankState:
    """State of one rank alone: its RNG states, and its loss since the last log entry.

    Args:
        order: RNG state that the sample order was drawn from; None draws a new order.
        shared: RNG states of the emulated single process; None where one process trained.
        ahead: RNG states before the batches that were read ahead, and how many batches; None without any.
        position: number of batches read in this pass over a stream without length.
    """

    own: States
    unlogged_loss: float
    last_logged_step: int
    order: torch.Tensor | None = None
    shared: States | None = None
    ahead: tuple[States, int] | None = None
    position: int | None = None
