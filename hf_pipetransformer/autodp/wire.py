"""Trees of tensors from one rank to others, point to point: a size, then the bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from hf_pipetransformer.errors import guarded, wait_for
from hf_pipetransformer.messages import pack, unpack


class Outbox:
    """Messages on their way; they are kept until they have left.

    Args:
        timeout: seconds that a message may take.
        what: names what is sent, for errors.
    """

    def __init__(self, timeout: float, what: str) -> None:
        self.timeout = timeout
        self.what = what
        self._leaving: list[tuple[Any, torch.Tensor]] = []

    def send(self, tree: Any, peers: Iterable[int], group: Any) -> None:
        """Start to send a tree to some ranks of a gloo `group`; `take` receives it there."""
        message = pack(tree)
        size = torch.tensor([message.numel()])
        self._leaving += [
            (dist.isend(tensor, dst=peer, group=group), tensor) for peer in peers for tensor in (size, message)
        ]

    def flush(self) -> None:
        """Wait until everything has left."""
        leaving, self._leaving = self._leaving, []
        for work, _tensor in leaving:
            wait_for(work, self.timeout, self.what)


def take(source: int, group: Any, what: str) -> Any:
    """The next tree that rank `source` sends to this one; `what` says what is awaited, for errors."""
    size = torch.zeros(1, dtype=torch.int64)
    guarded(lambda: dist.recv(size, src=source, group=group), what)
    message = torch.empty(int(size), dtype=torch.uint8)
    guarded(lambda: dist.recv(message, src=source, group=group), what)
    return unpack(message)
