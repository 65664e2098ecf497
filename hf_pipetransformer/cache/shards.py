"""Shards of rows, and the index of what they hold."""

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


MIN_SHARD_BYTES = 256 * 1024
MAX_SHARD_BYTES = 256 * 1000 * 1000
GROWTH = 36
"""A new shard is this part of what its writer has: little of the bound is taken in vain, and files stay few. Space on
the disk is reserved by the same rule, also within a shard that is larger."""

NUM_OPEN_SHARDS = 16
"""The first of a writer's last shards that has room takes a row: what is left in older ones is too little."""

WRITER_FACTOR = 1 << 16
"""The number of a shard is that of its writer times this, plus which of the writer's shards it is."""

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors that say so, of the disk or of the user's part of it."""

_SHARD_NAME = re.compile(r"shard-(\d+)-(\d+)\.arrow")


def shard_name(shard: int) -> str:
    """File of a shard."""
    writer, index = divmod(shard, WRITER_FACTOR)
    return f"shard-{writer}-{index}.arrow"


def list_shards(folder: PrivateFolder) -> dict[int, str]:
    """The names of the whole shards in a folder, by number."""
    matches = [match for name in folder.names() if (match := _SHARD_NAME.fullmatch(name))]
    return dict(sorted((int(match[1]) * WRITER_FACTOR + int(match[2]), match[0]) for match in matches))


def hash_of(columns: Mapping[str, Array]) -> int:
    """64 bits of the bytes of a row's columns, one behind the other: it knows their places."""
    hasher = xxhash.xxh3_64()
    for values in columns.values():
        hasher.update(values.data)
    return hasher.intdigest()


class Shards(dict[int, ArrowTable]):
    """The shards of a folder, by number, each opened when it is first asked for. Their rows are tokens."""

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
        """Make a shard with the space for its first tokens reserved.

        Raises:
            StoreDamagedError: there is one already.
            OSError: as `ArrowTable.create`.
        """
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
        """Copy tokens to the columns of `targets`, cut or filled up with zeros, and return the hash of all of them."""
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
    """The shards that one writer makes, and the free tokens at their ends.

    The disk's space is reserved a little ahead of the rows: a full disk shows before a row is written.

    Args:
        shards: where new shards are entered.
        writer: number of the writer; no other process may allocate under it.
        used: of each of its shards, the tokens in use, counted from the start.
        header: of the store.
        growing: to hold while a shard is made; one writer at a time, with the bytes of the store that all have made.
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
        """Why a row has been turned away; empty if none has."""
        self._shards = shards
        self._header = header
        self._growing = growing
        self._used = dict(used)
        self._own_bytes = sum(shards[shard].num_bytes for shard in used)
        self._next_shard = max(used, default=writer * WRITER_FACTOR - 1) + 1
        self._refused = math.inf  # Tokens of the shortest row that there was no room for: files never shrink.
        self._reserved = dict(used)
        self._is_full = False

    def allocate(self, length: int) -> tuple[int, int] | None:
        """Shard and start of `length` free tokens; None if the bound or the disk leaves no room."""
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
        """Take no more of the disk. Not tried again: it belongs to others too, each try takes what little is left."""
        self._is_full = True
        self._refuse(0, f"the disk of {self._shards.folder.path} is full")

    def _reserve(self, shard: int, end: int) -> bool:
        """Have the disk's space for the tokens of a shard up to `end`, and for some more."""
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
        """Make a shard with room for a row, if the bound and the disk allow one."""
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
        """Tokens of the next shard of a store of `num_bytes`; fewer than `length` if no row fits the bound."""
        header, token_bytes = self._header, self._shards.token_bytes
        # Any writer may be the one that stores what is missing, so each takes a part of it at a time.
        missing = header.num_samples * header.row_length * token_bytes - num_bytes
        wanted = max(missing // header.num_writers, self._own_bytes // GROWTH)
        wanted = max(MIN_SHARD_BYTES, min(MAX_SHARD_BYTES, wanted))
        # Whole rows, if all have this length.
        tokens = max(length, (wanted // token_bytes - ROWS_TOGETHER) // length * length)
        room = header.max_bytes - num_bytes - table_bytes(self._shards.columns, 0)
        return min(-(-tokens // ROWS_TOGETHER), room // token_bytes // ROWS_TOGETHER) * ROWS_TOGETHER

    def _refuse(self, length: int, reason: str) -> bool:
        self._refused = length
        self.reason = self.reason or reason
        return False
