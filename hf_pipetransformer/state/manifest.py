"""Manifest of a checkpoint: names, sizes and hashes of its files, and the schema of its state."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

from hf_pipetransformer.schedules.json_values import (
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
from hf_pipetransformer.schedules.layout import MOST_MICROBATCHES, Layout


Entry = dict[str, Any]
"""Entry of one file: `bytes`, its size, and `xxh3_128`, its hash in hexadecimal."""

_CHUNK_BYTES = 2**22
# Reading and hashing release the GIL; more than a few readers only compete for one disk.
_NUM_READERS = 4


def entry_of(path: str, sync: bool = False) -> Entry:
    """Return size and hash of a file, after an fsync if `sync`."""
    hasher, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return {"bytes": size, "xxh3_128": hasher.hexdigest()}


def list_files(folder: str) -> list[str]:
    """List the files below a folder by relative path, with `/` on every system."""
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return sorted(os.path.relpath(path, folder).replace(os.sep, "/") for path in paths)


def make_manifest(folder: str, names: Iterable[str]) -> dict[str, Entry]:
    """Sync files to disk and return their entries."""
    names = list(names)
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return dict(zip(names, pool.map(lambda name: entry_of(os.path.join(folder, name), True), names), strict=True))


def sync_folder(folder: str) -> None:
    """Sync a folder's file names to disk; ignored on network file systems that cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def find_damage(folder: str, files: Mapping[str, Entry]) -> str | None:
    """Describe the first file that does not match its entry; None if all do."""

    def check(name: str) -> str | None:
        path = os.path.join(folder, name)
        try:
            size, expected = os.path.getsize(path), files[name]["bytes"]
            if size != expected:
                return f"{name} has {size} bytes (expected {expected})"
            return None if entry_of(path) == files[name] else f"{name} has other content than was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({type(error).__name__}: {error})"

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return next((text for text in pool.map(check, files) if text is not None), None)


def checksum_of(content: Mapping[str, Any]) -> str:
    """Hash JSON values; the hash is the same after a round trip through a file.

    Raises:
        ValueError: the values are nested too deeply.
    """
    try:
        text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    except RecursionError as error:
        raise ValueError("The values are nested too deep for a JSON file.") from error
    return xxhash.xxh3_128_hexdigest(text.encode())


MOST_RATE = 1e30
"""Upper limit of a learning rate."""


def check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError for a state that no run can have written; the file list is checked separately."""
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
    for name in ("scaler", "slots"):
        if state.get(name) is not None:
            entries(state[name], name)
    if state.get("slots") is not None:
        slots = state["slots"]
        whole_number(entry(slots, "num_slots"), "num_slots", 1)
        whole_number(entry(slots, "seed"), "seed", -(2**63), 2**64)
        whole_number(entry(slots, "first"), "first")
        for known in items(entry(slots, "shares"), "shares"):
            start, share = items(known, "shares", 2)
            whole_number(start, "shares")
            number(share, "shares", 0, 1)


def _check_place(place: Any, step: int, num_samples: int) -> None:
    """Raise ValueError for a data position that a run of `step` steps cannot have."""
    place = entries(place, "place")
    whole_number(entry(place, "epoch"), "epoch", most=step)
    if place.get("num_samples") is not None:
        # A user's sampler may draw more samples per epoch than the data set has.
        num_samples = whole_number(place["num_samples"], "num_samples", most=MOST_SAMPLES)
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
    """Raise ValueError for values that no scheduler of torch has; a user's own may have other entries."""
    for name in ("last_epoch", "_step_count"):
        if name in schedule:
            whole_number(schedule[name], name, -1)
    for name in ("base_lrs", "_last_lr"):
        for rate in items(schedule.get(name, []), name):
            number(rate, name, -MOST_RATE, MOST_RATE)
