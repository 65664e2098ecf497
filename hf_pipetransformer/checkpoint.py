"""Checkpoints: the state of a run beside the model's own files.

A checkpoint folder holds the model as `from_pretrained` reads it, `trainer_state.json`, and `pipetransformer/`:

    optimizer-stage-<k>.safetensors   by replica 0: "<parameter>|<key>" to tensor; options and numbers in the header
    random-rank-<r>.safetensors       by every rank: its random number generators, and what else only it knows
    state.json                        by rank 0, last: names, sizes and hashes of all other files of the whole folder

Where one stage trains all that its user wants trained, Trainer's own files (`optimizer.pt`, `scheduler.pt`) lie beside
them, for plain Trainer alone.

All files are on the disk before `state.json` is written: a folder without it is incomplete, and one that is not as it
says is damaged. Nothing that is read here is pickled. A header is the metadata of a safetensors file: one entry, JSON.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from hf_pipetransformer.adapters import adapter_files, load_adapters
from hf_pipetransformer.json_values import (
    MOST_SAMPLES,
    MOST_STEPS,
    entries,
    entry,
    flag,
    items,
    number,
    text,
    whole_number,
)
from hf_pipetransformer.layout import MOST_MICROBATCHES, Layout
from hf_pipetransformer.manifest import (
    Entry,
    checksum_of,
    entry_of,
    find_damage,
    list_files,
    make_manifest,
    sync_folder,
)
from hf_pipetransformer.report.events import logger


STATE_FOLDER = "pipetransformer"
STATE_FILE = "state.json"
VERSION = 4

MOST_BYTES = 2**62
"""No file is larger."""
MOST_RATE = 1e30
"""No learning rate is larger."""

_OF_TRAINER = re.compile(r"trainer_state\.json|(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")
_TRAINER_STATE = "trainer_state.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OF_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_FOLDER_NAME = re.compile(r"checkpoint-(\d+)")
_HEADER = "json"
# Network file systems remember for some seconds what a folder held.
_TOKEN_SECONDS = 5.0


# ---- files ----


def optimizer_file(stage: int) -> str:
    """Name of the file with the optimizer state of a stage."""
    return f"optimizer-stage-{stage}.safetensors"


def decisions_file(stage: int) -> str:
    """Name of the file with what a stage was at the last freeze decision; it is there if the policy asks for that."""
    return f"decisions-stage-{stage}.safetensors"


def has_part(folder: str, name: str) -> bool:
    """Whether a checkpoint has a file of `write_part`."""
    return os.path.isfile(os.path.join(folder, STATE_FOLDER, name))


def random_file(rank: int) -> str:
    """Name of the file with the random number generators of a rank."""
    return f"random-rank-{rank}.safetensors"


def clear(folder: str, keeps_random: bool = False) -> None:
    """Forget the state that an earlier run left in a checkpoint folder: it is not that of the weights to come.

    Args:
        folder: the checkpoint.
        keeps_random: leave Trainer's random states, which other processes may have written by now.
    """
    for mark in (os.path.join(STATE_FOLDER, STATE_FILE), _TRAINER_STATE):
        # First what says that the rest is whole: a kill may come at any moment.
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, mark))
    shutil.rmtree(os.path.join(folder, STATE_FOLDER), ignore_errors=True)
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if _OF_TRAINER.fullmatch(name) and not (keeps_random and name.startswith("rng_state")):
            os.remove(os.path.join(folder, name))


def check_unlinked(folder: str) -> None:
    """Refuse to save where something is a link: what it leads to would be overwritten.

    Raises:
        ValueError: names the link.
    """
    inner = (os.path.join(where, name) for where, *names in os.walk(folder) for name in [*names[0], *names[1]])
    for path in (folder, *inner):
        if os.path.islink(path):
            raise ValueError(
                f"{path!r} is a link to {os.readlink(path)!r}: saving a checkpoint there would overwrite what it "
                "leads to. Remove the link, or set another output_dir."
            )


def rotate(output_dir: str, limit: int | None, step: int, best: str | None) -> None:
    """Delete the oldest checkpoints of a run's folder beyond `limit`, by their steps.

    A time of modification says nothing: a copy, a backup or `touch` changes it. Those of steps that the run has not
    come to yet are of an earlier run, and go first.

    Args:
        output_dir: the run's folder.
        limit: checkpoints to keep; None or 0 keeps all.
        step: of the one that was saved last, which stays.
        best: a checkpoint that stays too.
    """
    if limit is None or limit <= 0:
        return
    found = sorted(_numbered(output_dir), key=lambda each: (each[0] <= step, each[0]))
    kept = {step}
    if best is not None:
        kept |= {each for each, folder in found if os.path.abspath(folder) == os.path.abspath(best)}
    num_left = len(found)
    for each, folder in found:
        if num_left <= max(limit, len(kept)):
            return
        if each not in kept:
            # What a kill leaves of it must not look like a checkpoint of weights alone.
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, _TRAINER_STATE))
            shutil.rmtree(folder, ignore_errors=True)
            num_left -= 1


def begin(folder: str) -> None:
    """From now on `folder` is an incomplete checkpoint, until `write_state`."""
    clear(folder)
    os.makedirs(os.path.join(folder, STATE_FOLDER), exist_ok=True)


def write_part(
    folder: str, name: str, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]
) -> dict[str, Entry]:
    """Write one file of the state to the disk: tensors, and JSON values in its header.

    Returns:
        Its entry for `write_state`, by its path in the checkpoint.
    """
    own: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        # Optimizers may share one tensor between parameters, a file may not.
        own[key] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    os.makedirs(os.path.join(folder, STATE_FOLDER), exist_ok=True)
    path = os.path.join(folder, STATE_FOLDER, name)
    save_file(own, path, metadata={_HEADER: json.dumps(dict(header))})
    return {f"{STATE_FOLDER}/{name}": entry_of(path, sync=True)}


def read_part(
    folder: str, name: str, is_wanted: Callable[[str], bool] = lambda key: True
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The inverse of `write_part`; every tensor has memory of its own.

    Args:
        folder: the checkpoint.
        name: the file.
        is_wanted: by the tensor's key; the others are not read.

    Raises:
        ValueError: the file is missing or damaged.
    """
    path = os.path.join(folder, STATE_FOLDER, name)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key).clone() for key in file.keys() if is_wanted(key)}  # noqa: SIM118
            return tensors, json.loads(file.metadata()[_HEADER])
    except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): expected a file of a checkpoint that "
            "every process can see. Put the folder where all nodes read it, or resume from another checkpoint."
        ) from error


def write_state(folder: str, state: Mapping[str, Any], parts: Mapping[str, Entry]) -> None:
    """Write `state.json`, at once or not at all: the last file of a checkpoint.

    Args:
        folder: the checkpoint.
        state: JSON values.
        parts: entries of the files that were hashed where they were written; the others are hashed here.
    """
    path = os.path.join(folder, STATE_FOLDER, STATE_FILE)
    others = [name for name in list_files(folder) if name not in parts and name != f"{STATE_FOLDER}/{STATE_FILE}"]
    files = {**parts, **make_manifest(folder, others)}
    content = {"version": VERSION, **state, "weights": _hash_of_weights(folder), "files": files}
    for inner in {folder, *(os.path.join(folder, os.path.dirname(name)) for name in content["files"])}:
        sync_folder(inner)
    with open(f"{path}.unfinished", "w", encoding="utf-8") as file:
        json.dump({"checksum": checksum_of(content), **content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.unfinished", path)
    sync_folder(os.path.dirname(path))
    sync_folder(os.path.dirname(os.path.abspath(folder)))


def read_state(folder: str) -> dict[str, Any]:
    """What `write_state` wrote, if the checkpoint is complete and every file of it is as it was written.

    Raises:
        ValueError: the folder is no checkpoint, holds the model only, is incomplete or damaged; the text says which,
            and names the file.
    """
    path = os.path.join(folder, STATE_FOLDER)
    if not os.path.isdir(folder):
        raise ValueError(
            f"resume_from_checkpoint={folder!r} is not a folder: expected a checkpoint-N of a run with "
            "save_only_model=False."
        )
    check_readable(folder)
    names = set(os.listdir(folder))
    if not os.path.isdir(path):
        if not has_weights(folder):
            raise ValueError(
                f"{folder!r} is no complete checkpoint: it holds neither {_WEIGHTS} nor {_INDEX}, nor adapters."
            )
        by_trainer = any(name.startswith(("optimizer.", "scheduler.", "rng_state")) for name in names)
        what = "was saved by plain Trainer" if by_trainer else "holds the model only (save_only_model=True)"
        raise ValueError(f"{folder!r} {what}: expected a folder {STATE_FOLDER!r} with the state of the pipeline.")
    if not os.path.isfile(os.path.join(path, STATE_FILE)):
        raise ValueError(f"{folder!r} is incomplete: saving it was interrupted ({STATE_FILE} is missing).")
    state = _read_json(os.path.join(path, STATE_FILE), folder)
    if state.get("version") != VERSION:
        found = f"version {state['version']}" if "version" in state else "no version"
        raise ValueError(f"{folder!r} has {found} in {STATE_FILE}: expected version {VERSION}.")
    saved_checksum = state.pop("checksum", None)
    try:
        if saved_checksum != checksum_of(state):
            raise ValueError("it has other content than was written")
        _check_files(folder, state)
        _check_state(state)
    except ValueError as error:
        raise ValueError(f"{folder!r} is damaged: {STATE_FILE}: {str(error).rstrip('.')}.") from error
    damage = find_damage(folder, _files_to_check(folder, state))
    if damage is not None:
        raise ValueError(f"{folder!r} is damaged: {damage}.")
    trainers = _read_json(os.path.join(folder, _TRAINER_STATE), folder)
    for key, name in (("step", "global_step"), ("epoch", "epoch")):
        expected = trainers.get(name)
        if state[key] != expected:
            raise ValueError(
                f"{folder!r} is damaged: {STATE_FILE}: found {state[key]!r} as {key!r}, expected {expected!r} as "
                f"{_TRAINER_STATE} has it."
            )
    return state


def _files_to_check(folder: str, state: Mapping[str, Any]) -> dict[str, Entry]:
    """The files that must be as they were written: all, but for weights that were put into other files since.

    Raises:
        ValueError: weights lie in files that were not written with the checkpoint, and are not the same tensors.
    """
    files, names = state["files"], _names_of_weights(folder)
    others = [name for name in names if name not in files]
    if not others or state.get("weights") is None:
        return dict(files)
    if _hash_of_weights(folder) != state["weights"]:
        raise ValueError(
            f"{folder!r} is damaged: {others[0]} was not written with it, and the weights are not those that were "
            "saved."
        )
    logger.warning(
        f"{folder!r}: the weights lie in other files than were saved ({names[0]}, one of {len(names)}); every tensor "
        "is as it was written."
    )
    return {name: entry for name, entry in files.items() if name in names or not _OF_WEIGHTS.fullmatch(name)}


def _names_of_weights(folder: str) -> list[str]:
    """The files that `load_weights` reads; none where they cannot be told."""
    try:
        names = _weight_files(folder) if has_weights(folder) else []
    except ValueError:
        return []
    return names if all(isinstance(name, str) and not os.path.dirname(name) for name in names) else []


def _hash_of_weights(folder: str) -> str | None:
    """One for names, shapes, precisions and bytes of all tensors, in whatever files; None without any to read."""
    names, hashes = _names_of_weights(folder), {}
    try:
        for key, tensor in (pair for name in names for pair in _tensors_of(folder, name)):
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            hashes[key] = [str(tensor.dtype), list(tensor.shape), xxhash.xxh3_128_hexdigest(content)]
    except ValueError:
        return None
    return checksum_of(hashes) if hashes else None


# ---- what a state may hold ----


def _check_files(folder: str, state: Mapping[str, Any]) -> None:
    """Raises ValueError if the list of files is none, or lacks one that a checkpoint cannot do without."""
    files = entries(entry(state, "files"), "files")
    for name, found in files.items():
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"found {name[:60]!r} in 'files', expected files of this folder")
        whole_number(entry(entries(found, name), "bytes"), "bytes", most=MOST_BYTES)
        text(entry(found, "xxh3_128"), "xxh3_128")
    layout = Layout.from_event(entry(state, "layout"))
    world_size = whole_number(entry(state, "world_size"), "world_size", 1)
    if world_size != layout.pipeline_size * layout.num_replicas:
        raise ValueError(
            f"found {world_size} as 'world_size', expected {layout.pipeline_size * layout.num_replicas}, the ranks of "
            "its layout"
        )
    needed = [f"{STATE_FOLDER}/{optimizer_file(position)}" for position in range(layout.pipeline_size)]
    needed += [f"{STATE_FOLDER}/{random_file(rank)}" for rank in range(world_size)]
    # Of weights with a hash the tensors count, not the files that they lie in.
    weights = (_WEIGHTS, _INDEX) if state.get("weights") is None else ()
    needed += [name for name in (*weights, *adapter_files(folder)) if os.path.isfile(os.path.join(folder, name))]
    for name in (_TRAINER_STATE, *needed):
        if name not in files:
            raise ValueError(f"found no {name!r} in 'files', expected all files of the checkpoint")


def _check_state(state: Mapping[str, Any]) -> None:
    """Raises ValueError for what no run can have written, beside its files."""
    step = whole_number(entry(state, "step"), "step")
    if entry(state, "epoch") is not None:
        number(state["epoch"], "epoch", 0, MOST_STEPS)
    layout, first = (Layout.from_event(entry(state, name)) for name in ("layout", "first_layout"))
    if first.num_layers != layout.num_layers:
        raise ValueError(f"found a 'first_layout' of {first.num_layers} layers, expected {layout.num_layers}")
    data = entries(entry(state, "data"), "data")
    for name in ("fingerprint", "samples"):
        if entry(data, name) is not None:
            text(data[name], name)
    num_samples = entry(data, "num_samples")
    if num_samples is not None:
        whole_number(num_samples, "num_samples", most=MOST_SAMPLES)
    if entry(state, "place") is not None:
        _check_place(state["place"], step, MOST_SAMPLES if num_samples is None else num_samples)
    for name in ("num_starts", "num_transitions"):
        whole_number(entry(state, name), name)
    for name in ("optimizer_class", "scheduler_class", "model", "policy"):
        text(entry(state, name), name)
    flag(entry(state, "has_plan"), "has_plan")
    flag(state.get("is_counted", True), "is_counted")
    text(state.get("policy_class", ""), "policy_class")
    number(entry(state, "unlogged_loss"), "unlogged_loss")
    for parameter, found in entries(entry(state, "parameters"), "parameters").items():
        text(found, parameter)
    for name in items(entry(state, "decaying"), "decaying"):
        text(name, "decaying")
    for name, value in entries(entry(state, "arguments"), "arguments").items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"found a {type(value).__name__} as {name!r} in 'arguments', expected a text or number")
    _check_decisions(entries(entry(state, "decisions"), "decisions"))
    _check_schedule(entries(entry(state, "scheduler"), "scheduler"))
    if state.get("weights") is not None:
        text(state["weights"], "weights")
    for name in ("scaler", "views"):
        if state.get(name) is not None:
            entries(state[name], name)
    if state.get("views") is not None:
        views = state["views"]
        whole_number(entry(views, "num_views"), "num_views", 1)
        whole_number(entry(views, "seed"), "seed", -(2**63), 2**64)
        whole_number(entry(views, "first"), "first")
        for known in items(entry(views, "shares"), "shares"):
            start, share = items(known, "shares", 2)
            whole_number(start, "shares")
            number(share, "shares", 0, 1)


def _check_place(place: Any, step: int, num_samples: int) -> None:
    """Raises ValueError for a place in the data that a run of `step` steps cannot be at."""
    place = entries(place, "place")
    whole_number(entry(place, "epoch"), "epoch", most=step)
    whole_number(entry(place, "samples"), "samples", most=num_samples)
    whole_number(entry(place, "global_batch"), "global_batch", 1)
    if place.get("group_size") is not None:
        whole_number(place["group_size"], "group_size", 1)
    if place.get("nodes") is not None:
        nodes = entries(place["nodes"], "nodes")
        whole_number(entry(nodes, "seed"), "seed", -(2**63), 2**64)
        whole_number(entry(nodes, "batch_size"), "batch_size", 1)
        for count in items(entry(nodes, "devices"), "devices"):
            whole_number(count, "devices", 1)


def _check_decisions(decisions: Mapping[str, Any]) -> None:
    number(entry(decisions, "num_wanted"), "num_wanted", -MOST_RATE, MOST_RATE)  # A user's policy may want any number.
    whole_number(entry(decisions, "num_fruitless"), "num_fruitless")
    entries(entry(decisions, "policy"), "policy")
    if entry(decisions, "gradient_norms") is not None:
        for norm in items(decisions["gradient_norms"], "gradient_norms"):
            number(norm, "gradient_norms")
    for known in items(entry(decisions, "known_microbatches"), "known_microbatches"):
        for count in items(known, "known_microbatches", 3):
            whole_number(count, "known_microbatches", 1, MOST_MICROBATCHES)


def _check_schedule(schedule: Mapping[str, Any]) -> None:
    """Raises ValueError for what no schedule of torch has; one of the user's own may have other entries."""
    for name in ("last_epoch", "_step_count"):
        if name in schedule:
            whole_number(schedule[name], name, -1)
    for name in ("base_lrs", "_last_lr"):
        for rate in items(schedule.get(name, []), name):
            number(rate, name, -MOST_RATE, MOST_RATE)


def has_weights(folder: str) -> bool:
    """Whether a folder holds a saved model, or the adapters of one."""
    is_whole = any(os.path.isfile(os.path.join(folder, name)) for name in (_WEIGHTS, _INDEX))
    return is_whole or bool(adapter_files(folder))


def _read_json(path: str, folder: str) -> dict[str, Any]:
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


def latest_sound(output_dir: str, read: Callable[[str], Any] = read_state) -> tuple[str | None, list[str]]:
    """The sound checkpoint of the highest step in a run's folder, and why each later one was passed over.

    Args:
        output_dir: the run's folder.
        read: raises ValueError for a folder that is not sound.

    Raises:
        UnreadableError: there is a later one that this user may not read: it may be sound.
    """
    reasons = []
    for folder in newest_first(output_dir):
        try:
            check_readable(folder)
            read(folder)
        except UnreadableError:
            raise
        except ValueError as error:
            reasons.append(str(error))
        else:
            return folder, reasons
    return None, reasons


def newest(output_dir: str) -> str | None:
    """The checkpoint of the highest step in a run's folder, sound or not."""
    return next(iter(newest_first(output_dir)), None)


def newest_first(output_dir: str) -> list[str]:
    """The checkpoints in a run's folder by their steps, the last one first.

    Raises:
        UnreadableError: the user may not read the folder.
    """
    return [folder for _step, folder in sorted(_numbered(output_dir), reverse=True)]


def _numbered(output_dir: str) -> list[tuple[int, str]]:
    found = []
    try:
        names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    except PermissionError as error:
        raise UnreadableError(_unreadable(output_dir, error)) from error
    for name in names:
        match = _FOLDER_NAME.fullmatch(name)
        if match is not None and os.path.isdir(os.path.join(output_dir, name)):
            found.append((int(match[1]), os.path.join(output_dir, name)))
    return found


class UnreadableError(ValueError):
    """A checkpoint that this user may not read; whether it is sound is not known."""


def check_readable(folder: str) -> None:
    """Refuse a checkpoint with a file or folder that this user may not read.

    Raises:
        UnreadableError: names it.
    """

    def refuse(error: OSError) -> None:
        if isinstance(error, PermissionError):
            raise UnreadableError(_unreadable(folder, error)) from error

    for where, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            try:
                with open(os.path.join(where, name), "rb"):
                    pass
            except OSError as error:
                refuse(error)  # What is missing or damaged is told of where it is read.


def _unreadable(folder: str, error: PermissionError) -> str:
    return (
        f"{folder!r} cannot be read: this user has no permission for {error.filename!r}. Give it (chmod -R u+rX, or "
        "chown), or name another checkpoint in resume_from_checkpoint; an older one is not taken in silence."
    )


# ---- a folder that all nodes see ----


def leave_token(output_dir: str) -> str:
    """Leave a file that the other nodes look for; gives its name."""
    os.makedirs(output_dir, exist_ok=True)
    name = f".pipetransformer-{uuid.uuid4().hex}"
    with open(os.path.join(output_dir, name), "w", encoding="utf-8") as file:
        file.flush()
        os.fsync(file.fileno())
    sync_folder(output_dir)
    return name


def sees_token(output_dir: str, name: str) -> bool:
    """Whether the file is there; a network file system may show it a little later."""
    deadline = time.monotonic() + _TOKEN_SECONDS
    while not (os.path.isdir(output_dir) and name in os.listdir(output_dir)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def remove_token(output_dir: str, name: str) -> None:
    """Remove what `leave_token` left."""
    with contextlib.suppress(OSError):
        os.remove(os.path.join(output_dir, name))


def plain(value: Any, what: str) -> Any:
    """`value` as it comes back from JSON.

    Raises:
        ValueError: it holds something that JSON does not; `what` names the value.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, what) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item, f"{what}[{key!r}]") for key, item in value.items()}
    raise ValueError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: nothing is pickled, so only tensors, "
        "numbers, texts, lists and dicts with names can be saved. Use another optimizer, scheduler or policy, or "
        "set save_only_model=True."
    )


# ---- what belongs to a run ----


def split_optimizer_state(states: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Optimizer state by parameter name as what a file holds: tensors, and everything else.

    Raises:
        ValueError: a state is neither a tensor nor a JSON value.
    """
    tensors, values = {}, {}
    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}|{key}"] = value
            else:
                values[f"{name}|{key}"] = plain(value, f"The optimizer's state {key!r} of {name}")
    return tensors, values


def join_optimizer_state(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The inverse of `split_optimizer_state`."""
    states: dict[str, dict[str, Any]] = {}
    for joined, value in {**tensors, **values}.items():
        name, _, key = joined.rpartition("|")
        states.setdefault(name, {})[key] = value
    return states


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of the parameter groups: schedulers change learning rates, some also momenta.

    Raises:
        ValueError: an option is no JSON value.
    """
    return [
        {key: plain(value, f"The optimizer's option {key!r}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def set_group_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """The inverse of `group_options`.

    Raises:
        ValueError: the optimizer has another number of groups.
    """
    if len(options) != len(optimizer.param_groups):
        raise ValueError(
            f"The checkpoint's optimizer has {len(options)} parameter groups: expected {len(optimizer.param_groups)}, "
            "as this run's has. Build the optimizer as in the run that was saved."
        )
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(value, list) and isinstance(group.get(key, ()), tuple) else value


def random_state(device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The random number generators of this process, as what a file holds."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    values = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), int(position), int(has_gauss), float(cached)],
    }
    return tensors, values


def set_random_state(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], device: torch.device) -> None:
    """The inverse of `random_state`."""
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    kind, *rest = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)


def load_weights(model: nn.Module, folder: str) -> None:
    """Load a saved model, also one that was saved under the names of the hub's files, into `model` in place.

    transformers saves some models (ViT) under other names than their parameters have; only `from_pretrained` knows
    them. Tensors that have the model's own names, such as those of a head that the user exchanged, are taken as they
    are. Of adapters of PEFT the base is not saved and stays as it is.

    Raises:
        ValueError: the files are not those of this model.
    """
    names = _weight_files(folder)
    if names == adapter_files(folder):
        load_adapters(model, folder, {name: dict(_tensors_of(folder, name)) for name in names})
        return
    saved = {key: value for name in names for key, value in _tensors_of(folder, name)}
    expected = model.state_dict()
    own = {key: value for key, value in saved.items() if key in expected and value.shape == expected[key].shape}
    missing = _not_loaded(model, own)
    kind: Any = type(model)
    if missing and hasattr(kind, "from_pretrained"):
        config: Any = copy.deepcopy(model.config)
        # What is missing would be drawn at random.
        with torch.random.fork_rng(devices=[]):
            fresh, found = kind.from_pretrained(
                folder, config=config, dtype=model.dtype, ignore_mismatched_sizes=True, output_loading_info=True
            )
        absent = {*found["missing_keys"], *(str(entry[0]) for entry in found["mismatched_keys"])}
        own = {key: value for key, value in fresh.state_dict().items() if key not in absent} | own
        missing = _not_loaded(model, own)
    if missing:
        raise ValueError(
            f"{folder!r} holds no weights for {missing[0]} (one of {len(missing)}) of {kind.__name__}: "
            "expected a checkpoint of the same model."
        )
    model.load_state_dict(own, strict=False)


def check_weights(folder: str) -> None:
    """Notice weights that are cut or missing, where no list of files says what they were.

    Raises:
        ValueError: names the file.
    """
    for name in _weight_files(folder):
        with _opened_weights(folder, name):
            pass


def _weight_files(folder: str) -> list[str]:
    if os.path.isfile(os.path.join(folder, _WEIGHTS)):
        return [_WEIGHTS]
    if not os.path.isfile(os.path.join(folder, _INDEX)) and adapter_files(folder):
        return adapter_files(folder)
    try:
        return sorted(set(_read_json(os.path.join(folder, _INDEX), folder)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder!r} is damaged: {_INDEX} names no files of weights ({error!r}).") from error


def _opened_weights(folder: str, name: str) -> Any:
    try:
        return safe_open(os.path.join(folder, name), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder!r} is damaged: {name} cannot be read ({error}).") from error


def _tensors_of(folder: str, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    with _opened_weights(folder, name) as file:
        for key in file.keys():  # noqa: SIM118
            yield key, file.get_tensor(key)


def _not_loaded(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters and persistent buffers that none of `tensors` would fill; of tied weights one name is enough."""
    state = model.state_dict(keep_vars=True)
    filled = {id(value) for key, value in state.items() if key in tensors}
    return [key for key, value in state.items() if id(value) not in filled]
