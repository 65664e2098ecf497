"""Checkpoints of plain Trainer: reading one, and exporting a pipeline's checkpoint as one.

Trainer stores optimizer state by position, in two groups: parameters with weight decay and those without, each in
model order. Files are loaded with `weights_only`, which runs no code; `training_args.bin` cannot be read that way and
never is.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_pipetransformer.data.sampler import Position
from hf_pipetransformer.schedules.json_values import Count, entry, read_as
from hf_pipetransformer.state import checkpoint
from hf_pipetransformer.state.checkpoint import TRAINER_STATE
from hf_pipetransformer.state.run_state import Epochs, RunState, read_json_file
from hf_pipetransformer.state.weights import check_weights, has_weights


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments


_OPTIMIZER = "optimizer.pt"
_SCHEDULER = "scheduler.pt"
_RANDOM = "rng_state.pth"
_RANDOM_OF_RANK = re.compile(r"rng_state_\d+\.pth")

# Types in Trainer's RNG states that `weights_only` does not allow by default.
_NUMPY_TYPES = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]

Groups = list[list[str]]
"""Parameter names per optimizer group, each in model order."""


def trainers_groups(parameters: Collection[str], decaying: Collection[str]) -> Groups:
    """Return the groups that Trainer makes of the trained parameters."""
    decaying = set(decaying)
    return [[n for n in parameters if n in decaying], [n for n in parameters if n not in decaying]]


# ---- reading ----


def is_plain(folder: str) -> bool:
    """Return True if a folder has the files of a complete plain Trainer checkpoint; their content is not checked."""
    names = (_OPTIMIZER, _SCHEDULER, TRAINER_STATE)
    return (
        has_weights(folder)
        and not checkpoint.has_state(folder)
        and all(os.path.isfile(os.path.join(folder, name)) for name in names)
    )


def read_progress(
    folder: str, num_samples: int | None, args: PipeTransformerArguments
) -> tuple[int, float | None, Position | None]:
    """Read the step, the epoch and the position of plain Trainer's run, over epochs of `num_samples`.

    Raises ValueError for a damaged file.
    """
    step, epoch, batch = check_trainers(folder)
    # For their errors alone: damage is to be found before a training has begun.
    _load(folder, _OPTIMIZER)
    read_plain_scheduler(folder)
    names = os.listdir(folder)
    # Each process has a file of RNG states, which tells how many there were.
    world_size = sum(_RANDOM_OF_RANK.fullmatch(name) is not None for name in names) or int(_RANDOM in names)
    if not (num_samples and batch and world_size and epoch is not None):
        return step, epoch, None
    # With `split_batches`, the batch size that Trainer recorded covers all processes together.
    size = batch if args.splits_batches else batch * world_size
    in_epoch = num_samples // size if args.dataloader_drop_last else math.ceil(num_samples / size)
    # Trainer saves a fraction of the epoch's batches, with the rounding of a float.
    done = round((epoch - int(epoch)) * in_epoch) * size
    return step, epoch, Position(int(epoch), min(done, num_samples), size, num_samples, None, None)


_PICKLED = re.compile(r"pytorch_model.*\.bin|(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")
"""Files of `torch.save` that Trainer reads; a callback of the user's may add others."""


def check_trainers(folder: str, needs_weights: bool = True) -> tuple[int, float | None, int | None]:
    """Refuse a checkpoint that Trainer would fail to resume from, or restore only in part.

    Without a manifest, only names and formats can be checked: Trainer's state, its last file, exists; weights are in
    known files if `needs_weights`, and not truncated; optimizer and scheduler exist unless only the model was saved,
    and neither is truncated or changed. Nothing is unpickled.

    Returns step, epoch and batch size as `trainer_state.json` has them.
    """
    if not os.path.isfile(os.path.join(folder, TRAINER_STATE)):
        raise ValueError(f"{folder!r} is incomplete: saving it was interrupted ({TRAINER_STATE} is missing).")
    content = read_json_file(os.path.join(folder, TRAINER_STATE), folder)
    try:
        step: int = read_as(Count, entry(content, "global_step"), "global_step")
        epoch: float | None = read_as(Epochs | None, entry(content, "epoch"), "epoch")
        batch: int | None = read_as(Count | None, content.get("train_batch_size"), "train_batch_size")
    except ValueError as error:
        raise ValueError(f"{folder!r} is damaged: {TRAINER_STATE}: {error}.") from error
    names = sorted(os.listdir(folder))
    if has_weights(folder):
        check_weights(folder)
    elif needs_weights and not any(name.startswith(("pytorch_model", "adapter_model")) for name in names):
        raise ValueError(f"{folder!r} is no complete checkpoint: it holds no weights.")
    if any(name in (_OPTIMIZER, _SCHEDULER) or name.startswith("rng_state") for name in names):
        for name in (_OPTIMIZER, _SCHEDULER):
            if name not in names:
                raise ValueError(f"{folder!r} is damaged: {name} is missing.")
    for name in filter(_PICKLED.fullmatch, names):
        _check_archive(folder, name)
    return step, epoch, batch


def _check_archive(folder: str, name: str) -> None:
    """Raise ValueError if a file of `torch.save`, a zip archive, is truncated or changed."""
    try:
        with zipfile.ZipFile(os.path.join(folder, name)) as file:
            # torch.serialization.set_crc32_options(False) writes no checksums.
            damaged = file.testzip() if torch.serialization.get_crc32_options() else None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{folder!r} is damaged: {name} cannot be read ({type(error).__name__}: {error}).") from error
    if damaged is not None:
        raise ValueError(f"{folder!r} is damaged: {name} has other content than was written ({damaged}).")


def read_plain_optimizer(
    folder: str, groups: Groups, shapes: Mapping[str, Collection[int]], options: list[dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Read the optimizer state by parameter name, and the options of the groups.

    Raises ValueError if the positions in the file cannot belong to the parameters in `groups`, or another optimizer
    wrote it.
    """
    saved = _load(folder, _OPTIMIZER)
    # The file has positions and no names: the lengths of its groups tell if they can be those of these parameters.
    lengths, expected = [len(group["params"]) for group in saved["param_groups"]], [len(group) for group in groups]
    if lengths != expected:
        raise ValueError(
            f"{folder!r} holds an optimizer with groups of {lengths} parameters, expected {expected}: decaying ones "
            "and others, as Trainer makes them for this model. Freeze the same parameters as in the run that was "
            f"saved, or start a new run from its weights: `from_pretrained({folder!r})`."
        )
    name_of = {
        position: name
        for group, names in zip(saved["param_groups"], groups, strict=True)
        for position, name in zip(group["params"], names, strict=True)
    }
    found = [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]
    # A scheduler adds `initial_lr`.
    kinds, own_kinds = ([sorted(set(group) - {"initial_lr"}) for group in each] for each in (found, options))
    if kinds != own_kinds:
        raise ValueError(
            f"{folder!r} holds another kind of optimizer: its {len(kinds)} groups have the options {kinds[0]}, "
            f"expected {len(own_kinds)} groups with {own_kinds[0]}. Choose the `optim` of the run that was saved."
        )
    states = {name_of[position]: state for position, state in saved["state"].items()}
    for name, state in states.items():
        for key, value in state.items():
            shape, own_shape = tuple(getattr(value, "shape", ())), tuple(shapes[name])
            # Step counts and Adafactor's rows and columns have other dimensions, which tell nothing.
            if len(shape) == len(own_shape) and shape != own_shape:
                raise ValueError(
                    f"{folder!r} holds a {key} of shape {shape} for {name}, expected {own_shape}: its optimizer "
                    "trained other parameters, or in another order."
                )
    return states, found


def read_plain_scheduler(folder: str) -> Any:
    return _load(folder, _SCHEDULER)


def set_plain_random_state(folder: str) -> bool:
    """Restore the RNG state of a single-process training; return False if there were several processes."""
    if not os.path.isfile(os.path.join(folder, _RANDOM)):
        return False
    states = _load(folder, _RANDOM)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    return True


def _load(folder: str, name: str) -> Any:
    path = os.path.join(folder, name)
    try:
        with torch.serialization.safe_globals(_NUMPY_TYPES):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds of errors for a damaged file.
        text = str(error).strip().split("\n", 1)[0]
        raise ValueError(f"{folder!r} is damaged: {name} cannot be read ({type(error).__name__}: {text}).") from error


# ---- writing ----


def export_checkpoint(folder: str, output: str) -> list[str]:
    """Export a pipeline's checkpoint for plain Trainer; returns sentences on what Trainer will do differently.

    Raises ValueError if the checkpoint is not sound, its optimizer groups are not Trainer's, or `output` is not empty.
    """
    _check_is_checkpoint(folder)
    state = checkpoint.read_state(folder)
    if os.path.isdir(output) and os.listdir(output):
        raise ValueError(f"{output!r} is not empty: name a folder that does not exist yet.")
    trained = [name for name, described in state.parameters.items() if not described.endswith(" frozen")]
    groups = trainers_groups(trained, state.decaying)
    states, _names, options = checkpoint.read_optimizer(folder, state.layout.pipeline_size)
    if len(options) != len(groups):
        raise ValueError(
            f"{folder!r} holds an optimizer with {len(options)} parameter groups, expected {len(groups)}: "
            "plain Trainer knows only those that it makes itself."
        )
    position_of = {name: position for position, name in enumerate(name for group in groups for name in group)}
    content = {
        "state": {position_of[name]: states[name] for name in position_of if name in states},
        "param_groups": [
            # JSON has no tuples, and Adam's betas are one.
            {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}
            | {"params": [position_of[name] for name in names]}
            for own, names in zip(options, groups, strict=True)
        ],
    }
    # Without the pipeline's own state, which a run would prefer to Trainer's files.
    shutil.copytree(folder, output, ignore=shutil.ignore_patterns(checkpoint.STATE_FOLDER), dirs_exist_ok=True)
    torch.save(content, os.path.join(output, _OPTIMIZER))
    torch.save(state.scheduler, os.path.join(output, _SCHEDULER))
    if state.scaler is not None:
        torch.save(state.scaler, os.path.join(output, "scaler.pt"))
    # Several ranks have drawn from states of their own, none of which is that of one process.
    if state.world_size == 1:
        torch.save(_random_states(folder), os.path.join(output, _RANDOM))
    return list(_differences(state))


def _check_is_checkpoint(folder: str) -> None:
    """Refuse a folder that does not exist, or that holds a run's checkpoints instead of being one of them."""
    if not os.path.isdir(folder):
        raise ValueError(f"{folder!r} is not a folder: expected a checkpoint-N of a pipeline.")
    inside = checkpoint.numbered_checkpoints(folder)
    if inside and not checkpoint.has_state(folder):
        raise ValueError(
            f"{folder!r} is the folder of a run, expected one of its checkpoints. Did you mean {inside[-1][1]!r}?"
        )


def _random_states(folder: str) -> dict[str, Any]:
    """Return a single process's RNG states in Trainer's format."""
    tensors, values = checkpoint.read_rank_state(folder, 0).own
    version, words, gauss = values["python"]
    kind, *rest = values["numpy"]
    own = {"cuda": tensors["cuda"]} if "cuda" in tensors else {}
    numpy = (kind, tensors["numpy"].numpy().astype(np.uint32), *rest)
    return {"python": (version, tuple(words), gauss), "numpy": numpy, "cpu": tensors["torch"], **own}


def _differences(state: RunState) -> Iterator[str]:
    """Say what plain Trainer will do differently than the run would have."""
    if state.layout.num_frozen_layers:
        yield (
            f"{state.layout.num_frozen_layers} layers were frozen by the run; plain Trainer trains them again, from "
            "fresh optimizer state, unless the script freezes them."
        )
    if state.place is not None and state.place.is_split_by_node:
        yield (
            "The epoch under way was split by node; plain Trainer draws the rest of it in an order of its own, so "
            "that some of its samples come twice and others not at all. Export a checkpoint from the end of an epoch "
            "instead."
        )
    if not state.is_counted:
        yield (
            "The run had gone on with batches of another size, or from the beginning of an epoch; plain Trainer finds "
            "its place in the data by the number of steps, which leads to another one: some samples of the epoch come "
            "twice, or not at all."
        )
    if state.world_size > 1:
        yield (
            f"The run had {state.world_size} processes: start as many, or change per_device_train_batch_size so "
            "that a batch has as many samples over all of them. Random numbers (dropout) begin anew."
        )
