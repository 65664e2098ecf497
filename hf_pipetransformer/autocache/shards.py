"""The shard files: who opens them, and where a new row finds its place."""

from __future__ import annotations

import errno
import re
from typing import Any

import numpy as np

from hf_pipetransformer.autocache.files import Folder
from hf_pipetransformer.autocache.rows import RowFormat
from hf_pipetransformer.autocache.table import Array, ArrowTable, StoreDamagedError, table_bytes


MIN_SHARD_BYTES = 256 * 1024
MAX_SHARD_BYTES = 256 * 1000 * 1000
GROWTH = 36
"""A new shard is this part of what its writer has: little is reserved in vain, and the number of files stays small."""

_WRITER_FACTOR = 1 << 16
_SHARD_NAME = re.compile(r"shard-(\d+)-(\d+)\.arrow")
_NUM_OPEN_TAILS = 16


def shard_name(shard: int) -> str:
    """File of a shard; its number says which writer made it and as which of its shards."""
    writer, index = divmod(shard, _WRITER_FACTOR)
    return f"shard-{writer}-{index}.arrow"


def list_shards(folder: Folder) -> dict[int, str]:
    """The names of the whole shards in a folder, by number."""
    matches = [match for name in folder.names() if (match := _SHARD_NAME.fullmatch(name))]
    return dict(sorted((int(match[1]) * _WRITER_FACTOR + int(match[2]), match[0]) for match in matches))


def writer_of(shard: Any) -> Any:
    """Number of the writer of a shard, or of each of several."""
    return shard // _WRITER_FACTOR


class ShardMap(dict[int, ArrowTable]):
    """The shards of a folder, by number, each opened when it is first asked for."""

    def __init__(self, folder: Folder, row_format: RowFormat, store_id: str) -> None:
        super().__init__()
        self.folder = folder
        self.store_id = store_id
        self.row_format = row_format
        self.columns = row_format.shard_columns()

    def __missing__(self, shard: int) -> ArrowTable:
        if shard < 0:
            raise StoreDamagedError(f"{self.folder.path}: the index names shard number {shard}.")
        table = self[shard] = ArrowTable.open(self.folder, shard_name(shard), self.columns, self.store_id)
        return table


class Arena:
    """The shards that one writer makes, and the free tokens at their ends.

    Args:
        shards: where new shards are entered.
        writer: number of the writer; no other process may allocate under it.
        max_bytes: bound on the bytes of this writer's files.
        own_bytes: what it has already.
        used: of each of its shards, the tokens in use, counted from the start.
        expected_tokens: what it will probably store in all, if that is known: then it gets few large shards.
    """

    def __init__(
        self,
        shards: ShardMap,
        writer: int,
        max_bytes: int,
        own_bytes: int,
        used: dict[int, int],
        expected_tokens: int = 0,
    ) -> None:
        self.is_full = False
        """Whether a row has been turned away."""
        self.reason = ""
        self._shards = shards
        self._max_bytes = max_bytes
        self._own_bytes = own_bytes
        self._next_shard = max(used, default=writer * _WRITER_FACTOR - 1) + 1
        self._may_grow = True
        self._expected_bytes = expected_tokens * shards.row_format.token_bytes
        self._token_bytes = shards.row_format.token_bytes
        self._overhead = table_bytes(shards.columns, 1) + 64 * len(shards.columns)
        self._tails: dict[int, list[int]] = {}
        for shard, tokens in used.items():
            self._add_tail(shard, tokens)

    def allocate(self, length: int) -> tuple[int, int] | None:
        """Shard and start of `length` free tokens; None if the bound or the disk leaves no room."""
        for shard, tail in self._tails.items():
            start, end = tail
            if end - start >= length:
                tail[0] += length
                return shard, start
        new = self._grow(length)
        if new is None:
            self.is_full = True
            return None
        self._tails[new][0] = length
        return new, 0

    def _grow(self, length: int) -> int | None:
        room = self._max_bytes - self._own_bytes - self._overhead
        missing = self._expected_bytes - self._own_bytes
        wanted = max(MIN_SHARD_BYTES, min(MAX_SHARD_BYTES, max(missing, self._own_bytes // GROWTH)))
        tokens = min(max(length, wanted // self._token_bytes // length * length), room // self._token_bytes)
        if not self._may_grow or tokens < length:
            self.reason = self.reason or f"the bound of {self._max_bytes} bytes for this process is reached"
            return None
        shard = self._next_shard
        folder, name = self._shards.folder, shard_name(shard)
        if name in folder.names():
            raise StoreDamagedError(
                f"{folder.path / name} exists already: two processes write to the store under the same number."
            )
        try:
            table = ArrowTable.create(folder, name, self._shards.columns, tokens, self._shards.store_id)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Not tried again: a disk that is full belongs to others too, and each try takes what little is left.
            self._may_grow = False
            self.reason = f"the disk of {folder.path} is full"
            return None
        self._next_shard += 1
        self._own_bytes += table.num_bytes
        self._shards[shard] = table
        self._add_tail(shard, 0)
        return shard

    def _add_tail(self, shard: int, used: int) -> None:
        self._tails[shard] = [used, self._shards[shard].num_rows]
        if len(self._tails) > _NUM_OPEN_TAILS:
            # The search stays short; what is left of a tail is less than a row of usual length.
            del self._tails[min(self._tails, key=lambda other: self._tails[other][1] - self._tails[other][0])]


def used_tokens(shard: Array, start: Array, capacity: Array, own: list[int]) -> dict[int, int]:
    """Of each shard in `own`, the tokens up to the end of its last slot, from the columns of the index."""
    taken: Any = capacity > 0
    ends = start[taken] + capacity[taken]
    owners = shard[taken]
    return {number: int(np.max(ends[owners == number], initial=0)) for number in own}
