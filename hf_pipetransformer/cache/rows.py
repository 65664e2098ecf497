"""Rows of a store: their format, the header that names it, and conversions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import torch
import xxhash

from hf_pipetransformer.cache.files import PrivateFolder
from hf_pipetransformer.cache.table import Array, Columns, StoreDamagedError


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
_INT32 = np.iinfo(np.int32)


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

    def shard_columns(self) -> Columns:
        """Columns of a shard, whose rows are tokens."""
        columns: dict[str, np.dtype[Any]] = {"activation": np.dtype((_STORED[self.dtype], (self.hidden_size,)))}
        for name, dtype in self.token_fields.items():
            # Token ids, positions and masks fit in half of int64.
            columns[field_column(name)] = np.dtype(np.int32 if dtype == torch.int64 else _STORED[dtype])
        return columns

    def entry_dtype(self) -> np.dtype[Any]:
        """An entry of the index.

        A row's tokens are `length` of the `capacity` ones from `start` on in a `shard`, and have the hash `tokens`.
        `hash` is that of all but itself and `compared`, of the sample's number and of the store. `weights_id` says
        what weights the row was computed with, 0 if there is no row. `compared` says in which run the input was last
        found to be that of `input_digest`, see `Index.are_compared`.
        """
        parts: list[Any] = [("start", "<i8"), ("tokens", "<u8"), ("input_digest", "<u8")]
        parts += [("shard", "<i4"), ("length", "<i4"), ("capacity", "<i4")]
        parts += [
            (field_column(name), np.dtype(_STORED[dtype]), shape)
            for name, (dtype, shape) in self.sample_fields.items()
        ]
        # Whole words: the id never lies on two pages.
        parts += [("padding", "u1", (-np.dtype(parts).itemsize % 8,))]
        parts += [("compared", "<u8"), ("hash", "<u8"), ("weights_id", "<i8")]
        return np.dtype(parts)

    def stored(
        self, activation: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The stored form of rows: their columns in a shard, `(n, seq, ...)`, and in the index, `(n, *shape)`.

        Raises:
            ValueError: other fields, shapes or dtypes than this format's, or integers per token beyond int32.
        """
        num_rows, seq = activation.shape[:2]
        shape = (num_rows, seq, self.hidden_size)
        if activation.shape != shape or not activation.is_floating_point():
            raise ValueError(
                f"activation is {activation.dtype} {tuple(activation.shape)}: expected floats of {shape}."
            )
        expected = {name: (dtype, (num_rows, seq)) for name, dtype in self.token_fields.items()} | {
            name: (dtype, (num_rows, *own)) for name, (dtype, own) in self.sample_fields.items()
        }
        found = {name: (values.dtype, tuple(values.shape)) for name, values in fields.items()}
        if found != expected:
            raise ValueError(f"Side fields are {found}: expected {expected}.")
        tokens = {"activation": as_numpy(activation.to(self.dtype))}
        tokens |= {field_column(name): _as_int32(name, fields[name]) for name in self.token_fields}
        return tokens, {field_column(name): as_numpy(fields[name]) for name in self.sample_fields}

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RowFormat:
        """The inverse of `to_json`."""
        return cls(
            values["hidden_size"],
            _dtype(values["dtype"]),
            {name: _dtype(dtype) for name, dtype in values["token_fields"].items()},
            {name: (_dtype(dtype), tuple(shape)) for name, (dtype, shape) in values["sample_fields"].items()},
        )


@dataclass(frozen=True)
class Rows:
    """A batch that was read.

    Attributes:
        weights_ids: `(n,)` of the weights that rows were computed with; 0 where there is nothing, or where the row was
            being written: all its values are then zero.
        lengths: `(n,)` tokens that are stored, which may be more than were asked for.
        activation: `(n, length, hidden)` in the stored dtype, zero beyond a row's own length.
        fields: token fields `(n, length)`, zero likewise, and sample fields `(n, *shape)`, in their own dtypes.
    """

    weights_ids: Array
    lengths: Array
    activation: torch.Tensor
    fields: dict[str, torch.Tensor]

    def take(self, chosen: Array) -> Rows:
        """A part of the rows, by a mask `(n,)` or by positions."""
        places = torch.from_numpy(np.arange(len(self.weights_ids))[chosen])
        fields = {name: values[places] for name, values in self.fields.items()}
        return Rows(self.weights_ids[chosen], self.lengths[chosen], self.activation[places], fields)


def field_column(name: str) -> str:
    """Column of a side field; the prefix keeps it apart from the store's own columns."""
    return f"field_{name}"


def as_numpy(tensor: torch.Tensor) -> Array:
    """The stored form of a tensor, in the same memory if it is contiguous and on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.bool):
        tensor = tensor.view(torch.uint16 if tensor.dtype == torch.bfloat16 else torch.uint8)
    return tensor.numpy()


def as_torch(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a stored form, in the same memory unless int32 stands for int64."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(dtype) if dtype in (torch.bfloat16, torch.bool) else tensor.to(dtype)


def _as_int32(name: str, values: torch.Tensor) -> Array:
    array = as_numpy(values)
    if values.dtype != torch.int64:
        return array
    if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
        raise ValueError(
            f"Token field {name!r} has values from {array.min()} to {array.max()}: the activation cache stores "
            f"integers per token as int32. Use values from {_INT32.min} to {_INT32.max}, or set "
            "activation_cache to off."
        )
    return array.astype(np.int32)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


HEADER_FILE = "store.json"
DROPPED_FILE = "dropped"

# Where the columns of a table begin follows from what Arrow writes before them now.
_VERSION = f"5, Arrow {pa.__version__}"


@dataclass(frozen=True)
class Header:
    """What was decided when a store was made: see `ActivationStore.create`."""

    store_id: str
    key: str
    num_samples: int
    max_bytes: int
    num_writers: int
    row_format: RowFormat
    row_length: int
    run_id: str
    """Of the run that has the store now; the one before may have read other inputs."""

    @classmethod
    def read(cls, folder: PrivateFolder, key: str | None = None) -> Header:
        """The header of the store in `folder`, which must be that of `key` if one is given.

        Raises:
            StoreDamagedError: there is none, it is not what was written, or it is of another version or another key.
        """
        try:
            values = json.loads(folder.read(HEADER_FILE))
            if values.pop("hash") != _hash(values):
                raise ValueError("its hash does not hold")
            if (version := values.pop("version")) != _VERSION:
                raise ValueError(f"version {version}, expected {_VERSION}")
            header = cls(**{**values, "row_format": RowFormat.from_json(values["row_format"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreDamagedError(
                f"{folder.path / HEADER_FILE} is not the header of an activation store "
                f"({type(error).__name__}: {error})."
            ) from error
        if key is not None and header.key != key:
            # The name of a folder is no proof: folders are copied and renamed.
            raise StoreDamagedError(
                f"{folder.path} has the store of {header.key!r}: expected {key!r}. The folder was copied or renamed; "
                "delete it, or give it its own name back."
            )
        return header

    def write(self, folder: PrivateFolder) -> None:
        values = {"version": _VERSION, **vars(self), "row_format": self.row_format.to_json()}
        folder.write(HEADER_FILE, json.dumps({**values, "hash": _hash(values)}, indent=2).encode() + b"\n")


def _hash(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())
