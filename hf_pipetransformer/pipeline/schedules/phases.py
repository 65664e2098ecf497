"""Regular rows, written as phases of a repeated pattern."""

from __future__ import annotations

from collections import Counter

from hf_pipetransformer.pipeline.schedules.actions import Action, Op


def in_phases(num_microbatches: int, *phases: tuple[str, int]) -> list[Action]:
    """One rank's computations: `("F I1", 3)` is a forward of chunk 0 and an input gradient of chunk 1, three times.

    Each computation of a chunk takes the micro-batches in order; those from `num_microbatches` on are left out.
    """
    row, taken = [], Counter[str]()
    for pattern, times in phases:
        for word in pattern.split() * times:
            row.append(Action(Op(word[0]), taken[word], int(word[1:] or 0)))
            taken[word] += 1
    return [action for action in row if action.micro_batch < num_microbatches]
