"""Gradient norms by layer, averaged over the optimizer steps between two freeze decisions."""

from __future__ import annotations

import torch


class GradientNormMonitor:
    """Averages what the gradient norm for clipping computes anyway; never waits for the device.

    Args:
        num_layers: L.
        device: where the squares come from.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        # The last entry counts the steps.
        self._sums = torch.zeros(num_layers + 2, dtype=torch.float64, device=device)

    def record(self, squares: torch.Tensor) -> None:
        """Add one optimizer step.

        Args:
            squares: `(num_layers + 1,)` squared L2 norms of the reduced, unscaled, unclipped gradients of the layers
                and the head. A step whose gradients are not finite will be skipped and does not count.
        """
        squares = squares.to(self._sums)
        norms = torch.cat([squares.sqrt(), squares.new_ones(1)])
        self._sums += torch.where(squares.isfinite().all(), norms, torch.zeros_like(norms))

    def means(self) -> tuple[float, ...]:
        """`num_layers + 1` mean norms since the last `reset`; empty if no step counted."""
        sums: list[float] = self._sums.tolist()
        count = sums.pop()
        return tuple(value / count for value in sums) if count else ()

    def reset(self) -> None:
        """Begin a new interval."""
        self._sums.zero_()

    def state(self) -> list[float]:
        """The sums, for a checkpoint."""
        return list(self._sums.tolist())

    def load_state(self, sums: list[float]) -> None:
        """Go on from `state`."""
        self._sums.copy_(torch.tensor(sums, dtype=torch.float64))
