"""The index of a store: one entry per sample, which counts only if its own hash holds."""

from __future__ import annotations

import numpy as np
import xxhash

from hf_pipetransformer.autocache.files import PrivateFolder
from hf_pipetransformer.autocache.header import Header
from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.autocache.table import Array, ArrowTable, Columns, StoreDamagedError


INDEX_FILE = "index.arrow"

_WORD_BYTES = 8
"""The last word of an entry is the id of the weights, before it come the hash and the word of comparing."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_NUM_TRIES = 10
_MAX_BYTES = 1 << 28
"""Of one read; systems give 2 GB at most."""


def index_columns(row_format: RowFormat) -> Columns:
    """Of the index's table: the bytes of an entry."""
    return {"entry": np.dtype((np.uint8, (row_format.entry_dtype().itemsize,)))}


class Index:
    """Where each sample's row lies, the id of its weights, its side fields, and the hash of its tokens.

    Before a row is written its id is set to 0, and then its entry in one piece, of which the id is the last word. A
    reader that comes in between finds a hash that does not hold, and looks again. The hash covers the number of the
    sample and the id of the store, so that no entry counts in another's place.

    Raises:
        StoreDamagedError: the file is not the index of this store.
    """

    def __init__(self, folder: PrivateFolder, header: Header) -> None:
        self.table = ArrowTable.open(folder, INDEX_FILE, index_columns(header.row_format), header.store_id)
        if self.table.num_rows != header.num_samples:
            raise StoreDamagedError(
                f"{self.table.path} has {self.table.num_rows} samples: expected {header.num_samples}."
            )
        self.dtype = header.row_format.entry_dtype()
        self._seed = xxhash.xxh3_64_intdigest(header.store_id.encode())
        self._run = np.uint64(xxhash.xxh3_64_intdigest(header.run_id.encode()))

    def entries(self, samples: Array) -> Array:
        """`(n,)` entries of the samples, see `RowFormat.entry_dtype`; all zero where nothing is stored.

        Raises:
            StoreDamagedError: the file has vanished or was cut, or an entry is not what was written.
        """
        self.table.check()
        entries = self.read(samples)
        for _ in range(_NUM_TRIES):
            stored = np.flatnonzero(entries["weights_id"])
            unsound = stored[self._hashes(entries[stored], samples[stored]) != entries["hash"][stored]]
            if not len(unsound):
                entries[entries["weights_id"] == 0] = np.zeros((), self.dtype)
                return entries
            entries[unsound] = self.read(samples[unsound])
        raise StoreDamagedError(
            f"The entry of sample {samples[unsound][0]} in {self.table.path} is not what was written: it has another "
            "hash. The disk or the memory is faulty, or something outside the run wrote to the file."
        )

    def read(self, samples: Array) -> Array:
        """`(n,)` entries as they lie in the file, unchecked."""
        num_rows = self.table.num_rows
        assert not len(samples) or (samples.min() >= 0 and samples.max() < num_rows), samples
        if len(samples) * 8 < num_rows:
            found = np.empty((len(samples), self.dtype.itemsize), np.uint8)
            for sample, entry in zip(samples.tolist(), found, strict=True):
                self.table.read("entry", sample, entry)
            return found.view(self.dtype)[:, 0]
        whole = np.empty(num_rows, self.dtype)
        part = _MAX_BYTES // self.dtype.itemsize + 1
        for first in range(0, num_rows, part):
            self.table.read("entry", first, whole[first : first + part])
        return whole[samples]

    def make_room(self, sample: int) -> None:
        """Write the entry of a sample of which nothing is stored, so that the disk has the space for it from now on.

        Raises:
            OSError: the disk is full.
        """
        self.table.write("entry", sample, np.zeros(self.dtype.itemsize, np.uint8))

    def clear(self, samples: Array) -> None:
        """From now on nothing is stored of these samples."""
        nothing = np.zeros(_WORD_BYTES, np.uint8)
        for sample in samples.tolist():
            self.table.write("entry", sample, nothing, self.dtype.itemsize - _WORD_BYTES)

    def are_compared(self, samples: Array, entries: Array) -> Array:
        """`(n,)` bool: whether this run has read the input of each sample, and found it to be that of the entry."""
        stored: Array = entries["compared"] == self._compared(samples, entries["input_digest"])
        return stored

    def set_compared(self, samples: Array, input_digests: Array) -> None:
        """From now on, and in all processes, the inputs of these samples are known to have these digests.

        It is a word of its own and valid for one digest in one run only: whatever else happens to the entry at this
        moment, no row of another input counts for it.
        """
        words = self._compared(samples, input_digests)
        place = int(self.dtype.fields["compared"][1])  # type: ignore[index]
        for row, sample in enumerate(samples.tolist()):
            self.table.write("entry", sample, words[row : row + 1], place)

    def _compared(self, samples: Array, input_digests: Array) -> Array:
        words: Array = input_digests ^ (samples.astype(np.uint64) * _SPREAD + self._run)
        return words

    def put(self, samples: Array, entries: Array) -> None:
        """Set entries that were cleared; their inputs are those that this run has read. Their hashes are set here."""
        entries["compared"] = self._compared(samples, entries["input_digest"])
        entries["hash"] = self._hashes(entries, samples)
        for sample, entry in zip(samples.tolist(), entries[:, None].view(np.uint8), strict=True):
            self.table.write("entry", sample, entry)

    def _hashes(self, entries: Array, samples: Array) -> Array:
        """`(n,)` uint64, of all but the stored hashes and the words of comparing, which change by themselves."""
        size, content = self.dtype.itemsize, entries.tobytes()
        hashes = []
        for sample, place in zip(samples.tolist(), range(0, len(content), size), strict=True):
            entry = content[place : place + size]
            hashed = entry[: -3 * _WORD_BYTES] + entry[-_WORD_BYTES:]
            hashes.append(xxhash.xxh3_64_intdigest(hashed, (self._seed + sample) % 2**64))
        return np.array(hashes, np.uint64)
