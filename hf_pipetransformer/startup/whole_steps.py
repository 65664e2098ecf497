"""Whole steps, where one rank holds the whole model: what they take corrects what single units took alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_pipetransformer.batches import batch_size
from hf_pipetransformer.splitters.profile import PROFILE_SECONDS, UnitProfile, time_ranges
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.startup.model import Subject, trained_units
from hf_pipetransformer.units import attention_of, block_of, first_above, mlp_of


NUM_REPEATS = 4

Seconds = tuple[float, float]
"""Of a forward and a backward of one sample."""


@dataclass(frozen=True)
class WholeSteps:
    """What some units in a row take together.

    Args:
        whole: all of them.
        embeddings: the first.
        top: from unit number `top_start` on, whose input needs no gradient.
        top_start: the first unit of a layer, or the head.
        first: the first unit with a backward: what lies below it is frozen.
    """

    whole: Seconds
    embeddings: Seconds
    top: Seconds
    top_start: int
    first: int = 0


def correct_by_steps(
    profile: UnitProfile, subject: Subject, structure: Structure, batch: dict[str, Any]
) -> UnitProfile:
    """The profile with units that add up to whole steps: units alone take longer than in a row, and drop nothing out.

    Args:
        profile: measured with `batch`.
        subject: the model; each rank has all of it.
        structure: of the model.
        batch: that fits into memory with all activations.
    """
    size, last = batch_size(batch), structure.num_units
    found = _first_trained(subject.model, structure)
    if found is None:
        return profile
    first, layer = found
    # At least one layer with a backward lies below.
    top = first_above(max(layer + 1, (layer + structure.num_layers) // 2))
    estimated = 2 * size * (sum(profile.forward) + sum(profile.backward))
    repeats = max(1, min(NUM_REPEATS, int(PROFILE_SECONDS / estimated) - 1 if estimated else NUM_REPEATS))
    ranges = (range(last), range(1), range(top, last))
    parts = (subject.model, subject.splitter, structure, subject.loss, batch, ranges, repeats)
    whole, embeddings, upper = ((forward / size, backward / size) for forward, backward in time_ranges(*parts))
    return fitted(profile, WholeSteps(whole, embeddings, upper, top, first))


def _first_trained(model: nn.Module, structure: Structure) -> tuple[int, int] | None:
    """The first unit that is trained, and the layer that it lies in, 0 for the embeddings.

    None where a layer above it is not trained, or none is: there no factor is that of all layers.
    """
    trained = trained_units(model, structure)
    first = min(trained, default=structure.num_units - 1)
    layer = max(0, block_of(first) - 1)
    above = range(layer, structure.num_layers)
    has_all = all(attention_of(index) in trained or mlp_of(index) in trained for index in above)
    return (first, layer) if above and has_all else None


def fitted(profile: UnitProfile, steps: WholeSteps) -> UnitProfile:
    """The profile that adds up to whole steps and to those of the top. Pure.

    All layers have one factor for forwards and one for backwards, the head takes what the layers do not. Where noise
    leaves nothing for a layer or the head, all units are scaled alike.
    """
    top, last = steps.top_start, len(profile.forward) - 1
    trained = range(max(1, steps.first), top)
    upper = range(top, last)
    # A unit whose input needs no gradient is the first of the top, and of the whole model if something is frozen.
    spared, whole_spared = (
        profile.backward[unit] - profile.edge_backward[unit] if unit else 0.0 for unit in (top, steps.first)
    )
    below = (
        steps.whole[0] - steps.embeddings[0] - steps.top[0],
        steps.whole[1] - steps.embeddings[1] - steps.top[1],
    )
    modelled = (
        sum(profile.forward[unit] for unit in range(1, top)),
        sum(profile.backward[unit] for unit in trained) + spared - whole_spared,
    )
    factors = [one / other if other else 1.0 for one, other in zip(below, modelled, strict=True)]
    head = (
        steps.top[0] - factors[0] * sum(profile.forward[unit] for unit in upper),
        steps.top[1] - factors[1] * (sum(profile.backward[unit] for unit in upper) - spared),
    )
    if min(*factors, *head) <= 0:
        sums = sum(profile.forward), sum(profile.backward[steps.first :]) - whole_spared
        forward, backward = (one / other if other else 1.0 for one, other in zip(steps.whole, sums, strict=True))
        return replace(
            profile,
            forward=[forward * seconds for seconds in profile.forward],
            backward=[backward * seconds for seconds in profile.backward],
            edge_backward=[backward * seconds for seconds in profile.edge_backward],
        )
    return replace(
        profile,
        forward=[steps.embeddings[0], *(factors[0] * seconds for seconds in profile.forward[1:-1]), head[0]],
        backward=[steps.embeddings[1], *(factors[1] * seconds for seconds in profile.backward[1:-1]), head[1]],
        edge_backward=[
            steps.embeddings[1],
            *(factors[1] * seconds for seconds in profile.edge_backward[1:-1]),
            min(head[1], profile.edge_backward[-1]),
        ],
    )
