"""Trees of tensors from one rank to others, point to point: a size, then the bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from hf_pipetransformer.errors import guarded, present_limit, wait_for
from hf_pipetransformer.messages import pack, unpack
from hf_pipetransformer.transfers import post, receiving, sending


class Outbox:
    """Messages on their way; they are kept until they have left.

    Args:
        timeout: seconds that a message may take.
        what: names what is sent, for errors.
    """

    def __init__(self, timeout: float, what: str) -> None:
        self.timeout = timeout
        self.what = what
        self._leaving: deque[list[tuple[Any, tuple[torch.Tensor, ...]]]] = deque()

    def send(self, tree: Any, peers: Iterable[int], group: Any) -> None:
        """Start to send a tree to some ranks of a gloo `group`; `take` receives it there."""
        message = pack(tree)
        tensors = (torch.tensor([message.numel()]), message)
        works = [work for peer in peers for work in post([sending(tensor, peer, group) for tensor in tensors])]
        self._leaving.append([(work, tensors) for work in works])

    def flush(self, num_kept: int = 0) -> None:
        """Wait until everything has left but the last trees that were sent, `num_kept` at most."""
        while len(self._leaving) > num_kept:
            for work, _tensors in self._leaving.popleft():
                wait_for(work, self.timeout, self.what)


def take(source: int, group: Any, what: str) -> Any:
    """The next tree that rank `source` sends to this one; `what` says what is awaited, for errors."""
    size = torch.zeros(1, dtype=torch.int64)
    _receive(size, source, group, what)
    message = torch.empty(int(size), dtype=torch.uint8)
    _receive(message, source, group, what)
    return unpack(message)


def _receive(tensor: torch.Tensor, source: int, group: Any, what: str) -> None:
    for work in guarded(lambda: post([receiving(tensor, source, group)]), what):
        wait_for(work, present_limit(), what)
