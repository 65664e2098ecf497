"""One Arrow file of fixed-width columns that is changed in place."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

from hf_pipetransformer.autocache.files import Folder


Array = np.ndarray[Any, np.dtype[Any]]

_ID_KEY = b"activation_store"
_SIZE_KEY = b"file_size"
_SIZE_DIGITS = 20
_PADDING_KEY = b"padding"
_ALIGNMENT = 64
"""The first column begins at a multiple of a cache line: copying out of it is then a fifth faster."""

_MAX_BUFFERS = 512
"""Of one write; systems take 1024."""


class StoreDamagedError(RuntimeError):
    """A file of the activation store is not what was written; the text names the file and what was found."""


@dataclass(frozen=True)
class Column:
    """`width` numbers of `dtype` in each row; a width above 1 becomes an Arrow list of fixed size."""

    dtype: np.dtype[Any]
    width: int = 1

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * self.width

    @property
    def arrow_type(self) -> Any:
        single = pa.from_numpy_dtype(self.dtype)
        return single if self.width == 1 else pa.list_(pa.field("item", single, nullable=False), self.width)

    def zeros(self, num_rows: int) -> Any:
        """An Arrow array of zeros; its memory is never touched, so it costs none."""
        buffer = pa.py_buffer(np.zeros(num_rows * self.width, self.dtype))
        single = pa.Array.from_buffers(pa.from_numpy_dtype(self.dtype), num_rows * self.width, [None, buffer])
        if self.width == 1:
            return single
        return pa.Array.from_buffers(self.arrow_type, num_rows, [None], children=[single])


Columns = Mapping[str, Column]


@dataclass(frozen=True)
class _Layout:
    """Where everything lies in the file of a table: it follows from the columns and the number of rows alone.

    Attributes:
        head: all bytes before the first column.
        places: where in the file the numbers of each column begin.
        end: all bytes behind the last column.
        num_bytes: size of the file.
    """

    head: bytes
    places: dict[str, int]
    end: bytes
    num_bytes: int

    @classmethod
    def of(cls, columns: Columns, num_rows: int, store_id: str) -> _Layout:
        head_size = _head_size(tuple(columns.items()))
        places, end = {}, head_size + -head_size % _ALIGNMENT
        for name, column in columns.items():
            places[name] = end
            end += _column_bytes(column, num_rows)
        num_bytes = end + len(_END)
        # Arrow aligns to 8 bytes, so that the head grows by exactly what is added.
        head = _head(columns, num_rows, store_id, num_bytes, -head_size % _ALIGNMENT)
        return cls(head, places, _END, num_bytes)


_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Of an Arrow stream."""


def table_bytes(columns: Columns, num_rows: int) -> int:
    """Size of the file of a table with these columns."""
    return _Layout.of(columns, num_rows, "0" * 32).num_bytes


class ArrowTable:
    """An Arrow IPC stream with one record batch, written and read in place by all processes of a node.

    `datasets.Dataset.from_file` reads the same file. It is read through its descriptor and not through a memory map:
    as fast, and a file that is cut while it is read gives an error and not the end of the process. Attributes: `path`,
    `num_rows`, `num_bytes` (of the file) and `columns`.
    """

    def __init__(self, path: Path, descriptor: int, columns: Columns, num_rows: int, layout: _Layout) -> None:
        self._fd = descriptor
        self.path = path
        self.num_rows = num_rows
        self.num_bytes = layout.num_bytes
        self.columns = columns
        self._places = layout.places
        self._row_bytes = {name: column.row_bytes for name, column in columns.items()}

    def __del__(self) -> None:
        os.close(self._fd)

    @classmethod
    def create(cls, folder: Folder, name: str, columns: Columns, num_rows: int, store_id: str) -> ArrowTable:
        """Make the file, all zeros, with its space on the disk reserved, and open it.

        It gets its name when it is whole: no process ever sees a part of it.

        Raises:
            OSError: the disk is full (nothing is left behind), or the folder cannot be written.
        """
        layout = _Layout.of(columns, num_rows, store_id)
        unfinished = name + ".tmp"
        try:
            descriptor = folder.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            table = cls(folder.path / name, descriptor, columns, num_rows, layout)
            # Without a reservation a full disk would show only when a row is written.
            os.posix_fallocate(descriptor, 0, layout.num_bytes)
            os.pwrite(descriptor, layout.head, 0)
            os.pwrite(descriptor, layout.end, layout.num_bytes - len(layout.end))
            folder.rename(unfinished, name)
        except BaseException:
            folder.unlink(unfinished)
            raise
        return table

    @classmethod
    def open(cls, folder: Folder, name: str, columns: Columns, store_id: str) -> ArrowTable:
        """Open an existing file.

        Raises:
            StoreDamagedError: it is missing, a link, cut short, of another store, or has other columns.
        """
        path = folder.path / name
        try:
            descriptor = folder.open(name, os.O_RDWR)
        except OSError as error:
            raise StoreDamagedError(f"{path} cannot be opened as a table ({error}).") from error
        size = os.fstat(descriptor).st_size
        # The number of rows follows from the size, so that nothing in the file is believed before it is compared.
        num_rows = _num_rows(columns, size)
        try:
            layout = _Layout.of(columns, num_rows, store_id)
        except (MemoryError, OverflowError, ValueError) as error:
            os.close(descriptor)
            raise StoreDamagedError(f"{path} has {size} bytes, more than a table can have ({error}).") from error
        table = cls(path, descriptor, columns, num_rows, layout)
        if size != layout.num_bytes or os.pread(descriptor, len(layout.head), 0) != layout.head:
            raise StoreDamagedError(
                f"{path}, of {size} bytes, does not begin as the table of {num_rows} rows of the activation store "
                f"{store_id} that would have that size. It was cut or changed, or belongs to another store."
            )
        return table

    def read(self, column: str, start: int, *outs: Array) -> None:
        """Fill `outs`, C-contiguous, one behind the other from row `start` of a column on.

        Raises:
            StoreDamagedError: the file ends before.
        """
        place = self._places[column] + start * self._row_bytes[column]
        try:
            # A single call: its own cost is that of some thousand bytes.
            num_read = os.preadv(self._fd, [out.data for out in outs], place)
        except OSError as error:
            raise self._unreadable(error) from error
        if num_read != sum([out.nbytes for out in outs]):
            raise self._ends_early()

    def read_rows(self, column: str, rows: Sequence[int]) -> bytearray:
        """The bytes of single rows of a column, one behind the other; raises as `read`."""
        place, size = self._places[column], self._row_bytes[column]
        try:
            found = bytearray().join([os.pread(self._fd, size, place + row * size) for row in rows])
        except OSError as error:
            raise self._unreadable(error) from error
        if len(found) != size * len(rows):
            raise self._ends_early()
        return found

    def _unreadable(self, error: OSError) -> StoreDamagedError:
        return StoreDamagedError(f"{self.path} cannot be read ({error}).")

    def _ends_early(self) -> StoreDamagedError:
        return StoreDamagedError(
            f"{self.path} ends before the row that is read. Something outside the run changed it."
        )

    def write(self, column: str, start: int, rows: Sequence[Array]) -> None:
        """Write `rows` of a column one behind the other, from row `start` on."""
        place = self._places[column] + start * self._row_bytes[column]
        for first in range(0, len(rows), _MAX_BUFFERS):
            part: list[Any] = [np.ascontiguousarray(row) for row in rows[first : first + _MAX_BUFFERS]]
            place += self._write(part, place)

    def write_at(self, column: str, row: int, content: bytes) -> None:
        """Write the first bytes of one row of a column."""
        self._write([content], self._places[column] + row * self._row_bytes[column])

    def _write(self, part: list[Any], place: int) -> int:
        size = sum(memoryview(row).nbytes for row in part)
        if os.pwritev(self._fd, part, place) != size:
            raise OSError(errno.EIO, "a row was written in part", os.fspath(self.path))
        return size

    def check(self) -> None:
        """Notice a vanished or cut file.

        Raises:
            StoreDamagedError: the file is gone, or its size is not what it was when it was opened.
        """
        status = os.fstat(self._fd)
        if not status.st_nlink:
            raise StoreDamagedError(
                f"{self.path} has vanished: expected a file of {self.num_bytes} bytes. Something outside the run "
                "deleted it; keep the folder of the activation cache away from cleaning jobs."
            )
        if status.st_size != self.num_bytes:
            raise StoreDamagedError(
                f"{self.path} has {status.st_size} bytes: expected {self.num_bytes}. Something outside the run "
                "changed it."
            )


def _column_bytes(column: Column, num_rows: int) -> int:
    """Arrow fills a column up to a multiple of 8 bytes."""
    return -(-num_rows * column.row_bytes // 8) * 8


def _num_rows(columns: Columns, num_bytes: int) -> int:
    """Rows of a table whose file has this size; any number if no table has."""
    body = num_bytes - _Layout.of(columns, 0, "0" * 32).num_bytes
    most = max(body, 0) // sum(column.row_bytes for column in columns.values())
    # Each column is filled up by less than 8 bytes, so that the number is not far below.
    for num_rows in range(most, max(most - 8 * len(columns), 0), -1):
        if sum(_column_bytes(column, num_rows) for column in columns.values()) == body:
            return num_rows
    return most


def _head(columns: Columns, num_rows: int, store_id: str, num_bytes: int, num_added: int) -> bytes:
    """What Arrow writes before the columns, `num_added` blanks included."""
    metadata = {
        _ID_KEY: store_id.encode(),
        _SIZE_KEY: str(num_bytes).zfill(_SIZE_DIGITS).encode(),
        _PADDING_KEY: b" " * num_added,
    }
    fields = [pa.field(name, column.arrow_type, nullable=False) for name, column in columns.items()]
    schema = pa.schema(fields, metadata=metadata)
    batch = pa.RecordBatch.from_arrays([column.zeros(num_rows) for column in columns.values()], schema=schema)
    sink = _Beginning()
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), schema) as writer:
        writer.write_batch(batch)
    body = sum(_column_bytes(column, num_rows) for column in columns.values())
    return bytes(sink.content[: sink.size - body - len(_END)])


@lru_cache
def _head_size(columns: tuple[tuple[str, Column], ...]) -> int:
    """Bytes before the columns without any blanks; their number of rows changes nothing."""
    return len(_head(dict(columns), 1, "0" * 32, 0, 0))


class _Beginning:
    """A file that keeps what comes before the first large write: that is a column of zeros."""

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
