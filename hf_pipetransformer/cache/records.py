"""Format of the stored records, the header of a store, and the index that says where each record is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from hf_pipetransformer.cache.files import Array, PrivateFolder, StoreDamagedError, StoreFile
from hf_pipetransformer.report.files import FULL_DISK


ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# numpy has no bfloat16: its bits are stored as unsigned integers.
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
    torch.bool: np.bool_,
}
_INT32 = np.iinfo(np.int32)
_ALIGNMENT = 64
"""Records start at a multiple of a cache line, which makes copying out of the page cache about 20 % faster."""


@dataclass(frozen=True)
class RecordFormat:
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

    def token_dtypes(self) -> list[np.dtype[Any]]:
        """Return the stored dtype of a token's activation, and of its side fields in their order."""
        # Token ids, positions and masks fit in int32; `_as_int32` rejects values that do not.
        fields = [np.int32 if dtype == torch.int64 else _STORED[dtype] for dtype in self.token_fields.values()]
        return [np.dtype((_STORED[self.dtype], (self.hidden_size,))), *map(np.dtype, fields)]

    def record_bytes(self, length: int) -> int:
        """Return the disk space of a record of `length` tokens."""
        return -(-length * sum(dtype.itemsize for dtype in self.token_dtypes()) // _ALIGNMENT) * _ALIGNMENT

    def entry_dtype(self) -> np.dtype[Any]:
        """Return the dtype of an index entry.

        - `start`, `writer`, `capacity`: the record's place, `capacity` tokens of the writer's file from byte `start`.
        - `length`, `tokens`: the number of tokens in use, and their hash.
        - `field_*`: side fields per sample.
        - `input_digest`: digest of the sample's input.
        - `compared`: the run that last compared the input with this digest, see `ActivationStore.are_compared`.
        - `hash`: hash of the other parts except `compared`, seeded by sample number and store id.
        - `weights_id`: the weights that computed the record; 0 if there is no record.
        """
        parts: list[Any] = [("start", "<i8"), ("tokens", "<u8"), ("input_digest", "<u8")]
        parts += [("writer", "<i4"), ("length", "<i4"), ("capacity", "<i4")]
        parts += [
            (field_column(name), np.dtype(_STORED[dtype]), shape)
            for name, (dtype, shape) in self.sample_fields.items()
        ]
        # Padding to 8-byte words keeps the weights id within one page.
        parts += [("padding", "u1", (-np.dtype(parts).itemsize % 8,))]
        parts += [("compared", "<u8"), ("hash", "<u8"), ("weights_id", "<i8")]
        return np.dtype(parts)

    def index_bytes(self, num_samples: int) -> int:
        """Return the size of the index; it is sparse, so samples without a record take less disk space."""
        return num_samples * self.entry_dtype().itemsize

    def stored(
        self, activation: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> tuple[list[Array], dict[str, Array]]:
        """Convert records to their stored form: arrays `(n, seq, ...)` per token and `(n, *shape)` per sample.

        Raises:
            ValueError: the tensors do not match this format, or a per-token integer exceeds int32.
        """
        num_records, seq = activation.shape[:2]
        shape = (num_records, seq, self.hidden_size)
        if activation.shape != shape or not activation.is_floating_point():
            raise ValueError(
                f"activation is {activation.dtype} {tuple(activation.shape)}: expected floats of {shape}."
            )
        expected = {name: (dtype, (num_records, seq)) for name, dtype in self.token_fields.items()} | {
            name: (dtype, (num_records, *own)) for name, (dtype, own) in self.sample_fields.items()
        }
        found = {name: (values.dtype, tuple(values.shape)) for name, values in fields.items()}
        if found != expected:
            raise ValueError(f"Side fields are {found}: expected {expected}.")
        tokens = [_as_numpy(activation.to(self.dtype)), *(_as_int32(name, fields[name]) for name in self.token_fields)]
        return tokens, {field_column(name): _as_numpy(fields[name]) for name in self.sample_fields}

    def empty(self, num_records: int, length: int) -> tuple[torch.Tensor, list[Array]]:
        """Return an uninitialized activation `(n, length, hidden)`, and it and the token fields as stored arrays."""
        activation = torch.empty(num_records, length, self.hidden_size, dtype=self.dtype)
        # The first array shares the tensor's memory, so records are read directly into it.
        fields = [np.empty((num_records, length), dtype) for dtype in self.token_dtypes()[1:]]
        return activation, [_as_numpy(activation), *fields]

    def fields_of(self, tokens: Sequence[Array], entries: Array) -> dict[str, torch.Tensor]:
        """Return the side fields as tensors: those per token from `tokens`, those per sample from index entries."""
        fields = {
            name: _as_torch(values, dtype)
            for (name, dtype), values in zip(self.token_fields.items(), tokens, strict=True)
        }
        for name, (dtype, _) in self.sample_fields.items():
            fields[name] = _as_torch(entries[field_column(name)], dtype)
        return fields

    def to_json(self) -> dict[str, Any]:
        # Dtypes become text such as "torch.int64", which `_dtype` converts back.
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RecordFormat:
        return cls(
            values["hidden_size"],
            _dtype(values["dtype"]),
            {name: _dtype(dtype) for name, dtype in values["token_fields"].items()},
            {name: (_dtype(dtype), tuple(shape)) for name, (dtype, shape) in values["sample_fields"].items()},
        )


@dataclass(frozen=True)
class StoredRecords:
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

    def take(self, chosen: Array) -> StoredRecords:
        """Return some of the records, chosen by a mask `(n,)` or by positions."""
        places = torch.from_numpy(np.arange(len(self.weights_ids))[chosen])
        fields = {name: values[places] for name, values in self.fields.items()}
        return StoredRecords(self.weights_ids[chosen], self.lengths[chosen], self.activation[places], fields)


def field_column(name: str) -> str:
    """Return the column of a side field in an index entry; the prefix avoids clashes with the store's own columns."""
    return f"field_{name}"


def _as_numpy(tensor: torch.Tensor) -> Array:
    """Convert a tensor to its stored form; shares memory if the tensor is contiguous and on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _as_torch(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """Convert a stored array back to a tensor; shares memory unless int32 is widened to int64."""
    # A column of the index entries has the stride of an entry, which `from_numpy` rejects where it is no multiple of
    # the column's item size.
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor.to(dtype)


def _as_int32(name: str, values: torch.Tensor) -> Array:
    array = _as_numpy(values)
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
_VERSION = 6


@dataclass(frozen=True)
class Header:
    """Parameters of a store, see `ActivationStore.create`; `ActivationStore.reopen` changes bounds and `run_id`."""

    store_id: str
    key: str
    num_samples: int
    max_bytes: int
    record_format: RecordFormat
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
                raise ValueError(f"it is of version {version}, expected {_VERSION}")
            header = cls(**{**values, "record_format": RecordFormat.from_json(values["record_format"])})
        # Whatever the file holds, the store counts as damaged: json raises RecursionError for deep nesting, and values
        # of other types raise TypeError or AttributeError.
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
        values = {"version": _VERSION, **vars(self), "record_format": self.record_format.to_json()}
        folder.write(HEADER_FILE, json.dumps({**values, "hash": _hash(values)}, indent=2).encode() + b"\n")


def _hash(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def hash_of(columns: Sequence[Array]) -> int:
    """Return a 64-bit hash of the bytes of a record."""
    hasher = xxhash.xxh3_64()
    for values in columns:
        hasher.update(values.data)
    return hasher.intdigest()


INDEX_FILE = "index.bin"

# An entry is written in one call, so a reader that meets a write halfway finds the entry whole soon after.
_NUM_TRIES = 10
_WORD_BYTES = 8
"""An index entry ends with three 8-byte words: `compared`, `hash` and, last, `weights_id`."""
_MAX_READ_BYTES = 1 << 28
"""Upper bound on one read; Linux returns at most 2 GB per call."""
# 2**64 divided by the golden ratio, as in Fibonacci hashing: neighboring samples get words far apart.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class Index:
    """One entry per sample: place of its record, weights id, per-sample side fields, and the hash of its tokens.

    Readers take no locks. A writer sets the weights id to 0, writes the record, and then writes the whole entry in one
    call, the id last. A reader that sees a half-written entry gets a hash mismatch and retries. The hash covers the
    sample's number and the store id, so an entry copied to another place is rejected.
    """

    def __init__(self, folder: PrivateFolder, header: Header) -> None:
        self.file = StoreFile(folder, INDEX_FILE)
        self.dtype = header.record_format.entry_dtype()
        self.num_bytes = header.record_format.index_bytes(header.num_samples)
        self.check()
        self._num_samples = header.num_samples
        self._seed = xxhash.xxh3_64_intdigest(header.store_id.encode())
        self._run = np.uint64(xxhash.xxh3_64_intdigest(header.run_id.encode()))

    def check(self) -> None:
        """Raise StoreDamagedError if the file was deleted, cut or extended."""
        self.file.check_size(self.num_bytes)

    def entries(self, samples: Array) -> Array:
        """Return the entries `(n,)` of the samples, see `RecordFormat.entry_dtype`; all zero where nothing is stored.

        Raises:
            StoreDamagedError: the file is gone or was truncated, or an entry fails its hash check.
        """
        self.check()
        entries = self.read(samples)
        for _ in range(_NUM_TRIES):
            stored = np.flatnonzero(entries["weights_id"])
            unsound = stored[self._hashes(entries[stored], samples[stored]) != entries["hash"][stored]]
            if not len(unsound):
                # The place that a cleared entry still claims is the writer's business, see `clear`; for readers
                # nothing is stored.
                entries[entries["weights_id"] == 0] = np.zeros((), self.dtype)
                return entries
            entries[unsound] = self.read(samples[unsound])
        raise StoreDamagedError(
            f"The entry of sample {samples[unsound][0]} in {self.file.path} is not what was written: it has another "
            "hash. The disk or the memory is faulty, or something outside the run wrote to the file."
        )

    def read(self, samples: Array) -> Array:
        """Return entries as they are in the file, also those of records that are being written."""
        assert not len(samples) or (samples.min() >= 0 and samples.max() < self._num_samples), samples
        # Few samples: one small read each. Many: reading the whole index sequentially is faster.
        if len(samples) * 8 < self._num_samples:
            found = np.empty(len(samples), self.dtype)
            for sample, entry in zip(samples.tolist(), found[:, None].view(np.uint8), strict=True):
                self.file.read(sample * self.dtype.itemsize, [entry])
            return found
        content = np.empty(self.num_bytes, np.uint8)
        for start in range(0, self.num_bytes, _MAX_READ_BYTES):
            self.file.read(start, [content[start : start + _MAX_READ_BYTES]])
        return content.view(self.dtype)[samples]

    def clear(self, sample: int, is_new: bool) -> bool:
        """Mark a sample's record as missing until `put`; return False if the disk is full.

        The rest of an old entry stays its owner's claim to the place. A new entry is written whole: the file is
        sparse, and this allocates its block.
        """
        size = self.dtype.itemsize if is_new else _WORD_BYTES
        try:
            # Counted from the end of the entry, whose last word is the id: of an old entry nothing else is lost.
            self.file.write((sample + 1) * self.dtype.itemsize - size, [np.zeros(size, np.uint8)])
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            return False
        return True

    def put(self, samples: Array, entries: Array) -> None:
        """Write the entries of records that are complete; fills in their hashes and marks them as compared."""
        entries["compared"] = self.compared_words(samples, entries["input_digest"])
        entries["hash"] = self._hashes(entries, samples)
        for sample, entry in zip(samples.tolist(), entries[:, None].view(np.uint8), strict=True):
            self.file.write(sample * self.dtype.itemsize, [entry])

    def compared_words(self, samples: Array, input_digests: Array) -> Array:
        """Return the words that mark inputs as compared by this run."""
        # The odd multiplier gives each sample another word, even for equal digests.
        words: Array = input_digests ^ (samples.astype(np.uint64) * _SPREAD + self._run)
        return words

    def set_compared(self, samples: Array, input_digests: Array) -> None:
        words = self.compared_words(samples, input_digests)
        place = int(self.dtype.fields["compared"][1])  # type: ignore[index]
        for position, sample in enumerate(samples.tolist()):
            self.file.write(sample * self.dtype.itemsize + place, [words[position : position + 1]])

    def _hashes(self, entries: Array, samples: Array) -> Array:
        """Return the hash of each entry, uint64 `(n,)`, without `hash` and `compared`, which is updated separately."""
        size, content = self.dtype.itemsize, entries.tobytes()
        hashes = []
        for sample, place in zip(samples.tolist(), range(0, len(content), size), strict=True):
            entry = content[place : place + size]
            hashed = entry[: -3 * _WORD_BYTES] + entry[-_WORD_BYTES:]
            hashes.append(xxhash.xxh3_64_intdigest(hashed, (self._seed + sample) % 2**64))
        return np.array(hashes, np.uint64)
