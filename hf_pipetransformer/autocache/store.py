"""The activations that frozen layers gave, one row per sample, shared by all processes of a node."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from hf_pipetransformer.autocache.header import DROPPED_FILE, HEADER_FILE, Header
from hf_pipetransformer.autocache.levels import LEVELS_FILE, LevelTable
from hf_pipetransformer.autocache.reading import read_rows
from hf_pipetransformer.autocache.rows import RowFormat, Rows, field_column
from hf_pipetransformer.autocache.shards import Arena, ShardMap, list_shards, used_tokens
from hf_pipetransformer.autocache.table import Array, ArrowTable, StoreDamagedError, table_bytes
from hf_pipetransformer.autocache.writing import write_rows
from hf_pipetransformer.report.events import logger


INDEX_FILE = "index.arrow"


class ActivationStore:
    """Rows of `length` tokens x `hidden_size` numbers and their side fields, by sample.

    Any process may read any row; one thread of one process writes under each number of a writer, and no two processes
    write the same sample at the same time. A row has a level, an id of what it was computed with (`level_of`). It is
    cleared before a row is written and set again when the row is whole, and a reader takes it before and after it
    copies: a row that was being written, by a process that lives or that was killed, reads as level 0.

    Made by `create` in one process, opened by `open` in the others.
    """

    def __init__(self, folder: Path, header: Header, writer: int) -> None:
        self.folder = folder
        self.num_samples = header.num_samples
        self.row_format = header.row_format
        self._index = ArrowTable.open(folder / INDEX_FILE, header.row_format.index_columns(), header.store_id)
        if self._index.num_rows != header.num_samples:
            raise StoreDamagedError(
                f"{self._index.path} has {self._index.num_rows} samples: expected {header.num_samples}."
            )
        self._columns = self._index.columns
        self._shards = ShardMap(folder, header.row_format, header.store_id)
        self._levels = LevelTable(folder)
        self._arena = self._open_arena(header, writer)
        self._has_warned = False
        if (folder / DROPPED_FILE).exists():
            self._columns["dropped"][0] = 1

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
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
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        index_bytes = table_bytes(row_format.index_columns(), num_samples)
        if index_bytes > max_bytes:
            raise ValueError(
                f"The activation cache may take {max_bytes} bytes, and the index of {num_samples} samples alone takes "
                f"{index_bytes}. Raise activation_cache_max_gb, or set activation_cache to off."
            )
        for old in (path / HEADER_FILE, path / INDEX_FILE, path / LEVELS_FILE, path / DROPPED_FILE):
            old.unlink(missing_ok=True)
        for old in list_shards(path).values():
            old.unlink()
        header = Header(uuid.uuid4().hex, num_samples, max_bytes, num_writers, row_format, row_length)
        ArrowTable.create(path / INDEX_FILE, row_format.index_columns(), num_samples, header.store_id)
        header.write(path)
        return cls(path, header, writer)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], writer: int) -> ActivationStore:
        """Open the store that another process made, or an earlier run.

        Raises:
            StoreDamagedError: there is none, or a file of it was cut, changed or deleted.
        """
        header = Header.read(Path(folder))
        assert 0 <= writer < header.num_writers
        return cls(Path(folder), header, writer)

    def _open_arena(self, header: Header, writer: int) -> Arena:
        own = {number: path for number, path in list_shards(self.folder).items() if number >> 16 == writer}
        for unfinished in self.folder.glob(f"shard-{writer}-*.tmp"):
            unfinished.unlink(missing_ok=True)
        own_bytes = sum(path.stat().st_size for path in own.values())
        if writer == 0:
            own_bytes += self._index.num_bytes
        shard, capacity = self._columns["shard"], self._columns["capacity"]
        named = np.unique(shard[(capacity > 0) & (shard >> 16 == writer)]).tolist()
        used = used_tokens(shard, self._columns["start"], capacity, sorted({*own, *named}))
        expected = -(-header.num_samples // header.num_writers) * header.row_length
        return Arena(self._shards, writer, header.max_bytes // header.num_writers, own_bytes, used, expected)

    @property
    def bytes_stored(self) -> int:
        """Size of the index and of the shards of all writers; of the index alone if the folder is gone."""
        if not self.folder.is_dir():
            return self._index.num_bytes
        return self._index.num_bytes + sum(path.stat().st_size for path in list_shards(self.folder).values())

    @property
    def is_full(self) -> bool:
        """Whether this process has had to leave a row out, for the bound or for the disk."""
        return self._arena.is_full

    @property
    def dropped(self) -> str | None:
        """Why the store was given up, or None."""
        if not self._columns["dropped"][0]:
            return None
        try:
            return (self.folder / DROPPED_FILE).read_text(encoding="utf-8")
        except OSError:
            return "unknown reason"

    def drop(self, reason: str) -> None:
        """Give the store up, for all processes at once: from now on it holds nothing and takes nothing."""
        try:
            self._index.check_size()
            self._columns["dropped"][0] = 1
            unfinished = self.folder / f"{DROPPED_FILE}.{os.getpid()}"
            unfinished.write_text(reason, encoding="utf-8")
            os.rename(unfinished, self.folder / DROPPED_FILE)
        except (OSError, StoreDamagedError) as error:
            # Whatever is wrong with the folder: the other processes come upon it as this one did.
            logger.debug(f"The end of the store could not be noted: {error}")

    def level_of(self, key: str) -> int:
        """The id, 1 or more, of a level's key, the same in all processes; a new key gets the next id."""
        return self._levels.level_of(key)

    def levels(self, samples: Array) -> Array:
        """`(n,)` int64: the level of each sample's row, 0 where nothing is stored."""
        found = self._take("level", samples)
        return np.zeros_like(found) if self._columns["dropped"][0] else found

    def lengths(self, samples: Array) -> Array:
        """`(n,)` int32: stored tokens; means something only where the level is not 0."""
        return self._take("length", samples)

    def input_digests(self, samples: Array) -> Array:
        """`(n,)` uint64: what `write` was given; means something only where the level is not 0."""
        return self._take("input_digest", samples)

    def sample_field(self, samples: Array, name: str) -> Array:
        """One side field of each sample, `(n,)` or `(n, width)`, as it is now; meaningless where nothing is stored."""
        return self._take(field_column(name), samples)

    def _take(self, column: str, samples: Array) -> Array:
        self._index.check_size()
        return self._columns[column][samples]

    def read(self, samples: Array, length: int, out: torch.Tensor | None = None, verify: bool = True) -> Rows:
        """Copy rows out.

        Args:
            samples: `(n,)` indices, in any order, also repeated.
            length: tokens of the result; longer rows are cut, shorter ones filled with zeros.
            out: `(n, length, hidden)` of the stored dtype, contiguous, on the CPU: filled and returned as
                `Rows.activation`.
            verify: compare checksums; without, a row that is written again at its own level while it is copied may
                come out mixed.

        Raises:
            StoreDamagedError: a shard has vanished or was cut, or a row is not what was written.
        """
        samples = np.asarray(samples, np.int64)
        shape = (len(samples), length, self.row_format.hidden_size)
        if out is None:
            out = torch.empty(shape, dtype=self.row_format.dtype)
        assert out.shape == shape and out.dtype == self.row_format.dtype and out.is_contiguous(), out.shape
        return read_rows(self._index, self._shards, samples, out, verify)

    def write(
        self,
        samples: Array,
        level: int,
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
            level: id of what the rows were computed with, 1 or more.
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
        assert level > 0, level
        self._index.check_size()
        if self._columns["dropped"][0]:
            return 0
        stored = write_rows(
            self._index,
            self._shards,
            self._arena,
            np.asarray(samples, np.int64),
            level,
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
        """Let go of the maps; the files stay."""
        self._shards.clear()
        self._columns.clear()
