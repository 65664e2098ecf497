"""Checkpoint files: the state of a run next to the model's own files.

A checkpoint folder holds the model as `from_pretrained` reads it, `trainer_state.json`, and `pipetransformer/`:

    optimizer-stage-<k>.safetensors   by replica 0: "<parameter>|<key>" to tensor; options and numbers in the header
    random-rank-<r>.safetensors       by every rank: its RNG states, and whatever else only it knows
    decisions-stage-<k>.safetensors   by replica 0, if the freeze policy keeps tensors from its last decision
    state.json                        by rank 0, last: the run's state; size and hash of every other file in the folder

Where one stage trains everything that the user wants trained, the folder also has Trainer's own files (`optimizer.pt`,
`scheduler.pt`), which only plain Trainer reads.

All files are synced to disk before `state.json` is written: a folder without it is incomplete, and one that does not
match it is damaged. Nothing that is read here is pickled. A header is the metadata of a safetensors file with a single
entry, JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import trainer as stock

from hf_pipetransformer.comm.transfers import plain
from hf_pipetransformer.report import logger
from hf_pipetransformer.schedules.json_values import entries, entry, text, whole_number
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.splitters.adapters import adapter_files
from hf_pipetransformer.state.manifest import (
    Entry,
    check_state,
    checksum_of,
    entry_of,
    find_damage,
    list_files,
    make_manifest,
    sync_folder,
)
from hf_pipetransformer.state.weights import (
    INDEX_FILE,
    OF_WEIGHTS,
    WEIGHTS_FILE,
    has_weights,
    hash_of_weights,
    names_of_weights,
    read_json_file,
)


STATE_FOLDER = "pipetransformer"
STATE_FILE = "state.json"
VERSION = 4

MOST_BYTES = 2**62
"""Upper limit of a file size, in bytes."""

_OF_TRAINER = re.compile(r"trainer_state\.json|(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")
_TRAINER_STATE = "trainer_state.json"
_FOLDER_NAME = re.compile(r"checkpoint-(\d+)")
_HEADER = "json"
# Network file systems cache directory listings for some seconds.
_TOKEN_SECONDS = 5.0


# ---- files ----


def optimizer_file(stage: int) -> str:
    """Name a stage's optimizer state file."""
    return f"optimizer-stage-{stage}.safetensors"


def decisions_file(stage: int) -> str:
    """Name the file with a stage's tensors from the last freeze decision; written only for policies that need them."""
    return f"decisions-stage-{stage}.safetensors"


def has_part(folder: str, name: str) -> bool:
    """Return True if the checkpoint has the file `name`, written by `write_part`."""
    return os.path.isfile(os.path.join(folder, STATE_FOLDER, name))


def random_file(rank: int) -> str:
    """Name a rank's RNG state file."""
    return f"random-rank-{rank}.safetensors"


def clear(folder: str, keeps_random: bool = False) -> None:
    """Delete what an earlier run left in a checkpoint folder, as it will not match the weights about to be saved.

    `keeps_random` keeps Trainer's RNG files, which other processes may already have written.
    """
    for mark in (os.path.join(STATE_FOLDER, STATE_FILE), _TRAINER_STATE):
        # Remove the files that mark it complete first: the process may be killed at any moment.
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, mark))
    shutil.rmtree(os.path.join(folder, STATE_FOLDER), ignore_errors=True)
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if _OF_TRAINER.fullmatch(name) and not (keeps_random and name.startswith("rng_state")):
            os.remove(os.path.join(folder, name))


def check_unlinked(folder: str) -> None:
    """Refuse to save over a symbolic link: the link's target would be overwritten.

    Raises:
        ValueError: the folder is or contains a symbolic link.
    """
    inner = (os.path.join(where, name) for where, *names in os.walk(folder) for name in [*names[0], *names[1]])
    for path in (folder, *inner):
        if os.path.islink(path):
            raise ValueError(
                f"{path!r} is a link to {os.readlink(path)!r}: saving a checkpoint there would overwrite what it "
                "leads to. Remove the link, or set another output_dir."
            )


def rotate(output_dir: str, limit: int | None, step: int, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, ordered by step.

    A copy, a backup or `touch` changes modification times, so they do not count. Checkpoints above `step`, the one
    saved last, are an earlier run's and go first. `step` and the folder `best` are kept; `limit` None or 0 keeps all.
    """
    if limit is None or limit <= 0:
        return
    # A link leads to a folder that is somebody else's: it neither counts nor goes.
    folders = [each for each in _numbered(output_dir) if not os.path.islink(each[1])]
    found = sorted(folders, key=lambda each: (each[0] <= step, each[0]))
    kept = {step}
    if best is not None:
        kept |= {each for each, folder in found if os.path.abspath(folder) == os.path.abspath(best)}
    num_left = len(found)
    for each, folder in found:
        if num_left <= max(limit, len(kept)):
            return
        if each not in kept:
            # If the process is killed during the deletion, the rest must not look like a checkpoint of weights alone.
            with contextlib.suppress(OSError):
                os.remove(os.path.join(folder, _TRAINER_STATE))
            shutil.rmtree(folder, ignore_errors=True)
            num_left -= 1


def begin(folder: str) -> None:
    """Mark `folder` as an incomplete checkpoint, until `write_state` completes it."""
    clear(folder)
    os.makedirs(os.path.join(folder, STATE_FOLDER), exist_ok=True)


def write_part(
    folder: str, name: str, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]
) -> dict[str, Entry]:
    """Write tensors and a JSON header to a synced file; returns its entry for `write_state`, by relative path."""
    own: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        # Optimizers may share one tensor between parameters; safetensors refuses shared memory.
        own[key] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    os.makedirs(os.path.join(folder, STATE_FOLDER), exist_ok=True)
    path = os.path.join(folder, STATE_FOLDER, name)
    save_file(own, path, metadata={_HEADER: json.dumps(dict(header))})
    return {f"{STATE_FOLDER}/{name}": entry_of(path, sync=True)}


def read_part(
    folder: str, name: str, is_wanted: Callable[[str], bool] = lambda key: True
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read a file of `write_part`, only tensors whose key `is_wanted`; they are copies, not views of the mapped file.

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
    """Write `state.json` atomically, as the last file of a checkpoint.

    `parts` has the manifest entries that the writing ranks computed; all other files are hashed here.
    """
    path = os.path.join(folder, STATE_FOLDER, STATE_FILE)
    others = [name for name in list_files(folder) if name not in parts and name != f"{STATE_FOLDER}/{STATE_FILE}"]
    files = {**parts, **make_manifest(folder, others)}
    content = {"version": VERSION, **state, "weights": hash_of_weights(folder), "files": files}
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
    """Read `state.json`, after checking that the checkpoint is complete and every file matches its manifest.

    Raises:
        ValueError: the folder is no checkpoint, holds only the model, is incomplete or damaged; names the file.
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
                f"{folder!r} is no complete checkpoint: it holds neither {WEIGHTS_FILE} nor {INDEX_FILE}, nor "
                "adapters."
            )
        by_trainer = any(name.startswith(("optimizer.", "scheduler.", "rng_state")) for name in names)
        what = "was saved by plain Trainer" if by_trainer else "holds the model only (save_only_model=True)"
        raise ValueError(f"{folder!r} {what}: expected a folder {STATE_FOLDER!r} with the state of the pipeline.")
    if not os.path.isfile(os.path.join(path, STATE_FILE)):
        raise ValueError(f"{folder!r} is incomplete: saving it was interrupted ({STATE_FILE} is missing).")
    state = read_json_file(os.path.join(path, STATE_FILE), folder)
    if state.get("version") != VERSION:
        found = f"version {state['version']}" if "version" in state else "no version"
        raise ValueError(f"{folder!r} has {found} in {STATE_FILE}: expected version {VERSION}.")
    saved_checksum = state.pop("checksum", None)
    try:
        if saved_checksum != checksum_of(state):
            raise ValueError("it has other content than was written")
        _check_files(folder, state)
        check_state(state)
    except ValueError as error:
        raise ValueError(f"{folder!r} is damaged: {STATE_FILE}: {str(error).rstrip('.')}.") from error
    damage = find_damage(folder, _files_to_check(folder, state))
    if damage is not None:
        raise ValueError(f"{folder!r} is damaged: {damage}.")
    trainers = read_json_file(os.path.join(folder, _TRAINER_STATE), folder)
    for key, name in (("step", "global_step"), ("epoch", "epoch")):
        expected = trainers.get(name)
        if state[key] != expected:
            raise ValueError(
                f"{folder!r} is damaged: {STATE_FILE}: found {state[key]!r} as {key!r}, expected {expected!r} as "
                f"{_TRAINER_STATE} has it."
            )
    return state


def _files_to_check(folder: str, state: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the files to verify: all, except weights that were re-sharded into other files with equal tensors."""
    files, names = state["files"], names_of_weights(folder)
    others = [name for name in names if name not in files]
    if not others or state.get("weights") is None:
        return dict(files)
    if hash_of_weights(folder) != state["weights"]:
        raise ValueError(
            f"{folder!r} is damaged: {others[0]} was not written with it, and the weights are not those that were "
            "saved."
        )
    logger.warning(
        f"{folder!r}: the weights lie in other files than were saved ({names[0]}, one of {len(names)}); every tensor "
        "is as it was written."
    )
    return {name: entry for name, entry in files.items() if name in names or not OF_WEIGHTS.fullmatch(name)}


# ---- what a state may hold ----


def _check_files(folder: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError for a malformed file list, or one without a file that a checkpoint requires."""
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
    # With a hash of the weights, the tensors count, not the files they are in.
    weights = (WEIGHTS_FILE, INDEX_FILE) if state.get("weights") is None else ()
    needed += [name for name in (*weights, *adapter_files(folder)) if os.path.isfile(os.path.join(folder, name))]
    for name in (_TRAINER_STATE, *needed):
        if name not in files:
            raise ValueError(f"found no {name!r} in 'files', expected all files of the checkpoint")


def latest_sound(output_dir: str, read: Callable[[str], Any] = read_state) -> tuple[str | None, list[str]]:
    """Return the highest-step folder that `read` accepts, without a ValueError, and why later ones were skipped.

    Raises:
        UnreadableError: this user has no permission for a later checkpoint, which may be sound.
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
    """Return the checkpoint of the highest step, sound or not."""
    return next(iter(newest_first(output_dir)), None)


def newest_first(output_dir: str) -> list[str]:
    """Return the checkpoints in a run's folder, highest step first.

    Raises:
        UnreadableError: this user has no permission for the folder.
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
    """Checkpoint that this user has no permission to read; it may be sound."""


def check_readable(folder: str) -> None:
    """Try to open every file of a checkpoint.

    Raises:
        UnreadableError: this user has no permission for one of them, or for a folder.
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
                refuse(error)  # Missing or damaged files are reported where they are read.


def _unreadable(folder: str, error: PermissionError) -> str:
    return (
        f"{folder!r} cannot be read: this user has no permission for {error.filename!r}. Give it (chmod -R u+rX, or "
        "chown), or name another checkpoint in resume_from_checkpoint; an older one is not taken in silence."
    )


# ---- a folder that all nodes see ----


def leave_token(output_dir: str) -> str:
    """Create a file for the other nodes to look for; return its name."""
    os.makedirs(output_dir, exist_ok=True)
    name = f".pipetransformer-{uuid.uuid4().hex}"
    with open(os.path.join(output_dir, name), "w", encoding="utf-8") as file:
        file.flush()
        os.fsync(file.fileno())
    sync_folder(output_dir)
    return name


def sees_token(output_dir: str, name: str) -> bool:
    """Return True once the file is visible; a network file system may take some seconds to show it."""
    deadline = time.monotonic() + _TOKEN_SECONDS
    while not (os.path.isdir(output_dir) and name in os.listdir(output_dir)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def remove_token(output_dir: str, name: str) -> None:
    """Remove the file of `leave_token`."""
    with contextlib.suppress(OSError):
        os.remove(os.path.join(output_dir, name))


# ---- what belongs to a run ----


def split_optimizer_state(states: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split optimizer state by parameter name into tensors and other values, both keyed "<parameter>|<key>".

    Raises:
        ValueError: a value is neither a tensor nor a JSON value.
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
    """Invert `split_optimizer_state`."""
    states: dict[str, dict[str, Any]] = {}
    for joined, value in {**tensors, **values}.items():
        name, _, key = joined.rpartition("|")
        states.setdefault(name, {})[key] = value
    return states


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of the parameter groups; schedulers change learning rates, some also momenta.

    Raises:
        ValueError: an option is not a JSON value.
    """
    return [
        {key: plain(value, f"The optimizer's option {key!r}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def set_group_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Invert `group_options`.

    Raises:
        ValueError: the optimizer has a different number of groups.
    """
    if len(options) != len(optimizer.param_groups):
        raise ValueError(
            f"The checkpoint's optimizer has {len(options)} parameter groups: expected {len(optimizer.param_groups)}, "
            "as this run's has. Build the optimizer as in the run that was saved."
        )
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(value, list) and isinstance(group.get(key, ()), tuple) else value


@contextmanager
def rotating_by_step(step: int) -> Iterator[None]:
    """Make Trainer delete old checkpoints by step instead of by modification time.

    Trainer calls a module-level function, not a method to override, so `transformers.trainer.rotate_checkpoints` is
    patched.
    """
    original = stock.rotate_checkpoints

    def by_step(
        output_dir: str, save_total_limit: int | None = None, best_model_checkpoint: str | None = None, **_: Any
    ) -> None:
        rotate(output_dir, save_total_limit, step, best_model_checkpoint)

    stock.rotate_checkpoints = by_step
    try:
        yield
    finally:
        stock.rotate_checkpoints = original
