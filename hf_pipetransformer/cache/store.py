"""Store the activations of the frozen blocks on disk: one record per sample, shared by all processes of a node."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import numpy as np
import torch
import xxhash

from hf_pipetransformer.cache.files import PrivateFolder
from hf_pipetransformer.cache.rows import (
    DROPPED_FILE,
    HEADER_FILE,
    Header,
    RowFormat,
    Rows,
    as_numpy,
    as_torch,
    field_column,
)
from hf_pipetransformer.cache.shards import (
    FULL_DISK,
    INDEX_FILE,
    WRITER_FACTOR,
    Arena,
    Index,
    Shards,
    hash_of,
    index_columns,
    list_shards,
    shard_name,
)
from hf_pipetransformer.cache.table import Array, ArrowTable, StoreDamagedError, table_bytes
from hf_pipetransformer.report import logger


_NUM_TRIES = 3
_PLACE = ["weights_id", "shard", "start", "length", "tokens"]


def fitting_share(
    max_bytes: float, num_samples: int, row_format: RowFormat, row_length: int, num_rows: int | None = None
) -> float:
    """Return the share of the samples, 0 to 1, that fits into `max_bytes` with records of `row_length` tokens.

    `num_rows` limits the records to those that this node stores; the index covers all `num_samples` anyway.
    """
    rows = table_bytes(row_format.shard_columns(), (num_samples if num_rows is None else num_rows) * row_length)
    return min(1.0, max(0.0, max_bytes - table_bytes(index_columns(row_format), num_samples)) / rows)


class ActivationStore:
    """Records of activations `(tokens, hidden_size)` plus side fields, addressed by sample.

    Any process may read any record. Each writer number belongs to one thread of one process, and two processes must
    not write the same sample at the same time. Each record carries the id of the weights that computed it. `write`
    sets the id to 0, writes the tokens, and then sets the id; readers also verify hashes. So a record that is being
    written, or whose writer was killed, reads as not stored.
    """

    def __init__(self, folder: PrivateFolder, header: Header, writer: int | None) -> None:
        self.folder = folder.path
        self.key = header.key
        self.num_samples = header.num_samples
        self.row_format = header.row_format
        self._held = folder
        self._store_id = header.store_id
        self._index = Index(folder, header)
        self._shards = Shards(folder, header)
        self.num_found = 0
        """Number of records already present when a writer opened the store."""
        self._arena = None if writer is None else self._open_arena(header, writer)
        self._has_warned = False
        self._is_dropped = False
        self.bytes_beside: Callable[[], int] = lambda: 0
        """Bytes that other stores have taken from the common limit since this store was opened."""

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str] | PrivateFolder,
        num_samples: int,
        row_format: RowFormat,
        max_bytes: int,
        num_writers: int,
        row_length: int = 0,
        key: str | None = None,
    ) -> ActivationStore:
        """Create an empty store in `folder` and open it as writer 0. An existing store there is deleted.

        Args:
            folder: on a local disk of this node, see `folder.StoreFolder`.
            max_bytes: limit on the total file size of all writers; the files are sparse, so disk usage is lower.
            row_length: tokens per record if all are equally long, else 0. A known length gives few, large shards.
            key: identifies the data, see `folder.take_store`; defaults to the folder's name.

        Raises:
            ValueError: the index alone exceeds `max_bytes`.
            OSError: the disk is full or not writable.
        """
        assert num_samples > 0 and num_writers > 0
        held = folder if isinstance(folder, PrivateFolder) else PrivateFolder.at(folder, create=True)
        columns = index_columns(row_format)
        if table_bytes(columns, num_samples) > max_bytes:
            raise ValueError(
                f"The activation cache may take {max_bytes} bytes, and the index of {num_samples} samples alone takes "
                f"{table_bytes(columns, num_samples)}. Raise activation_cache_max_gb, or set activation_cache to off."
            )
        # The header goes first: without it the folder has no store, whatever else a crash leaves there.
        for old in (HEADER_FILE, INDEX_FILE, DROPPED_FILE, *list_shards(held).values()):
            held.unlink(old)
        header = Header(
            store_id=uuid.uuid4().hex,
            key=key or held.path.name,
            num_samples=num_samples,
            max_bytes=max_bytes,
            num_writers=num_writers,
            row_format=row_format,
            row_length=row_length,
            run_id=uuid.uuid4().hex,
        )
        ArrowTable.create(held, INDEX_FILE, columns, num_samples, header.store_id)
        # The header comes last: it makes the store valid.
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
        header = Header.read(held, key)
        assert writer is None or 0 <= writer < header.num_writers
        return cls(held, header, writer)

    def _open_arena(self, header: Header, writer: int) -> Arena:
        # A killed process with this writer number may have left unfinished files.
        for name in self._held.names():
            if name.startswith(f"shard-{writer}-") and name.endswith(".tmp"):
                self._held.unlink(name)
        # Entries with id 0 count here: a record that is being written right now already owns its place.
        entries = self._index.read(np.arange(header.num_samples))
        self.num_found = int(np.count_nonzero(entries["weights_id"]))
        entries = entries[(entries["capacity"] > 0) & (entries["shard"] // WRITER_FACTOR == writer)]
        own = {number for number in list_shards(self._held) if number // WRITER_FACTOR == writer}
        used = dict.fromkeys(sorted(own.union(entries["shard"].tolist())), 0)
        ends = (entries["start"] + entries["capacity"]).tolist()
        for shard, end in zip(entries["shard"].tolist(), ends, strict=True):
            used[shard] = max(used[shard], end)
        return Arena(self._shards, writer, used, header, self._growing)

    @contextmanager
    def _growing(self) -> Iterator[int]:
        """Keep other writers from adding files; yield the bytes used so far, including those of other stores."""
        with self._index.table.locked():
            yield self._num_bytes() + self.bytes_beside()

    @property
    def bytes_taken(self) -> int:
        """Apparent size of the index and all shards, limited by `max_bytes`; of the index alone if they are gone."""
        with suppress(OSError):
            return self._num_bytes()
        return self._index.table.num_bytes

    @property
    def bytes_stored(self) -> int:
        """Actual disk usage of the sparse files; 0 if the folder is gone."""
        with suppress(OSError):
            return sum(map(self._held.bytes_on_disk, (INDEX_FILE, *list_shards(self._held).values())))
        return 0

    def _num_bytes(self) -> int:
        return self._index.table.num_bytes + sum(map(self._held.size, list_shards(self._held).values()))

    @property
    def dropped(self) -> str | None:
        """Reason why the store was abandoned, or None while it is in use."""
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
        return xxhash.xxh3_64_intdigest(f"{self._store_id}\0{key}".encode()) >> 1 or 1

    def entries(self, samples: Array) -> Array:
        """Return the current index entries `(n,)`, see `RowFormat.entry_dtype`; all zero where no record is stored.

        Raises:
            StoreDamagedError: the index is gone, was truncated, or fails its hash check.
        """
        if self.dropped is not None:
            return np.zeros(len(samples), self._index.dtype)
        return self._index.entries(samples)

    def weights_ids(self, samples: Array) -> Array:
        """Return the weights id of each sample's record, `(n,)` int64, 0 if there is none. Raises like `entries`."""
        return self.entries(samples)["weights_id"]

    def are_compared(self, samples: Array, entries: Array) -> Array:
        """Return a bool mask `(n,)`: True if this run wrote the record or verified it with `set_compared`."""
        return self._index.are_compared(samples, entries)

    def set_compared(self, samples: Array, input_digests: Array) -> None:
        """Mark the inputs of samples as read and found to have these digests, for all processes of this run.

        Raises:
            StoreDamagedError: the index is gone or was truncated.
        """
        self._index.table.check()
        # A lost mark is harmless: the sample is read and compared again.
        with suppress(OSError):
            self._index.set_compared(samples, input_digests)

    def read(self, samples: Array, length: int) -> Rows:
        """Read records into new tensors.

        Args:
            samples: `(n,)` indices in any order, repeats allowed.
            length: tokens per record in the result; longer records are truncated, shorter ones zero-padded.

        Raises:
            StoreDamagedError: a shard is gone or was truncated, or a record fails its hash check.
        """
        samples = np.asarray(samples, np.int64)
        activation = torch.empty(len(samples), length, self.row_format.hidden_size, dtype=self.row_format.dtype)
        # as_numpy shares memory, so records are read directly into the tensor.
        columns = {"activation": as_numpy(activation)}
        for name in map(field_column, self.row_format.token_fields):
            columns[name] = np.empty((len(samples), length), self._shards.columns[name])
        entries = self.entries(samples)
        places = entries[_PLACE].tolist()
        for shard in {place[1] for place in places if place[0]}:
            self._shards[shard].check()
        for row, place in enumerate(places):
            targets = {name: values[row] for name, values in columns.items()}
            for _ in range(_NUM_TRIES):
                if self._has_copied(place, targets):
                    break
                # Either a writer replaced the record during the copy (retry helps), or it is damaged.
                entries[row : row + 1] = self.entries(samples[row : row + 1])
                place = entries[_PLACE][row].item()
            else:
                raise StoreDamagedError(
                    f"The row of sample {samples[row]} is not what was written: {place[3]} tokens from token "
                    f"{place[2]} of {self.folder / shard_name(place[1])} have another hash. The disk or the memory is "
                    "faulty, or something outside the run wrote to the file. Delete the folder to compute the rows "
                    "anew."
                )
        fields = {}
        for name, dtype in self.row_format.token_fields.items():
            fields[name] = as_torch(columns[field_column(name)], dtype)
        for name, (dtype, _) in self.row_format.sample_fields.items():
            fields[name] = as_torch(entries[field_column(name)], dtype)
        return Rows(entries["weights_id"].copy(), entries["length"].copy(), activation, fields)

    def _has_copied(self, place: tuple[int, ...], targets: Mapping[str, Array]) -> bool:
        """Copy a record, or zeros if none is stored; return False if its hash does not match."""
        weights_id, shard, start, length, tokens = place
        if weights_id:
            return self._shards.read_row(shard, start, length, targets) == tokens
        for target in targets.values():
            target[:] = 0
        return True

    def write(
        self,
        samples: Array,
        weights_id: int,
        activation: torch.Tensor,
        lengths: Array,
        fields: Mapping[str, torch.Tensor],
        input_digests: Array,
    ) -> int:
        """Write records, replacing those the samples already have, and return the number written (0 if dropped).

        A sample whose record exceeds the byte limit or the disk space is skipped and keeps its old record. So when the
        store is full, the same part of the data set stays cached from epoch to epoch.

        Args:
            samples: `(n,)` indices; for a repeated sample the last record wins.
            weights_id: 1 or more, see the method `weights_id`.
            activation: `(n, seq, hidden)`, any floating dtype and device.
            lengths: `(n,)` tokens to store per sample, 1 to `seq`.
            fields: every side field of the format, `(n, seq)` or `(n, *shape)`.
            input_digests: `(n,)` uint64, stored in the index.

        Raises:
            ValueError: the arguments do not match the format, or the store is read-only.
            StoreDamagedError: a file of the store is gone or was truncated.
        """
        assert weights_id > 0 and len(samples) == len(lengths) == len(input_digests) == len(activation)
        arena = self._arena
        if arena is None:
            raise ValueError(f"The store in {self.folder} was opened to read only.")
        if len(samples) and not 1 <= min(lengths) <= max(lengths) <= activation.shape[1]:
            raise ValueError(f"lengths are {min(lengths)} to {max(lengths)}: expected 1 to {activation.shape[1]}.")
        columns, sample_fields = self.row_format.stored(activation, fields)
        self._index.table.check()
        if self.dropped is not None:
            return 0
        last_row = {sample: row for row, sample in enumerate(np.asarray(samples).tolist())}
        targets = np.fromiter(last_row, np.int64, len(last_row))
        rows = np.fromiter(last_row.values(), np.int64, len(last_row))
        entries = self._index.entries(targets)
        entries["length"] = np.asarray(lengths)[rows]
        is_placed = [
            self._place(sample, entry, arena) for sample, entry in zip(targets.tolist(), entries, strict=True)
        ]
        targets, rows, entries = targets[is_placed], rows[is_placed], entries[is_placed]
        places = entries[_PLACE].tolist()
        values = [
            {name: column[row, : place[3]] for name, column in columns.items()}
            for row, place in zip(rows.tolist(), places, strict=True)
        ]
        entries["tokens"] = [hash_of(value) for value in values]
        entries["weights_id"] = weights_id
        entries["input_digest"] = np.asarray(input_digests)[rows]
        for name, field in sample_fields.items():
            entries[name] = field[rows]
        for shard in {place[1] for place in places}:
            self._shards[shard].check()

        # Crash safety: ids go to 0 first, and `put` sets them only after all tokens are written.
        self._index.clear(targets)
        for place, value in zip(places, values, strict=True):
            for name, tokens in value.items():
                self._shards[place[1]].write(name, place[2], tokens)
        self._index.put(targets, entries)
        return len(targets)

    def _place(self, sample: int, entry: np.void, arena: Arena) -> bool:
        """Find space for a record and put it into `entry`. A record keeps its place while it fits there."""
        length = int(entry["length"])
        if entry["capacity"] >= length:
            return True
        slot = arena.allocate(length)
        if slot is not None and not entry["capacity"] and not self._has_entry(sample, arena):
            slot = None
        if slot is not None:
            entry["shard"], entry["start"] = slot
            entry["capacity"] = length
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"The activation cache in {self.folder} takes no more rows: {arena.reason}. The rows that are "
                "in it are used, the others are computed anew each time."
            )
        return slot is not None

    def _has_entry(self, sample: int, arena: Arena) -> bool:
        """Allocate disk space for the index entry of a sample that had none; return False if the disk is full."""
        try:
            self._index.make_room(sample)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            arena.note_full_disk()
            return False
        return True

    def close(self) -> None:
        self._shards.clear()
