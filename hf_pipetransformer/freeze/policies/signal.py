"""What a freeze policy may look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


GRADIENT_NORMS = "gradient_norms"
WEIGHT_CHANGES = "weight_changes"
ACTIVATION_SIMILARITY = "activation_similarity"
PREDICTED_SECONDS = "predicted_seconds"
MEASUREMENTS = (GRADIENT_NORMS, WEIGHT_CHANGES, ACTIVATION_SIMILARITY, PREDICTED_SECONDS)
"""What a policy may ask for: fields of `FreezeSignal` that cost something."""


@dataclass(frozen=True)
class FreezeSignal:
    """What a policy may look at. What it does not name in `needs` is empty.

    Args:
        step: optimizer steps done.
        max_steps: optimizer steps of the whole run.
        num_layers: L.
        num_frozen: layers frozen now.
        num_wanted: what the policy answered last, L_frozen of Eq. 1 before rounding; `num_frozen` at the start.
        gradient_norms: `num_layers + 1` means, over the optimizer steps since the last decision, of the L2 norm of
            the reduced, unscaled, unclipped gradient: of layer `l` at index `l`, of the head at index L. 0 for layers
            that are frozen. Empty if no step counted.
        weight_changes: `num_layers + 1` L2 norms of what the weights of a layer, or of the head, have changed by since
            the last decision (the first step of the run), over the L2 norm of the weights then. 0 for what is frozen.
        activation_similarity: `num_layers` linear CKA (Kornblith et al., 2019) of what a layer gives, averaged over
            positions, for a few samples of the training set, and what it gave for them at the last decision (the
            first step of the run): 1 where nothing has changed.
        predicted_seconds: `num_layers + 1` predicted seconds of the rest of the run, by the layers that would be
            frozen from now on, with the layout and the activation cache that would follow: the first pass over the
            data computes what later ones read. 0 for fewer layers than are frozen, and for more than may be.
        learning_rate: of the first group of the optimizer, for the step that comes; 0 where the optimizer has none.
        num_frozen_by_user: layers that the script froze, which nothing thaws.
    """

    step: int
    max_steps: int
    num_layers: int
    num_frozen: int
    num_wanted: float
    gradient_norms: tuple[float, ...] = ()
    weight_changes: tuple[float, ...] = ()
    activation_similarity: tuple[float, ...] = ()
    predicted_seconds: tuple[float, ...] = ()
    learning_rate: float = 0.0
    num_frozen_by_user: int = 0


def is_usable(values: Sequence[float]) -> bool:
    """Whether something was measured, and all of it is finite."""
    return bool(values) and all(map(math.isfinite, values))
