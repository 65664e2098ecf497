"""Copying rows out of the files, and noticing those that are not what was written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from hf_pipetransformer.autocache.index import Index
from hf_pipetransformer.autocache.rows import RowFormat, Rows, as_numpy, as_torch, field_column
from hf_pipetransformer.autocache.shards import ShardMap, shard_name
from hf_pipetransformer.autocache.table import Array, StoreDamagedError


_NUM_TRIES = 3


@dataclass(frozen=True)
class _Place:
    """Where a row lies, and what must be found there."""

    weights_id: int
    shard: int
    start: int
    length: int
    tokens: int


def read_rows(entries: Array, index: Index, shards: ShardMap, samples: Array, out: torch.Tensor) -> Rows:
    """Fill `out`, `(n, length, hidden)`, with the rows of `samples`, of which the index said `entries` just now.

    See `ActivationStore.read`.
    """
    num_rows, length = out.shape[:2]
    targets = {"activation": as_numpy(out)}
    for name, column in list(shards.columns.items())[1:]:
        targets[name] = np.empty((num_rows, length), column.dtype)
    places = _places(entries)
    for number in {place.shard for place in places if place.weights_id}:
        shards[number].check()
    for row, place in enumerate(places):
        for _ in range(_NUM_TRIES):
            if _copy(shards, place, [values[row] for values in targets.values()]):
                break
            # It was overwritten while it was copied, or it is damaged.
            entries[row : row + 1] = index.entries(samples[row : row + 1])
            (place,) = _places(entries[row : row + 1])
        else:
            raise StoreDamagedError(
                f"The row of sample {samples[row]} is not what was written: {place.length} tokens from token "
                f"{place.start} of {shards.folder.path / shard_name(place.shard)} have another hash. The disk or the "
                "memory is faulty, or something outside the run wrote to the file. Delete "
                f"{shards.folder.path} to compute the rows anew."
            )
    fields = _tensors(shards.row_format, entries, targets)
    return Rows(entries["weights_id"].copy(), entries["length"].copy(), out, fields)


def is_sound(index: Index, shards: ShardMap, sample: int) -> bool:
    """Whether the row of a sample is what was written; nothing stored is sound.

    Raises:
        StoreDamagedError: a file is not one of the store, or the entry of the sample is damaged.
    """
    nowhere = [np.empty((0, column.width), column.dtype) for column in shards.columns.values()]
    for _ in range(_NUM_TRIES):
        (place,) = _places(index.entries(np.array([sample])))
        if _copy(shards, place, nowhere):
            return True
        # A live run may have overwritten it meanwhile.
    return False


def _places(entries: Array) -> list[_Place]:
    columns = [entries[name].tolist() for name in ("weights_id", "shard", "start", "length", "tokens")]
    return [_Place(*values) for values in zip(*columns, strict=True)]


def _copy(shards: ShardMap, place: _Place, targets: list[Array]) -> bool:
    """Copy a row to its targets, one for each column, and say whether it is what was written.

    Zeros are what lies beyond its length, and what is not stored; what the targets are too short for is hashed only.
    """
    length = len(targets[0])
    copied = min(place.length, length)
    if copied < length:
        for target in targets:
            target[copied:] = 0
    if not place.weights_id:
        return True
    table = shards[place.shard]
    if place.start < 0 or place.start + place.length > table.num_rows:
        return False  # The entry is as it was written: the shard is another one.
    hasher = xxhash.xxh3_64()
    for (name, column), target in zip(table.columns.items(), targets, strict=True):
        parts = [target[:copied]] if copied < length else [target]
        if copied < place.length:
            parts.append(np.empty((place.length - copied, column.width), column.dtype))
        table.read(name, place.start, *parts)
        for part in parts:
            hasher.update(part.data)
    return hasher.intdigest() == place.tokens


def _tensors(row_format: RowFormat, entries: Array, targets: dict[str, Array]) -> dict[str, torch.Tensor]:
    """The side fields as they were given to the store."""
    fields = {}
    for name, dtype in row_format.token_fields.items():
        fields[name] = as_torch(targets[field_column(name)], dtype)
    for name, (dtype, _) in row_format.sample_fields.items():
        fields[name] = as_torch(np.ascontiguousarray(entries[field_column(name)]), dtype)
    return fields
