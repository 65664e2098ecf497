"""Whole steps, where one rank holds the whole model: what they take corrects what single units took alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_pipetransformer.batches import batch_size
from hf_pipetransformer.splitters.profile import PROFILE_SECONDS, UnitProfile, time_ranges
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.startup.model import Subject
from hf_pipetransformer.units import first_above


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
        top_start: the first unit of a layer.
    """

    whole: Seconds
    embeddings: Seconds
    top: Seconds
    top_start: int


def correct_by_steps(
    profile: UnitProfile, subject: Subject, structure: Structure, batch: dict[str, Any]
) -> UnitProfile:
    """The profile with units that add up to whole steps: units alone take longer than in a row, and drop nothing out.

    Args:
        profile: measured with `batch`.
        subject: the model, all of which is trained here.
        structure: of the model.
        batch: that fits into memory with all activations.
    """
    size, last = batch_size(batch), structure.num_units
    top = first_above(max(1, structure.num_layers // 2))
    estimated = 2 * size * (sum(profile.forward) + sum(profile.backward))
    repeats = max(1, min(NUM_REPEATS, int(PROFILE_SECONDS / estimated) - 1 if estimated else NUM_REPEATS))
    ranges = (range(last), range(1), range(top, last))
    parts = (subject.model, subject.splitter, structure, subject.loss, batch, ranges, repeats)
    whole, embeddings, upper = ((forward / size, backward / size) for forward, backward in time_ranges(*parts))
    return fitted(profile, WholeSteps(whole, embeddings, upper, top))


def fitted(profile: UnitProfile, steps: WholeSteps) -> UnitProfile:
    """The profile that adds up to whole steps and to those of the top. Pure.

    All layers have one factor for forwards and one for backwards, the head takes what the layers do not. Where noise
    leaves nothing for a layer or the head, all units are scaled alike.
    """
    top, last = steps.top_start, len(profile.forward) - 1
    first_layer = range(1, top)
    upper = range(top, last)
    # A layer whose input needs no gradient is one of the top's units, and none of the whole model's.
    spared = profile.backward[top] - profile.edge_backward[top]
    below = (
        steps.whole[0] - steps.embeddings[0] - steps.top[0],
        steps.whole[1] - steps.embeddings[1] - steps.top[1],
    )
    modelled = (
        sum(profile.forward[unit] for unit in first_layer),
        sum(profile.backward[unit] for unit in first_layer) + spared,
    )
    factors = [one / other if other else 1.0 for one, other in zip(below, modelled, strict=True)]
    head = (
        steps.top[0] - factors[0] * sum(profile.forward[unit] for unit in upper),
        steps.top[1] - factors[1] * (sum(profile.backward[unit] for unit in upper) - spared),
    )
    if min(*factors, *head) <= 0:
        sums = sum(profile.forward), sum(profile.backward)
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
