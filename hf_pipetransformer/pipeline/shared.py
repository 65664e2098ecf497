"""Parameters that several stages use: one gradient, one optimizer state, one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_pipetransformer.errors import guarded


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that this stage and others use (a tied embedding, say).

    Args:
        name: its first name in the model.
        parameter: this stage's copy.
        group: ranks of all stages that use it, over all replicas.
        pipeline_group: ranks of this pipeline that use it.
        owner: global rank in this pipeline that keeps its optimizer state: the first user.
        is_owner: whether that is this rank.
    """

    name: str
    parameter: torch.nn.Parameter
    group: Any
    pipeline_group: Any
    owner: int
    is_owner: bool

    def reduced(self) -> torch.Tensor:
        """Its gradient summed over stages and replicas, flat, and behind it how many of them had one."""
        parameter = self.parameter
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flag = gradient.new_full((1,), 0.0 if parameter.grad is None else 1.0)
        flat = torch.cat([gradient.reshape(-1), flag])
        guarded(lambda: dist.all_reduce(flat, group=self.group), f"summing the gradient of {self.name} over stages")
        return flat

    def take(self, flat: torch.Tensor, is_used: bool) -> None:
        """Take what `reduced` gave; afterwards only the owner has a gradient, and only if somebody had one."""
        self.parameter.grad = flat[:-1].view_as(self.parameter) if self.is_owner and is_used else None

    def share_value(self) -> None:
        """Give the owner's value to the other stages of this pipeline."""
        with torch.no_grad():
            guarded(
                lambda: dist.broadcast(self.parameter.data, src=self.owner, group=self.pipeline_group),
                f"receiving the updated value of {self.name}",
            )


def share_values(shared: Sequence[SharedParameter]) -> None:
    """Hand the updated values on, in one order on every rank."""
    for entry in shared:
        entry.share_value()
