"""Checkpoint files: the state of a run next to the model's own files.

A checkpoint folder holds the model as `from_pretrained` reads it, `trainer_state.json`, and `pipetransformer/`:

    optimizer-stage-<k>.safetensors   by replica 0: "<parameter>|<key>" to tensor; options and numbers in the header
    random-rank-<r>.safetensors       by every rank: its RNG states, and whatever else only it knows
    state.json                        by rank 0, last: the run's state, and the manifest of all other files

Where one stage trains everything that the user wants trained, the folder also has Trainer's own files (`optimizer.pt`,
`scheduler.pt`), which only plain Trainer reads.

All files are synced to disk before `state.json` is written: a folder without it is incomplete, and one that does not
match it is damaged. Nothing that is read here is pickled. A header is the metadata of a safetensors file with a single
entry, JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils._pytree import tree_map_only

from hf_pipetransformer.comm.transfers import pack, unpack
from hf_pipetransformer.report import logger
from hf_pipetransformer.schedules.json_values import as_json, read_as
from hf_pipetransformer.splitters.adapters import adapter_files
from hf_pipetransformer.state.run_state import (
    FileEntry,
    Manifest,
    RankState,
    RunState,
    checksum_of,
    read_json_file,
)
from hf_pipetransformer.state.weights import (
    INDEX_FILE,
    OF_WEIGHTS,
    WEIGHTS_FILE,
    has_weights,
    hash_of_weights,
    names_of_weights,
)


STATE_FOLDER = "pipetransformer"
STATE_FILE = "state.json"
TRAINER_STATE = "trainer_state.json"
# Raised with a change after which files of before cannot be read.
VERSION = 6

_FOLDER_NAME = re.compile(r"checkpoint-(\d+)")
# Names in files on disk.
_HEADER, _PACKED = "json", "packed"
# Reading and hashing release the GIL; more than a few readers only compete for one disk.
_NUM_READERS = 4


# ---- parts: tensors and a header, each written by one rank ----


optimizer_file = "optimizer-stage-{}.safetensors".format
random_file = "random-rank-{}.safetensors".format


def has_state(folder: str) -> bool:
    """Return True if a pipeline saved the checkpoint, with its state; it may be incomplete."""
    return os.path.isdir(os.path.join(folder, STATE_FOLDER))


def is_complete(folder: str) -> bool:
    """Return True if `write_state` has completed the checkpoint."""
    return os.path.isfile(os.path.join(folder, STATE_FOLDER, STATE_FILE))


def write_part(
    folder: str, name: str, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]
) -> dict[str, FileEntry]:
    """Write tensors and a JSON header to a synced file; returns its entry for `write_state`, by relative path."""
    values = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    # Optimizers may share one tensor between parameters; safetensors refuses shared memory.
    first = {value.data_ptr(): key for key, value in reversed(values.items())}
    own = {key: value if first[value.data_ptr()] == key else value.clone() for key, value in values.items()}
    os.makedirs(os.path.join(folder, STATE_FOLDER), exist_ok=True)
    path = os.path.join(folder, STATE_FOLDER, name)
    save_file(own, path, metadata={_HEADER: json.dumps(dict(header))})
    return {f"{STATE_FOLDER}/{name}": _entry_of(path, sync=True)}


def read_part(
    folder: str, name: str, is_wanted: Callable[[str], bool] = lambda key: True
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read a file of `write_part`, only tensors whose key `is_wanted`; they are copies, not views of the mapped file.

    Raises ValueError if the file is missing or damaged.
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


def read_optimizer(
    folder: str, num_stages: int, is_wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, dict[str, Any]], list[str], list[dict[str, Any]]]:
    """Read the optimizer state of all stages by parameter name, of parameters that `is_wanted`.

    Returns also the names of all parameters that have one, and the options of the groups.
    """
    states: dict[str, dict[str, Any]] = {}
    names: list[str] = []
    for stage in range(num_stages):
        tensors, header = read_part(folder, optimizer_file(stage), lambda key: is_wanted(key.rpartition("|")[0]))
        names += header["names"]
        for joined, value in {**tensors, **header["values"]}.items():
            # From the right: a name may have a "|" in it, the key of an optimizer has none.
            name, _, key = joined.rpartition("|")
            if is_wanted(name):
                states.setdefault(name, {})[key] = value
    return states, names, header["groups"]


def write_rank_state(folder: str, rank: int, state: RankState) -> dict[str, FileEntry]:
    return write_part(folder, random_file(rank), {_PACKED: pack(vars(state))}, {})


def read_rank_state(folder: str, rank: int) -> RankState:
    values = unpack(read_part(folder, random_file(rank))[0][_PACKED])
    # Copies, as torch's generators crash when they are given views as states.
    return RankState(**tree_map_only(torch.Tensor, torch.Tensor.clone, values))


# ---- the state, and the manifest that makes a checkpoint whole ----


def write_state(folder: str, state: RunState, parts: Mapping[str, FileEntry]) -> None:
    """Write `state.json` atomically, as the last file of a checkpoint.

    `parts` has the manifest entries that the writing ranks computed; all other files are synced and hashed here.
    """
    path, own = os.path.join(folder, STATE_FOLDER, STATE_FILE), f"{STATE_FOLDER}/{STATE_FILE}"
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    found = sorted(os.path.relpath(each, folder).replace(os.sep, "/") for each in paths)
    # The ranks have hashed their own parts as they wrote them, which need not be read again.
    others = [name for name in found if name not in parts and name != own]
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        entries = pool.map(lambda name: _entry_of(os.path.join(folder, name), sync=True), others)
        files = {**parts, **dict(zip(others, entries, strict=True))}
    # The tensors have a hash of their own, as a user may put them into other files.
    content = {"version": VERSION, **as_json(state), "weights": hash_of_weights(folder), "files": files}
    # First, as the state says that all of this is on disk.
    _sync_folders({folder, *(os.path.join(folder, os.path.dirname(name)) for name in files)})
    with open(f"{path}.unfinished", "w", encoding="utf-8") as file:
        json.dump({"checksum": checksum_of(content), **content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.unfinished", path)
    # The file's new name is in its folder, and the checkpoint's own in the run's.
    _sync_folders([os.path.dirname(path), os.path.dirname(os.path.abspath(folder))])


def _entry_of(path: str, sync: bool = False) -> FileEntry:
    """Return size and hash of a file, after an fsync if `sync`."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        # Piece by piece, as a file may be larger than the memory.
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return {"bytes": file.tell(), "xxh3_128": digest.hexdigest()}


def _sync_folders(folders: Iterable[str]) -> None:
    """Sync folders' file names to disk; ignored on network file systems that cannot."""
    for folder in folders:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def read_state(folder: str) -> RunState:
    """Read `state.json`, after checking that the checkpoint is complete and every file matches its manifest.

    Raises:
        ValueError: the folder is no checkpoint, holds only the model, is incomplete or damaged; names the file.
    """
    _check_complete(folder)
    content = read_json_file(os.path.join(folder, STATE_FOLDER, STATE_FILE), folder)
    if content.get("version") != VERSION:
        found = f"version {content['version']}" if "version" in content else "no version"
        raise ValueError(f"{folder!r} has {found} in {STATE_FILE}: expected version {VERSION}.")
    saved_checksum = content.pop("checksum", None)
    try:
        if saved_checksum != checksum_of(content):
            raise ValueError("it has other content than was written")
        manifest: Manifest = read_as(Manifest, content, STATE_FILE)
        state = RunState.from_json(content)
        _check_manifest(folder, manifest, state)
    except ValueError as error:
        raise ValueError(f"{folder!r} is damaged: {STATE_FILE}: {str(error).rstrip('.')}.") from error
    _check_files(folder, manifest)
    trainers = read_json_file(os.path.join(folder, TRAINER_STATE), folder)
    # Hashes prove that neither file has changed, not that the two say the same.
    for key, name in (("step", "global_step"), ("epoch", "epoch")):
        own, expected = getattr(state, key), trainers.get(name)
        if own != expected:
            raise ValueError(
                f"{folder!r} is damaged: {STATE_FILE}: found {own!r} as {key!r}, expected {expected!r} as "
                f"{TRAINER_STATE} has it."
            )
    return state


def _check_complete(folder: str) -> None:
    """Raise ValueError if a folder has no state of a pipeline, saying what it is instead."""
    if not os.path.isdir(folder):
        raise ValueError(
            f"resume_from_checkpoint={folder!r} is not a folder: expected a checkpoint-N of a run with "
            "save_only_model=False."
        )
    check_readable(folder)
    if not has_state(folder):
        if not has_weights(folder):
            raise ValueError(
                f"{folder!r} is no complete checkpoint: it holds neither {WEIGHTS_FILE} nor {INDEX_FILE}, nor "
                "adapters."
            )
        by_trainer = any(name.startswith(("optimizer.", "scheduler.", "rng_state")) for name in os.listdir(folder))
        what = "was saved by plain Trainer" if by_trainer else "holds the model only (save_only_model=True)"
        raise ValueError(
            f"{folder!r} {what}: expected a folder {STATE_FOLDER!r} with the state of the pipeline. Start a new run "
            f"from its weights: from_pretrained({folder!r})."
        )
    if not is_complete(folder):
        raise ValueError(f"{folder!r} is incomplete: saving it was interrupted ({STATE_FILE} is missing).")


def _check_manifest(folder: str, manifest: Manifest, state: RunState) -> None:
    """Raise ValueError for a manifest with a file outside the folder, or without one that a checkpoint requires."""
    for name in manifest["files"]:
        # The manifest is read from a file, and its names are opened: none may lead out of the folder.
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"found {name[:60]!r} in 'files', expected files of this folder")
    needed = [optimizer_file(position) for position in range(state.layout.pipeline_size)]
    needed += [random_file(rank) for rank in range(state.world_size)]
    # With a hash of the weights, the tensors count, not the files they are in.
    weights = (WEIGHTS_FILE, INDEX_FILE) if manifest["weights"] is None else ()
    models = [name for name in (*weights, *adapter_files(folder)) if os.path.isfile(os.path.join(folder, name))]
    for name in (TRAINER_STATE, *(f"{STATE_FOLDER}/{name}" for name in needed), *models):
        if name not in manifest["files"]:
            raise ValueError(f"found no {name!r} in 'files', expected all files of the checkpoint")


def _check_files(folder: str, manifest: Manifest) -> None:
    """Raise ValueError for the first file that differs from its entry; weights may be in other files than saved."""
    files, names = manifest["files"], names_of_weights(folder)
    others = [name for name in names if name not in files]
    if others and manifest["weights"] is not None:
        if hash_of_weights(folder) != manifest["weights"]:
            raise ValueError(
                f"{folder!r} is damaged: {others[0]} was not written with it, and the weights are not those that "
                "were saved."
            )
        logger.warning(
            f"{folder!r}: the weights lie in other files than were saved ({names[0]}, one of {len(names)}); every "
            "tensor is as it was written."
        )
        files = {name: entry for name, entry in files.items() if name in names or not OF_WEIGHTS.fullmatch(name)}

    def find_damage(name: str) -> str | None:
        path, expected = os.path.join(folder, name), files[name]
        try:
            # The size first, which costs nothing: a file that was cut need not be read.
            size = os.path.getsize(path)
            if size != expected["bytes"]:
                return f"{name} has {size} bytes (expected {expected['bytes']})"
            return None if _entry_of(path) == expected else f"{name} has other content than was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({type(error).__name__}: {error})"

    # map() keeps the order, so that the same damage is named each time.
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        for damage in pool.map(find_damage, files):
            if damage is not None:
                raise ValueError(f"{folder!r} is damaged: {damage}.")


# ---- the checkpoints of a run ----


class UnreadableError(ValueError):
    """Checkpoint that this user has no permission to read; it may be sound."""

    def __init__(self, folder: str, error: PermissionError) -> None:
        super().__init__(
            f"{folder!r} cannot be read: this user has no permission for {error.filename!r}. Give it (chmod -R u+rX, "
            "or chown), or name another checkpoint in resume_from_checkpoint; an older one is not taken in silence."
        )


def check_readable(folder: str) -> None:
    """Raise UnreadableError if this user has no permission for a file of a checkpoint, or for a folder in it."""

    def refuse(error: OSError) -> None:
        if isinstance(error, PermissionError):  # Missing or damaged files are reported where they are read.
            raise UnreadableError(folder, error) from error

    for where, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            try:
                # Opened, as the mode bits do not tell what access lists and network file systems refuse.
                with open(os.path.join(where, name), "rb"):
                    pass
            except OSError as error:
                refuse(error)


def newest_verified(output_dir: str, read: Callable[[str], Any] = read_state) -> tuple[str | None, list[str]]:
    """Return the highest-step folder that `read` accepts, without a ValueError, and why later ones were skipped.

    Raises UnreadableError if this user has no permission for a later checkpoint, which may be sound.
    """
    reasons = []
    for _step, folder in reversed(numbered_checkpoints(output_dir)):
        # Not passed over: the newest checkpoint may be sound, and an older one would lose its steps in silence.
        check_readable(folder)
        try:
            read(folder)
        except ValueError as error:
            reasons.append(str(error))
        else:
            return folder, reasons
    return None, reasons


def newest_by_sizes(output_dir: str) -> tuple[str, int] | None:
    """Return the newest checkpoint to resume from, and its bytes, by the files' sizes alone: reading them takes long.

    A checkpoint of plain Trainer counts as whole once Trainer has written its last file.
    """
    for _step, folder in reversed(numbered_checkpoints(output_dir)):
        paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
        sizes = {os.path.relpath(path, folder).replace(os.sep, "/"): os.path.getsize(path) for path in paths}
        if has_state(folder):
            try:
                files = read_json_file(os.path.join(folder, STATE_FOLDER, STATE_FILE), folder)["files"]
                # Weights may have been put into other files.
                is_whole = all(
                    sizes[name] == files[name]["bytes"]
                    for name in files
                    if name in sizes or not OF_WEIGHTS.match(name)
                )
            # It was interrupted, or is being written.
            except (KeyError, TypeError, ValueError):
                continue
        else:
            is_whole = TRAINER_STATE in sizes and any(name.startswith("optimizer.") for name in sizes)
        if is_whole and has_weights(folder):
            return folder, sum(sizes.values())
    return None


def numbered_checkpoints(output_dir: str) -> list[tuple[int, str]]:
    """Return step and folder of each checkpoint in a run's folder, sound or not, in the order of the steps."""
    try:
        names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    except PermissionError as error:
        raise UnreadableError(output_dir, error) from error
    matches = filter(None, map(_FOLDER_NAME.fullmatch, names))
    found = [(int(match[1]), os.path.join(output_dir, match[0])) for match in matches]
    return sorted(each for each in found if os.path.isdir(each[1]))
