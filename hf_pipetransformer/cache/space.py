"""Space that one writer takes on the disk of a store, within the bound of all writers together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hf_pipetransformer.cache.files import StoreDamagedError, StoreFile
from hf_pipetransformer.report import logger
from hf_pipetransformer.report.files import FULL_DISK


MIN_GROWTH_BYTES = 256 * 1024
GROWTH = 36
"""A writer's file grows by at least 1 / GROWTH of its size: this wastes little disk space and keeps locks rare."""


class Space:
    """Allocator of one writer: its file, which grows slightly ahead of its records.

    A full disk therefore shows before a record is half written.

    Args:
        end: end of the writer's last record, in bytes.
        growing: admits one writer at a time, and yields the bytes that this file may still grow by.
    """

    def __init__(
        self, writer: int, file: StoreFile, end: int, max_bytes: int, growing: Callable[[], Iterator[int]]
    ) -> None:
        self.writer = writer
        self._file = file
        self._end = end
        self._max_bytes = max_bytes
        self._growing = contextmanager(growing)
        self._reserved = file.size()
        self._refused: float = math.inf  # Fewest bytes beyond the reserved ones rejected so far; files never shrink.
        if self._reserved < end:
            raise StoreDamagedError(f"{file.path} has {self._reserved} bytes: the index names {end}. It was cut.")

    def check(self) -> None:
        """Raise StoreDamagedError if the file was deleted or cut, or another process writes under the same number."""
        self._file.check_size(self._reserved)

    def allocate(self, num_bytes: int) -> int | None:
        """Return the start of free space, or None if the byte limit or the disk leaves no room."""
        start, end = self._end, self._end + num_bytes
        if end > self._reserved and not self._grow(end):
            return None
        self._end = end
        return start

    def note_full_disk(self) -> bool:
        """Stop growing for good; return False.

        Other programs need the disk too, and each retry would take the little space left.
        """
        return self._refuse(0, f"the disk of {self._file.path.parent} is full")

    def _grow(self, end: int) -> bool:
        missing = end - self._reserved
        if missing >= self._refused:
            return False
        with self._growing() as room:
            if missing > room:
                return self._refuse(missing, f"the bound of {self._max_bytes} bytes is reached")
            # More than is missing, because each growth takes the lock that all writers share.
            grown = self._reserved + min(room, max(missing, MIN_GROWTH_BYTES, self._reserved // GROWTH))
            try:
                self._file.reserve(self._reserved, grown)
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                # Some file systems keep the part that still fitted.
                self._file.resize(self._reserved)
                return self.note_full_disk()
        self._reserved = grown
        return True

    def _refuse(self, num_bytes: int, reason: str) -> bool:
        if self._refused == math.inf:
            logger.warning(
                f"The activation cache in {self._file.path.parent} takes no more records: {reason}. Stored records "
                "are used, the other samples are computed each time. Name a larger disk with activation_cache_dir."
            )
        self._refused = num_bytes
        return False
