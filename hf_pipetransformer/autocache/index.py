"""The index of a store: one entry per sample, which counts only if its own hash holds."""

from __future__ import annotations

import numpy as np
import xxhash

from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.autocache.table import Array, ArrowTable, Column, Columns, StoreDamagedError


INDEX_FILE = "index.arrow"

_COLUMN = "entry"
_ID_BYTES = 8
_HASH_BYTES = 8
_NUM_TRIES = 10
_MAX_BYTES = 1 << 28
"""Of one read; systems give 2 GB at most."""


def index_columns(row_format: RowFormat) -> Columns:
    """Of the index's table: the bytes of an entry."""
    return {_COLUMN: Column(np.dtype(np.uint8), row_format.entry_dtype().itemsize)}


class Index:
    """Where each sample's row lies, the id of its weights, its side fields, and the hash of its tokens.

    An entry is changed in three writes: id 0, all but the id, the id. A reader that comes in between finds a hash
    that does not hold, and looks again. The hash covers the number of the sample and the id of the store, so that
    no entry counts in another's place.

    Args:
        table: with `index_columns`.
        row_format: of the store.
        store_id: of the store.
    """

    def __init__(self, table: ArrowTable, row_format: RowFormat, store_id: str) -> None:
        self.table = table
        self.dtype = row_format.entry_dtype()
        self._seed = xxhash.xxh3_64_intdigest(store_id.encode())

    def entries(self, samples: Array) -> Array:
        """`(n,)` entries of the samples, see `RowFormat.entry_dtype`; all zero where nothing is stored.

        Raises:
            StoreDamagedError: the file has vanished or was cut, or an entry is not what was written.
        """
        self.table.check()
        entries = self._taken(samples)
        for _ in range(_NUM_TRIES):
            unsound = (entries["weights_id"] != 0) & (self._hashes(entries, samples) != entries["hash"])
            if not unsound.any():
                entries[entries["weights_id"] == 0] = np.zeros((), self.dtype)
                return entries
            entries[unsound] = self._taken(samples[unsound])
        raise StoreDamagedError(
            f"The entry of sample {samples[unsound][0]} in {self.table.path} is not what was written: it has another "
            "hash. The disk or the memory is faulty, or something outside the run wrote to the file."
        )

    def all_slots(self) -> tuple[Array, Array, Array]:
        """Shard, start and capacity of each sample, unchecked: what is taken at most."""
        entries = self._taken(np.arange(self.table.num_rows))
        return entries["shard"], entries["start"], entries["capacity"]

    def clear(self, samples: Array) -> None:
        """From now on nothing is stored of these samples."""
        for sample in samples.tolist():
            self.table.write_at(_COLUMN, sample, b"\0" * _ID_BYTES)

    def put(self, samples: Array, entries: Array) -> None:
        """Set entries that were cleared; their hashes are set here."""
        entries["hash"] = self._hashes(entries, samples)
        size, content = self.dtype.itemsize, entries.tobytes()
        for sample, place in zip(samples.tolist(), range(0, len(content), size), strict=True):
            own = content[place : place + size]
            self.table.write_at(_COLUMN, sample, b"\0" * _ID_BYTES + own[_ID_BYTES:])
            self.table.write_at(_COLUMN, sample, own[:_ID_BYTES])

    def _taken(self, samples: Array) -> Array:
        """Entries as they lie in the file."""
        num_rows = self.table.num_rows
        assert not len(samples) or (samples.min() >= 0 and samples.max() < num_rows), samples
        if len(samples) * 8 < num_rows:
            return np.frombuffer(self.table.read_rows(_COLUMN, samples.tolist()), self.dtype)
        whole = np.empty(num_rows, self.dtype)
        part = _MAX_BYTES // self.dtype.itemsize + 1
        for first in range(0, num_rows, part):
            self.table.read(_COLUMN, first, whole[first : first + part])
        return whole[samples]

    def _hashes(self, entries: Array, samples: Array) -> Array:
        """`(n,)` uint64, of all but the stored hashes."""
        size, content = self.dtype.itemsize, entries.tobytes()
        places = zip(samples.tolist(), range(0, len(content), size), strict=True)
        hashes = [
            xxhash.xxh3_64_intdigest(content[place : place + size - _HASH_BYTES], (self._seed + sample) % 2**64)
            for sample, place in places
        ]
        return np.array(hashes, np.uint64)
