"""Place, dtype, limit and speed of activation stores, and how the processes of a node open one.

`args` are a trainer's arguments with those of the store, whose names begin with `activation_cache`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from timeit import repeat, timeit
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch

from hf_pipetransformer.cache.files import StoreDamagedError
from hf_pipetransformer.cache.folder import StoreFolder, default_base, safe_max_bytes
from hf_pipetransformer.cache.records import RecordFormat
from hf_pipetransformer.cache.store import ActivationStore


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Peers


MEASURED_RECORDS = 32
"""Most records that are written and read at once to measure the storage speed."""
LARGE_INDEX = 16 * MEASURED_RECORDS
"""Entries of an index that stand for any larger one."""
LOOKUPS = 2
"""How often the places of a batch's records are looked up besides the reading itself: before it comes, and then."""


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


def most_bytes(args: Any, taken: int = 0) -> float:
    """Return the limit of a store in bytes, beside others of the run that have `taken` some of them."""
    asked = args.activation_cache_max_gb
    return safe_max_bytes(cache_base(args)) if asked is None else max(0.0, asked * 1e9 - taken)


def first_told(topology: Peers, reason: str | None) -> str | None:
    """Return the reason of the lowest rank that has one; None if no rank has. Collective: call on every rank."""
    for told, node in topology.gather([reason, topology.ranks_here]):
        if told is not None:
            return str(told) if 0 in node else f"on the node of rank {node[0]}: {told}"
    return None


class OpenStores:
    """Stores that a run has open, which share one limit."""

    def __init__(self) -> None:
        self._opened = WeakSet[ActivationStore]()

    def bytes_taken(self, beside: Path | None = None) -> int:
        """Return the bytes of all stores but for the one in the folder `beside`."""
        others = (store for store in self._opened if not store.is_closed and store.folder != beside)
        return sum(store.bytes_taken for store in others)

    def open(
        self, topology: Peers, make: Callable[[], tuple[StoreFolder, ActivationStore]], writer: int
    ) -> tuple[StoreFolder | None, ActivationStore] | str:
        """Return the node's store, which its first process makes and the others open, or why some node has none.

        Collective: call on every rank. The folder is that of the process that has made the store, and none for the
        others, which write under the number `writer`.
        """
        taken, folder, error = self.bytes_taken(), None, None
        store: ActivationStore | None = None
        first = topology.ranks_here[0]
        try:
            if topology.is_first_here:
                folder, store = make()
        # Kept for the gathers below, for which all processes wait.
        except (OSError, ValueError, StoreDamagedError) as found:
            error = str(found)
        # The gather is a barrier, too: the others open the store only once it is there.
        made = topology.gather(None if store is None else str(store.folder))[first]
        try:
            if made is not None and store is None:
                store = ActivationStore.open(made, writer)
        except FileNotFoundError as found:
            error = (
                f"rank {topology.rank} does not see {made}, which rank {first} has made ({found.strerror}): both have "
                "one host name and one kernel, but different file systems, as in containers. Give each container a "
                "host name of its own, or set activation_cache_dir to a folder of the machine that both see."
            )
        except (OSError, ValueError, StoreDamagedError) as found:
            error = str(found)
        # One node without a store is enough: the run then computes everywhere what the others would read.
        reason = first_told(topology, error)
        if reason is not None or store is None:
            if folder is not None:
                folder.close()
            return str(reason)
        path = store.folder
        # Its limit was without what was taken before: it loses what the others take from now on.
        store.bytes_beside = lambda: self.bytes_taken(beside=path) - taken
        self._opened.add(store)
        return folder, store


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
    records = activation, np.full(num_records, length), np.zeros((num_records, 2), dtype=np.uint64)

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
