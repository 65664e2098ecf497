"""fp16: an overflow on any stage skips the step on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def agree_on_overflow(
    scaler: Any, optimizer: torch.optim.Optimizer, device: torch.device, largest: Callable[[torch.Tensor], None]
) -> None:
    """Unscale this rank's gradients and make its scaler skip the step if any rank found an infinite one.

    Without it the stages would drift apart: each `GradScaler` looks at its own gradients only.

    Args:
        scaler: this rank's `torch.amp.GradScaler`.
        optimizer: this rank's optimizer, not wrapped.
        device: where this rank computes.
        largest: replaces a CPU tensor by its maximum over all ranks, in place.
    """
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    flags = [flag.reshape(1).float() for flag in state["found_inf_per_device"].values()]
    found = torch.stack(flags).amax(0).cpu() if flags else torch.zeros(1)
    largest(found)
    # A stage without gradients has no entry of its own; the scaler insists on one. It stays on the host, where the
    # scaler reads it once more.
    state["found_inf_per_device"] = {device: found.reshape(())}
