"""State of a run as `state.json` has it, declared once: the annotations below are its JSON form and its schema.

A hash proves that a file is what was written, not that a run can have written it: `RunState.from_json` checks every
value against its annotation, and what several values say together. A resume compares the identity of its run, and the
data, with those that were saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Self, TypedDict

import datasets
import numpy as np
import torch
import xxhash
from transformers.trainer_utils import SaveStrategy

from hf_pipetransformer.data.rng import States, generators_kept
from hf_pipetransformer.data.sampler import Position
from hf_pipetransformer.options.refusals import comparable
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
from hf_pipetransformer.splitters.masters import master_names


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.freeze.policy import FreezePolicy
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.runtime.context import RunView


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


# ---- whether it is the same run ----


NUM_SAMPLES = 8
"""Number of samples that are hashed."""

# Network file systems cache directory listings for some seconds.
_TOKEN_SECONDS = 5.0


def describe_data(dataset: Any) -> DataDescription:
    """Describe a data set in JSON values, each None if unknown.

    `fingerprint` is that of a `datasets.Dataset`, which changes with every operation; `samples` is a hash of a few
    samples, None if reading them twice gives different results.
    """
    is_stream = isinstance(dataset, (torch.utils.data.IterableDataset, datasets.IterableDataset))
    if is_stream or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return {"num_samples": None, "fingerprint": None, "samples": None}
    return {
        "num_samples": len(dataset),
        "fingerprint": getattr(dataset, "_fingerprint", None),
        "samples": _hash_of_samples(dataset),
    }


def are_other_data(saved: DataDescription, present: DataDescription) -> bool:
    """Return True if two descriptions of equally long data sets show different data."""
    # An equal fingerprint proves equal data; another one does not prove other data, as any operation changes it.
    if saved["fingerprint"] is not None and saved["fingerprint"] == present["fingerprint"]:
        return False
    if saved["samples"] is None or present["samples"] is None:
        # Samples are random, so only fingerprints can show a difference, and only if both data sets have one.
        return None not in (saved["fingerprint"], present["fingerprint"])
    return bool(saved["samples"] != present["samples"])


def _hash_of_samples(dataset: Any) -> str | None:
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.with_format(None)  # Stored content, without a transform that may be random.
    count = len(dataset)
    # From the first to the last sample, so that other data at either end are found.
    spread = sorted({index * (count - 1) // (NUM_SAMPLES - 1) for index in range(NUM_SAMPLES)}) if count else []
    # Twice: samples that are drawn at random differ, and tell nothing of the data.
    found = {xxhash.xxh3_128_hexdigest(b"".join(_content(dataset[index]) for index in spread)) for _ in range(2)}
    return found.pop() if len(found) == 1 else None


def _content(value: Any) -> bytes:
    """Return the content of a sample as bytes, for any nesting of common types."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        # With dtype and shape, as other data may have the same bytes.
        return f"{value.dtype}{tuple(value.shape)}".encode() + flat.numpy().tobytes()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    if isinstance(value, Mapping):
        return b"".join(str(key).encode() + _content(value[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return f"{len(value)} items".encode() + b"".join(map(_content, value))
    # Images of PIL, for instance.
    if callable(getattr(value, "tobytes", None)):
        return bytes(value.tobytes())
    if value is None or isinstance(value, (str, bytes, int, float, np.generic)):
        return repr(value).encode()
    # Not its repr, which may show an address and so differ in every process.
    return type(value).__name__.encode()


TOLD_ARGUMENTS = (
    *("pipeline_parallel_size", "pipeline_parallel_num_microbatches", "pipeline_schedule", "pipeline_compression"),
    *("pipeline_chunks", "pipeline_token_slices", "pipeline_weights", "pipeline_clip", "pipeline_drain_interval"),
    *("pipeline_gradient_dtype", "pipeline_loss", "pipeline_head_slices"),
    *("freeze_policy", "freeze_alpha", "freeze_rule", "freeze_interval", "freeze_warmup", "freeze_at", "elastic"),
    *("freeze_min_active_layers", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("max_steps", "seed", "data_seed", "train_sampling_strategy", "length_column_name", "dataloader_drop_last"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor"),
    *("neftune_noise_alpha", "bf16", "fp16", "activation_cache_dtype"),
)
"""Arguments that must be equal for a resumed run to reproduce the saved run's numbers."""


_KEPT_ARGUMENTS = ("learning_rate", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def check_same_run(folder: str, saved: RunState, present: RunIdentity, data: DataDescription) -> str | None:
    """Refuse to resume with another model or other `data`; return a sentence on other differences.

    None means that the run will reproduce the numbers of the saved one. The ValueError lists everything that must not
    differ, as found and as expected.
    """
    differences = []
    if present.model != saved.model:
        differences.append(f"{present.model} as model (expected {saved.model})")
    if saved.data["num_samples"] != data["num_samples"]:
        differences.append(f"{data['num_samples']} training samples (expected {saved.data['num_samples']})")
    elif are_other_data(saved.data, data):
        differences.append(
            f"other training data: as many samples, but not the same ones (fingerprint {data['fingerprint']}, "
            f"hash of some {data['samples']}; expected {saved.data['fingerprint']} and {saved.data['samples']})"
        )
    old, new = saved.parameters, present.parameters
    unequal = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if unequal:
        name = unequal[0]
        found, expected = new.get(name, "none"), old.get(name, "none")
        differences.append(f"parameter {name}: {found} (expected {expected}; {len(unequal)} differ)")
    _refuse_other_run(folder, differences)
    return _describe_changes(saved, present)


def _describe_changes(saved: RunState, present: RunIdentity) -> str | None:
    old_arguments, arguments = saved.arguments, present.arguments
    changed = [name for name in old_arguments if name in arguments and arguments[name] != old_arguments[name]]
    # Chosen later in the start, and compared there.
    changed = [name for name in changed if (name, arguments[name]) != ("pipeline_head_slices", "auto")]
    told = [f"{name}={arguments[name]} (was {old_arguments[name]})" for name in changed]
    for found, old, what in (
        (present.policy_class, saved.policy_class, "as class of the freeze policy, which begins anew"),
        (present.world_size, saved.world_size, "processes"),
        (present.policy, saved.policy, "as freeze policy"),
    ):
        if found != old:
            told.append(f"{found} {what} (was {old})")
    if saved.has_plan and not present.has_plan:
        told.append("no layout_plan (was replayed)")
    if not told:
        return None
    kept = [name for name in _KEPT_ARGUMENTS if name in changed]
    stay = "stays" if len(kept) == 1 else "stay"
    of_checkpoint = f" As with Trainer, {', '.join(kept)} of the checkpoint {stay} in force." if kept else ""
    return (
        f"The run goes on with other settings than it was saved with: {'; '.join(told)}. It goes on from the same "
        f"weights and optimizer, but its numbers are not those of the run that was saved.{of_checkpoint}"
    )


def check_same_kinds(folder: str, saved: RunState, present: Mapping[str, str]) -> None:
    """Refuse an optimizer or scheduler of another class, which cannot load the saved state."""
    pairs = [(key, value, getattr(saved, key)) for key, value in present.items()]
    _refuse_other_run(folder, [f"{key}={value} (expected {old})" for key, value, old in pairs if value != old])


def _refuse_other_run(folder: str, differences: list[str]) -> None:
    if differences:
        raise ValueError(
            f"{folder!r} cannot be resumed by this run, which has {'; '.join(differences)}. Make them as in the run "
            f"that was saved, or start a new run from the checkpoint's weights: `from_pretrained({folder!r})`."
        )


class RunDescription:
    """Identity of this run, which rank 0 collects before the start and broadcasts, and its training data."""

    def __init__(self, run: RunView, topology: Topology, policy: FreezePolicy) -> None:
        self.run = run
        self.identity = RunIdentity(**topology.decide(lambda: vars(self._own_identity(topology, policy))))

    def _own_identity(self, topology: Topology, policy: FreezePolicy) -> RunIdentity:
        model, args = self.run.model, self.run.args
        arguments = args.to_dict()
        # The dtypes of the training, to which the weights are cast later.
        dtypes = dict.fromkeys(master_names(model) if args.pipeline_master_dtype else (), torch.float32)
        return RunIdentity(
            world_size=topology.world_size,
            # Slices as a number, which checkpoints have.
            arguments=comparable({name: arguments[name] for name in TOLD_ARGUMENTS})
            | {"pipeline_head_slices": args.head_slices or "auto"},
            has_plan=args.layout_plan is not None,
            policy=policy.describe(),
            policy_class=type(policy).__name__,
            decaying=self.run.decaying,
            model=type(model).__name__,
            parameters={
                name: f"{tuple(p.shape)} {dtypes.get(name, p.dtype)}{'' if p.requires_grad else ' frozen'}"
                for name, p in model.named_parameters()
            },
        )

    @cached_property
    def data(self) -> DataDescription:
        """`describe_data` of the training data, computed without changing the run's RNG state."""
        with generators_kept(self.run.train_dataset):
            return describe_data(self.run.train_dataset)


def saves_state(args: PipeTransformerArguments) -> bool:
    """Return True if the run's checkpoints hold more than the model."""
    return not args.save_only_model and (args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint)


def check_shared_folder(args: PipeTransformerArguments, topology: Topology) -> None:
    """Check that all nodes share one output folder, since each rank writes a part. Collective: call on every rank.

    Rank 0 leaves a folder there, for which the others look; the ValueError names the first rank that does not see it.
    """
    if not saves_state(args) or topology.local_world_size >= topology.world_size:
        return

    def leave_token() -> str:
        os.makedirs(args.output_dir, exist_ok=True)
        # A new name each time: that of another run would be taken for this one's.
        made = tempfile.TemporaryDirectory(prefix=".pipetransformer-", dir=args.output_dir, ignore_cleanup_errors=True)
        return os.path.basename(stack.enter_context(made))

    with contextlib.ExitStack() as stack:
        token = os.path.join(args.output_dir, topology.decide(leave_token))
        deadline = time.monotonic() + _TOKEN_SECONDS
        while not (sees := os.path.exists(token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        own = {"sees": sees, "host": socket.gethostname(), "output_dir": os.path.abspath(args.output_dir)}
        # After the gather all ranks have looked, and it goes.
        answers = topology.gather(own)
    for rank, answer in enumerate(answers):
        if not answer["sees"]:
            raise ValueError(
                f"output_dir is {answers[0]['output_dir']} on rank 0 ({answers[0]['host']}) and another folder, "
                f"{answer['output_dir']}, on rank {rank} ({answer['host']}): every node would hold a part of each "
                "checkpoint, and no resume could find the whole. Set output_dir to a folder that all nodes share, "
                "or save_only_model=True or save_strategy='no'."
            )
