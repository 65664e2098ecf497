"""Which rank of a pipeline holds which stage. Pure."""

from __future__ import annotations

from typing import NamedTuple


PLACEMENTS = ("loop", "v")
"""`loop`: every chunk runs up the ranks. `v`: odd chunks run down them, so that two stages in a row share a rank."""


class Placement(NamedTuple):
    """A pipeline of K ranks with V stages each, numbered from 0 to K*V - 1 in the order of the model.

    Chunk `c` of a rank is its stage among `c * K` to `c * K + K - 1`. Ranks are positions in the pipeline, 0 to K - 1.
    K=3, V=2:

        loop: rank 0 holds stages 0 and 3, rank 1 holds 1 and 4, rank 2 holds 2 and 5
        v:    rank 0 holds stages 0 and 5, rank 1 holds 1 and 4, rank 2 holds 2 and 3

    Args:
        pipeline_size: K.
        num_chunks: V.
        kind: one of `PLACEMENTS`.
    """

    pipeline_size: int
    num_chunks: int = 1
    kind: str = "loop"

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, K*V."""
        return self.pipeline_size * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        chunk, position = divmod(stage, self.pipeline_size)
        return self.pipeline_size - 1 - position if self.kind == "v" and chunk % 2 else position

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's stages `stage` is."""
        return stage // self.pipeline_size

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, by chunk."""
        starts = range(0, self.num_stages, self.pipeline_size)
        return tuple(start + self.rank_of(start + rank) for start in starts)

    def is_crossed(self, lower: int) -> bool:
        """Whether stages `lower` and `lower + 1` exist and lie on two ranks: what passes between them is sent."""
        return 0 <= lower < self.num_stages - 1 and self.rank_of(lower) != self.rank_of(lower + 1)

    def rounds(self) -> list[list[int]]:
        """The crossed boundaries, each by its lower stage, in rounds of which no rank is in two."""
        rounds: list[tuple[set[int], list[int]]] = []
        for lower in filter(self.is_crossed, range(self.num_stages)):
            ends = {self.rank_of(lower), self.rank_of(lower + 1)}
            free = next((entry for entry in rounds if not entry[0] & ends), None)
            if free is None:
                free = (set(), [])
                rounds.append(free)
            free[0].update(ends)
            free[1].append(lower)
        return [boundaries for _, boundaries in rounds]
