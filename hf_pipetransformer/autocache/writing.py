"""Writing rows through the mapped files, so that a kill at any moment leaves no row that is half new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hf_pipetransformer.autocache.rows import (
    RowFormat,
    as_numpy,
    field_column,
    field_sum,
    place_sum,
    stored_token_field,
    word_dtype,
)
from hf_pipetransformer.autocache.shards import Arena, ShardMap
from hf_pipetransformer.autocache.table import Array, ArrowTable, StoreDamagedError


@dataclass(frozen=True)
class _Values:
    """Rows in stored form: activation `(n, seq, hidden)`, token fields `(n, seq)`, sample fields by index column."""

    activation: Array
    token_fields: list[Array]
    sample_fields: dict[str, Array]


def write_rows(
    index: ArrowTable,
    shards: ShardMap,
    arena: Arena,
    samples: Array,
    level: int,
    activation: torch.Tensor,
    lengths: Array,
    fields: Mapping[str, torch.Tensor],
    input_digests: Array,
) -> int:
    """Store rows and return how many; see `ActivationStore.write`."""
    _check(shards.row_format, len(samples), activation, lengths, fields, input_digests)
    values = _stored_form(shards.row_format, activation, fields)
    index.check_size()
    columns = index.columns
    last_row = {sample: row for row, sample in enumerate(samples.tolist())}
    placed, shard_numbers, starts = _place(columns, shards, arena, last_row, lengths)
    if not placed:
        return 0
    chosen = np.array(placed)
    targets, lengths = samples[chosen], lengths[chosen]
    sums = place_sum(np.full(len(placed), level), lengths, input_digests[chosen])
    for number in set(shard_numbers):
        shards[number].table.check_size()

    columns["level"][targets] = 0
    _write_tokens(shards, values, list(zip(placed, shard_numbers, starts, lengths.tolist(), strict=True)))
    sums += _sums(values, placed, lengths.tolist())
    for name, field in values.sample_fields.items():
        columns[name][targets] = field[chosen]
    columns["length"][targets] = lengths
    columns["checksum"][targets] = sums
    columns["input_digest"][targets] = input_digests[chosen]
    columns["level"][targets] = level
    return len(placed)


def _write_tokens(shards: ShardMap, values: _Values, slots: list[tuple[int, int, int, int]]) -> None:
    """Write the tokens of rows to their slots: row, shard, start and length of each."""
    by_shard: dict[int, list[tuple[int, list[Array], list[list[Array]]]]] = {}
    ends: dict[int, int] = {}
    for row, number, start, length in slots:
        runs = by_shard.setdefault(number, [])
        if ends.get(number) != start:
            runs.append((start, [], [[] for _ in values.token_fields]))
        ends[number] = start + length
        runs[-1][1].append(values.activation[row, :length])
        for rows, field in zip(runs[-1][2], values.token_fields, strict=True):
            rows.append(field[row, :length])
    names = [field_column(name) for name in shards.row_format.token_fields]
    for number, runs in by_shard.items():
        with shards[number].table.writing() as write:
            for start, activation, fields in runs:
                write("activation", start, activation)
                for name, rows in zip(names, fields, strict=True):
                    write(name, start, rows)


def _check(
    row_format: RowFormat,
    num_rows: int,
    activation: torch.Tensor,
    lengths: Array,
    fields: Mapping[str, torch.Tensor],
    input_digests: Array,
) -> None:
    seq = activation.shape[1]
    shape = (num_rows, seq, row_format.hidden_size)
    if activation.shape != shape or not activation.is_floating_point():
        raise ValueError(f"activation is {activation.dtype} {tuple(activation.shape)}: expected floats of {shape}.")
    if len(lengths) != num_rows or len(input_digests) != num_rows:
        raise ValueError(f"Found {len(lengths)} lengths and {len(input_digests)} digests for {num_rows} samples.")
    if num_rows and (lengths.min() < 1 or lengths.max() > seq):
        raise ValueError(f"lengths are {lengths.min()} to {lengths.max()}: expected 1 to {seq}.")
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    expected = {name: (dtype, (num_rows, seq)) for name, dtype in row_format.token_fields.items()}
    for name, (dtype, own) in row_format.sample_fields.items():
        expected[name] = (dtype, (num_rows, *own))
    found = {name: (values.dtype, tuple(values.shape)) for name, values in fields.items()}
    if found != expected:
        raise ValueError(f"Side fields are {found}: expected {expected}.")


def _stored_form(row_format: RowFormat, activation: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> _Values:
    columns = row_format.index_columns()
    per_sample = {}
    for name in row_format.sample_fields:
        column = columns.get(field_column(name))
        if column is not None:
            array = as_numpy(fields[name].detach().cpu().contiguous())
            per_sample[field_column(name)] = array.reshape((-1,) if column.width == 1 else (-1, column.width))
    return _Values(
        as_numpy(activation.detach().to("cpu", row_format.dtype).contiguous()),
        [stored_token_field(name, fields[name]) for name in row_format.token_fields],
        per_sample,
    )


def _place(
    columns: Mapping[str, Array], shards: ShardMap, arena: Arena, last_row: Mapping[int, int], lengths: Array
) -> tuple[list[int], list[int], list[int]]:
    """The rows that have a slot, each slot's shard and start; a row keeps its slot as long as it fits there."""
    targets = np.fromiter(last_row, np.int64, len(last_row))
    slots = zip(
        last_row.items(),
        columns["shard"][targets].tolist(),
        columns["start"][targets].tolist(),
        columns["capacity"][targets].tolist(),
        strict=True,
    )
    placed, numbers, starts = [], [], []
    for (sample, row), number, start, capacity in slots:
        length = int(lengths[row])
        if capacity < length:
            slot = arena.allocate(length)
            if slot is None:
                continue
            number, start = slot
            columns["level"][sample] = 0
            # The slot counts from when its capacity is set: a kill in between must not leave half of another place.
            columns["capacity"][sample] = 0
            columns["shard"][sample] = number
            columns["start"][sample] = start
            columns["capacity"][sample] = length
        elif start < 0 or start + capacity > shards[number].num_tokens:
            raise StoreDamagedError(
                f"{shards.folder}: the index places sample {sample} at tokens {start} to {start + capacity} of shard "
                f"{number}, which has {shards[number].num_tokens}. Delete the folder to compute the rows anew."
            )
        placed.append(row)
        numbers.append(number)
        starts.append(start)
    return placed, numbers, starts


def _sums(values: _Values, placed: list[int], lengths: list[int]) -> Array:
    """`(n,)` uint64: sums of the placed rows, without what lies beyond their length."""
    num_rows, seq, hidden_size = values.activation.shape
    word = word_dtype(hidden_size * values.activation.itemsize)
    words = values.activation.reshape(num_rows, seq * hidden_size).view(word)
    words_per_token = words.shape[1] // seq
    sums = np.zeros(len(placed), np.uint64)
    for place, (row, length) in enumerate(zip(placed, lengths, strict=True)):
        sums[place] = words[row, : length * words_per_token].sum(dtype=np.uint64)
    is_real = np.arange(seq) < np.array(lengths)[:, None]
    for number, field in enumerate(values.token_fields):
        sums += field_sum(np.where(is_real, field[placed], np.zeros((), field.dtype)), number)
    for number, field in enumerate(values.sample_fields.values(), start=len(values.token_fields)):
        sums += field_sum(field[placed], number)
    return sums
