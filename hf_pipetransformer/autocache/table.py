"""One Arrow file of fixed-width columns that is changed in place through a memory map."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]


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


def table_bytes(columns: Columns, num_rows: int) -> int:
    """Size of the file of a table with these columns."""
    sink = pa.MockOutputStream()
    _write_stream(sink, columns, num_rows, store_id="0" * 32, file_size=0)
    return int(sink.size())


class ArrowTable:
    """An Arrow IPC stream with one record batch, seen as writable numpy arrays that all processes share.

    `datasets.Dataset.from_file` reads the same file. Attributes: `path`, `num_rows`, `num_bytes` (of the file) and
    `columns`, the array of each column: `(num_rows,)`, or `(num_rows, width)` for a width above 1.
    """

    def __init__(
        self, path: Path, num_rows: int, num_bytes: int, columns: dict[str, Array], places: Mapping[str, int]
    ) -> None:
        self.path = path
        self.num_rows = num_rows
        self.num_bytes = num_bytes
        self.columns = columns
        self._places = places
        self._path_text = os.fspath(path)

    @classmethod
    def create(cls, path: Path, columns: Columns, num_rows: int, store_id: str) -> ArrowTable:
        """Make the file, all zeros, with its space on the disk reserved, and open it.

        It gets its name when it is whole: no process ever sees a part of it.

        Raises:
            OSError: the disk is full (nothing is left behind), or the folder cannot be written.
        """
        file_size = table_bytes(columns, num_rows)
        unfinished = path.with_name(path.name + ".tmp")
        try:
            with open(unfinished, "wb") as file:
                # Without a reservation a full disk would show as SIGBUS when a row is written through the map.
                os.posix_fallocate(file.fileno(), 0, file_size)
                _write_stream(pa.PythonFile(_SkippingZeros(file), "w"), columns, num_rows, store_id, file_size)
                file.flush()
            os.rename(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return cls.open(path, columns, store_id)

    @classmethod
    def open(cls, path: Path, columns: Columns, store_id: str) -> ArrowTable:
        """Map an existing file.

        Raises:
            StoreDamagedError: it is missing, cut short, of another store, or has other columns.
        """
        try:
            with open(path, "r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
            content = pa.py_buffer(mapped)
            _check_head(path, content, columns, store_id)
            num_rows, places = _find_columns(content, columns)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise StoreDamagedError(
                f"{path} cannot be opened as a table ({type(error).__name__}: {error})."
            ) from error
        views = {}
        for name, column in columns.items():
            view = np.frombuffer(mapped, column.dtype, num_rows * column.width, places[name])
            views[name] = view if column.width == 1 else view.reshape(num_rows, column.width)
        return cls(path, num_rows, len(mapped), views, places)

    @contextmanager
    def writing(self) -> Iterator[Callable[[str, int, Sequence[Array]], None]]:
        """A function that writes `rows` of a column one behind the other, from row `start` on.

        Through the file and not through the map, which sees it at once: neighbouring rows are one call, while
        through the map each page is faulted in on its own.
        """
        file = os.open(self._path_text, os.O_WRONLY)

        def write(column: str, start: int, rows: Sequence[Array]) -> None:
            view = self.columns[column]
            place = self._places[column] + start * view.strides[0]
            for first in range(0, len(rows), _MAX_BUFFERS):
                part: list[Any] = [np.ascontiguousarray(row) for row in rows[first : first + _MAX_BUFFERS]]
                size = sum(row.nbytes for row in part)
                if os.pwritev(file, part, place) != size:
                    raise OSError(errno.EIO, "a row was written in part", self._path_text)
                place += size

        try:
            yield write
        finally:
            os.close(file)

    def check_size(self) -> None:
        """Notice a vanished or cut file before its map is touched, which would end the process with SIGBUS.

        Raises:
            StoreDamagedError: the file is gone, or its size is not what it was when it was mapped.
        """
        try:
            found = os.stat(self._path_text).st_size
        except FileNotFoundError:
            raise StoreDamagedError(
                f"{self.path} has vanished: expected a file of {self.num_bytes} bytes. Something outside the run "
                "deleted it; keep the folder of the activation cache away from cleaning jobs."
            ) from None
        if found != self.num_bytes:
            raise StoreDamagedError(
                f"{self.path} has {found} bytes: expected {self.num_bytes}. Something outside the run changed it."
            )


def _schema(columns: Columns, metadata: Mapping[bytes, bytes] | None = None) -> Any:
    fields = [pa.field(name, column.arrow_type, nullable=False) for name, column in columns.items()]
    return pa.schema(fields, metadata=metadata)


def _write_stream(sink: Any, columns: Columns, num_rows: int, store_id: str, file_size: int) -> None:
    metadata = {_ID_KEY: store_id.encode(), _SIZE_KEY: str(file_size).zfill(_SIZE_DIGITS).encode(), _PADDING_KEY: b""}
    head = pa.BufferOutputStream()
    _write_zeros(head, columns, 1, metadata)
    _, places = _find_columns(head.getvalue(), columns)
    # Arrow aligns to 8 bytes, so that the head grows by exactly this much.
    metadata[_PADDING_KEY] = b" " * (-min(places.values()) % _ALIGNMENT)
    _write_zeros(sink, columns, num_rows, metadata)


def _write_zeros(sink: Any, columns: Columns, num_rows: int, metadata: Mapping[bytes, bytes]) -> None:
    schema = _schema(columns, metadata)
    batch = pa.RecordBatch.from_arrays([column.zeros(num_rows) for column in columns.values()], schema=schema)
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch)


class _SkippingZeros:
    """A file that steps over large writes: they are the columns, zeros like the reserved space below them."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size > 65536:
            self._file.seek(size, os.SEEK_CUR)
        else:
            self._file.write(data)
        return size

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()


def _check_head(path: Path, content: Any, columns: Columns, store_id: str) -> None:
    with pa.ipc.open_stream(content) as reader:
        schema = reader.schema
    metadata = schema.metadata or {}
    found = metadata.get(_ID_KEY)
    if found != store_id.encode():
        raise StoreDamagedError(
            f"{path} belongs to the activation store {(found or b'none').decode(errors='replace')}: expected "
            f"{store_id}. Something outside the run put it there."
        )
    expected_size = int(metadata[_SIZE_KEY])
    if content.size != expected_size:
        raise StoreDamagedError(f"{path} has {content.size} bytes: expected {expected_size}. It was cut or changed.")
    if not schema.equals(_schema(columns)):
        raise StoreDamagedError(f"{path} has the columns {schema}: expected {_schema(columns)}.")


def _find_columns(content: Any, columns: Columns) -> tuple[int, dict[str, int]]:
    """Number of rows, and where in the file the numbers of each column begin; only the file's head is touched."""
    with pa.ipc.open_stream(content) as reader:
        batch = reader.read_next_batch()
    # Arrow's buffers lie in the map itself: nothing was copied.
    places = {name: batch.column(name).buffers()[-1].address - content.address for name in columns}
    return batch.num_rows, places
