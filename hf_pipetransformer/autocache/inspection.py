"""What activation stores lie under a folder, whether their rows are what was written, and deleting them by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from hf_pipetransformer.autocache.files import Folder
from hf_pipetransformer.autocache.folder import StoreFolder, find_stores, open_root
from hf_pipetransformer.autocache.header import Header
from hf_pipetransformer.autocache.index import INDEX_FILE, Index, index_columns
from hf_pipetransformer.autocache.reading import is_sound
from hf_pipetransformer.autocache.shards import ShardMap
from hf_pipetransformer.autocache.table import ArrowTable, StoreDamagedError


def list_stores(base: str | os.PathLike[str]) -> list[str]:
    """A line for each store: name, whether a run uses it, size, and how much is in it; raises as `open_root`."""
    return _lines(base, _content_of)


def verify_stores(base: str | os.PathLike[str]) -> tuple[list[str], bool]:
    """A line for each store that says what is damaged in it, and whether all are sound; raises as `open_root`."""
    damaged: list[str] = []

    def look(folder: Folder) -> str:
        found = _damage_of(folder)
        damaged.extend([found] if found else [])
        return found or "sound"

    return _lines(base, look), not damaged


def prune_stores(base: str | os.PathLike[str], with_kept: bool) -> list[str]:
    """Delete the stores that no run uses, the kept ones only if asked for; a line for each, raises as `open_root`."""
    lines = []
    with suppress(FileNotFoundError):
        for store in find_stores(open_root(base), with_kept):
            if store.is_held:
                lines.append(f"{store.path.name}  {_size_of(store.folder)}  deleted")
                store.remove()
    return lines


def _lines(base: str | os.PathLike[str], look: Callable[[Folder], str]) -> list[str]:
    stores: list[StoreFolder] = []
    with suppress(FileNotFoundError):
        stores = find_stores(open_root(base))
    states = [_state_of(store) for store in stores]
    for store in stores:
        # A run that wants it shall not wait until all of it has been read.
        store.release()
    return [
        f"{store.path.name}  {state}  {_size_of(store.folder)}  {look(store.folder)}"
        for store, state in zip(stores, states, strict=True)
    ]


def _state_of(store: StoreFolder) -> str:
    if not store.is_held:
        return "in use"
    return "kept" if store.is_kept else "left behind"


def _size_of(folder: Folder) -> str:
    total = 0
    for name in folder.names():
        with suppress(OSError):
            total += folder.size(name)
    return f"{total / 1e6:.1f} MB"


def _opened(folder: Folder) -> tuple[Index, ShardMap]:
    header = Header.read(folder)
    table = ArrowTable.open(folder, INDEX_FILE, index_columns(header.row_format), header.store_id)
    if table.num_rows != header.num_samples:
        raise StoreDamagedError(f"{table.path} has {table.num_rows} samples: expected {header.num_samples}.")
    index = Index(table, header.row_format, header.store_id)
    return index, ShardMap(folder, header.row_format, header.store_id)


def _content_of(folder: Folder) -> str:
    try:
        index, _ = _opened(folder)
        ids = index.entries(np.arange(index.table.num_rows))["weights_id"]
    except StoreDamagedError as error:
        return f"damaged: {error}"
    return f"{np.count_nonzero(ids)} of {len(ids)} samples stored"


def _damage_of(folder: Folder) -> str:
    """What is damaged in a store; empty if nothing is."""
    try:
        index, shards = _opened(folder)
    except StoreDamagedError as error:
        return f"damaged: {error}"
    first, count = "", 0
    for sample in range(index.table.num_rows):
        try:
            text = "" if is_sound(index, shards, sample) else f"The row of sample {sample} is not what was written."
        except StoreDamagedError as error:
            text = str(error)
        count += bool(text)
        first = first or text
    return f"damaged: {count} of {index.table.num_rows} samples. {first}" if count else ""
