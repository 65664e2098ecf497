"""Point-to-point transfers: all of the package's are posted here, in batches, also where it is one.

On NCCL a transfer outside a batch makes a communicator of its own for its two ranks, and that blocks the host until
the other rank joins it. A batch uses the communicator of its group, which a collective has made before. What still
blocks the host of both is the first transfer of a pair in one direction, which connects them: a group whose ranks do
not meet in one call anyway is rehearsed when it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_pipetransformer.errors import guarded, wait_for


Transfer = dist.P2POp
"""One tensor that leaves this rank or comes to it."""


def sending(tensor: torch.Tensor, peer: int, group: Any) -> Transfer:
    """A contiguous `tensor` to global rank `peer`; it must stay unchanged until the transfer is done."""
    return dist.P2POp(dist.isend, tensor, peer, group)


def receiving(tensor: torch.Tensor, peer: int, group: Any) -> Transfer:
    """Global rank `peer`'s next message into a contiguous `tensor`."""
    return dist.P2POp(dist.irecv, tensor, peer, group)


def post(transfers: Sequence[Transfer]) -> list[Any]:
    """Start transfers that belong together; two ranks' messages match by their order, there are no tags.

    Within one call no transfer waits for another. Two calls on one group run one after the other, on both ranks, so
    what waits for each other (an exchange) has to be in one call of each rank, or on two groups.

    Args:
        transfers: all on one group, whose ranks have met in a collective before; tensors on its device.

    Returns:
        What to wait for, all of it: NCCL gives one handle for the call, gloo one for each transfer.
    """
    assert len({id(transfer.group) for transfer in transfers}) <= 1, "one batch is one group's"
    if not transfers:
        return []
    if not _goes_through_host(transfers[0]):
        return dist.batch_isend_irecv(list(transfers))
    staged = [_Staged(transfer) for transfer in transfers]
    for each, work in zip(staged, dist.batch_isend_irecv([each.on_host for each in staged]), strict=True):
        each.work = work
    return list(staged)


def _goes_through_host(transfer: Transfer) -> bool:
    """gloo transfers host memory only: two processes on one GPU, which NCCL refuses, go through a copy."""
    return not transfer.tensor.is_cpu and dist.get_backend(transfer.group) == "gloo"


class _Staged:
    """A transfer of a copy in host memory; what comes is on the device after `wait`."""

    def __init__(self, transfer: Transfer) -> None:
        self._arrives = transfer.op.__name__ == "irecv"
        self._tensor = transfer.tensor
        host = torch.empty_like(self._tensor, device="cpu") if self._arrives else self._tensor.to("cpu", copy=True)
        self.on_host = dist.P2POp(transfer.op, host, transfer.peer, transfer.group)
        self.work: Any = None

    def wait(self, *limit: Any) -> bool:
        """Wait as a handle of `torch.distributed` does."""
        is_done: bool = self.work.wait(*limit)
        if self._arrives:
            self._tensor.copy_(self.on_host.tensor)
        return is_done


def complete(transfers: Sequence[Transfer], timeout: float, what: str) -> None:
    """Post transfers and wait for them, at most `timeout` seconds each on CPU tensors.

    On a GPU the wait orders the current stream behind the transfers and does not block the host.

    Raises:
        PeerLostError: the other rank died, or `timeout` passed; `what` says what was awaited.
    """
    on_cpu = all(transfer.tensor.is_cpu for transfer in transfers)
    for work in guarded(lambda: post(transfers), what):
        wait_for(work, timeout if on_cpu else None, what)
