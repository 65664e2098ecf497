"""Moving many tensors between any ranks, with bounded memory and without a wait that goes in circles.

Two ranks whose first transfer it is may block their hosts until both are there (NCCL connects them then). So all ranks
go through the same rounds in one order, and post at once what they have to do in a round: a rank only waits for ranks
in the same round or an earlier one, and the earliest round that is not over finds all its ranks there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_pipetransformer.errors import guarded, wait_for
from hf_pipetransformer.transfers import post, receiving, sending


ROUND_BYTES = 2**28
"""What a rank receives in a round at most, unless a single thing is larger: the memory that moving takes beside."""


@dataclass(frozen=True)
class Parcel:
    """One tensor on its way.

    Args:
        tensor: contiguous; what leaves, or the memory of what comes.
        peer: global rank at the other end.
        is_leaving: whether it goes to the peer or comes from it.
        what: for error texts, "units (3,) from rank 0 to rank 1".
    """

    tensor: torch.Tensor
    peer: int
    is_leaving: bool
    what: str


def in_rounds(sizes: Sequence[int]) -> list[range]:
    """Cut things of `sizes` bytes, the same on all ranks, into rounds: indices of neighbours. Pure."""
    rounds: list[range] = []
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > ROUND_BYTES:
            rounds.append(range(start, index))
            start, total = index, 0
        total += size
    return [*rounds, range(start, len(sizes))] if sizes else []


def carry(parcels: Sequence[Parcel], control: Any, timeout: float) -> None:
    """This rank's part of one round; the messages of two ranks match by their order.

    Tensors on a device travel over the world group, whose backend is the device's own and whose ranks have met before;
    those on the CPU over `control`.

    Args:
        control: a gloo group of all ranks that take part.
        timeout: seconds that any rank may wait for another.

    Raises:
        PeerLostError: a rank died, or `timeout` passed.
    """
    works: list[tuple[Any, Parcel]] = []
    for group, is_cpu in ((control, True), (None, False)):
        part = [parcel for parcel in parcels if parcel.tensor.is_cpu == is_cpu and parcel.tensor.numel()]
        if part:
            started = guarded(partial(_start, part, group), f"moving {part[0].what}")
            # NCCL has one handle for all.
            works += zip(started, part, strict=len(started) == len(part))
    for work, parcel in works:
        wait_for(work, timeout if parcel.tensor.is_cpu else None, f"moving {parcel.what}")


def _start(parcels: Sequence[Parcel], group: Any) -> list[Any]:
    transfers = []
    for parcel in parcels:
        make = sending if parcel.is_leaving else receiving
        # Backends know few dtypes, but all know bytes.
        transfers.append(make(parcel.tensor.reshape(-1).view(torch.uint8), parcel.peer, group))
    return post(transfers)
