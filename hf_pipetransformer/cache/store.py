"""Store the activations of the frozen blocks on disk: one record per sample, shared by all processes of a node.

An index with one entry per sample says where the sample's record is; each writer appends records to a file of its own
and rewrites them in place. Both are flat files: nothing is mapped into memory, so no truncated file can end a process.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import xxhash

from hf_pipetransformer.cache.files import Array, PrivateFolder, StoreDamagedError, StoreFile
from hf_pipetransformer.cache.records import (
    ENTRY,
    HEADER_FILE,
    INDEX_FILE,
    Header,
    Index,
    RecordFormat,
    StoredRecords,
    as_stored,
    hash_of,
    index_bytes,
)
from hf_pipetransformer.report import logger
from hf_pipetransformer.report.files import FULL_DISK


DROPPED_FILE = "dropped"
RECORDS_FILE = "records-{}.bin"

_NUM_TRIES = 3
_LOCK_SECONDS = 60.0
"""Long timeout: file systems that cannot reserve space are filled with zeros, by one process at a time."""
MIN_GROWTH_BYTES = 256 * 1024
GROWTH = 36
"""A writer's file grows by at least 1 / GROWTH of its size: this wastes little disk space and keeps locks rare."""


@dataclass(frozen=True)
class StoreSize:
    """Bytes that a store of all samples would take on this node, those of its index, and the limit."""

    needed: float
    index: float
    allowed: float

    @property
    def share(self) -> float:
        """Share of the samples, 0 to 1, that the store can hold; the index covers all of them anyway."""
        return min(1.0, max(0.0, self.allowed - self.index) / (self.needed - self.index))


def store_size(
    max_bytes: float, num_samples: int, record_format: RecordFormat, length: int, num_records: int | None = None
) -> StoreSize:
    """Return the size of a store with records of `length` tokens, of which `max_bytes` are allowed.

    `num_records` is the number of records that this node stores, all `num_samples` by default.
    """
    index = index_bytes(num_samples)
    records = (num_samples if num_records is None else num_records) * record_format.record_bytes(length)
    return StoreSize(index + records, index, max_bytes)


@dataclass
class Counts:
    """Counters of what a process has read of a store and written to it: records, and seconds.

    A hit is a record that was read, a miss one that was computed. While nothing is to be stored, nothing is counted.
    """

    hits: int = 0
    misses: int = 0
    written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._reported = asdict(self)

    def since_report(self) -> dict[str, float]:
        """Return by how much the counters have grown since the last call."""
        before, self._reported = self._reported, asdict(self)
        return {name: value - before[name] for name, value in self._reported.items()}


class Space:
    """Allocator of one writer: its file, which grows slightly ahead of its records.

    A full disk therefore shows before a record is half written.

    Args:
        end: end of the writer's last record, in bytes.
        growing: admits one writer at a time, and yields the bytes that this file may still grow by.
    """

    def __init__(
        self, writer: int, file: StoreFile, end: int, max_bytes: int, growing: Callable[[], Iterator[int]]
    ) -> None:
        self.writer = writer
        self._file = file
        self._end = end
        self._max_bytes = max_bytes
        self._growing = contextmanager(growing)
        self._reserved = file.size()
        self._refused: float = math.inf  # Fewest bytes beyond the reserved ones rejected so far; files never shrink.
        if self._reserved < end:
            raise StoreDamagedError(f"{file.path} has {self._reserved} bytes: the index names {end}. It was cut.")

    def check(self) -> None:
        """Raise StoreDamagedError if the file was deleted or cut, or another process writes under the same number."""
        self._file.check_size(self._reserved)

    def allocate(self, num_bytes: int) -> int | None:
        """Return the start of free space, or None if the byte limit or the disk leaves no room."""
        start, end = self._end, self._end + num_bytes
        if end > self._reserved and not self._grow(end):
            return None
        self._end = end
        return start

    def note_full_disk(self) -> bool:
        """Stop growing for good; return False.

        Other programs need the disk too, and each retry would take the little space left.
        """
        return self._refuse(0, f"the disk of {self._file.path.parent} is full")

    def _grow(self, end: int) -> bool:
        missing = end - self._reserved
        if missing >= self._refused:
            return False
        with self._growing() as room:
            if missing > room:
                return self._refuse(missing, f"the bound of {self._max_bytes} bytes is reached")
            # More than is missing, because each growth takes the lock that all writers share.
            grown = self._reserved + min(room, max(missing, MIN_GROWTH_BYTES, self._reserved // GROWTH))
            try:
                self._file.reserve(self._reserved, grown)
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                # Some file systems keep the part that still fitted.
                self._file.resize(self._reserved)
                return self.note_full_disk()
        self._reserved = grown
        return True

    def _refuse(self, num_bytes: int, reason: str) -> bool:
        if self._refused == math.inf:
            logger.warning(
                f"The activation cache in {self._file.path.parent} takes no more records: {reason}. Stored records "
                "are used, the other samples are computed each time. Name a larger disk with activation_cache_dir."
            )
        self._refused = num_bytes
        return False


class ActivationStore:
    """Records of activations `(tokens, hidden_size)`, addressed by sample.

    Any process may read any record. Each writer number belongs to one thread of one process, and two processes must
    not write the same sample at the same time. Each record carries the id of the weights that computed it. `write`
    sets the id to 0, writes the tokens, and then sets the id; readers also verify hashes. So a record that is being
    written, or whose writer was killed, reads as not stored.
    """

    def __init__(self, folder: PrivateFolder, header: Header, writer: int | None) -> None:
        self.folder = folder.path
        self.key = header.key
        self.num_samples = header.num_samples
        self.record_format = header.record_format
        self.run_id = header.run_id
        self._held = folder
        self._header = header
        self._index = Index(folder, header)
        self._files: dict[int, StoreFile] = {}
        self.num_found = 0
        """Number of records already present when a writer opened the store."""
        self._space = None if writer is None else self._open_space(writer)
        self._is_dropped = self.is_closed = False
        self.bytes_beside: Callable[[], int] = lambda: 0
        """Bytes that other stores have taken from the common limit since this store was opened."""

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str] | PrivateFolder,
        num_samples: int,
        record_format: RecordFormat,
        max_bytes: int,
        key: str | None = None,
    ) -> ActivationStore:
        """Create an empty store in `folder` and open it as writer 0. An existing store there is deleted.

        Args:
            folder: on a local disk of this node, see `folder.StoreFolder`.
            max_bytes: limit on the total file size of all writers; the index is sparse, so disk usage is lower.
            key: identifies the data, see `folder.take_store`; defaults to the folder's name.

        Raises:
            ValueError: the index alone exceeds `max_bytes`.
            OSError: the disk is full or not writable.
        """
        assert num_samples > 0
        held = folder if isinstance(folder, PrivateFolder) else PrivateFolder.at(folder, create=True)
        size = index_bytes(num_samples)
        if size > max_bytes:
            raise ValueError(
                f"The activation cache may take {max_bytes} bytes, and the index of {num_samples} samples alone takes "
                f"{size}. Raise activation_cache_max_gb, or set activation_cache to off."
            )
        # The header goes first and comes last: without it the folder has no store, whatever else a crash leaves there.
        for old in (HEADER_FILE, INDEX_FILE, DROPPED_FILE, *_records_files(held)):
            held.unlink(old)
        header = Header(
            store_id=uuid.uuid4().hex,
            key=key or held.path.name,
            num_samples=num_samples,
            max_bytes=max_bytes,
            record_format=record_format,
            run_id=uuid.uuid4().hex,
        )
        StoreFile(held, INDEX_FILE, create=True).resize(size)
        header.write(held)
        return cls(held, header, 0)

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str] | PrivateFolder, writer: int | None, key: str | None = None
    ) -> ActivationStore:
        """Open an existing store, under a writer number or, with None, read-only.

        Args:
            key: expected key of the store; None skips the check.

        Raises:
            StoreDamagedError: no store is there, its key differs, or a file was truncated, changed or deleted.
            ValueError: the folder is a link, belongs to another user, or is writable by others.
            OSError: the folder is missing.
        """
        held = folder if isinstance(folder, PrivateFolder) else PrivateFolder.at(folder)
        return cls(held, Header.read(held, key), writer)

    @classmethod
    def reopen(cls, folder: PrivateFolder, key: str, max_bytes: int, num_more: int = 0) -> ActivationStore:
        """Open a store that an earlier run kept, as writer 0, with this run's limit.

        The limit applies to new records; those that are there are served even beyond it.

        Args:
            num_more: makes room for as many records behind the last one.

        Raises:
            StoreDamagedError: like `open`.
            OSError: the disk is full or not writable.
        """
        header = Header.read(folder, key)
        index = Index(folder, header)
        capacities = index.read(np.arange(header.num_samples if num_more else 0))["capacity"]
        room = max(header.num_samples, num_more + int(np.flatnonzero(capacities).max(initial=-1)) + 1)
        index.file.resize(index_bytes(room))
        replace(header, num_samples=room, max_bytes=max_bytes, run_id=uuid.uuid4().hex).write(folder)
        return cls.open(folder, 0, key)

    def _open_space(self, writer: int) -> Space:
        # Entries with id 0 count here: a record that is being written right now already owns its place.
        entries = self._index.read(np.arange(self.num_samples))
        self.num_found = int(np.count_nonzero(entries["weights_id"]))
        # Behind all places that this writer number has given out before, in earlier runs, too.
        entries = entries[(entries["capacity"] > 0) & (entries["writer"] == writer)]
        places = zip(entries["start"].tolist(), entries["capacity"].tolist(), strict=True)
        end = max((start + self.record_format.record_bytes(capacity) for start, capacity in places), default=0)
        name = RECORDS_FILE.format(writer)
        # Created only if nothing of that name is there: a link is damage, not a reason to end the run.
        file = self._files[writer] = StoreFile(self._held, name, create=name not in self._held.names())
        return Space(writer, file, end, self._header.max_bytes, self._growing)

    def _growing(self) -> Iterator[int]:
        """Keep other writers from growing their files; yield the bytes left, also by other stores."""
        # One lock for all writers, because they share the limit.
        with self._index.file.locked(_LOCK_SECONDS):
            yield self._header.max_bytes - self.bytes_taken - self.bytes_beside()

    def _file(self, writer: int) -> StoreFile:
        if writer not in self._files:
            self._files[writer] = StoreFile(self._held, RECORDS_FILE.format(writer))
        return self._files[writer]

    @property
    def bytes_taken(self) -> int:
        """Size of the index and all records, limited by `max_bytes`; of the index alone if they are gone."""
        records = 0
        with suppress(OSError):
            # The file system is asked, because other processes grow their files as well.
            records = sum(self._held.status(name).st_size for name in _records_files(self._held))
        return self._index.num_bytes + records

    @property
    def bytes_stored(self) -> int:
        """Actual disk usage, less than `bytes_taken` as the index is sparse; 0 if the folder is gone."""
        with suppress(OSError):
            return sum(map(self._held.bytes_on_disk, (INDEX_FILE, *_records_files(self._held))))
        return 0

    @property
    def dropped(self) -> str | None:
        """Reason why the store was abandoned, or None while it is in use."""
        # Looked up each time, because any process of the machine may drop the store.
        if not self._is_dropped and not self._held.holds(DROPPED_FILE):
            return None
        with suppress(OSError):
            return self._held.read(DROPPED_FILE).decode(errors="replace")
        return "unknown reason"

    def drop(self, reason: str) -> None:
        """Abandon the store in all processes: it serves no records and accepts none from now on."""
        self._is_dropped = True
        try:
            self._held.write(DROPPED_FILE, reason.encode(errors="replace"))
        except OSError as error:
            # Best effort: if the folder is broken, the other processes will run into it as well.
            logger.debug(f"The end of the store could not be noted: {error}")

    def weights_id(self, key: str) -> int:
        """Return the positive id of the weights named by `key`: a hash, so there is no table of ids to lose."""
        # 63 bits, as entries store the id as a signed int64, and never 0, which means no record.
        return xxhash.xxh3_64_intdigest(f"{self._header.store_id}\0{key}".encode()) >> 1 or 1

    def entries(self, samples: Array) -> Array:
        """Return the current index entries `(n,)`, see `ENTRY`; all zero where nothing is stored.

        Raises:
            StoreDamagedError: the index is gone, was truncated, or fails its hash check.
        """
        if self.dropped is not None:
            return np.zeros(len(samples), ENTRY)
        return self._index.entries(samples)

    def weights_ids(self, samples: Array) -> Array:
        """Return the weights id of each sample's record, `(n,)` int64, 0 if there is none. Raises like `entries`."""
        return self.entries(samples)["weights_id"]

    def read(self, samples: Array, length: int) -> StoredRecords:
        """Read records into new tensors.

        Args:
            samples: `(n,)` indices in any order, repeats allowed.
            length: tokens per record in the result; longer records are truncated, shorter ones zero-padded.

        Raises:
            StoreDamagedError: a file is gone or was truncated, or a record fails its hash check.
        """
        samples = np.asarray(samples, np.int64)
        activation = self.record_format.empty(len(samples), length)
        # It shares the tensor's memory, so records are read directly into it.
        stored = as_stored(activation)
        entries = self.entries(samples)
        # Reading through an open descriptor works after its file was deleted; only the size check notices.
        for writer in set(entries["writer"][entries["weights_id"] != 0].tolist()):
            self._file(writer).size()
        for position, (sample, place) in enumerate(zip(samples.tolist(), _places(entries), strict=True)):
            for _ in range(_NUM_TRIES):
                if self._has_copied(place, stored[position]):
                    break
                # Either a writer replaced the record during the copy (retry helps), or it is damaged.
                entries[position : position + 1] = self.entries(samples[position : position + 1])
                (place,) = _places(entries[position : position + 1])
            else:
                raise StoreDamagedError(
                    f"The record of sample {sample} is not what was written: {place[3]} tokens from byte {place[2]} "
                    f"of {self._file(place[1]).path} have another hash. The disk or the memory is faulty, or "
                    "something outside the run wrote to the file. Delete the folder to compute the records again."
                )
        return StoredRecords(entries["weights_id"].copy(), activation)

    def _has_copied(self, place: tuple[int, ...], target: Array) -> bool:
        """Copy a record, truncated or zero-padded, or zeros if none is stored; return False if its hash is another."""
        weights_id, writer, start, length, tokens = place
        if not weights_id:
            target[:] = 0
            return True
        # The hash covers all tokens of the record and nothing else, so exactly these are read.
        whole = target[:length] if length <= len(target) else np.empty((length, *target.shape[1:]), target.dtype)
        self._file(writer).read(start, [whole])
        if length > len(target):
            target[:] = whole[: len(target)]
        target[length:] = 0
        return hash_of(whole) == tokens

    def write(
        self,
        samples: Array,
        weights_id: int,
        activation: torch.Tensor,
        lengths: Array,
        digests: Array,
    ) -> int:
        """Write records, replacing those the samples already have, and return the number written (0 if dropped).

        A sample whose record exceeds the byte limit or the disk space is skipped and keeps its old record. So when the
        store is full, the same part of the data set stays cached from epoch to epoch.

        Args:
            samples: `(n,)` indices; for a repeated sample the last record wins.
            weights_id: 1 or more, see the method `weights_id`.
            activation: `(n, seq, hidden)`, any floating dtype and device.
            lengths: `(n,)` tokens to store per sample, 1 to `seq`.
            digests: `(n, 2)` uint64, of what the records were made from.

        Raises:
            ValueError: the arguments do not match the format, or the store is read-only.
            StoreDamagedError: a file of the store is gone or was truncated.
        """
        assert weights_id > 0 and len(samples) == len(lengths) == len(digests) == len(activation)
        if self._space is None:
            raise ValueError(f"The store in {self.folder} was opened to read only.")
        if len(samples) and not 1 <= min(lengths) <= max(lengths) <= activation.shape[1]:
            raise ValueError(f"lengths are {min(lengths)} to {max(lengths)}: expected 1 to {activation.shape[1]}.")
        stored = self.record_format.stored(activation)
        self._index.check()
        self._space.check()
        if self.dropped is not None:
            return 0
        last = {sample: position for position, sample in enumerate(np.asarray(samples).tolist())}
        targets = np.fromiter(last, np.int64, len(last))
        chosen = np.fromiter(last.values(), np.int64, len(last))
        entries = self._index.entries(targets)
        entries["length"] = np.asarray(lengths)[chosen]
        is_placed = [
            self._place(sample, entry, self._space) for sample, entry in zip(targets.tolist(), entries, strict=True)
        ]
        targets, chosen, entries = targets[is_placed], chosen[is_placed], entries[is_placed]
        places = _places(entries)
        values = [stored[position, : place[3]] for position, place in zip(chosen.tolist(), places, strict=True)]
        entries["tokens"] = [hash_of(record) for record in values]
        entries["weights_id"] = weights_id
        entries["digest"] = np.asarray(digests)[chosen]
        # Crash safety: `_place` has set ids to 0, and `put` sets them only after all tokens are written.
        self._write_tokens(places, values)
        self._index.put(targets, entries)
        return len(targets)

    def _write_tokens(self, places: list[tuple[int, ...]], values: list[Array]) -> None:
        # A record keeps its place, which may be in the file of another writer, one of an earlier run, say.
        for writer in {place[1] for place in places}:
            self._file(writer).size()
        for (_, writer, start, _, _), tokens in zip(places, values, strict=True):
            self._file(writer).write(start, [tokens])

    def _place(self, sample: int, entry: np.void, space: Space) -> bool:
        """Find space for a record, put it into `entry`, and mark the record as being written.

        A record keeps its place while it fits there.
        """
        length, is_new = int(entry["length"]), not entry["capacity"]
        if entry["capacity"] < length:
            start = space.allocate(self.record_format.record_bytes(length))
            if start is None:
                return False
            entry["writer"], entry["start"], entry["capacity"] = space.writer, start, length
        return self._index.clear(sample, is_new) or space.note_full_disk()

    def close(self) -> None:
        self._files.clear()
        self.is_closed = True


def _places(entries: Array) -> list[tuple[int, ...]]:
    """Return weights id, writer, start, length and hash of the tokens of each record."""
    places: list[tuple[int, ...]] = entries[["weights_id", "writer", "start", "length", "tokens"]].tolist()
    return places


def _records_files(folder: PrivateFolder) -> list[str]:
    prefix, suffix = RECORDS_FILE.split("{}")
    return [name for name in folder.names() if name.startswith(prefix) and name.endswith(suffix)]
