"""Samples of a training that are left unread where all that a step needs of them is stored, see `data.row_table`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_pipetransformer.cache.frozen_parts.call import Deferred
from hf_pipetransformer.cache.frozen_parts.values import Rows
from hf_pipetransformer.data.rng import CPU
from hf_pipetransformer.data.row_table import (
    ROWS,
    Field,
    RowsRead,
    RowTable,
    TableReads,
    table_reads,
)


if TYPE_CHECKING:
    from hf_pipetransformer.cache.files import Array


MOST_PAUSES = 3
"""Passes in which rows that were left unread had to be read, after which none is left unread any more."""
SHARE_TOLERATED = 0.125
ROWS_TOLERATED = 64
"""Share of the rows left unread in a pass that may have to be read after all, and how many may in any case."""
MOST_KEYS = 64
"""Fields that were read, of which keys are kept at a time."""


class FieldRead:
    """A field of a batch of which no sample was read, in the place of the `PartCall` of a `Deferred`.

    Args:
        keys: two words `(rows, 2)` of each row, by which records of what is computed from it are found.
        read: gives the field of samples.
    """

    def __init__(self, indices: Array, keys: Array, field: Field, read: Callable[[Array, str], torch.Tensor]) -> None:
        self.indices, self.field = indices, field
        self._keys = keys
        self._read = read
        self.rows = Rows(((), {}), (), len(indices))
        self.chain: list[Any] = []
        self._value: torch.Tensor | None = None

    def deferred(self, device: torch.device) -> Deferred:
        like = torch.empty(0, dtype=self.field.kind, device=device)
        return Deferred(self, 0, [len(self.indices), *self.field.shape], like)

    @property
    def is_given(self) -> bool:
        return self._value is not None

    def keys_as_read(self) -> Array | None:
        """Return the keys of the rows; None once their values are there, which whoever has them may write into."""
        return self._keys if self._value is None else None

    def note(self, number: int, is_first: bool = False) -> None: ...

    def value(self, number: int, first: bool = False) -> torch.Tensor:
        """Read the samples."""
        if self._value is None:
            self._value = self._read(self.indices, self.field.name)
        return self._value[:, 0] if first else self._value

    def output_of(self, number: int, rows: Array, length: int | None, known: Any) -> torch.Tensor:
        return self._read(self.indices[rows], self.field.name) if self._value is None else self._value[rows]

    def moved(self, number: int, device: torch.device) -> Deferred:
        def read(indices: Array, name: str) -> torch.Tensor:
            return self._read(indices, name).to(device)

        return FieldRead(self.indices, self._keys, self.field, read).deferred(device)

    def some(self, chosen: Array) -> FieldRead:
        return FieldRead(self.indices[chosen], self._keys[chosen], self.field, self._read)


class UnreadSamples:
    """Samples of the loader of a training that are left unread, and what is known of those that are read.

    Args:
        say: tells the user.
        step: gives the number of the present step.
    """

    def __init__(self, loader: Any, say: Callable[[str], None], step: Callable[[], int]) -> None:
        self._say, self._step = say, step
        self._checked_at = 0
        """Number of the last step before which a batch was read, and was what it had been."""
        self._table: RowTable | None = table_reads(loader, self._completed)
        self._unread = self._read = self._num_pauses = 0
        """Rows left unread in this pass, and those of them that had to be read after all."""
        self._has_left = False
        self._keys: dict[Any, tuple[weakref.ref[torch.Tensor], int, Array]] = {}

    def _completed(self, reads: TableReads, batch: Any) -> Any:
        """Return a batch as the script's collator gives it, fields that were not read deferred."""
        self._notice()
        if type(batch) is not dict or ROWS not in batch:
            return batch
        rows: RowsRead = batch.pop(ROWS)
        is_unread = any(isinstance(each, Field) for each in batch.values())
        if is_unread and self._table is None:
            return reads.read(rows.indices)  # It was on its way when others were found to have changed.
        for name, keys in rows.digests.items():
            field = batch[name]
            if isinstance(field, Field):
                batch[name] = FieldRead(rows.indices, keys, field, partial(self._late, reads)).deferred(CPU)
            else:
                self._keys[_place_of(field)] = weakref.ref(field), field._version, keys
        if is_unread:
            self._unread += len(rows.indices)
            if not self._has_left:
                self._has_left = True
                self._say(
                    "Samples whose outputs are stored are not read any more, nor decoded: they came out alike in two "
                    "passes. Of each further pass, the first batch and every 64th are read, and compared."
                )
        else:
            self._checked_at = self._step()
        if len(self._keys) > MOST_KEYS:
            self._keys = {place: each for place, each in self._keys.items() if each[0]() is not None}
        return batch

    def _late(self, reads: TableReads, indices: Array, name: str) -> torch.Tensor:
        """Read a field of samples that were left unread."""
        self._read += len(indices)
        if self._table is not None and self._read > SHARE_TOLERATED * self._unread + ROWS_TOLERATED:
            self._table.read_all()
        found: torch.Tensor = reads.read(indices)[name]
        return found

    def keys_of(self, tensor: torch.Tensor) -> Array | None:
        """Return the keys of the rows of a field that was read, as it was read; None for other tensors."""
        known, version, keys = self._keys.get(_place_of(tensor), (None, 0, None))
        is_there = known is not None and known() is not None
        return keys if is_there and not tensor.is_inference() and tensor._version == version else None

    def end_pass(self, may_leave: bool) -> None:
        """Leave samples unread from here on if that may be, and if little of what was had to be read after all.

        Args:
            may_leave: True if outputs are stored, and no code of the script's in the model would see the fields.
        """
        self._notice()
        if self._table is None:
            return
        self._num_pauses += self._read > SHARE_TOLERATED * self._unread + ROWS_TOLERATED
        self._unread = self._read = 0
        if not may_leave:
            self._table.switch_off("nothing is stored any more, or code of the script's sees them")
        if self._num_pauses >= MOST_PAUSES:
            self._table.switch_off("they are not used by frozen parts alone")
        self._table.end_pass(serves=True)
        self._notice()

    def _notice(self) -> None:
        """Say why the table was switched off, if it was, here or in a process that reads."""
        if self._table is None or (reason := self._table.why_off) is None:
            return
        self._table = None
        if self._has_left:
            # The loader is a batch ahead, which may be one that was left unread.
            first, last = self._checked_at + 1, self._step() + (self._unread > 0)
            text = f" Steps {first} to {last} may have used what they were before." if last >= first else ""
            self._say(f"Samples are read in every pass from here on: {reason}.{text}")


def _place_of(tensor: torch.Tensor) -> Any:
    is_plain = tensor.layout is torch.strided
    return is_plain and (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
