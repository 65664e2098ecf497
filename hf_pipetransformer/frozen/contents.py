"""Store of what a frozen part has computed, found again by a hash of what it was computed from."""

from __future__ import annotations

import os
import uuid

import numpy as np
import torch

from hf_pipetransformer.cache.files import Array, StoreDamagedError
from hf_pipetransformer.cache.folder import take_store
from hf_pipetransformer.cache.records import RecordFormat, field_column
from hf_pipetransformer.report import logger


DIGEST_FIELD = "digest"
"""Side field with the second half of a row's hash; the index has the first."""


def record_format(hidden_size: int, dtype: torch.dtype) -> RecordFormat:
    """Return the format of records of `(tokens, hidden_size)`; raises ValueError for a dtype that is not stored."""
    return RecordFormat(hidden_size, dtype, {}, {DIGEST_FIELD: (torch.int64, ())})


class ContentStore:
    """Records by 128-bit hashes, in an `ActivationStore` whose places are given out in the order of writing.

    A failure of the store turns it off with one warning: from then on it has and takes nothing.

    Args:
        num_places: most records.
        key: name of the store in its folder; None for one that no later run finds.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        num_places: int,
        content: RecordFormat,
        max_bytes: int,
        key: str | None = None,
    ) -> None:
        name = key or f"unnamed-{uuid.uuid4().hex}"
        self._folder, self._store = take_store(base, name, num_places, content, max_bytes)
        if key is not None:
            self._folder.keep()
        self._places: dict[bytes, int] = {}
        self._next = 0
        self._weights_id = 0
        self.is_off = False

    def use_weights(self, key: str) -> None:
        """Serve the records of the weights named by `key`, of an earlier run too, and no others.

        Others are overwritten.
        """
        self._weights_id = self._store.weights_id(key)
        try:
            entries = self._store.entries(np.arange(self._store.num_samples))
        except StoreDamagedError as error:
            self.switch_off(str(error))
            return
        found = np.flatnonzero(entries["weights_id"] == self._weights_id)
        words = np.stack([entries["input_digest"], entries[field_column(DIGEST_FIELD)].view(np.uint64)], axis=1)[found]
        self._places = {row.tobytes(): place for row, place in zip(words, found.tolist(), strict=True)}
        self._next = int(found[-1]) + 1 if len(found) else 0

    @property
    def bytes_taken(self) -> int:
        return self._store.bytes_taken

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
            if not (records.weights_ids == self._weights_id).all():
                raise StoreDamagedError("records are not those that were written")
            return records.activation
        except (OSError, StoreDamagedError) as error:
            self.switch_off(str(error))
            return None

    def write(self, digests: Array, activation: torch.Tensor, lengths: Array) -> None:
        """Store records `(n, seq, hidden)` of rows that have none, as far as there is room."""
        names = [row.tobytes() for row in digests]
        new = [row for row in {name: row for row, name in enumerate(names)}.values() if names[row] not in self._places]
        new = new[: self._store.num_samples - self._next]
        if self.is_off or not new:
            return
        places, first, second = np.arange(self._next, self._next + len(new)), *digests[new].T.copy()
        fields = {DIGEST_FIELD: torch.from_numpy(second.view(np.int64))}
        try:
            written = self._store.write(places, self._weights_id, activation[new], lengths[new], fields, first)
            if written < len(new):
                # The store was full: it has said so, and which of them it took the index tells.
                taken = self._store.weights_ids(places) == self._weights_id
                places, new = places[taken], [row for row, is_there in zip(new, taken, strict=True) if is_there]
        except (OSError, ValueError, StoreDamagedError) as error:
            self.switch_off(str(error))
            return
        self._next = int(places[-1]) + 1 if len(places) else self._next
        self._places.update({names[row]: place for row, place in zip(new, places.tolist(), strict=True)})

    def switch_off(self, reason: str) -> None:
        """Find and take nothing from here on."""
        if not self.is_off:
            logger.warning(f"Outputs of frozen parts are computed from here on, not read: {reason}")
        self.is_off, self._places = True, {}

    def close(self) -> None:
        """Close the store and delete its folder, unless it is kept for later runs."""
        self._store.close()
        if self._folder.is_kept:
            self._folder.release()
        else:
            self._folder.remove()
