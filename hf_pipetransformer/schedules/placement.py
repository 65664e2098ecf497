"""Numbering of a model's blocks, placement of stages on ranks and nodes, and plans of token slices. Pure.

Token slices cut sequences into parts that run one after the other (TeraPipe, Li et al., ICML 2021, section 3.2). This
works for causal models, where a token attends only to earlier ones and itself.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple


EMBEDDINGS = 0


def num_blocks(num_layers: int) -> int:
    return 2 * num_layers + 2


def num_layers(num_blocks: int) -> int:
    return num_blocks // 2 - 1


def attention_of(layer: int) -> int:
    """Return the block of a layer's attention sublayer, which follows the first `layer` layers."""
    return 2 * layer + 1


def mlp_of(layer: int) -> int:
    return 2 * layer + 2


def head_of(num_layers: int) -> int:
    """Return the last block, which follows all layers."""
    return attention_of(num_layers)


def first_above(num_layers: int) -> int:
    """Return the first block above the embeddings and the first `num_layers` layers; for 0 layers, the embeddings."""
    return attention_of(num_layers) if num_layers else EMBEDDINGS


def block_of(block: int) -> int:
    """Return 0 for the embeddings, `layer + 1` for both sublayers of a layer, `num_layers + 1` for the head."""
    return (block + 1) // 2


def pipeline_sizes(most: int, node_size: int) -> list[int]:
    """Return the K, ranks of a pipeline, that `most` ranks on nodes of `node_size` ranks allow, in increasing order.

    K divides `most`, so that no rank stays idle. It also divides the ranks of a node or takes whole nodes, so that no
    pipeline ends amid a node where another one begins. Two nodes of 4 ranks: 1, 2, 4, 8. A run that began with K ranks
    reaches `pipeline_sizes(K, node_size)`.
    """
    return [k for k in range(1, most + 1) if most % k == 0 and (node_size % k == 0 or k % node_size == 0)]


PLACEMENTS = ("loop", "v")
"""`loop`: every chunk runs up the ranks. `v`: odd chunks run down, so two consecutive stages share a rank."""


class Placement(NamedTuple):
    """Placement of a pipeline's stages, numbered 0 to K*V - 1 in model order, on K ranks with V stages each.

    Chunk `c` of a rank is its stage among `c * K` to `c * K + K - 1`. Ranks are positions in the pipeline, 0 to K - 1.
    K=3, V=2:

        loop: rank 0 owns stages 0 and 3, rank 1 owns 1 and 4, rank 2 owns 2 and 5
        v:    rank 0 owns stages 0 and 5, rank 1 owns 1 and 4, rank 2 owns 2 and 3
    """

    pipeline_size: int
    num_chunks: int = 1
    kind: str = "loop"

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.num_chunks

    def rank_of(self, stage: int) -> int:
        chunk, position = divmod(stage, self.pipeline_size)
        return self.pipeline_size - 1 - position if self.kind == "v" and chunk % 2 else position

    def chunk_of(self, stage: int) -> int:
        return stage // self.pipeline_size

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, by chunk."""
        starts = range(0, self.num_stages, self.pipeline_size)
        return tuple(start + self.rank_of(start + rank) for start in starts)

    def is_crossed(self, lower: int) -> bool:
        """Return True if stages `lower` and `lower + 1` exist and are on different ranks."""
        return 0 <= lower < self.num_stages - 1 and self.rank_of(lower) != self.rank_of(lower + 1)

    def leaves_node(self, lower: int, node_size: int) -> bool:
        """Return True if stages `lower` and `lower + 1` are on different nodes of `node_size` ranks each."""
        return self.rank_of(lower) // node_size != self.rank_of(lower + 1) // node_size

    def rounds(self) -> list[list[int]]:
        """Return the boundaries between ranks, as their lower stages, in rounds with each rank at most once."""
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
"""Slice lengths in tokens, one entry per planned sequence length, from short to long."""


def slice_bounds(plans: Plans, length: int) -> tuple[int, ...]:
    """Return the start of each slice of sequences of `length` tokens, and the end of the last.

    Uses the plan for the shortest planned sequences of at least this length, else the last plan, scaled to the length.
    """
    if not plans or length < 1:
        return (0, length)
    lengths = next((plan for plan in plans if sum(plan) >= length), plans[-1])
    ends = (-(-length * end // sum(lengths)) for end in accumulate(lengths))
    # A sequence with fewer tokens than slices gives equal ends: the set drops empty slices.
    return tuple(sorted({0, *ends}))
