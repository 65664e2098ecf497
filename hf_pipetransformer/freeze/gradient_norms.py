"""Mean gradient norms between two freeze decisions."""

from __future__ import annotations

import torch


class GradientNormMonitor:
    """Mean gradient norm of each layer and the head, from the norms of gradient clipping; `record` never syncs."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        # The last entry counts the steps.
        self._sums = torch.zeros(num_layers + 2, dtype=torch.float64, device=device)

    def record(self, squares: torch.Tensor) -> None:
        """Add one optimizer step. A step with non-finite gradients does not count, as the optimizer skips it.

        Args:
            squares: `(num_layers + 1,)` squared L2 norms of the reduced, unscaled, unclipped gradients of the layers
                and the head.
        """
        # Sums in float64, which Python's floats and JSON keep exactly: a resumed run takes the same decisions.
        squares = squares.to(self._sums)
        norms = torch.cat([squares.sqrt(), squares.new_ones(1)])
        # Chosen on the device: a Python `if` would wait for it in every step.
        self._sums += torch.where(squares.isfinite().all(), norms, torch.zeros_like(norms))

    def means(self) -> tuple[float, ...]:
        """Return the `num_layers + 1` mean norms since the last `reset`; empty if no step counted."""
        sums: list[float] = self._sums.tolist()
        count = sums.pop()
        return tuple(value / count for value in sums) if count else ()

    def reset(self) -> None:
        self._sums.zero_()

    def state(self) -> list[float]:
        return list(self._sums.tolist())

    def load_state(self, sums: list[float]) -> None:
        self._sums.copy_(torch.tensor(sums, dtype=torch.float64))
