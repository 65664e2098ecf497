"""Place, dtype and speed of activation stores.

`args` are a trainer's arguments with those of the store, whose names begin with `activation_cache`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from timeit import repeat, timeit
from typing import Any

import numpy as np
import torch

from hf_pipetransformer.cache.folder import StoreFolder, default_base
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.store import ActivationStore


MEASURED_RECORDS = 32
"""Most records that are written and read at once to measure the storage speed."""
LARGE_INDEX = 16 * MEASURED_RECORDS
"""Entries of an index that stand for any larger one."""
LOOKUPS = 3
"""How often the places of a batch's records are looked up besides the reading itself: when samples are asked for, when
the next batch is, and when a batch is put together."""


@dataclass(frozen=True)
class StorageSpeed:
    """Seconds to read a record, and to write it the first time."""

    read: float
    write: float


def stored_dtype(args: Any, own: torch.dtype) -> torch.dtype:
    """Return the dtype of cached activations of dtype `own`, which by default is theirs: nothing is rounded."""
    name = args.activation_cache_dtype
    asked: torch.dtype = own if name == "auto" else getattr(torch, name)
    return asked


def cache_base(args: Any) -> Path:
    """Return the folder that contains the stores."""
    return Path(args.activation_cache_dir or default_base())


def measure_storage(
    base: Path, record_format: RecordFormat, length: int, batch_size: int = MEASURED_RECORDS, num_samples: int = 0
) -> StorageSpeed:
    """Measure writing and reading records of `length` tokens in the store's folder; raises like `StoreFolder.take`.

    Args:
        batch_size: samples that are read at once: a batch's fixed time weighs more, the fewer they are.
        num_samples: of the data set; an index is read entry by entry if it has many more than a batch.
    """
    folder = StoreFolder.take(base, f"measured-{uuid.uuid4().hex}")
    num_records = max(1, min(batch_size, MEASURED_RECORDS, num_samples or MEASURED_RECORDS))
    num_samples = max(min(num_samples, LARGE_INDEX), num_records)
    # Spread and reversed: training does not read records in file order either.
    samples = np.linspace(num_samples - 1, 0, num_records).astype(np.int64)
    # Zeros, not random numbers: the run's RNG state must not advance.
    activation = torch.zeros(num_records, length, record_format.hidden_size)
    fields = {
        **{name: torch.zeros(num_records, length, dtype=d) for name, d in record_format.token_fields.items()},
        **{name: torch.zeros(num_records, *s, dtype=d) for name, (d, s) in record_format.sample_fields.items()},
    }
    records = activation, np.full(num_records, length), fields, np.zeros(num_records, dtype=np.uint64)

    def look_up() -> None:
        for _ in range(LOOKUPS):
            store.entries(samples)

    def read() -> None:
        look_up()
        store.read(samples, length)

    def write() -> None:
        look_up()
        store.write(samples, store.weights_id("measured"), *records)

    try:
        # A bound that no measurement reaches.
        store = ActivationStore.create(folder.folder, num_samples, record_format, 2**45)
        # Two writes: the first also makes the file of records, which a run does only occasionally.
        write_seconds = timeit(write, number=2) / 2
        # The fastest of three, which other work on the machine has slowed down the least.
        read_seconds = min(repeat(read, number=1, repeat=3))
        store.close()
    finally:
        folder.remove()
    return StorageSpeed(read_seconds / num_records, write_seconds / num_records)
