"""Costs of blocks whose weights are float32, and of which all that a test does not say is 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_pipetransformer.planning.blocks import BlockCosts


def block_costs(
    forward: Sequence[float],
    backward: Sequence[float],
    edge_backward: Sequence[float],
    parameters: Sequence[int],
    activation_bytes: Sequence[float],
    kept: Sequence[int] = (),
    **given: Any,
) -> BlockCosts:
    """Return the costs; `kept` elements are frozen, by default none."""
    times = tuple(forward), tuple(backward), tuple(edge_backward)
    nothing = (0,) * len(times[0])
    costs = BlockCosts(*times, nothing, tuple(activation_bytes), nothing, nothing, nothing, nothing, nothing)
    return replace(with_weights(costs, parameters, kept), **given)


def with_weights(costs: BlockCosts, parameters: Sequence[int], kept: Sequence[int] = ()) -> BlockCosts:
    """Return the costs with other numbers of weights, of which `kept` are frozen."""
    kept = tuple(kept) or (0,) * len(parameters)
    trained = tuple(4 * (whole - frozen) for whole, frozen in zip(parameters, kept, strict=True))
    return replace(
        costs,
        parameters=tuple(parameters),
        kept=kept,
        trained_bytes=trained,
        kept_bytes=tuple(4 * each for each in kept),
    )
