"""The wires between a stage and its neighbours: one process group a pair and direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_pipetransformer.errors import wait_for
from hf_pipetransformer.transfers import post, receiving, sending


@dataclass(frozen=True)
class Link:
    """One direction of traffic with one neighbour.

    Args:
        peer: the neighbour's global rank.
        group: process group of the two, used for nothing else, so that messages match by their order alone and wait
            for nothing else; rehearsed, so that no transfer blocks the host.
        description: for error texts, "activations from stage 0 (rank 2)".
    """

    peer: int
    group: Any
    description: str


class Pending:
    """A transfer under way and the tensor that it fills or reads."""

    def __init__(self, tensor: torch.Tensor, works: list[Any], description: str, timeout: float) -> None:
        self._tensor = tensor
        self._works = works
        self._description = description
        self._timeout = timeout

    def wait(self) -> torch.Tensor:
        """Wait until the tensor is whole (receive) or may be reused (send).

        Raises:
            PeerLostError: the neighbour died, or `pipeline_timeout` passed.
        """
        for work in self._works:
            wait_for(work, self._timeout if self._tensor.is_cpu else None, self._description)
        return self._tensor


def post_receive(
    link: Link, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, timeout: float
) -> Pending:
    """Post the receive of the next message of `link`."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    works = post([receiving(tensor, link.peer, link.group)])
    return Pending(tensor, works, f"receiving {link.description}", timeout)


def post_send(link: Link, tensor: torch.Tensor, timeout: float) -> Pending:
    """Start sending `tensor` as the next message of `link`; it must stay unchanged until the send is waited for."""
    tensor = tensor.detach().contiguous()
    works = post([sending(tensor, link.peer, link.group)])
    return Pending(tensor, works, f"sending {link.description}", timeout)
