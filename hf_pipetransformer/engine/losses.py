"""How micro-batch losses combine into the batch loss, and the overflow check of fp16 loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch


PARTS_TOLERANCE = 1e-4
"""Relative difference between a batch and its parts up to which it counts as rounding: kernels differ by shape."""
SMALLEST_SCALE = 1e-3
"""Floor of the denominator of a relative difference."""


class LossRule(Enum):
    """Rule that combines the losses of parts of a batch.

    MEAN: each part's loss is a mean over its items, weighted by its share of the items of the batch. SUM: the model
    divides by `num_items_in_batch`, so the losses of the parts add up.
    """

    MEAN = "mean"
    SUM = "sum"

    def weight(self, num_items: int, total_items: int) -> float:
        if self is LossRule.SUM:
            return 1.0
        # Weight 1 lets the nan of an empty batch through, as in Trainer; weight 0 would hide it.
        return num_items / total_items if total_items else 1.0


class LossScope(Enum):
    """Samples that one call of the loss sees."""

    PARTS = "parts"
    """Those of a micro-batch: the losses of micro-batches and replicas are added with the weights of a `LossRule`."""
    REPLICA = "replica"
    """Those of a replica, as with DDP: the mean over the replicas is that of their losses."""
    BATCH = "batch"
    """Those of all replicas, as on one process."""


def agree_on_overflow(
    scaler: Any, optimizer: torch.optim.Optimizer, device: torch.device, largest: Callable[[torch.Tensor], None]
) -> None:
    """Unscale this rank's gradients, and skip the step on all ranks if any rank found an inf or nan.

    Each `GradScaler` sees only its own gradients, so without this some stages would step and others not. `optimizer`
    must not be accelerate's wrapper; `largest` all-reduces a CPU tensor in place with MAX over all ranks.
    Collective: call on every rank.
    """
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    flags = [flag.reshape(1).float() for flag in state["found_inf_per_device"].values()]
    # The only wait for the device: the ranks agree on the host, and the scaler reads the flag there.
    found = torch.stack(flags).amax(0).cpu() if flags else torch.zeros(1)
    largest(found)
    # `GradScaler` asserts that there is an entry, which a stage without gradients lacks. The entry stays on the CPU:
    # the scaler reads it there without another device synchronization.
    state["found_inf_per_device"] = {device: found.reshape(())}
