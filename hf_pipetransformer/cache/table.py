"""Arrow IPC files with fixed-width columns that are modified in place."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

from hf_pipetransformer.cache.files import PrivateFolder, locked


Array = np.ndarray[Any, np.dtype[Any]]

ROWS_TOGETHER = 8
"""Row counts are multiples of 8: Arrow pads each column to 8 bytes, and these counts need no padding at any width."""

_ALIGNMENT = 64
"""The first column starts at a multiple of a cache line, which makes copying out of it about 20 % faster."""

_LOCK_SECONDS = 60.0
"""Long timeout: file systems that cannot reserve space are filled with zeros, by one process at a time."""

_END = b"\xff\xff\xff\xff\0\0\0\0"
"""End-of-stream marker of the Arrow IPC format."""


class StoreDamagedError(RuntimeError):
    """Damaged file of the activation store, not what was written; the message names the file and the finding."""


Columns = Mapping[str, np.dtype[Any]]
"""Dtype of each column; a subarray dtype such as `np.dtype((np.float32, (192,)))` becomes a fixed-size Arrow list."""


def table_bytes(columns: Columns, num_rows: int) -> int:
    return _head_bytes(columns) + num_rows * _row_bytes(columns) + len(_END)


class ArrowTable:
    """Arrow stream with a single record batch whose columns are read and written in place.

    `pread` is as fast as a memory map, and if the file is truncated it gives an error, not a SIGBUS.
    """

    def __init__(self, path: Path, descriptor: int, columns: Columns, num_rows: int) -> None:
        self._fd = descriptor
        self.path = path
        self.num_rows = num_rows
        self.num_bytes = table_bytes(columns, num_rows)
        self._row_bytes = {name: dtype.itemsize for name, dtype in columns.items()}
        self._places: dict[str, int] = {}
        place = _head_bytes(columns)
        for name, row_bytes in self._row_bytes.items():
            self._places[name] = place
            place += num_rows * row_bytes

    def __del__(self) -> None:
        os.close(self._fd)

    @classmethod
    def create(
        cls, folder: PrivateFolder, name: str, columns: Columns, num_rows: int, store_id: str, num_reserved: int = 0
    ) -> ArrowTable:
        """Create the file, sparse and all zeros, with disk space reserved for its first `num_reserved` rows.

        The file is renamed to its name when complete, so no process sees a partial one.

        Raises:
            OSError: the disk is full (nothing is left behind), or the folder is not writable.
        """
        # Otherwise Arrow would pad the columns, and the offsets in `_places` would be wrong.
        assert all(num_rows * dtype.itemsize % ROWS_TOGETHER == 0 for dtype in columns.values()), num_rows
        unfinished = name + ".tmp"
        try:
            descriptor = folder.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            table = cls(folder.path / name, descriptor, columns, num_rows)
            os.ftruncate(descriptor, table.num_bytes)
            table.reserve(0, num_reserved)
            num_blanks = _head_bytes(columns) - _bare_head_bytes(tuple(columns.items()))
            head = _head(columns, num_rows, store_id, num_blanks)
            assert len(head) == _head_bytes(columns), len(head)
            os.pwrite(descriptor, head, 0)
            os.pwrite(descriptor, _END, table.num_bytes - len(_END))
            folder.rename(unfinished, name)
        except BaseException:
            folder.unlink(unfinished)
            raise
        return table

    @classmethod
    def open(cls, folder: PrivateFolder, name: str, columns: Columns, store_id: str) -> ArrowTable:
        """Open an existing table; raises StoreDamagedError if it is missing, truncated, a link, or another store's."""
        path = folder.path / name
        try:
            descriptor = folder.open(name, os.O_RDWR)
        except OSError as error:
            raise StoreDamagedError(f"{path} cannot be opened as a table ({error}).") from error
        size = os.fstat(descriptor).st_size
        num_rows, rest = divmod(size - table_bytes(columns, 0), _row_bytes(columns))
        table = cls(path, descriptor, columns, max(num_rows, 0))
        head = os.pread(descriptor, table_bytes(columns, 0), 0)
        # The store id is in the schema's metadata, part of the header.
        if num_rows < 0 or rest or store_id.encode() not in head:
            raise StoreDamagedError(
                f"{path}, of {size} bytes, is no table of the activation store {store_id}. It was cut or changed, or "
                "belongs to another store."
            )
        return table

    def read(self, column: str, row: int, out: Array) -> None:
        """Fill `out` (C-contiguous, below 2 GB) from `column`, starting at `row`.

        Raises:
            StoreDamagedError: the file ends too early, or cannot be read.
        """
        try:
            num_read = os.preadv(self._fd, [out.data], self._place(column, row, out.nbytes))
        except OSError as error:
            raise StoreDamagedError(f"{self.path} cannot be read ({error}).") from error
        if num_read != out.nbytes:
            raise StoreDamagedError(f"{self.path} ends before the row that is read. {_CHANGED}")

    def write(self, column: str, row: int, values: Array, offset: int = 0) -> None:
        """Write to `column`, starting `offset` bytes into `row`; raises like `read`, or OSError."""
        size = values.nbytes
        if os.pwrite(self._fd, values.data, self._place(column, row, offset + size) + offset) != size:
            raise OSError(errno.EIO, "a row was written in part", os.fspath(self.path))

    def _place(self, column: str, row: int, size: int) -> int:
        start, row_bytes = self._places[column], self._row_bytes[column]
        if row < 0 or row * row_bytes + size > self.num_rows * row_bytes:
            raise StoreDamagedError(
                f"{self.path} has {self.num_rows} rows: the index of the store names row {row}. {_CHANGED}"
            )
        return start + row * row_bytes

    def reserve(self, first: int, end: int) -> None:
        """Reserve disk space for the rows `first` to `end`; raises OSError if the disk is full."""
        for name, row_bytes in self._row_bytes.items():
            if end > first:
                os.posix_fallocate(self._fd, self._places[name] + first * row_bytes, (end - first) * row_bytes)

    def check(self) -> None:
        """Raise `StoreDamagedError` if the file was deleted, or its size has changed since it was opened."""
        status = os.fstat(self._fd)
        # An open descriptor survives deletion of its file; only the link count shows it.
        if not status.st_nlink or status.st_size != self.num_bytes:
            found = f"has {status.st_size} bytes" if status.st_nlink else "has vanished"
            raise StoreDamagedError(f"{self.path} {found}: expected {self.num_bytes} bytes. {_CHANGED}")

    def locked(self) -> AbstractContextManager[None]:
        return locked(self._fd, self.path, _LOCK_SECONDS)


_CHANGED = (
    "Something outside the run changed or deleted it; keep the folder of the activation cache away from cleaning jobs."
)


def _row_bytes(columns: Columns) -> int:
    return sum(dtype.itemsize for dtype in columns.values())


@lru_cache
def _bare_head_bytes(columns: tuple[tuple[str, np.dtype[Any]], ...]) -> int:
    """Return the header size without padding. Only the columns matter: Arrow's row counts have a fixed width."""
    return len(_head(dict(columns), ROWS_TOGETHER, "0" * 32, 0))


def _head_bytes(columns: Columns) -> int:
    # Arrow aligns to 8 bytes: n blanks, a multiple of 8, make the header exactly n bytes longer.
    return -(-_bare_head_bytes(tuple(columns.items())) // _ALIGNMENT) * _ALIGNMENT


def _head(columns: Columns, num_rows: int, store_id: str, num_blanks: int) -> bytes:
    """Return the bytes that Arrow writes before the columns: schema and record-batch metadata."""
    arrays = {name: _zeros(dtype, num_rows) for name, dtype in columns.items()}
    fields = [pa.field(name, array.type, nullable=False) for name, array in arrays.items()]
    schema = pa.schema(fields, metadata={b"activation_store": store_id.encode(), b"padding": b" " * num_blanks})
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)
    sink = _Beginning()
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.content[: sink.size - num_rows * _row_bytes(columns) - len(_END)])


def _zeros(dtype: np.dtype[Any], num_rows: int) -> Any:
    """Return an Arrow array of zeros whose memory is never touched, so the system never allocates it."""
    single, (width,) = pa.from_numpy_dtype(dtype.base), dtype.shape or (1,)
    buffer = pa.py_buffer(np.zeros(num_rows, dtype))
    array = pa.Array.from_buffers(single, num_rows * width, [None, buffer])
    if not dtype.shape:
        return array
    rows = pa.list_(pa.field("item", single, nullable=False), width)
    return pa.Array.from_buffers(rows, num_rows, [None], children=[array])


class _Beginning:
    """Write-only file that keeps the content before the first large write, which is a column of zeros."""

    closed = False

    def __init__(self) -> None:
        self.content = bytearray()
        self.size = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.size == len(self.content) and size <= 65536:
            self.content += data
        self.size += size
        return size

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        pass
