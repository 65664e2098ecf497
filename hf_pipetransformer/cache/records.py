"""Format of the stored records, the header of a store, and the index that says where each record is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from hf_pipetransformer.cache.files import Array, PrivateFolder, StoreDamagedError, StoreFile
from hf_pipetransformer.report.files import FULL_DISK


ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_ALIGNMENT = 64
"""Records start at a multiple of a cache line, which makes copying out of the page cache about 20 % faster."""

ENTRY = np.dtype(
    [
        *[("start", "<i8"), ("tokens", "<u8"), ("digest", "<u8", (2,)), ("writer", "<i4"), ("length", "<i4")],
        # Padding to 8-byte words keeps the weights id within one page.
        *[("capacity", "<i4"), ("padding", "<i4"), ("hash", "<u8"), ("weights_id", "<i8")],
    ]
)
"""Entry of an index.

- `start`, `writer`, `capacity`: the record's place, `capacity` tokens of the writer's file from byte `start`.
- `length`, `tokens`: the number of tokens in use, and their hash.
- `digest`: 128-bit hash of what the record was made from.
- `hash`: hash of the other parts, seeded by the entry's number and the store's id.
- `weights_id`: the weights that computed the record; 0 if there is no record.
"""


def index_bytes(num_samples: int) -> int:
    """Return the size of an index; it is sparse, so samples without a record take less disk space."""
    return num_samples * ENTRY.itemsize


@dataclass(frozen=True)
class RecordFormat:
    """Content of one record; raises ValueError for a dtype that cannot be stored.

    Args:
        dtype: float32, bfloat16 or float16.
    """

    hidden_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in ACTIVATION_DTYPES:
            raise ValueError(f"Activations cannot be stored as {self.dtype}: expected one of {ACTIVATION_DTYPES}.")

    def record_bytes(self, length: int) -> int:
        """Return the disk space of a record of `length` tokens."""
        return -(-length * self.hidden_size * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def stored(self, activation: torch.Tensor) -> Array:
        """Convert records to their stored form, `(n, seq, hidden)`.

        Raises:
            ValueError: the tensor does not match this format.
        """
        shape = (*activation.shape[:2], self.hidden_size)
        if activation.shape != shape or not activation.is_floating_point():
            raise ValueError(
                f"activation is {activation.dtype} {tuple(activation.shape)}: expected floats of {shape}."
            )
        return as_stored(activation.to(self.dtype))

    def empty(self, num_records: int, length: int) -> torch.Tensor:
        """Return an uninitialized activation `(n, length, hidden)`."""
        return torch.empty(num_records, length, self.hidden_size, dtype=self.dtype)

    def to_json(self) -> dict[str, Any]:
        # A dtype becomes text such as "torch.float32", which `_dtype` converts back.
        return {"hidden_size": self.hidden_size, "dtype": str(self.dtype)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RecordFormat:
        return cls(values["hidden_size"], _dtype(values["dtype"]))


@dataclass(frozen=True)
class StoredRecords:
    """Records of a batch, read from a store.

    Attributes:
        weights_ids: `(n,)`; 0 if the record is missing or was being written: all its values are then zero.
        activation: `(n, length, hidden)` in the stored dtype, zero beyond a record's length.
    """

    weights_ids: Array
    activation: torch.Tensor


def as_stored(tensor: torch.Tensor) -> Array:
    """Convert a tensor to its stored form; shares memory if the tensor is contiguous and on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    # numpy has no bfloat16: its bits are stored as unsigned integers.
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


HEADER_FILE = "store.json"
_VERSION = 7


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


def hash_of(record: Array) -> int:
    """Return a 64-bit hash of the bytes of a record."""
    return xxhash.xxh3_64_intdigest(record.data)


INDEX_FILE = "index.bin"

# An entry is written in one call, so a reader that meets a write halfway finds the entry whole soon after.
_NUM_TRIES = 10
_WORD_BYTES = 8
"""An index entry ends with two 8-byte words: `hash` and, last, `weights_id`."""
_MAX_READ_BYTES = 1 << 28
"""Upper bound on one read; Linux returns at most 2 GB per call."""


class Index:
    """One `ENTRY` per record: its place, the hash of its tokens, and what it was made from.

    Readers take no locks. A writer sets the weights id to 0, writes the record, and then writes the whole entry in one
    call, the id last. A reader that sees a half-written entry gets a hash mismatch and retries. The hash covers the
    sample's number and the store id, so an entry copied to another place is rejected.
    """

    def __init__(self, folder: PrivateFolder, header: Header) -> None:
        self.file = StoreFile(folder, INDEX_FILE)
        self.num_bytes = index_bytes(header.num_samples)
        self.check()
        self._num_samples = header.num_samples
        self._seed = xxhash.xxh3_64_intdigest(header.store_id.encode())

    def check(self) -> None:
        """Raise StoreDamagedError if the file was deleted, cut or extended."""
        self.file.check_size(self.num_bytes)

    def entries(self, samples: Array) -> Array:
        """Return the entries `(n,)` of the samples, see `ENTRY`; all zero where nothing is stored.

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
                entries[entries["weights_id"] == 0] = np.zeros((), ENTRY)
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
            found = np.empty(len(samples), ENTRY)
            for sample, entry in zip(samples.tolist(), found[:, None].view(np.uint8), strict=True):
                self.file.read(sample * ENTRY.itemsize, [entry])
            return found
        content = np.empty(self.num_bytes, np.uint8)
        for start in range(0, self.num_bytes, _MAX_READ_BYTES):
            self.file.read(start, [content[start : start + _MAX_READ_BYTES]])
        return content.view(ENTRY)[samples]

    def clear(self, sample: int, is_new: bool) -> bool:
        """Mark a sample's record as missing until `put`; return False if the disk is full.

        The rest of an old entry stays its owner's claim to the place. A new entry is written whole: the file is
        sparse, and this allocates its block.
        """
        size = ENTRY.itemsize if is_new else _WORD_BYTES
        try:
            # Counted from the end of the entry, whose last word is the id: of an old entry nothing else is lost.
            self.file.write((sample + 1) * ENTRY.itemsize - size, [np.zeros(size, np.uint8)])
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            return False
        return True

    def put(self, samples: Array, entries: Array) -> None:
        """Write the entries of records that are complete; fills in their hashes."""
        entries["hash"] = self._hashes(entries, samples)
        for sample, entry in zip(samples.tolist(), entries[:, None].view(np.uint8), strict=True):
            self.file.write(sample * ENTRY.itemsize, [entry])

    def _hashes(self, entries: Array, samples: Array) -> Array:
        """Return the hash of each entry without its hash, uint64 `(n,)`."""
        size, content = ENTRY.itemsize, entries.tobytes()
        hashes = []
        for sample, place in zip(samples.tolist(), range(0, len(content), size), strict=True):
            entry = content[place : place + size]
            hashed = entry[: -2 * _WORD_BYTES] + entry[-_WORD_BYTES:]
            hashes.append(xxhash.xxh3_64_intdigest(hashed, (self._seed + sample) % 2**64))
        return np.array(hashes, np.uint64)
