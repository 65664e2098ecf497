"""The activations that frozen layers gave, one row per sample, shared by all processes of a node."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import torch
import xxhash

from hf_pipetransformer.autocache.files import Folder
from hf_pipetransformer.autocache.header import DROPPED_FILE, HEADER_FILE, Header
from hf_pipetransformer.autocache.index import INDEX_FILE, Index, index_columns
from hf_pipetransformer.autocache.reading import read_rows
from hf_pipetransformer.autocache.rows import RowFormat, Rows
from hf_pipetransformer.autocache.shards import Arena, ShardMap, list_shards, used_tokens, writer_of
from hf_pipetransformer.autocache.table import Array, ArrowTable, StoreDamagedError, table_bytes
from hf_pipetransformer.autocache.writing import write_rows
from hf_pipetransformer.report.events import logger


class ActivationStore:
    """Rows of `length` tokens x `hidden_size` numbers and their side fields, by sample.

    Any process may read any row; one thread of one process writes under each number of a writer, and no two processes
    write the same sample at the same time. A row has the id of the weights that it was computed with. It is
    cleared before a row is written and set again when the row is whole, and a row counts only if its hashes hold: one
    that was being written, by a process that lives or that was killed, reads as id 0.

    Made by `create` in one process, opened by `open` in the others.
    """

    def __init__(self, folder: Folder, header: Header, writer: int) -> None:
        self.folder = folder.path
        self.num_samples = header.num_samples
        self.row_format = header.row_format
        self._held = folder
        table = ArrowTable.open(folder, INDEX_FILE, index_columns(header.row_format), header.store_id)
        if table.num_rows != header.num_samples:
            raise StoreDamagedError(f"{table.path} has {table.num_rows} samples: expected {header.num_samples}.")
        self._store_id = header.store_id
        self._index = Index(table, header.row_format, header.store_id)
        self._shards = ShardMap(folder, header.row_format, header.store_id)
        self._arena = self._open_arena(header, writer)
        self._has_warned = False
        self._is_dropped = False

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str] | Folder,
        num_samples: int,
        row_format: RowFormat,
        max_bytes: int,
        num_writers: int,
        writer: int = 0,
        row_length: int = 0,
    ) -> ActivationStore:
        """Make an empty store in `folder`; a store that was there is deleted.

        Args:
            folder: on a disk of this node, see `folder.StoreFolder`.
            num_samples: samples of the data set; every one has its place in the index.
            row_format: what a row holds.
            max_bytes: bound on the size of all files, split evenly over the writers; the index is in the share of
                writer 0.
            num_writers: processes that write.
            writer: number of this process among them.
            row_length: tokens of every row, 0 if they differ; known, the shards are few and large.

        Raises:
            ValueError: the index alone is larger than `max_bytes`.
            OSError: the disk has no room for the index, or cannot be written.
        """
        assert num_samples > 0 and 0 <= writer < num_writers
        held = folder if isinstance(folder, Folder) else Folder.at(folder, create=True)
        index_bytes = table_bytes(index_columns(row_format), num_samples)
        if index_bytes > max_bytes:
            raise ValueError(
                f"The activation cache may take {max_bytes} bytes, and the index of {num_samples} samples alone takes "
                f"{index_bytes}. Raise activation_cache_max_gb, or set activation_cache to off."
            )
        for old in (HEADER_FILE, INDEX_FILE, DROPPED_FILE, *list_shards(held).values()):
            held.unlink(old)
        header = Header(uuid.uuid4().hex, num_samples, max_bytes, num_writers, row_format, row_length)
        ArrowTable.create(held, INDEX_FILE, index_columns(row_format), num_samples, header.store_id)
        header.write(held)
        return cls(held, header, writer)

    @classmethod
    def open(cls, folder: str | os.PathLike[str] | Folder, writer: int) -> ActivationStore:
        """Open the store that another process made, or an earlier run.

        Raises:
            StoreDamagedError: there is none, or a file of it was cut, changed or deleted.
            ValueError: the folder is a link, another user's, or others may write to it.
            OSError: it is missing.
        """
        held = folder if isinstance(folder, Folder) else Folder.at(folder)
        header = Header.read(held)
        assert 0 <= writer < header.num_writers
        return cls(held, header, writer)

    def _open_arena(self, header: Header, writer: int) -> Arena:
        own = [number for number in list_shards(self._held) if writer_of(number) == writer]
        for name in self._held.names():
            if name.startswith(f"shard-{writer}-") and name.endswith(".tmp"):
                self._held.unlink(name)
        shard, start, capacity = self._index.all_slots()
        named = np.unique(shard[(capacity > 0) & (writer_of(shard) == writer)]).tolist()
        used = used_tokens(shard, start, capacity, sorted({*own, *named}))
        own_bytes = sum(self._shards[number].num_bytes for number in used)
        if writer == 0:
            own_bytes += self._index.table.num_bytes
        expected = -(-header.num_samples // header.num_writers) * header.row_length
        return Arena(self._shards, writer, header.max_bytes // header.num_writers, own_bytes, used, expected)

    @property
    def bytes_stored(self) -> int:
        """Size of the index and of the shards of all writers; of the index alone if the folder is gone."""
        total = self._index.table.num_bytes
        with suppress(OSError):
            total += sum(self._held.size(name) for name in list_shards(self._held).values())
        return total

    @property
    def is_full(self) -> bool:
        """Whether this process has had to leave a row out, for the bound or for the disk."""
        return self._arena.is_full

    @property
    def dropped(self) -> str | None:
        """Why the store was given up, or None."""
        if not self._is_dropped and not self._held.holds(DROPPED_FILE):
            return None
        try:
            return self._held.read(DROPPED_FILE).decode(errors="replace")
        except OSError:
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

    def read(self, samples: Array, length: int, out: torch.Tensor | None = None) -> Rows:
        """Copy rows out.

        Args:
            samples: `(n,)` indices, in any order, also repeated.
            length: tokens of the result; longer rows are cut, shorter ones filled with zeros.
            out: `(n, length, hidden)` of the stored dtype, contiguous, on the CPU: filled and returned as
                `Rows.activation`.

        Raises:
            StoreDamagedError: a shard has vanished or was cut, or a row is not what was written.
        """
        samples = np.asarray(samples, np.int64)
        shape = (len(samples), length, self.row_format.hidden_size)
        if out is None:
            out = torch.empty(shape, dtype=self.row_format.dtype)
        assert out.shape == shape and out.dtype == self.row_format.dtype and out.is_contiguous(), out.shape
        return read_rows(self.entries(samples), self._index, self._shards, samples, out)

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
            weights_id: id of what the rows were computed with, 1 or more.
            activation: `(n, seq, hidden)`, any floating dtype and device.
            lengths: `(n,)` tokens to store of each, at most `seq`.
            fields: each side field of the row format, `(n, seq)` or `(n, *shape)`.
            input_digests: `(n,)` uint64, kept beside the row.

        Returns:
            How many rows were stored; 0 if the store was dropped.

        Raises:
            ValueError: other fields, shapes or dtypes than the row format's, or integers per token beyond int32.
            StoreDamagedError: a file of the store has vanished or was cut.
        """
        assert weights_id > 0, weights_id
        self._index.table.check()
        if self.dropped is not None:
            return 0
        stored = write_rows(
            self._index,
            self._shards,
            self._arena,
            np.asarray(samples, np.int64),
            weights_id,
            activation,
            np.asarray(lengths, np.int32),
            fields,
            np.asarray(input_digests, np.uint64),
        )
        if self._arena.is_full and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"The activation cache in {self.folder} takes no more rows: {self._arena.reason}. The rows that are "
                "in it are used, the others are computed anew each time."
            )
        return stored

    def close(self) -> None:
        """Let go of the shards; the files stay."""
        self._shards.clear()
