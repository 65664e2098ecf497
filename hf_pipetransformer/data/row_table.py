"""Table of the samples that a loader has read: rows that came out alike in two passes need not be read again.

It lies in memory that the processes of a loader share, between the loader and the script's data set and collator.
Fields of many bytes (pixels, sounds) are not kept, but known by a hash of each row.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from hf_pipetransformer.data.rng import (
    NotedDraws,
    States,
    fetch_samples,
    generators_kept,
    objects_in,
    random_state,
    same_states,
)


ROWS = "rows_read"
MANY_BYTES = 4096
"""Of a row of a field from which on it is left unread; all others together have as many at most."""
MOST_BYTES = 1 << 31
"""Of a table."""
READ_EVERY = 64
"""Batches of a pass that a process fetches, of which the first is read although its rows are known, and compared."""
_ENOUGH = 2
"""Passes in which a row has to come out alike."""
_MOST_INSIDE = 64
"""Entries of a container up to which each is looked at."""

Array = NDArray[Any]


def digests_of_rows(values: torch.Tensor) -> Array:
    """Return two words `(rows, 2)` for the bytes of each row of a tensor on the host, a 128-bit hash."""
    return words_of(xxhash.xxh3_128(content.data) for content in bytes_of(values))


def words_of(hashers: Iterable[xxhash.xxh3_128]) -> Array:
    """Return the two words `(n, 2)` of 128-bit hashes."""
    # Joined into what may be written to, as bytes may not.
    return np.frombuffer(bytearray().join(each.digest() for each in hashers), np.uint64).reshape(-1, 2)


def bytes_of(tensor: torch.Tensor) -> Array:
    """Return the bytes of a tensor on the host, `(*shape, bytes of an element)`."""
    found: Array = tensor.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy()
    return found


@dataclass(frozen=True)
class Field:
    """Form of a field of a batch: the shape of a row, and its dtype by name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, values: torch.Tensor) -> Field:
        return cls(name, tuple(values.shape[1:]), str(values.dtype).removeprefix("torch."))

    @property
    def kind(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.kind.itemsize

    @property
    def is_large(self) -> bool:
        return self.num_bytes > MANY_BYTES

    @property
    def num_kept(self) -> int:
        """Bytes of the field in a row of the table."""
        return 16 if self.is_large else self.num_bytes


@dataclass(frozen=True)
class RowsRead:
    """Rows of a batch, which has it as an entry `ROWS` until it is complete.

    Args:
        indices: of the samples.
        digests: of the rows of each field of many bytes.
    """

    indices: Array
    digests: Mapping[str, Array]


_HEADER = np.dtype([("passes", "u1"), ("serves", "u1"), ("state", "i8"), ("why_off", "S512"), ("form", f"S{1 << 16}")])
"""Facts of a table that its processes share; `form` is that of its fields, as JSON."""


class RowTable:
    """Rows of a data set as a loader collates them, in memory that processes forked from this one share.

    A pass reads each row once, so each is written by one process at a time.

    Raises:
        OSError: the system gives no such memory.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        # Of memory that nobody writes to, none is taken.
        self._memory = mmap.mmap(-1, _HEADER.itemsize + num_rows + min(num_rows * MANY_BYTES, MOST_BYTES))
        self._header = np.frombuffer(self._memory, _HEADER, 1)
        self._lock = multiprocessing.get_context("fork").Lock()
        self._fields: tuple[Field, ...] = ()

    # ---- what the processes tell each other ----

    @property
    def passes(self) -> int:
        """How many passes over the data set have ended, modulo 256."""
        return int(self._header["passes"][0])

    def end_pass(self, serves: bool) -> None:
        """Note that a pass has ended; from here on rows that are known are left unread, or all are read."""
        self._header["passes"], self._header["serves"] = (self.passes + 1) % 256, serves

    def begin_pass(self, state: int) -> None:
        """Read all rows of this pass if the data set is in another state than in the pass before."""
        with self._lock:
            if self._header["state"][0] != state:
                self._header["state"] = state
                self.read_all()

    def read_all(self) -> None:
        """Read all rows until the end of the pass."""
        self._header["serves"] = 0

    @property
    def serves(self) -> bool:
        """True while rows that are known are left unread."""
        return bool(self._header["serves"][0]) and self.why_off is None

    @property
    def why_off(self) -> str | None:
        """Why rows cannot be known, or None."""
        # A name of the script's may have been cut.
        return self._header["why_off"][0].decode(errors="replace") or None

    def switch_off(self, reason: str) -> None:
        """Read all rows from here on; the first reason counts."""
        with self._lock:
            if self.why_off is None:
                self._header["why_off"] = reason.encode()

    # ---- rows ----

    def has(self, indices: Sequence[Any]) -> bool:
        """Return True if all indices are numbers of rows."""
        return all(isinstance(each, Integral) and 0 <= int(each) < self._num_rows for each in indices)

    def _form(self, fields: tuple[Field, ...] = ()) -> tuple[Field, ...]:
        """Return the form of the rows, which the first process decides that has fields; none without."""
        if not self._fields:
            with self._lock:
                form = json.dumps([vars(each) for each in fields]).encode()
                if fields and not self._header["form"][0] and len(form) <= _HEADER["form"].itemsize:
                    self._header["form"] = form
                found = json.loads(self._header["form"][0] or b"[]")
            self._fields = tuple(Field(each["name"], tuple(each["shape"]), each["dtype"]) for each in found)
        return self._fields

    @property
    def _rows(self) -> Array:
        """The rows `(num_rows, bytes)`: how often each was read and came out alike, and its content."""
        size = 1 + sum(each.num_kept for each in self._fields)
        content = np.frombuffer(self._memory, np.uint8, self._num_rows * size, _HEADER.itemsize)
        return content.reshape(self._num_rows, size)

    def note(self, indices: Array, batch: Any) -> RowsRead | None:
        """Keep the rows of a batch that was read; None if they cannot be kept, which switches the table off."""
        if self.why_off is not None:
            return None
        reason, fields = _why_not(batch, len(indices)), tuple[Field, ...]()
        if reason is None:
            fields = tuple(Field.of(name, value) for name, value in batch.items())
            kept = sum(each.num_kept for each in fields)
            if not any(each.is_large for each in fields):
                reason = "no field of theirs has many bytes"
            elif kept > MANY_BYTES or kept * self._num_rows > MOST_BYTES:
                reason = "labels and other small fields of theirs have too many bytes"
            elif self._form(fields) != fields:
                reason = "their fields have other shapes in other batches"
        if reason is not None:
            self.switch_off(reason)
            return None
        digests = {each.name: digests_of_rows(batch[each.name]) for each in fields if each.is_large}
        columns = [digests[each.name] if each.is_large else bytes_of(batch[each.name]) for each in fields]
        found = np.concatenate([each.view(np.uint8).reshape(len(indices), -1) for each in columns], axis=1)
        rows = self._rows
        counts = rows[indices, 0]
        if (rows[indices, 1:] != found)[counts > 0].any():
            self.switch_off("they are not the same when they are read again")
            return None
        rows[indices, 1:] = found
        rows[indices, 0] = np.minimum(counts + 1, _ENOUGH)
        kept_batch = self.known(indices)
        if kept_batch is not None and not _is_same(kept_batch, RowsRead(indices, digests), batch):
            self.switch_off("what was kept of them is not what they are")
            return None
        return RowsRead(indices, digests)

    def known(self, indices: Array | Sequence[int]) -> dict[str, Any] | None:
        """Return the batch of rows that are all known, without its fields of many bytes; None if one is not."""
        if not self.serves or not (fields := self._form()):
            return None
        chosen = np.asarray(indices, np.int64)
        rows = self._rows[chosen]
        if (rows[:, 0] < _ENOUGH).any():
            return None
        batch, digests, start = dict[str, Any](), dict[str, Array](), 1
        for each in fields:
            content = rows[:, start : start + each.num_kept].copy()
            start += each.num_kept
            if each.is_large:
                digests[each.name] = content.view(np.uint64)
                # In its place among the fields.
                batch[each.name] = each
            else:
                batch[each.name] = torch.from_numpy(content).view(each.kind).reshape(len(chosen), *each.shape)
        return {**batch, ROWS: RowsRead(chosen, digests)}


def condition_of(*holders: Any) -> int:
    """Return a hash of what objects and those inside them hold, such as the number of an epoch that they were told.

    Numbers and texts count by value, other objects and long containers as the same object or another.
    """
    found = list[Any]()
    for value in (value for each in objects_in(holders) for value in vars(each).values()):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        is_short = isinstance(inside, (list, tuple)) and len(inside) <= _MOST_INSIDE
        for entry in [value, *inside] if is_short else [value]:
            is_plain = entry is None or isinstance(entry, (bool, int, float, complex, str))
            found.append(entry if is_plain else (id(entry), len(entry) if isinstance(entry, (dict, list, set)) else 0))
    return hash(tuple(found))


def _why_not(batch: Any, num_rows: int) -> str | None:
    """Return why the rows of a batch cannot be told apart, or None."""
    if type(batch) is not dict:
        return f"batches are of class {type(batch).__name__}, not dicts"
    for name, value in batch.items():
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
        if not is_plain or value.shape[:1] != (num_rows,):
            return f"field {name!r} has no row for each of them"
    return None


def _is_same(kept: dict[str, Any], rows: RowsRead, batch: dict[str, Any]) -> bool:
    """Return True if a batch as it would be left unread is what was read."""
    own = kept.pop(ROWS)
    return (
        np.array_equal(own.indices, rows.indices)
        and list(kept) == list(batch)
        and all(
            np.array_equal(own.digests[name], rows.digests[name])
            if isinstance(each, Field)
            else each.dtype == batch[name].dtype and torch.equal(each, batch[name])
            for name, each in kept.items()
        )
    )


@dataclass(frozen=True)
class _Fetched:
    """Samples of a batch on their way to the collator; or the batch itself, of rows that are known."""

    indices: Sequence[int]
    samples: Any
    batch: dict[str, Any] | None


@dataclass(frozen=True)
class _Travelling:
    """A batch on its way from a process that reads, completed where it arrives."""

    number: int
    batch: Any

    def __reduce__(self) -> Any:
        return _arrived, (self.number, self.batch)


def _arrived(number: int, batch: Any) -> Any:
    return _READS[number].complete(batch)


_READS: WeakValueDictionary[int, TableReads] = WeakValueDictionary()
_NUMBERS = count()


class TableReads:
    """A data set, as a loader reads it, of which rows that are known are left unread.

    Nothing is read for it that the loader would not have read then and there.

    Args:
        loader: reads in the same way what was left unread and is needed after all.
        complete: takes what `RowsRead` tells out of a batch, and gives the batch as the script's collator would.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        table: RowTable,
        complete: Callable[[TableReads, Any], Any],
    ) -> None:
        self._dataset: Any = loader.dataset
        self._collate, self.table, self._complete = loader.collate_fn, table, complete
        self._workers: dict[str, Any] = {
            "num_workers": min(1, loader.num_workers),
            "worker_init_fn": loader.worker_init_fn,
        }
        self._number, self._process = next(_NUMBERS), os.getpid()
        _READS[self._number] = self
        self._pass, self._num_fetched = -1, 0
        self._before: States | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitems__(self, indices: Sequence[int]) -> list[_Fetched]:
        if self.table.passes != self._pass:
            self._pass, self._num_fetched = self.table.passes, 0
            collate = self._collate.collate if isinstance(self._collate, NotedDraws) else self._collate
            self.table.begin_pass(condition_of(self._dataset, collate))
        is_read = self._num_fetched % READ_EVERY == 0
        self._num_fetched += 1
        batch = None if is_read or not self.table.has(indices) else self.table.known(indices)
        self._before = random_state() if batch is None else None
        samples = fetch_samples(self._dataset, indices) if batch is None else None
        return [_Fetched(indices, samples, batch)]

    def collated(self, samples: Any) -> Any:
        """Collate what was fetched; the batch then notes which rows it has."""
        if type(samples) is not list or not samples or type(samples[0]) is not _Fetched:
            return self._collate(samples)  # Of a loader that was made from the one with the table.
        fetched = samples[0]
        if fetched.batch is not None:
            return self._sent(fetched.batch)
        batch = self._collate(fetched.samples)
        if self._before is not None and not same_states(random_state(), self._before):
            self.table.switch_off("reading them draws random numbers")
        if not self.table.has(fetched.indices):
            self.table.switch_off("they are not read by number")
            return self._sent(batch)
        read = self.table.note(np.asarray(fetched.indices, np.int64), batch)
        return self._sent(batch if read is None else {**batch, ROWS: read})

    def _sent(self, batch: Any) -> Any:
        return self.complete(batch) if os.getpid() == self._process else _Travelling(self._number, batch)

    def complete(self, batch: Any) -> Any:
        """Return a batch as the script's collator would give it, in the process that trains."""
        return self._complete(self, batch)

    def read(self, indices: Array) -> Any:
        """Read samples now, where the loader would, without a trace in generators; see if they are what they were."""
        with generators_kept():
            loader = DataLoader(
                self._dataset, batch_sampler=[indices.tolist()], collate_fn=self._collate, **self._workers
            )
            (batch,) = loader
        self.table.note(indices, batch)
        return batch


def table_reads(loader: Any, complete: Callable[[TableReads, Any], Any]) -> RowTable | None:
    """Put a table between a loader and its data set; None if it does not read rows by number, in forked processes.

    `complete` is that of `TableReads`.
    """
    inside = getattr(loader, "base_dataloader", loader)
    if type(inside) is not DataLoader or inside.batch_sampler is None:
        return None
    context = inside.multiprocessing_context
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    if isinstance(inside.dataset, IterableDataset) or not hasattr(inside.dataset, "__len__"):
        return None
    if inside.num_workers and method != "fork":
        return None
    try:
        table = RowTable(len(inside.dataset))
    except OSError:
        return None
    reads = TableReads(inside, table, complete)
    if inside is not loader:
        # Whoever asks a loader for its data set gets the script's.
        vars(loader)["dataset"] = inside.dataset
    # Loaders refuse another data set, whose order might be another one: this one has the same rows.
    vars(inside).update(dataset=reads, collate_fn=reads.collated)
    return table
