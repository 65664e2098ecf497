"""Gathering evaluation results over replicas, in data-set order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply

from hf_pipetransformer.autodp.loader import PipelineLoader
from hf_pipetransformer.autodp.topology import PipelineGroups
from hf_pipetransformer.errors import guarded


class ReplicaGather:
    """Takes the place of `accelerator.gather_for_metrics`: one copy of every sample, whatever K and R are.

    Args:
        groups: this rank's pipeline.
        loader: the loader of this evaluation; it knows how many samples each replica has in the current batch.
    """

    def __init__(self, groups: PipelineGroups, loader: PipelineLoader) -> None:
        self.groups = groups
        self.loader = loader
        self.losses: list[torch.Tensor] = []
        """The loss of each global batch so far, `(1,)` each."""

    def __call__(self, values: Any) -> Any:
        """Tensors of shape `(own samples, ...)` become `(samples of the global batch, ...)`."""
        return recursively_apply(self._gather, values)

    def mean(self, loss: torch.Tensor, num_items: int) -> torch.Tensor:
        """The loss of the global batch from this replica's mean loss over `num_items`; shape `(1,)`."""
        self.losses.append(self._mean(loss, num_items))
        return self.losses[-1]

    def _mean(self, loss: torch.Tensor, num_items: int) -> torch.Tensor:
        group = self.groups.replica_control
        if group is None:
            return loss.detach().reshape(1)
        share = loss.double().cpu() * num_items if num_items else torch.zeros((), dtype=torch.float64)
        sums = torch.stack([share, torch.tensor(float(num_items), dtype=torch.float64)])
        guarded(
            lambda: dist.all_reduce(sums, group=group), f"averaging the evaluation loss over {self.groups.replicas}"
        )
        return (sums[0] / sums[1]).to(loss.dtype).to(loss.device).reshape(1)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        counts = self.loader.samples_of_replicas()
        group = self.groups.replica_group
        if group is None:
            return tensor[: counts[0]]
        rows = max(counts)
        own = tensor.new_zeros((rows, *tensor.shape[1:]))
        own[: min(rows, tensor.shape[0])] = tensor[:rows]
        parts = [torch.empty_like(own) for _ in counts]
        guarded(lambda: dist.all_gather(parts, own, group=group), f"gathering predictions over {self.groups.replicas}")
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
