"""Trainer's filter of losses that are not finite, without reading them."""

from __future__ import annotations

from typing import Any

import torch


class SelfFilteringLoss(torch.Tensor):
    """A loss that Trainer adds up without knowing its value.

    Trainer asks of each whether it is nan or infinite, which waits for the device twice a batch, and then counts the
    mean of the losses since the last log instead. This one says no, and does so itself when it is added.
    """

    num_logged: int

    @staticmethod
    def of(loss: torch.Tensor, num_logged: int) -> SelfFilteringLoss:
        """The loss, scalar, and what Trainer divides the sum of the earlier ones by to have their mean."""
        filtering = loss.as_subclass(SelfFilteringLoss)
        filtering.num_logged = num_logged
        return filtering

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.isnan, torch.isinf):
            return torch.zeros(args[0].shape, dtype=torch.bool)
        with torch._C.DisableTorchFunctionSubclass():
            # `+=` arrives as the method that it stands for.
            if function in (torch.Tensor.add_, torch.Tensor.__iadd__) and isinstance(args[1], cls):
                total, loss = args
                loss, count = loss.as_subclass(torch.Tensor), loss.num_logged
                return total.add_(torch.where(loss.isfinite(), loss, total / count))
            return function(*args, **(kwargs or {}))
