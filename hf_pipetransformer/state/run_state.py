"""State of a run as `state.json` has it, declared once: the annotations below are its JSON form and its schema.

A hash proves that a file is what was written, not that a run can have written it. `read_as` checks every value against
its annotation; `RunState.from_json` also checks what several values say together.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    Self,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import torch
import xxhash

from hf_pipetransformer.data.rng import States
from hf_pipetransformer.schedules import json_values
from hf_pipetransformer.schedules.json_values import MOST_SAMPLES, MOST_STEPS, entries, entry, items, whole_number
from hf_pipetransformer.schedules.layout import MOST_MICROBATCHES, Layout


if TYPE_CHECKING:
    from hf_pipetransformer.data.loader import PipelineLoader
    from hf_pipetransformer.options.arguments import PipeTransformerArguments


class Within(NamedTuple):
    """Smallest and largest value of an annotated number."""

    least: float
    most: float


Count = Annotated[int, Within(0, MOST_STEPS)]
Positive = Annotated[int, Within(1, MOST_STEPS)]
NumSamples = Annotated[int, Within(0, MOST_SAMPLES)]
Microbatches = Annotated[int, Within(1, MOST_MICROBATCHES)]
Seed = Annotated[int, Within(-(2**63), 2**64)]
Epochs = Annotated[float, Within(0, MOST_STEPS)]
# Far beyond any learning rate, so that a damaged number is refused.
Finite = Annotated[float, Within(-1e30, 1e30)]
Scalar = bool | int | float | str | None


class FileEntry(TypedDict):
    """Size and hash, in hexadecimal, of a checkpoint's file."""

    bytes: Annotated[int, Within(0, 2**62)]
    xxh3_128: str


class Manifest(TypedDict):
    """Files of a checkpoint by relative path, and a hash of the model's tensors, whichever files they are in."""

    files: dict[str, FileEntry]
    weights: str | None


class Nodes(TypedDict):
    """JSON form of `NodeOrder`."""

    seed: Seed
    devices: list[Positive]
    batch_size: Positive


class DataPosition(TypedDict):
    """Position in the data: samples of the epoch that are done, and what their order depends on.

    `num_samples` is an epoch's length, which a user's sampler may make longer than the data set; None for a stream.
    """

    epoch: Count
    samples: NumSamples
    global_batch: Positive
    num_samples: NumSamples | None
    group_size: Positive | None
    nodes: Nodes | None


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

    last_epoch: Annotated[int, Within(-1, MOST_STEPS)]
    _step_count: Annotated[int, Within(-1, MOST_STEPS)]
    base_lrs: list[Finite]
    _last_lr: list[Finite]


def _scalar(value: Any, name: str) -> Scalar:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"found a {type(value).__name__} as {name!r}, expected a text or number")
    return value


_READERS: dict[Any, Callable[[Any, str], Any]] = {
    bool: json_values.flag,
    float: json_values.number,
    str: json_values.text,
    Scalar: _scalar,
    Any: lambda value, name: value,
    Layout: lambda value, name: Layout.from_event(value),
}


def read_as(kind: Any, value: Any, name: str) -> Any:
    """Return a JSON value in the form that the annotation `kind` says; entries that a `TypedDict` does not name stay.

    Raises ValueError for another form; it says what was found as which entry, and what was expected.
    """
    if kind in _READERS:
        return _READERS[kind](value, name)
    if is_typeddict(kind):
        # Entries without an annotation stay: a scheduler of the user may have any.
        found, hints = dict(entries(value, name)), get_type_hints(kind, include_extras=True)
        for key in hints:
            if key in found or key in kind.__required_keys__:
                found[key] = read_as(hints[key], entry(found, key), key)
        return found
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        read: Callable[..., Any] = whole_number if inner[0] is int else json_values.number
        return read(value, name, *inner[1])
    if origin in (Union, UnionType):
        # Other unions than `X | None` have a reader of their own above.
        return None if value is None else read_as(inner[0], value, name)
    if origin is dict:
        return {key: read_as(inner[1], item, key) for key, item in entries(value, name).items()}
    if origin is tuple:
        return [read_as(*each, name) for each in zip(inner, items(value, name, len(inner)), strict=True)]
    assert origin is list, kind
    return [read_as(inner[0], item, name) for item in items(value, name)]


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
class Progress:
    """Progress of a run: all that is known if plain Trainer saved it. `place` is None for a user's own loader."""

    step: Count
    epoch: Epochs | None
    place: DataPosition | None

    def as_json(self) -> dict[str, Any]:
        return {name: value.as_event() if isinstance(value, Layout) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Invert `as_json`, ignoring other entries; raises ValueError for values that no run can have written."""
        hints = get_type_hints(cls, include_extras=True)
        return cls(**{own.name: read_as(hints[own.name], entry(values, own.name), own.name) for own in fields(cls)})


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
class RunState(RunIdentity, Progress):
    """Everything that a resumed run needs besides tensors and the RNG states of the ranks.

    `is_counted`: the position in the data follows from the number of steps, as Trainer assumes. `first_layout` is the
    layout that the run began under. With `sums_in_float32`, it adds gradients of half-precision weights in float32.
    """

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
        state = super().from_json(values)
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
            whole_number(place["epoch"], "epoch", most=state.step)
            lengths = (place["num_samples"], state.data["num_samples"], MOST_SAMPLES)
            whole_number(place["samples"], "samples", most=next(each for each in lengths if each is not None))
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


# ---- the position in the data, and what is left of an epoch from there ----


def is_split_by_node(place: DataPosition | None) -> bool:
    """Return True if the position is inside an epoch split by node, which Trainer would read in another order."""
    return place is not None and place["nodes"] is not None and place["samples"] > 0


@dataclass(frozen=True)
class Remainder:
    """Rest of an epoch, in batches of the current size.

    Args:
        num_done: samples of the epoch that were trained before the checkpoint.
        first: index of the next batch, chosen such that the epoch's last batch keeps its usual index.
        share: fraction of the epoch left, in (0, 1].
    """

    epoch: int
    num_done: int
    first: int
    num_batches: int
    num_updates: int
    share: float

    def epoch_at(self, part: float) -> float:
        """Return the fractional epoch when the fraction `part` of the rest is done."""
        return self.epoch + 1 - (1 - part) * self.share

    def last_step(self, step: int, num_epochs: float | Fraction, updates_per_epoch: int) -> int:
        """Return the total number of optimizer steps of the run, `step` of which are done."""
        total = math.ceil(num_epochs * updates_per_epoch)
        return step + max(0, total - ((self.epoch + 1) * updates_per_epoch - self.num_updates))

    def num_epochs(self, step: int, max_steps: int, updates_per_epoch: int) -> int:
        """Return the number of epochs that the run has entered when it reaches `max_steps`."""
        return self.epoch + 1 + math.ceil(max(0, max_steps - step - self.num_updates) / updates_per_epoch)


class Epoch(NamedTuple):
    """Number of an epoch's samples, and how batches over all replicas and optimizer steps are made of them."""

    num_samples: int
    batch_size: int
    drops_last: bool
    accumulation: int

    @classmethod
    def of(cls, loader: PipelineLoader, args: PipeTransformerArguments) -> Self:
        sizes = (loader.num_samples, loader.total_batch_size)
        return cls(*sizes, args.dataloader_drop_last, args.gradient_accumulation_steps)

    def num_batches(self, num_done: int = 0) -> int:
        """Return the number of batches in the samples that are left."""
        count = self.num_samples - num_done
        return count // self.batch_size if self.drops_last else math.ceil(count / self.batch_size)


def find_remainder(place: DataPosition, step: int, epoch: Epoch, skips: bool) -> Remainder | None:
    """Compute the rest of the epoch that a checkpoint was saved in.

    None if Trainer's own step arithmetic finds the same position, or if no batch is ever full. Without `skips` the
    samples that were done are not skipped: the epoch starts over.
    """
    in_epoch = epoch.num_batches()
    if not in_epoch:
        return None
    number, num_done = place["epoch"], place["samples"] if skips else 0
    left = epoch.num_batches(num_done)
    # All samples are done, or those that are left make no whole batch: the next epoch begins.
    if not left:
        number, num_done, left = number + 1, 0, in_epoch
    first = in_epoch - left
    # Trainer finds its position by division, as if all epochs had been of this length.
    trainers_number, updates = divmod(step, max(1, math.ceil(in_epoch / epoch.accumulation)))
    trainers_first = updates * epoch.accumulation if skips else 0
    if (trainers_number, trainers_first) == (number, first) and num_done == first * epoch.batch_size:
        return None
    return Remainder(number, num_done, first, left, math.ceil(left / epoch.accumulation), left / in_epoch)
