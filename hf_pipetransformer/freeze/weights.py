"""How far the weights of each layer have moved since the last freeze decision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch


Report = Sequence[Sequence[float]]
"""Of one rank: for each layer and the head the sums of squares of the changes, and of the weights before them."""


class WeightMonitor:
    """Keeps a copy of the weights that a rank trains, made at the last decision.

    Args:
        place_of: name of each parameter to its index among the layers, the head behind them; embeddings have none.
    """

    def __init__(self, place_of: Mapping[str, int]) -> None:
        self._place_of = place_of
        self._before: dict[str, torch.Tensor] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is something to compare with."""
        return self._before is not None

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """From now on changes are measured from here."""
        self._before = {name: value.detach().clone() for name, value in weights.items() if name in self._place_of}

    def forget(self) -> None:
        """The weights may go to other ranks."""
        self._before = None

    def report(self, weights: Mapping[str, torch.Tensor], num_layers: int) -> Report:
        """What has changed of the weights here; they are those of `begin`."""
        sums = torch.zeros(2, num_layers + 1, dtype=torch.float64)
        # In one order: a file gives the names in another one, and sums would differ in the last bit.
        for name, before in sorted((self._before or {}).items()):
            changed = (weights[name].detach() - before).double().square().sum()
            found = torch.stack([changed, before.double().square().sum()])
            sums[:, self._place_of[name]] += found.cpu()
        return list(sums.tolist())

    def state(self) -> dict[str, torch.Tensor]:
        """The copies by name, for a checkpoint."""
        return dict(self._before or {})

    def load_state(self, before: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`; the names are those of the weights that are trained here."""
        self._before = dict(before)


def relative_changes(reports: Sequence[Report]) -> tuple[float, ...]:
    """The L2 norms of the changes over those of the weights before, from what all ranks of a pipeline report."""
    changed, before = torch.tensor(reports, dtype=torch.float64).sum(dim=0).tolist()
    return tuple(math.sqrt(new / old) if old else 0.0 for new, old in zip(changed, before, strict=True))
