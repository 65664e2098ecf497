"""What activation stores lie under a folder, whether their rows are what was written, and deleting them by hand."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from hf_pipetransformer.autocache.files import PrivateFolder
from hf_pipetransformer.autocache.folder import StoreFolder, find_stores, open_root
from hf_pipetransformer.autocache.header import Header
from hf_pipetransformer.autocache.store import ActivationStore
from hf_pipetransformer.autocache.table import StoreDamagedError


_SOUND = "sound"


def list_stores(base: str | os.PathLike[str]) -> list[str]:
    """A line for each store: name, whether a run uses it, size, and how much is in it; raises as `open_root`."""
    return _lines(base, _content_of)


def verify_stores(base: str | os.PathLike[str]) -> tuple[list[str], bool]:
    """A line for each store that says what is damaged in it, and whether all are sound; raises as `open_root`."""
    lines = _lines(base, _damage_of)
    return lines, all(line.endswith(_SOUND) for line in lines)


def prune_stores(base: str | os.PathLike[str], with_kept: bool) -> list[str]:
    """Delete the stores that no run uses, the kept ones only if asked for; a line for each, raises as `open_root`."""
    lines = []
    with suppress(FileNotFoundError):
        for store in find_stores(open_root(base), with_kept):
            if store.is_held:
                lines.append(f"{store.path.name}  {_size_of(store.folder)}  deleted")
                store.remove()
    return lines


def _lines(base: str | os.PathLike[str], look: Callable[[ActivationStore], str]) -> list[str]:
    stores: list[StoreFolder] = []
    with suppress(FileNotFoundError):
        stores = find_stores(open_root(base))
    states = [("kept" if store.is_kept else "left behind") if store.is_held else "in use" for store in stores]
    for store in stores:
        # A run that wants it shall not wait until all of it has been read.
        store.release()
    lines = []
    for store, state in zip(stores, states, strict=True):
        try:
            found = look(ActivationStore.open(store.folder, None, _key_of(store.path.name, store.folder)))
        except StoreDamagedError as error:
            found = f"damaged: {error}"
        lines.append(f"{store.path.name}  {state}  {_size_of(store.folder)}  {found}")
    return lines


def _key_of(name: str, folder: PrivateFolder) -> str:
    """The key that a store in a folder of this name must have: `key-2` is that of a second run beside `key`."""
    key = Header.read(folder).key
    return key if re.fullmatch(re.escape(key) + r"-\d+", name) else name


def _size_of(folder: PrivateFolder) -> str:
    total = 0
    for name in folder.names():
        with suppress(OSError):
            total += folder.bytes_on_disk(name)
    return f"{total / 1e6:.1f} MB"


def _content_of(store: ActivationStore) -> str:
    stored = np.count_nonzero(store.weights_ids(np.arange(store.num_samples)))
    return f"{stored} of {store.num_samples} samples stored"


def _damage_of(store: ActivationStore) -> str:
    errors = []
    for sample in range(store.num_samples):
        try:
            store.read(np.array([sample]), 0)
        except StoreDamagedError as error:
            errors.append(str(error))
    return f"damaged: {len(errors)} of {store.num_samples} samples. {errors[0]}" if errors else _SOUND
