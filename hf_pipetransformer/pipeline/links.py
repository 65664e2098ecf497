"""The wires between stages: one process group a boundary and direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hf_pipetransformer.errors import wait_for
from hf_pipetransformer.transfers import post, receiving, sending


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> torch.Tensor:
        """The tensor once it is whole (receive) or may be reused (send)."""


class Link(Protocol):
    """One direction of traffic between two stages; messages match by their order alone."""

    def receive(self, shape: tuple[int, ...]) -> Pending:
        """Post the receive of the next message."""

    def send(self, tensor: torch.Tensor) -> Pending:
        """Start sending `tensor` as the next message; it must stay unchanged until the send is waited for."""

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A message that says nothing."""


@dataclass(frozen=True)
class Wire:
    """A link to another rank.

    Args:
        peer: the neighbour's global rank.
        group: process group of the two, used for nothing else, so that messages match by their order alone and wait
            for nothing else; rehearsed, so that no transfer blocks the host.
        description: for error texts, "activations from stage 0 (rank 2)".
        dtype: of what travels.
        device: where it comes from or goes to.
        timeout: seconds that a transfer may take.
    """

    peer: int
    group: Any
    description: str
    dtype: torch.dtype
    device: torch.device
    timeout: float

    def receive(self, shape: tuple[int, ...]) -> Pending:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return _Posted(tensor, post([receiving(tensor, self.peer, self.group)]), f"receiving {self.description}", self)

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def send(self, tensor: torch.Tensor) -> Pending:
        tensor = tensor.detach().contiguous()
        return _Posted(tensor, post([sending(tensor, self.peer, self.group)]), f"sending {self.description}", self)


@dataclass(frozen=True)
class _Posted:
    """A transfer and the tensor that it fills or reads."""

    tensor: torch.Tensor
    works: list[Any]
    what: str
    wire: Wire

    def wait(self) -> torch.Tensor:
        """See `Pending`.

        Raises:
            PeerLostError: the neighbour died, or `pipeline_timeout` passed.
        """
        for work in self.works:
            wait_for(work, self.wire.timeout if self.tensor.is_cpu else None, self.what)
        return self.tensor


@dataclass(frozen=True)
class Local:
    """In place of a link: the neighbouring stage is another one of this rank.

    Args:
        chunk: which.
    """

    chunk: int


@dataclass(frozen=True)
class StageLinks:
    """Where a stage's activations and gradients come from and go to; None at the ends of the pipeline."""

    forward_in: Link | Local | None = None
    forward_out: Link | Local | None = None
    backward_in: Link | Local | None = None
    backward_out: Link | Local | None = None
