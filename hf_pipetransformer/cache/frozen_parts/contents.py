"""Content of a frozen part's records, and the store in which they are found by a hash of what they were made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from hf_pipetransformer.cache.files import Array, StoreDamagedError
from hf_pipetransformer.cache.folder import StoreFolder
from hf_pipetransformer.cache.frozen_parts.values import NotStorableError, Rows, no_row_each
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.report import logger


if TYPE_CHECKING:
    from hf_pipetransformer.cache.frozen_parts.call import PartCall


Leaves = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
"""Outputs of a part by their numbers."""


@dataclass(frozen=True)
class Pick:
    """An output tensor of a part that the model reads: all of it, or of each row the first position alone."""

    number: int
    is_first: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, 0] if self.is_first else tensor


@dataclass(frozen=True)
class Reading:
    """Content of a record.

    Args:
        picks: the output tensors that are read, in their order.
        is_by_token: True if a record has one entry a token, up to the last real one; what lies beyond is zero.
        share: how many tokens or patches have one entry in what is read, where the rows of that lie one behind the
            other; 0 if it has one for each row.
    """

    picks: tuple[Pick, ...]
    is_by_token: bool = False
    share: int = 0

    def pick(self, number: int) -> Pick | None:
        return next((each for each in self.picks if each.number == number), None)

    def lengths(self, rows: Rows, values: int) -> Array:
        """Return the tokens of each row's record `(rows,)`, or the values of one without tokens."""
        found: Array
        if rows.lengths is not None and self.has_lengths:
            found = rows.lengths // max(self.share, 1)
            return found
        return torch.full((rows.number,), values).numpy()

    @property
    def has_lengths(self) -> bool:
        return self.share > 0 or self.is_by_token

    def records(self, leaves: Leaves, rows: Rows) -> torch.Tensor:
        """Return the records `(rows, tokens, values)` of output tensors; without tokens a row's values are in a line.

        Raises:
            NotStorableError: the tensors do not have a row for each row of the call, or differ in dtype.
        """
        read = [pick.of(leaves[pick.number].detach()) for pick in self.picks]
        if any(
            rows.share_of(each) != self.share or not (self.share or each.shape[:1] == (rows.number,)) for each in read
        ):
            raise NotStorableError(no_row_each(read, rows.number))
        kinds = {each.dtype for each in read if each.is_floating_point()}
        stored = [each.to(next(iter(kinds), torch.float32)) for each in read]
        # Masks and small whole numbers are stored among the others.
        if len(kinds) != 1 or any(
            not torch.equal(a.to(b.dtype), b) for a, b in zip(stored, read, strict=True) if not b.is_floating_point()
        ):
            names = ", ".join(sorted({str(each.dtype) for each in read}))
            raise NotStorableError(f"gives outputs of {names}, expected one kind of floating point numbers")
        if self.share:
            whole = torch.cat([each.reshape(each.shape[0], -1) for each in stored], dim=1)
            # The store takes records padded to one length, and the length of each beside them.
            return nn.utils.rnn.pad_sequence(whole.split(self.lengths(rows, 0).tolist()), batch_first=True)
        if self.is_by_token:
            return torch.cat([each.reshape(rows.number, rows.length, -1) for each in stored], dim=2)
        return torch.cat([each.reshape(rows.number, -1) for each in stored], dim=1)[:, :, None]

    def num_tokens(self, call: PartCall) -> int:
        """Return the tokens of a record for a call, or the values of one without tokens."""
        if self.has_lengths:
            return call.rows.length // max(self.share, 1)
        return sum(math.prod(self._shape_of_row(call, pick)) for pick in self.picks)

    def width(self, call: PartCall) -> int:
        """Return the values of a token's entry in a record, 1 for records without tokens."""
        if not self.has_lengths:
            return 1
        shapes = (self._shape_of_row(call, pick) for pick in self.picks)
        return sum(math.prod(shape if self.share else shape[1:]) for shape in shapes)

    def outputs(self, records: torch.Tensor, call: PartCall) -> dict[int, torch.Tensor]:
        """Return what `records` `(rows, tokens, values)` hold of the outputs of a call."""
        rows = call.rows
        if self.share:
            lengths = self.lengths(rows, 0).tolist()
            records = torch.cat([record[:length] for record, length in zip(records, lengths, strict=True)])
        elif not self.is_by_token:
            records = records.reshape(len(records), -1)
        found, start = dict[int, torch.Tensor](), 0
        for pick in self.picks:
            shape, like = call.template.shape(pick.number, rows), call.template.likes[pick.number]
            own_shape = [shape[0], *shape[2:]] if pick.is_first else shape
            size = math.prod(own_shape[records.dim() - 1 :])
            own = records[..., start : start + size].to(like.device, like.dtype).reshape(own_shape)
            # As the part would give it, which the model may write into: no view, and of several none of the others.
            own = own.detach() if len(self.picks) == 1 else own.clone(memory_format=torch.contiguous_format)
            found[pick.number] = own.requires_grad_(like.requires_grad)
            start += size
        return found

    def _shape_of_row(self, call: PartCall, pick: Pick) -> list[int]:
        shape = call.template.shape(pick.number, call.rows)
        return shape[2:] if pick.is_first else shape[1:]


class ContentStore:
    """Records by 128-bit hashes, in an `ActivationStore` that the processes of a node share.

    Each gives out places of its own, in the order of writing, and finds those of the others when it looks again. A
    failure of the store turns it off with one warning: from then on it has and takes nothing.

    Args:
        writer: number of this process among the `num_writers` of its node.
        folder: of a store that this process has made; None for one that another made.
    """

    def __init__(
        self, store: ActivationStore, writer: int = 0, num_writers: int = 1, folder: StoreFolder | None = None
    ) -> None:
        self._store, self._folder = store, folder
        self._writer, self._num_writers = writer, num_writers
        self._places: dict[bytes, int] = {}
        self._next = writer
        self._weights_id = 0
        self.is_off = False

    @property
    def dtype(self) -> torch.dtype:
        return self._store.record_format.dtype

    def use_weights(self, key: str) -> None:
        """Serve the records of the weights named by `key`, of an earlier run too, and no others.

        Others are overwritten.
        """
        self._weights_id = self._store.weights_id(key)
        self.look_again()

    def look_again(self) -> None:
        """Find the records that other processes have written, too."""
        try:
            entries = self._store.entries(np.arange(self._store.num_samples))
        except StoreDamagedError as error:
            self.switch_off(str(error))
            return
        found = np.flatnonzero(entries["weights_id"] == self._weights_id)
        digests = entries["digest"][found]
        self._places = {row.tobytes(): place for row, place in zip(digests, found.tolist(), strict=True)}
        own = found[found % self._num_writers == self._writer]
        # Behind the last place of this process, since an earlier run may have filled some.
        self._next = int(own[-1]) + self._num_writers if len(own) else self._writer

    @property
    def bytes_stored(self) -> int:
        return self._store.bytes_stored

    @property
    def places(self) -> Iterable[int]:
        """Places of the records that are served."""
        return self._places.values()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, digests: Array) -> Array:
        """Return the place of each row's record `(n,)`; -1 where there is none."""
        if self.is_off:
            return np.full(len(digests), -1)
        return np.array([self._places.get(row.tobytes(), -1) for row in digests], np.int64)

    def read(self, places: Array, length: int) -> torch.Tensor | None:
        """Return records `(n, length, hidden)`, zero beyond their own lengths; None if the store has failed."""
        try:
            records = self._store.read(places, length)
            # Since it was found, a record may have been overwritten for other weights.
            if not (records.weights_ids == self._weights_id).all():
                raise StoreDamagedError("records are not those that were written")
            return records.activation
        except (OSError, StoreDamagedError) as error:
            self.switch_off(str(error))
            return None

    def write(self, digests: Array, activation: torch.Tensor, lengths: Array) -> None:
        """Store records `(n, seq, hidden)` of rows that have none, as far as there is room."""
        names = [row.tobytes() for row in digests]
        # Of equal rows in a batch one is stored.
        new = [row for row in {name: row for row, name in enumerate(names)}.values() if names[row] not in self._places]
        # Every num_writers-th place belongs to this process, so no two processes write one record.
        places = np.arange(self._next, self._store.num_samples, self._num_writers)[: len(new)]
        new = new[: len(places)]
        if self.is_off or not new:
            return
        try:
            written = self._store.write(places, self._weights_id, activation[new], lengths[new], digests[new])
            if written < len(new):
                # The store was full: it has said so, and which of them it took the index tells.
                taken = self._store.weights_ids(places) == self._weights_id
                places, new = places[taken], [row for row, is_there in zip(new, taken, strict=True) if is_there]
        except (OSError, ValueError, StoreDamagedError) as error:
            self.switch_off(str(error))
            return
        self._next = int(places[-1]) + self._num_writers if len(places) else self._next
        self._places.update({names[row]: place for row, place in zip(new, places.tolist(), strict=True)})

    def switch_off(self, reason: str) -> None:
        """Find and take nothing from here on."""
        if not self.is_off:
            logger.warning(f"Outputs of frozen parts are computed from here on, not read: {reason}")
        self.is_off, self._places = True, {}

    def close(self, hits: int = 0, misses: int = 0) -> None:
        """Close the store; who made it deletes its folder, unless it is kept for later runs."""
        self._store.close()
        if self._folder is not None:
            self._folder.close(hits, misses)
