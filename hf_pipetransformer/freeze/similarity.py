"""How alike what each layer gives is to what it gave at the last freeze decision, for the same samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def linear_cka(first: torch.Tensor, second: torch.Tensor) -> float:
    """Linear centered kernel alignment of two representations of the same samples (Kornblith et al., 2019, Eq. 4).

    1 if one is the other rotated and scaled, 0 if they have nothing in common.

    Args:
        first: `(samples, features)`.
        second: `(samples, features)`, of as many samples.
    """
    grams = []
    for found in (first.double(), second.double()):
        centered = found - found.mean(dim=0)
        grams.append(centered @ centered.T)
    scale = grams[0].norm() * grams[1].norm()
    # What is the same for all samples has nothing that could change.
    return float((grams[0] * grams[1]).sum() / scale) if scale > 0 else 1.0


class SimilarityMonitor:
    """Keeps what the layers gave at the last decision, on the process that decides."""

    def __init__(self) -> None:
        self._before: dict[str, torch.Tensor] = {}

    @property
    def has_begun(self) -> bool:
        """Whether there is something to compare with."""
        return bool(self._before)

    def compare(self, outputs: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
        """The similarity of each layer's output to that of the last call; empty the first time.

        Args:
            outputs: number of each layer to its output, `(samples, hidden)`.
        """
        before, self._before = self._before, dict(outputs)
        return tuple(linear_cka(before[layer], outputs[layer]) for layer in sorted(before, key=int))

    def state(self) -> dict[str, torch.Tensor]:
        """What the layers gave, for a checkpoint."""
        return dict(self._before)

    def load_state(self, before: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`."""
        self._before = dict(before)
