"""Which rank of a pipeline holds which stage. Pure.

A pipeline of K ranks with V stages each has the stages 0 to K*V - 1. Chunk `c` of a rank is its stage among `c * K` to
`c * K + K - 1`. K=3, V=2:

    loop: rank 0 holds stages 0 and 3, rank 1 holds 1 and 4, rank 2 holds 2 and 5
    v:    rank 0 holds stages 0 and 5, rank 1 holds 1 and 4, rank 2 holds 2 and 3

Ranks are positions in the pipeline here, 0 to K - 1.
"""

from __future__ import annotations


PLACEMENTS = ("loop", "v")
"""`loop`: every chunk runs up the ranks. `v`: odd chunks run down them, so that two stages in a row share a rank."""


def rank_of(stage: int, pipeline_size: int, placement: str = "loop") -> int:
    """The rank that holds `stage`."""
    chunk, position = divmod(stage, pipeline_size)
    return pipeline_size - 1 - position if placement == "v" and chunk % 2 else position


def chunk_of(stage: int, pipeline_size: int) -> int:
    """Which of its rank's stages `stage` is, from 0."""
    return stage // pipeline_size


def stage_of(rank: int, chunk: int, pipeline_size: int, placement: str = "loop") -> int:
    """The stage that is a rank's chunk `chunk`: the inverse of `rank_of` and `chunk_of`."""
    return chunk * pipeline_size + rank_of(chunk * pipeline_size + rank, pipeline_size, placement)
