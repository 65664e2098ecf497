"""A list of files with their sizes and hashes: what a folder held when it was complete, and whether it still does."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash


Entry = dict[str, Any]
"""Of one file: `bytes`, its size, and `xxh3_128`, its hash in hexadecimal digits."""

_CHUNK_BYTES = 2**22
# Reading and hashing run without the interpreter's lock; more than a few readers only fight over one disk.
_NUM_READERS = 4


def entry_of(path: str, sync: bool = False) -> Entry:
    """Size and hash of a file.

    Args:
        path: the file.
        sync: make sure first that it is on the disk, not only on its way there.
    """
    hasher, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return {"bytes": size, "xxh3_128": hasher.hexdigest()}


def list_files(folder: str) -> list[str]:
    """The files in a folder and in the folders inside it, by their path from there, with `/` on every system."""
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return sorted(os.path.relpath(path, folder).replace(os.sep, "/") for path in paths)


def make_manifest(folder: str, names: Iterable[str]) -> dict[str, Entry]:
    """The entries of some files of a folder, all of them on the disk when it returns."""
    names = list(names)
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return dict(zip(names, pool.map(lambda name: entry_of(os.path.join(folder, name), True), names), strict=True))


def sync_folder(folder: str) -> None:
    """Make sure that the names in a folder are on the disk; some network file systems know no such thing."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def find_damage(folder: str, files: Mapping[str, Entry]) -> str | None:
    """The first file of a folder that is not as its entry says, in words; None if all are."""

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
    """The hash of JSON values, the same after their way through a file.

    Raises:
        ValueError: they are nested too deep.
    """
    try:
        text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    except RecursionError as error:
        raise ValueError("The values are nested too deep for a JSON file.") from error
    return xxhash.xxh3_128_hexdigest(text.encode())
