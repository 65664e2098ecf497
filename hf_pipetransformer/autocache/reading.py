"""Copying rows out of the mapped files, and noticing those that are not what was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hf_pipetransformer.autocache.rows import (
    RowFormat,
    Rows,
    as_numpy,
    as_torch,
    field_column,
    field_sum,
    place_sum,
    word_dtype,
)
from hf_pipetransformer.autocache.shards import Shard, ShardMap, shard_path
from hf_pipetransformer.autocache.table import Array, ArrowTable, StoreDamagedError


_NUM_TRIES = 3


@dataclass(frozen=True)
class _Batch:
    """Where rows are copied to, in stored form.

    Attributes:
        activation: `(n, length, hidden)`.
        words: the same memory as `(n, words)` integers.
        token_fields: `(n, length)` each, in the order of the row format.
        sample_fields: `(n,)` or `(n, width)`, by column of the index.
        lengths: `(n,)` stored tokens.
    """

    activation: Array
    words: Array
    token_fields: list[Array]
    sample_fields: dict[str, Array]
    lengths: Array

    @classmethod
    def around(cls, activation: Array, shards: ShardMap, index: ArrowTable) -> _Batch:
        num_rows, length, hidden_size = activation.shape
        row_format = shards.row_format
        word = word_dtype(hidden_size * activation.itemsize)
        per_sample = [field_column(name) for name in row_format.sample_fields]
        return cls(
            activation=activation,
            words=activation.reshape(num_rows, length * hidden_size).view(word),
            token_fields=[
                np.empty((num_rows, length), shards.columns[field_column(name)].dtype)
                for name in row_format.token_fields
            ],
            sample_fields={
                name: np.empty((num_rows, *index.columns[name].shape[1:]), index.columns[name].dtype)
                for name in per_sample
                if name in index.columns
            },
            lengths=np.empty(num_rows, np.int32),
        )

    @property
    def length(self) -> int:
        return self.activation.shape[1]

    def row(self, row: int) -> _Batch:
        """A batch of one row in the same memory."""
        part = slice(row, row + 1)
        return _Batch(
            self.activation[part],
            self.words[part],
            [values[part] for values in self.token_fields],
            {name: values[part] for name, values in self.sample_fields.items()},
            self.lengths[part],
        )

    def arrays(self) -> Iterator[Array]:
        yield self.activation
        yield from self.token_fields
        yield from self.sample_fields.values()
        yield self.lengths

    def sums(self) -> Array:
        """`(n,)` uint64 sums of what was copied; the zeros beyond a row's length add nothing."""
        sums: Array = self.words.sum(axis=1, dtype=np.uint64)
        for number, values in enumerate([*self.token_fields, *self.sample_fields.values()]):
            sums += field_sum(values, number)
        return sums

    def tensors(self, row_format: RowFormat) -> dict[str, torch.Tensor]:
        """The side fields as they were given to the store."""
        fields = {}
        for (name, dtype), values in zip(row_format.token_fields.items(), self.token_fields, strict=True):
            fields[name] = as_torch(values, dtype)
        for name, (dtype, shape) in row_format.sample_fields.items():
            per_sample = self.sample_fields.get(field_column(name))
            whole = (len(self.lengths), *shape)
            if per_sample is None:
                fields[name] = torch.zeros(whole, dtype=dtype)
            else:
                fields[name] = as_torch(per_sample, dtype).reshape(whole)
        return fields


def read_rows(index: ArrowTable, shards: ShardMap, samples: Array, out: torch.Tensor, verify: bool) -> Rows:
    """Fill `out`, `(n, length, hidden)`, with the rows of `samples`; see `ActivationStore.read`."""
    batch = _Batch.around(as_numpy(out), shards, index)
    levels, is_sound = _read_once(index, shards, samples, batch, verify)
    if not is_sound.all():
        for row in np.flatnonzero(~is_sound).tolist():
            levels[row] = _read_again(index, shards, samples[row : row + 1], batch.row(row), verify)
    return Rows(levels, batch.lengths, out, batch.tensors(shards.row_format))


def _read_again(index: ArrowTable, shards: ShardMap, sample: Array, batch: _Batch, verify: bool) -> int:
    """The level of a row that was not sound: it was overwritten while it was copied, or it is damaged."""
    for _ in range(_NUM_TRIES):
        levels, is_sound = _read_once(index, shards, sample, batch, verify)
        if is_sound[0]:
            return int(levels[0])
    shard, start, length = (int(index.columns[name][sample[0]]) for name in ("shard", "start", "length"))
    raise StoreDamagedError(
        f"The row of sample {sample[0]} is not what was written: {length} tokens from token {start} of "
        f"{shard_path(shards.folder, shard)} have another checksum. The disk or the memory is faulty, or something "
        f"outside the run wrote to the file. Delete {shards.folder} to compute the rows anew."
    )


def _read_once(
    index: ArrowTable, shards: ShardMap, samples: Array, batch: _Batch, verify: bool
) -> tuple[Array, Array]:
    """Fill `batch`; the levels, and whether each row is what was written (one of level 0 always is)."""
    index.check_size()
    columns = index.columns
    # A row counts only if its level is the same before and after everything else of it is copied.
    levels = columns["level"][samples]
    if columns["dropped"][0]:
        levels[:] = 0
    lengths, checksums = columns["length"][samples], columns["checksum"][samples]
    digests = columns["input_digest"][samples]
    for name, values in batch.sample_fields.items():
        values[:] = columns[name][samples]
    is_sound = np.ones(len(samples), bool)
    cut_off, strays = _copy_tokens(
        shards, levels, columns["shard"][samples], columns["start"][samples], lengths, batch, verify
    )
    if verify:
        is_sound = batch.sums() + cut_off + place_sum(levels, lengths, digests) == checksums
    is_sound[strays] = False
    is_missing = (levels == 0) | (columns["level"][samples] != levels)
    batch.lengths[:] = lengths
    if is_missing.any():
        levels[is_missing] = 0
        for values in batch.arrays():
            values[is_missing] = 0
    return levels, is_sound | is_missing


def _copy_tokens(
    shards: ShardMap, levels: Array, numbers: Array, starts: Array, lengths: Array, batch: _Batch, verify: bool
) -> tuple[Array, list[int]]:
    """Copy the tokens of all rows that have a level.

    Returns:
        For each row the sum of what was cut off, and the rows whose place lies outside their shard.
    """
    for number in set(numbers[levels != 0].tolist()):
        shards[number].table.check_size()
    cut_off = np.zeros(len(levels), np.uint64)
    strays: list[int] = []
    target, fields, length = batch.activation, batch.token_fields, batch.length
    places = list(zip(levels.tolist(), numbers.tolist(), starts.tolist(), lengths.tolist(), strict=True))
    if len(levels) and (levels != 0).all() and (lengths == length).all() and _copy_whole(shards, places, batch):
        return cut_off, strays
    for row, (level, number, start, stored) in enumerate(places):
        if not level:
            continue
        shard = shards[number]
        end = start + stored
        if start < 0 or stored < 0 or end > shard.num_tokens:
            strays.append(row)
            continue
        copied = stored
        if stored < length:
            target[row, stored:] = 0
            for field in fields:
                field[row, stored:] = 0
        elif stored > length:
            copied, end = length, start + length
            if verify:
                cut_off[row] = _sum_of(shard, end, start + stored)
        target[row, :copied] = shard.activation[start:end]
        for field, values in zip(fields, shard.fields, strict=True):
            field[row, :copied] = values[start:end]
    return cut_off, strays


def _copy_whole(shards: ShardMap, places: list[tuple[int, int, int, int]], batch: _Batch) -> bool:
    """Copy rows that all have the length of the batch in one call; False if a place lies outside its shard."""
    owners = [shards[number] for _, number, _, _ in places]
    spans = [slice(start, start + stored) for _, _, start, stored in places]
    if any(span.start < 0 or span.stop > owner.num_tokens for owner, span in zip(owners, spans, strict=True)):
        return False
    rows = [owner.activation[span] for owner, span in zip(owners, spans, strict=True)]
    np.concatenate(rows, out=batch.activation.reshape(-1, batch.activation.shape[2]))
    for number, values in enumerate(batch.token_fields):
        np.concatenate([o.fields[number][s] for o, s in zip(owners, spans, strict=True)], out=values.reshape(-1))
    return True


def _sum_of(shard: Shard, start: int, end: int) -> np.uint64:
    """The part of a checksum that tokens `start` to `end` of a shard give."""
    total: Array = shard.words[start:end].sum(dtype=np.uint64, keepdims=True).reshape(1)
    for number, values in enumerate(shard.fields):
        total += field_sum(values[None, start:end], number)
    return total[0]
