"""Store of what a frozen part has computed, found again by a hash of what it was computed from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from hf_pipetransformer.cache.files import Array, StoreDamagedError
from hf_pipetransformer.cache.folder import StoreFolder, Use
from hf_pipetransformer.cache.records import RecordFormat, field_column
from hf_pipetransformer.cache.store import ActivationStore
from hf_pipetransformer.report import logger


DIGEST_FIELD = "digest"
"""Side field with the second half of a row's hash; the index has the first."""


def record_format(hidden_size: int, dtype: torch.dtype) -> RecordFormat:
    """Return the format of records of `(tokens, hidden_size)`; raises ValueError for a dtype that is not stored."""
    return RecordFormat(hidden_size, dtype, {}, {DIGEST_FIELD: (torch.int64, ())})


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

    @classmethod
    def open(cls, path: str, writer: int, num_writers: int) -> ContentStore:
        """Open the store that another process of the node has made; raises like `ActivationStore.open`."""
        return cls(ActivationStore.open(path, writer), writer, num_writers)

    @property
    def path(self) -> str:
        return str(self._store.folder)

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
        words = np.stack([entries["input_digest"], entries[field_column(DIGEST_FIELD)].view(np.uint64)], axis=1)[found]
        self._places = {row.tobytes(): place for row, place in zip(words, found.tolist(), strict=True)}
        own = found[found % self._num_writers == self._writer]
        # Behind the last place of this process, since an earlier run may have filled some.
        self._next = int(own[-1]) + self._num_writers if len(own) else self._writer

    @property
    def bytes_taken(self) -> int:
        return self._store.bytes_taken

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
        # The index has 64 bits for a digest, and the other half goes into a side field.
        first, second = digests[new].T.copy()
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
        self._next = int(places[-1]) + self._num_writers if len(places) else self._next
        self._places.update({names[row]: place for row, place in zip(new, places.tolist(), strict=True)})

    def switch_off(self, reason: str) -> None:
        """Find and take nothing from here on."""
        if not self.is_off:
            logger.warning(f"Outputs of frozen parts are computed from here on, not read: {reason}")
        self.is_off, self._places = True, {}

    def close(self, use: Use | None = None) -> None:
        """Close the store; who made it deletes its folder, unless it is kept for later runs, as `use` says."""
        self._store.close()
        if self._folder is not None:
            self._folder.close(use)
