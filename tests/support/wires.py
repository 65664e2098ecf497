"""Ranks that are threads of one process, for tests of what ranks send each other in rounds."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hf_pipetransformer.comm.transfers import Parcel


class Wires:
    """Ranks that are threads. A transfer blocks both until both are there, as the first of two ranks may on NCCL."""

    def __init__(self, world_size: int) -> None:
        self.boxes: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self.met: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self.barrier = threading.Barrier(world_size, timeout=10)
        self.told: list[Any] = [None] * world_size
        for a in range(world_size):
            for b in range(world_size):
                self.boxes[a, b], self.met[a, b]  # Made before the threads run.

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.told[rank] = value
        self.barrier.wait()
        return self.told.copy()

    def carry(self, parcels: Sequence[Parcel], control: int, timeout: float) -> None:
        for parcel in parcels:
            if parcel.is_leaving:
                self.boxes[control, parcel.peer].put(parcel.tensor.clone())
        for parcel in parcels:
            if not parcel.is_leaving:
                parcel.tensor.copy_(self.boxes[parcel.peer, control].get(timeout=10))
                self.met[parcel.peer, control].put(None)
        for parcel in parcels:
            if parcel.is_leaving:
                self.met[control, parcel.peer].get(timeout=10)
