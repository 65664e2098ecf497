"""Lines that `hf-pipetransformer cache` prints on the activation stores of a machine."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from hf_pipetransformer.cache.files import PrivateFolder, StoreDamagedError
from hf_pipetransformer.cache.folder import KEEP_FILE, StoreFolder, Use, find_stores, open_root
from hf_pipetransformer.cache.records import Header
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.report import duration, printable


_LONGEST_USE = 400
_SOUND = "sound"


def list_stores(base: str | os.PathLike[str]) -> list[str]:
    """Return a line per store: name, state, size, number of samples stored, last use. Raises like `open_root`."""

    def content_of(store: ActivationStore) -> str:
        stored = np.count_nonzero(store.weights_ids(np.arange(store.num_samples)))
        return f"{stored} of {store.num_samples} samples stored{_last_use(store)}"

    return _lines(base, content_of)


def _last_use(store: ActivationStore) -> str:
    """Return what the last run that kept a store has noted of it; nothing if that cannot be read."""
    try:
        folder = PrivateFolder.at(store.folder)
        age = max(0.0, time.time() - folder.status(KEEP_FILE).st_mtime)
        use = Use(**json.loads(folder.read(KEEP_FILE)))
        reads = int(use.hits) + int(use.misses)
        rate = f", {use.hits / reads:.0%} of its reads were hits" if reads else ""
        text = f", used {duration(age)} ago: {use.model}, {use.data}{rate}"
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return ""
    # The text comes from a file and goes to a terminal.
    return printable(text[:_LONGEST_USE])


def verify_stores(base: str | os.PathLike[str]) -> tuple[list[str], bool]:
    """Return a line per store with its damage, and True if all are sound. Raises like `open_root`."""
    lines = _lines(base, _damage_of)
    return lines, all(line.endswith(_SOUND) for line in lines)


def prune_stores(base: str | os.PathLike[str], with_kept: bool) -> list[str]:
    """Delete the stores that no run uses, kept ones only if asked; return a line for each. Raises like `open_root`."""
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
        # Release first: verifying can take long, and a run may want the store meanwhile.
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
    """Return the key to expect in a folder of this name: a second run with the key `key` uses the folder `key-2`."""
    key = Header.read(folder).key
    return key if re.fullmatch(re.escape(key) + r"-\d+", name) else name


def _size_of(folder: PrivateFolder) -> str:
    total = 0
    for name in folder.names():
        with suppress(OSError):
            total += folder.bytes_on_disk(name)
    return f"{total / 1e6:.1f} MB"


def _damage_of(store: ActivationStore) -> str:
    errors = []
    for sample in range(store.num_samples):
        try:
            # Zero tokens are wanted, but the hash is checked over the whole record.
            store.read(np.array([sample]), 0)
        except StoreDamagedError as error:
            errors.append(str(error))
    return f"damaged: {len(errors)} of {store.num_samples} samples. {errors[0]}" if errors else _SOUND
