"""Writing rows in place, so that a kill at any moment leaves no row that is half new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hf_pipetransformer.autocache.index import Index
from hf_pipetransformer.autocache.rows import RowFormat, as_numpy, field_column, hash_of, stored_token_field
from hf_pipetransformer.autocache.shards import Arena, ShardMap
from hf_pipetransformer.autocache.table import Array, StoreDamagedError


@dataclass(frozen=True)
class _Values:
    """Rows in stored form: activation `(n, seq, hidden)` and token fields `(n, seq)` by column of a shard, and sample
    fields by column of the index.
    """

    tokens: dict[str, Array]
    sample_fields: dict[str, Array]


def write_rows(
    index: Index,
    shards: ShardMap,
    arena: Arena,
    samples: Array,
    weights_id: int,
    activation: torch.Tensor,
    lengths: Array,
    fields: Mapping[str, torch.Tensor],
    input_digests: Array,
) -> int:
    """Store rows and return how many; see `ActivationStore.write`."""
    _check(shards.row_format, len(samples), activation, lengths, fields, input_digests)
    values = _stored_form(shards.row_format, activation, fields)
    last_row = {sample: row for row, sample in enumerate(samples.tolist())}
    targets, placed, entries = _place(index, shards, arena, last_row, lengths)
    if not placed:
        return 0
    entries["weights_id"] = weights_id
    entries["input_digest"] = input_digests[placed]
    for name, field in values.sample_fields.items():
        entries[name] = field[placed]
    lengths_placed = entries["length"].tolist()
    for i, (row, length) in enumerate(zip(placed, lengths_placed, strict=True)):
        entries["tokens"][i] = hash_of(column[row, :length] for column in values.tokens.values())
    numbers, starts = entries["shard"].tolist(), entries["start"].tolist()
    for number in set(numbers):
        shards[number].check()

    index.clear(targets)
    _write_tokens(shards, values, list(zip(placed, numbers, starts, lengths_placed, strict=True)))
    index.put(targets, entries)
    return len(placed)


def _write_tokens(shards: ShardMap, values: _Values, slots: list[tuple[int, int, int, int]]) -> None:
    """Write the tokens of rows to their slots: row, shard, start and length of each."""
    runs: list[tuple[int, int, list[tuple[int, int]]]] = []
    ends: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for row, number, start, length in slots:
        end, run = ends.get(number, (-1, []))
        if end != start:
            run = []
            runs.append((number, start, run))
        run.append((row, length))
        ends[number] = start + length, run
    for number, start, run in runs:
        for name, column in values.tokens.items():
            shards[number].write(name, start, [column[row, :length] for row, length in run])


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
    tokens = {"activation": as_numpy(activation.detach().to("cpu", row_format.dtype).contiguous())}
    tokens |= {field_column(name): stored_token_field(name, fields[name]) for name in row_format.token_fields}
    per_sample = {
        field_column(name): as_numpy(fields[name].detach().cpu().contiguous()) for name in row_format.sample_fields
    }
    return _Values(tokens, per_sample)


def _place(
    index: Index, shards: ShardMap, arena: Arena, last_row: Mapping[int, int], lengths: Array
) -> tuple[Array, list[int], Array]:
    """Samples that have a slot, their rows, and entries with it; a row keeps its slot as long as it fits there.

    A slot whose row was never whole is not used again: only a whole entry is believed.
    """
    samples = np.fromiter(last_row, np.int64, len(last_row))
    entries = index.entries(samples)
    slots = [entries[name].tolist() for name in ("shard", "start", "capacity")]
    placed, kept = [], []
    for i, (row, number, start, capacity) in enumerate(zip(last_row.values(), *slots, strict=True)):
        length = int(lengths[row])
        if capacity < length:
            slot = arena.allocate(length)
            if slot is None:
                continue
            entries["shard"][i], entries["start"][i] = slot
            entries["capacity"][i] = length
        elif start + capacity > shards[number].num_rows:
            raise StoreDamagedError(
                f"{shards.folder.path}: the index places sample {samples[i]} at tokens {start} to {start + capacity} "
                f"of shard {number}, which has {shards[number].num_rows}. Delete the folder to compute the rows anew."
            )
        entries["length"][i] = length
        placed.append(row)
        kept.append(i)
    return samples[kept], placed, entries[kept]
