"""Record format, store header, and conversions between torch tensors and stored arrays."""

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
    """Content of one sample's record; raises ValueError for a dtype that cannot be stored.

    Args:
        dtype: dtype of the activation: float32, bfloat16 or float16.
        token_fields: side fields with one value per token, `(batch, seq)`; int64 is stored as int32.
        sample_fields: side fields per sample: dtype, and shape without the batch dimension.
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
        """Return the columns of a shard, whose rows are tokens."""
        columns: dict[str, np.dtype[Any]] = {"activation": np.dtype((_STORED[self.dtype], (self.hidden_size,)))}
        for name, dtype in self.token_fields.items():
            # Token ids, positions and masks fit in int32; `_as_int32` rejects values that do not.
            columns[field_column(name)] = np.dtype(np.int32 if dtype == torch.int64 else _STORED[dtype])
        return columns

    def entry_dtype(self) -> np.dtype[Any]:
        """Return the dtype of an index entry.

        - `start`, `shard`, `capacity`: the record's place, `capacity` tokens of the shard from `start` on.
        - `length`, `tokens`: the number of tokens in use, and their hash.
        - `field_*`: side fields per sample.
        - `input_digest`: digest of the sample's input.
        - `compared`: the run that last compared the input with this digest, see `Index.are_compared`.
        - `hash`: hash of the other parts except `compared`, seeded by sample number and store id.
        - `weights_id`: the weights that computed the record; 0 if there is no record.
        """
        parts: list[Any] = [("start", "<i8"), ("tokens", "<u8"), ("input_digest", "<u8")]
        parts += [("shard", "<i4"), ("length", "<i4"), ("capacity", "<i4")]
        parts += [
            (field_column(name), np.dtype(_STORED[dtype]), shape)
            for name, (dtype, shape) in self.sample_fields.items()
        ]
        # Padding to 8-byte words keeps the weights id within one page.
        parts += [("padding", "u1", (-np.dtype(parts).itemsize % 8,))]
        parts += [("compared", "<u8"), ("hash", "<u8"), ("weights_id", "<i8")]
        return np.dtype(parts)

    def stored(
        self, activation: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Convert records to their stored form: shard columns `(n, seq, ...)` and index columns `(n, *shape)`.

        Raises:
            ValueError: the tensors do not match this format, or a per-token integer exceeds int32.
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
        # Dtypes become text such as "torch.int64", which `_dtype` converts back.
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RowFormat:
        return cls(
            values["hidden_size"],
            _dtype(values["dtype"]),
            {name: _dtype(dtype) for name, dtype in values["token_fields"].items()},
            {name: (_dtype(dtype), tuple(shape)) for name, (dtype, shape) in values["sample_fields"].items()},
        )


@dataclass(frozen=True)
class Rows:
    """Records of a batch, read from a store.

    Attributes:
        weights_ids: `(n,)`; 0 if the record is missing or was being written: all its values are then zero.
        lengths: `(n,)` tokens stored, possibly more than requested.
        activation: `(n, length, hidden)` in the stored dtype, zero beyond a record's length.
        fields: token fields `(n, length)`, zero-padded likewise, and sample fields `(n, *shape)`; original dtypes.
    """

    weights_ids: Array
    lengths: Array
    activation: torch.Tensor
    fields: dict[str, torch.Tensor]

    def take(self, chosen: Array) -> Rows:
        """Return some of the records, chosen by a mask `(n,)` or by positions."""
        places = torch.from_numpy(np.arange(len(self.weights_ids))[chosen])
        fields = {name: values[places] for name, values in self.fields.items()}
        return Rows(self.weights_ids[chosen], self.lengths[chosen], self.activation[places], fields)


def field_column(name: str) -> str:
    """Return the column of a side field; the prefix avoids clashes with the store's own columns."""
    return f"field_{name}"


def as_numpy(tensor: torch.Tensor) -> Array:
    """Convert a tensor to its stored form; shares memory if the tensor is contiguous and on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.bool):
        tensor = tensor.view(torch.uint16 if tensor.dtype == torch.bfloat16 else torch.uint8)
    return tensor.numpy()


def as_torch(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Convert a stored array back to a tensor; shares memory unless int32 is widened to int64."""
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

# Column offsets depend on the header that this Arrow version writes.
_VERSION = f"5, Arrow {pa.__version__}"


@dataclass(frozen=True)
class Header:
    """Parameters of a store, fixed at creation except `max_bytes` and `run_id`; see `ActivationStore.create`."""

    store_id: str
    key: str
    num_samples: int
    max_bytes: int
    num_writers: int
    row_format: RowFormat
    row_length: int
    run_id: str
    """Id of the run that uses the store now; an earlier run may have read different inputs."""

    @classmethod
    def read(cls, folder: PrivateFolder, key: str | None = None) -> Header:
        """Read the header of the store in `folder`, and check its key if one is given.

        Raises:
            StoreDamagedError: the header is missing, corrupt, of another version, or has another key.
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
            # Users copy and rename folders, so the folder's name proves nothing.
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
