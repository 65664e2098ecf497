"""The activations that frozen layers gave, one row per sample, shared by all processes of a node."""

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
    """Share of the samples, with rows of `row_length` tokens, that a store of `max_bytes` has room for: 0 to 1.

    Args:
        num_rows: samples that may be stored, where others of the data set are stored elsewhere.
    """
    rows = table_bytes(row_format.shard_columns(), (num_samples if num_rows is None else num_rows) * row_length)
    return min(1.0, max(0.0, max_bytes - table_bytes(index_columns(row_format), num_samples)) / rows)


class ActivationStore:
    """Rows of tokens x `hidden_size` numbers and their side fields, by sample; `create` makes it, `open` opens it.

    Any process may read any row; one thread of one process writes under each number of a writer, and no two processes
    write the same sample at the same time. A row has the id of the weights that it was computed with. It is cleared
    before a row is written and set again when the row is whole, and a row counts only if its hashes hold: one that was
    being written, by a process that lives or that was killed, reads as id 0.
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
        """Rows that were there when a writer opened the store."""
        self._arena = None if writer is None else self._open_arena(header, writer)
        self._has_warned = False
        self._is_dropped = False
        self.bytes_beside: Callable[[], int] = lambda: 0
        """What others have taken, since this store was opened, of the bytes that it may have."""

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
        """Make an empty store in `folder`, of which this process is writer 0; a store that was there is deleted.

        Args:
            folder: on a disk of this node, see `folder.StoreFolder`.
            num_samples: samples of the data set; every one has its place in the index.
            row_format: what a row holds.
            max_bytes: bound on the size of all files, whoever writes them; they are sparse, so the disk used is less.
            num_writers: processes that may write.
            row_length: tokens of every row, 0 if they differ; known, the shards are few and large.
            key: what the rows are of, see `folder.take_store`; the folder's name if not given.

        Raises:
            ValueError: the index alone is larger than `max_bytes`.
            OSError: the disk is full, or cannot be written.
        """
        assert num_samples > 0 and num_writers > 0
        held = folder if isinstance(folder, PrivateFolder) else PrivateFolder.at(folder, create=True)
        columns = index_columns(row_format)
        if table_bytes(columns, num_samples) > max_bytes:
            raise ValueError(
                f"The activation cache may take {max_bytes} bytes, and the index of {num_samples} samples alone takes "
                f"{table_bytes(columns, num_samples)}. Raise activation_cache_max_gb, or set activation_cache to off."
            )
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
        header.write(held)
        return cls(held, header, 0)

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str] | PrivateFolder, writer: int | None, key: str | None = None
    ) -> ActivationStore:
        """Open the store that another process made, or an earlier run, as one of its writers; None: to read only.

        Args:
            key: what its rows must be of; not checked if not given.

        Raises:
            StoreDamagedError: there is none, it is that of another key, or a file of it was cut, changed or deleted.
            ValueError: the folder is a link, another user's, or others may write to it.
            OSError: it is missing.
        """
        held = folder if isinstance(folder, PrivateFolder) else PrivateFolder.at(folder)
        header = Header.read(held, key)
        assert writer is None or 0 <= writer < header.num_writers
        return cls(held, header, writer)

    def _open_arena(self, header: Header, writer: int) -> Arena:
        for name in self._held.names():
            if name.startswith(f"shard-{writer}-") and name.endswith(".tmp"):
                self._held.unlink(name)
        # A row that another process is writing now has a place too.
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
        """No other writer adds a file inside; the bytes of those that there are, and that are there for others."""
        with self._index.table.locked():
            yield self._num_bytes() + self.bytes_beside()

    @property
    def bytes_taken(self) -> int:
        """Size of the index and of the shards of all writers, by which the bound goes.

        Of the index alone if the folder is gone.
        """
        with suppress(OSError):
            return self._num_bytes()
        return self._index.table.num_bytes

    @property
    def bytes_stored(self) -> int:
        """What these files take of the disk: they are sparse. 0 if the folder is gone."""
        with suppress(OSError):
            return sum(map(self._held.bytes_on_disk, (INDEX_FILE, *list_shards(self._held).values())))
        return 0

    def _num_bytes(self) -> int:
        return self._index.table.num_bytes + sum(map(self._held.size, list_shards(self._held).values()))

    @property
    def dropped(self) -> str | None:
        """Why the store was given up, or None."""
        if not self._is_dropped and not self._held.holds(DROPPED_FILE):
            return None
        with suppress(OSError):
            return self._held.read(DROPPED_FILE).decode(errors="replace")
        return "unknown reason"

    def drop(self, reason: str) -> None:
        """Give the store up, for all processes at once: from now on it holds nothing and takes nothing."""
        self._is_dropped = True
        try:
            self._held.write(DROPPED_FILE, reason.encode(errors="replace"))
        except OSError as error:
            # Whatever is wrong with the folder: the other processes come upon it as this one did.
            logger.debug(f"The end of the store could not be noted: {error}")

    def weights_id(self, key: str) -> int:
        """The id, 1 or more, of what `key` names (see `chain_keys`): a hash of the key and of this store.

        No table gives it out, so none can be lost, and no id is ever that of another key or of another store.
        """
        return xxhash.xxh3_64_intdigest(f"{self._store_id}\0{key}".encode()) >> 1 or 1

    def entries(self, samples: Array) -> Array:
        """`(n,)` entries of the index as they are now, see `RowFormat.entry_dtype`; zero where nothing is stored.

        Raises:
            StoreDamagedError: the index has vanished, was cut, or is not what was written.
        """
        if self.dropped is not None:
            return np.zeros(len(samples), self._index.dtype)
        return self._index.entries(samples)

    def weights_ids(self, samples: Array) -> Array:
        """`(n,)` int64: the id of the weights of each sample's row, 0 where nothing is stored; raises as `entries`."""
        return self.entries(samples)["weights_id"]

    def are_compared(self, samples: Array, entries: Array) -> Array:
        """`(n,)` bool: whether the rows of these entries are known to be of inputs that the present run has read.

        Those that the run wrote are; those that an earlier run left are after `set_compared`.
        """
        return self._index.are_compared(samples, entries)

    def set_compared(self, samples: Array, input_digests: Array) -> None:
        """Note, for all processes of the run, that it has read the inputs of samples and found these digests.

        Raises:
            StoreDamagedError: the index has vanished or was cut.
        """
        self._index.table.check()
        # What cannot be noted is read and compared again.
        with suppress(OSError):
            self._index.set_compared(samples, input_digests)

    def read(self, samples: Array, length: int) -> Rows:
        """Copy rows out.

        Args:
            samples: `(n,)` indices, in any order, also repeated.
            length: tokens of the result; longer rows are cut, shorter ones filled with zeros.

        Raises:
            StoreDamagedError: a shard has vanished or was cut, or a row is not what was written.
        """
        samples = np.asarray(samples, np.int64)
        activation = torch.empty(len(samples), length, self.row_format.hidden_size, dtype=self.row_format.dtype)
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
                # It was overwritten while it was copied, or it is damaged.
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
        """Copy a row, zeros if it is not stored; whether it is what was written."""
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
        """Store rows, in place of what the samples had.

        A sample whose row does not fit the bound or the disk is left out, and keeps the row that it had: a part of
        the data set stays stored, the same one from epoch to epoch.

        Args:
            samples: `(n,)` indices; of a repeated one the last row counts.
            weights_id: of what the rows were computed with, 1 or more.
            activation: `(n, seq, hidden)`, any floating dtype and device.
            lengths: `(n,)` tokens to store of each, at most `seq`.
            fields: each side field of the row format, `(n, seq)` or `(n, *shape)`.
            input_digests: `(n,)` uint64, kept beside the row.

        Returns:
            How many rows were stored; 0 if the store was dropped.

        Raises:
            ValueError: other fields, shapes, lengths or dtypes than the row format's, or integers beyond int32; or the
                store was opened to read only.
            StoreDamagedError: a file of the store has vanished or was cut.
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

        self._index.clear(targets)
        for place, value in zip(places, values, strict=True):
            for name, tokens in value.items():
                self._shards[place[1]].write(name, place[2], tokens)
        self._index.put(targets, entries)
        return len(targets)

    def _place(self, sample: int, entry: np.void, arena: Arena) -> bool:
        """Find room for a row; it keeps its place as long as it fits there."""
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
        """Whether the disk has the space for the entry of a sample, which had none; from now on it has."""
        try:
            self._index.make_room(sample)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            arena.note_full_disk()
            return False
        return True

    def close(self) -> None:
        """Let go of the shards; the files stay."""
        self._shards.clear()
