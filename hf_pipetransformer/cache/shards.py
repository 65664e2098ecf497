"""Shard files with the records of a store, and the index that locates each record."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import numpy as np
import xxhash

from hf_pipetransformer.cache.files import PrivateFolder
from hf_pipetransformer.cache.rows import Header, RowFormat
from hf_pipetransformer.cache.table import ROWS_TOGETHER, Array, ArrowTable, Columns, StoreDamagedError, table_bytes


INDEX_FILE = "index.arrow"

_WORD_BYTES = 8
"""An index entry ends with three 8-byte words: `compared`, `hash` and, last, `weights_id`."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_NUM_TRIES = 10
_MAX_BYTES = 1 << 28
"""Upper bound on one read; Linux returns at most 2 GB per call."""


def index_columns(row_format: RowFormat) -> Columns:
    return {"entry": np.dtype((np.uint8, (row_format.entry_dtype().itemsize,)))}


class Index:
    """One entry per sample: place of its record, weights id, per-sample side fields, and the hash of its tokens.

    Readers take no locks. A writer sets the weights id to 0, writes the record, and then writes the whole entry in one
    call, the id last. A reader that sees a half-written entry gets a hash mismatch and retries. The hash covers the
    sample's number and the store id, so an entry copied to another place is rejected.
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
        """Return the entries `(n,)` of the samples, see `RowFormat.entry_dtype`; all zero where nothing is stored.

        Raises:
            StoreDamagedError: the file is gone or was truncated, or an entry fails its hash check.
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
        num_rows = self.table.num_rows
        assert not len(samples) or (samples.min() >= 0 and samples.max() < num_rows), samples
        # Few samples: one small read each. Many: reading the whole index sequentially is faster.
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
        """Write an empty entry, so that the file system allocates its block now; raises OSError on a full disk."""
        self.table.write("entry", sample, np.zeros(self.dtype.itemsize, np.uint8))

    def clear(self, samples: Array) -> None:
        # Clear only the id: the rest of the entry stays the owner's claim to its place.
        nothing = np.zeros(_WORD_BYTES, np.uint8)
        for sample in samples.tolist():
            self.table.write("entry", sample, nothing, self.dtype.itemsize - _WORD_BYTES)

    def are_compared(self, samples: Array, entries: Array) -> Array:
        """Return a bool mask `(n,)`: True where this run has found the sample's input equal to the entry's."""
        stored: Array = entries["compared"] == self._compared(samples, entries["input_digest"])
        return stored

    def set_compared(self, samples: Array, input_digests: Array) -> None:
        """Mark the inputs of samples as read and found to have these digests, for all processes of this run.

        The mark is a separate word, valid for one digest in one run, so a concurrent change of the entry is harmless.
        """
        words = self._compared(samples, input_digests)
        place = int(self.dtype.fields["compared"][1])  # type: ignore[index]
        for row, sample in enumerate(samples.tolist()):
            self.table.write("entry", sample, words[row : row + 1], place)

    def _compared(self, samples: Array, input_digests: Array) -> Array:
        # The odd multiplier gives each sample another word, even for equal digests.
        words: Array = input_digests ^ (samples.astype(np.uint64) * _SPREAD + self._run)
        return words

    def put(self, samples: Array, entries: Array) -> None:
        """Write the entries of records that are complete; fills in their hashes and marks them as compared."""
        entries["compared"] = self._compared(samples, entries["input_digest"])
        entries["hash"] = self._hashes(entries, samples)
        for sample, entry in zip(samples.tolist(), entries[:, None].view(np.uint8), strict=True):
            self.table.write("entry", sample, entry)

    def _hashes(self, entries: Array, samples: Array) -> Array:
        """Return the hash of each entry, uint64 `(n,)`, without `hash` and `compared`, which is updated separately."""
        size, content = self.dtype.itemsize, entries.tobytes()
        hashes = []
        for sample, place in zip(samples.tolist(), range(0, len(content), size), strict=True):
            entry = content[place : place + size]
            hashed = entry[: -3 * _WORD_BYTES] + entry[-_WORD_BYTES:]
            hashes.append(xxhash.xxh3_64_intdigest(hashed, (self._seed + sample) % 2**64))
        return np.array(hashes, np.uint64)


MIN_SHARD_BYTES = 256 * 1024
MAX_SHARD_BYTES = 256 * 1000 * 1000
GROWTH = 36
"""A new shard is at least 1 / GROWTH of the writer's present size, within the two bounds above: this wastes little of
the byte limit and keeps files few. Disk space within a shard is reserved in such steps too."""

NUM_OPEN_SHARDS = 16
"""Only this many of a writer's last shards are searched for free space; older ones have too little left."""

WRITER_FACTOR = 1 << 16
"""Shard number = writer number * WRITER_FACTOR + index of the shard among the writer's."""

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Disk full, or user quota exceeded."""

_SHARD_NAME = re.compile(r"shard-(\d+)-(\d+)\.arrow")


def shard_name(shard: int) -> str:
    writer, index = divmod(shard, WRITER_FACTOR)
    return f"shard-{writer}-{index}.arrow"


def list_shards(folder: PrivateFolder) -> dict[int, str]:
    """Return the file names of the complete shards in a folder, by shard number."""
    matches = [match for name in folder.names() if (match := _SHARD_NAME.fullmatch(name))]
    return dict(sorted((int(match[1]) * WRITER_FACTOR + int(match[2]), match[0]) for match in matches))


def hash_of(columns: Mapping[str, Array]) -> int:
    """Return a 64-bit hash of the bytes of a record's columns, in their order."""
    hasher = xxhash.xxh3_64()
    for values in columns.values():
        hasher.update(values.data)
    return hasher.intdigest()


class Shards(dict[int, ArrowTable]):
    """Shards of a folder by number, opened on first access. The rows of their tables are tokens."""

    def __init__(self, folder: PrivateFolder, header: Header) -> None:
        super().__init__()
        self.folder = folder
        self.store_id = header.store_id
        self.columns = header.row_format.shard_columns()
        self.token_bytes = sum(dtype.itemsize for dtype in self.columns.values())

    def __missing__(self, shard: int) -> ArrowTable:
        if shard < 0:
            raise StoreDamagedError(f"{self.folder.path}: the index names shard number {shard}.")
        table = self[shard] = ArrowTable.open(self.folder, shard_name(shard), self.columns, self.store_id)
        return table

    def create(self, shard: int, num_tokens: int, num_reserved: int) -> ArrowTable:
        """Create a shard, with disk space reserved for `num_reserved` tokens; raises like `ArrowTable.create`."""
        # Renaming a new file over it would silently replace the other writer's records.
        if shard_name(shard) in self.folder.names():
            raise StoreDamagedError(
                f"{self.folder.path / shard_name(shard)} exists already: two processes write to the store under the "
                "same number."
            )
        table = self[shard] = ArrowTable.create(
            self.folder, shard_name(shard), self.columns, num_tokens, self.store_id, num_reserved
        )
        return table

    def read_row(self, shard: int, start: int, length: int, targets: Mapping[str, Array]) -> int:
        """Read a record into `targets`, truncated or zero-padded, and return the hash of the full record."""
        read = {}
        for name, target in targets.items():
            whole = target[:length] if length <= len(target) else np.empty((length, *target.shape[1:]), target.dtype)
            self[shard].read(name, start, whole)
            target[length:] = 0
            if length > len(target):
                target[:] = whole[: len(target)]
            read[name] = whole
        return hash_of(read)


class Arena:
    """Allocator of one writer, over the shards it created and the free tokens at their ends.

    Disk space is reserved slightly ahead of the records, so a full disk shows before a record is half written.

    Args:
        used: tokens in use of each of the writer's shards, counted from the shard's start.
        growing: admits one writer at a time to create a shard, and yields the bytes used by all.
    """

    def __init__(
        self,
        shards: Shards,
        writer: int,
        used: Mapping[int, int],
        header: Header,
        growing: Callable[[], AbstractContextManager[int]],
    ) -> None:
        self.reason = ""
        """Reason of the first rejected record; empty if none was."""
        self._shards = shards
        self._header = header
        self._growing = growing
        self._used = dict(used)
        self._own_bytes = sum(shards[shard].num_bytes for shard in used)
        self._next_shard = max(used, default=writer * WRITER_FACTOR - 1) + 1
        self._refused = math.inf  # Shortest length rejected so far; final, as files never shrink.
        self._reserved = dict(used)
        self._is_full = False

    def allocate(self, length: int) -> tuple[int, int] | None:
        """Return shard and start of `length` free tokens, or None if the byte limit or the disk leaves no room."""
        for shard in list(self._used)[-NUM_OPEN_SHARDS:]:
            start, end = self._used[shard], self._used[shard] + length
            if end <= self._reserved[shard] or (end <= self._shards[shard].num_rows and self._reserve(shard, end)):
                break
        else:
            if not self._grow(length):
                return None
            shard, start = self._next_shard - 1, 0
        self._used[shard] = start + length
        return shard, start

    def note_full_disk(self) -> None:
        """Stop growing for good. Other programs need the disk too, and each retry would take the little space left."""
        self._is_full = True
        self._refuse(0, f"the disk of {self._shards.folder.path} is full")

    def _reserve(self, shard: int, end: int) -> bool:
        """Reserve disk space up to the token `end`, and some more; return False if the disk is full."""
        if self._is_full:
            return False
        table = self._shards[shard]
        ahead = min(table.num_rows, end + self._tokens_ahead())
        try:
            table.reserve(self._reserved[shard], ahead)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            self.note_full_disk()
            return False
        self._reserved[shard] = ahead
        return True

    def _tokens_ahead(self) -> int:
        used_bytes = sum(self._used.values()) * self._shards.token_bytes
        return max(MIN_SHARD_BYTES, used_bytes // GROWTH) // self._shards.token_bytes

    def _grow(self, length: int) -> bool:
        if length >= self._refused:
            return False
        with self._growing() as num_bytes:
            tokens = self._tokens_to_add(length, num_bytes)
            if tokens < length:
                return self._refuse(length, f"the bound of {self._header.max_bytes} bytes is reached")
            reserved = min(tokens, length + self._tokens_ahead())
            try:
                table = self._shards.create(self._next_shard, tokens, reserved)
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                self.note_full_disk()
                return False
        self._reserved[self._next_shard] = reserved
        self._next_shard += 1
        self._own_bytes += table.num_bytes
        return True

    def _tokens_to_add(self, length: int, num_bytes: int) -> int:
        """Return the size of the next shard in tokens; less than `length` if no record fits the limit."""
        header, token_bytes = self._header, self._shards.token_bytes
        # Which writer gets the missing records is not known in advance: each takes its share of them at a time.
        missing = header.num_samples * header.row_length * token_bytes - num_bytes
        wanted = max(missing // header.num_writers, self._own_bytes // GROWTH)
        wanted = max(MIN_SHARD_BYTES, min(MAX_SHARD_BYTES, wanted))
        # A multiple of the record length: with equal lengths no tokens are left over at the end.
        tokens = max(length, (wanted // token_bytes - ROWS_TOGETHER) // length * length)
        room = header.max_bytes - num_bytes - table_bytes(self._shards.columns, 0)
        return min(-(-tokens // ROWS_TOGETHER), room // token_bytes // ROWS_TOGETHER) * ROWS_TOGETHER

    def _refuse(self, length: int, reason: str) -> bool:
        self._refused = length
        self.reason = self.reason or reason
        return False
