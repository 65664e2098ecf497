"""Numbering of a model's blocks, placement of stages on ranks, and plans of token slices. Pure.

Token slices cut sequences into parts that run one after the other (TeraPipe, Li et al., ICML 2021, section 3.2): in a
causal model a token attends to no later one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple


EMBEDDINGS = 0


def num_units(num_layers: int) -> int:
    """Embeddings, two sublayers a layer, head."""
    return 2 * num_layers + 2


def attention_of(layer: int) -> int:
    """The attention sublayer of a layer: the unit that follows the first `layer` layers."""
    return 2 * layer + 1


def mlp_of(layer: int) -> int:
    """The MLP sublayer of a layer."""
    return 2 * layer + 2


def head_of(num_layers: int) -> int:
    """The last unit: it follows all layers."""
    return attention_of(num_layers)


def first_above(num_layers: int) -> int:
    """The first unit above the embeddings and `num_layers` layers; the embeddings themselves above no layer."""
    return attention_of(num_layers) if num_layers else EMBEDDINGS


def block_of(unit: int) -> int:
    """0 for the embeddings, `layer + 1` for both sublayers of a layer, `num_layers + 1` for the head."""
    return (unit + 1) // 2


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


Plans = tuple[tuple[int, ...], ...]
"""Lengths of slices, one entry for each length of sequences that was planned for, short to long."""


def slice_bounds(plans: Plans, length: int) -> tuple[int, ...]:
    """Where the slices of sequences of `length` tokens begin, and the end of the last.

    The lengths are those of the plan for the next longer sequences, or else of the last, in proportion.
    """
    if not plans or length < 1:
        return (0, length)
    lengths = next((plan for plan in plans if sum(plan) >= length), plans[-1])
    ends = (-(-length * end // sum(lengths)) for end in accumulate(lengths))
    return tuple(sorted({0, *ends}))
