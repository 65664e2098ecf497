"""What a stored row looks like: its columns on the disk, its values in torch, its checksum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_pipetransformer.autocache.table import Array, Column


ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Arrow has no bfloat16, and packs its booleans eight to a byte: both are stored as unsigned integers.
_STORED: dict[torch.dtype, type[np.generic]] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.uint8,
}
_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INT32 = np.iinfo(np.int32)

LEVEL_FACTOR, LENGTH_FACTOR, DIGEST_FACTOR, FIRST_FIELD_FACTOR = 1, 2, 3, 4


@dataclass(frozen=True)
class RowFormat:
    """What one sample's row holds.

    Args:
        hidden_size: numbers per token of the activation.
        dtype: how activations are stored: float32, bfloat16 or float16.
        token_fields: side fields with one value per token, `(batch, seq)`; int64 is stored as int32.
        sample_fields: side fields per sample: dtype, and shape without the batch dimension.

    Raises:
        ValueError: a dtype that cannot be stored.
    """

    hidden_size: int
    dtype: torch.dtype
    token_fields: Mapping[str, torch.dtype]
    sample_fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

    def __post_init__(self) -> None:
        if self.dtype not in ACTIVATION_DTYPES:
            raise ValueError(f"Activations cannot be stored as {self.dtype}: expected one of {ACTIVATION_DTYPES}.")
        dtypes = {**self.token_fields, **{name: dtype for name, (dtype, _) in self.sample_fields.items()}}
        for name, dtype in dtypes.items():
            if dtype not in _STORED:
                raise ValueError(f"Side field {name!r} has dtype {dtype}: expected one of {tuple(_STORED)}.")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in a shard, side fields included."""
        return sum(column.row_bytes for column in self.shard_columns().values())

    def shard_columns(self) -> dict[str, Column]:
        """Columns of a shard, whose rows are tokens."""
        columns = {"activation": Column(np.dtype(_STORED[self.dtype]), self.hidden_size)}
        for name, dtype in self.token_fields.items():
            columns[field_column(name)] = Column(stored_token_dtype(dtype))
        return columns

    def index_columns(self) -> dict[str, Column]:
        """Columns of the index, whose rows are samples. `dropped` is about the whole store; row 0 counts."""
        plain = {"level": "i8", "shard": "i4", "start": "i8", "length": "i4", "capacity": "i4"}
        plain |= {"checksum": "u8", "input_digest": "u8", "dropped": "u1"}
        columns = {name: Column(np.dtype(code)) for name, code in plain.items()}
        for name, (dtype, shape) in self.sample_fields.items():
            width = int(np.prod(shape, dtype=np.int64))
            if width:
                columns[field_column(name)] = Column(np.dtype(_STORED[dtype]), width)
        return columns

    def to_json(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden_size,
            "dtype": _name(self.dtype),
            "token_fields": {name: _name(dtype) for name, dtype in self.token_fields.items()},
            "sample_fields": {
                name: [_name(dtype), list(shape)] for name, (dtype, shape) in self.sample_fields.items()
            },
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RowFormat:
        return cls(
            hidden_size=int(values["hidden_size"]),
            dtype=getattr(torch, values["dtype"]),
            token_fields={name: getattr(torch, dtype) for name, dtype in values["token_fields"].items()},
            sample_fields={
                name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in values["sample_fields"].items()
            },
        )


@dataclass(frozen=True)
class Rows:
    """A batch that was read.

    Attributes:
        levels: `(n,)`; 0 where there is nothing, or where the row was being written: all its values are then zero.
        lengths: `(n,)` tokens that are stored, which may be more than were asked for.
        activation: `(n, length, hidden)` in the stored dtype, zero beyond a row's own length.
        fields: token fields `(n, length)`, zero likewise, and sample fields `(n, *shape)`, in their own dtypes.
    """

    levels: Array
    lengths: Array
    activation: torch.Tensor
    fields: dict[str, torch.Tensor]

    def take(self, chosen: Array) -> Rows:
        """A part of the rows, by a mask `(n,)` or by positions."""
        places = torch.from_numpy(np.arange(len(self.levels))[chosen])
        fields = {name: values[places] for name, values in self.fields.items()}
        return Rows(self.levels[chosen], self.lengths[chosen], self.activation[places], fields)


def field_column(name: str) -> str:
    """Column of a side field; the prefix keeps it apart from the store's own columns."""
    return f"field_{name}"


def stored_token_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """How a token field is stored: token ids, positions and masks fit in half of int64."""
    return np.dtype(np.int32 if dtype == torch.int64 else _STORED[dtype])


def as_numpy(tensor: torch.Tensor) -> Array:
    """The stored form of a CPU tensor, in the same memory."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def as_torch(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a stored form, in the same memory unless int32 stands for int64."""
    tensor = torch.from_numpy(array)
    if dtype in (torch.bfloat16, torch.bool):
        return tensor.view(dtype)
    return tensor.to(dtype)


def stored_token_field(name: str, values: torch.Tensor) -> Array:
    """`(n, seq)` values as they are stored.

    Raises:
        ValueError: an int64 value that does not fit in int32.
    """
    array = as_numpy(values.detach().cpu().contiguous())
    if values.dtype != torch.int64:
        return array
    if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
        raise ValueError(
            f"Token field {name!r} has values from {array.min()} to {array.max()}: the activation cache stores "
            f"integers per token as int32. Use values from {_INT32.min} to {_INT32.max}, or set "
            "activation_cache to off."
        )
    return array.astype(np.int32)


def unsigned(array: Array) -> Array:
    """The bits of each number, as an integer; the same memory."""
    return array.view(_UNSIGNED[array.itemsize])


def word_dtype(token_bytes: int) -> np.dtype[Any]:
    """The widest integer whose size divides the bytes of a token's activation."""
    return np.dtype(next(_UNSIGNED[size] for size in (8, 4, 2) if token_bytes % size == 0))


def factor(place: int) -> np.uint64:
    """An odd number for each part of a checksum.

    A checksum is the sum modulo 2**64 of all words of a row, each part times its factor. One flipped bit changes one
    word by a power of two, and a power of two below 2**64 times an odd number is never 0 modulo 2**64.
    """
    return np.uint64((2 * place + 1) * 0x9E3779B97F4A7C15 % 2**64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def place_sum(levels: Array, lengths: Array, input_digests: Array) -> Array:
    """`(n,)` uint64: the part of the checksums that comes from the index itself."""
    return (
        levels.astype(np.uint64) * factor(LEVEL_FACTOR)
        + lengths.astype(np.uint64) * factor(LENGTH_FACTOR)
        + input_digests * factor(DIGEST_FACTOR)
    )


def field_sum(values: Array, field: int) -> Array:
    """`(n,)` uint64: the part of the checksums that side field number `field`, `(n, ...)` in stored form, gives."""
    bits = unsigned(values)
    return bits.sum(axis=tuple(range(1, bits.ndim)), dtype=np.uint64) * factor(FIRST_FIELD_FACTOR + field)
