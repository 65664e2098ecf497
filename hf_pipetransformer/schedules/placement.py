"""Numbering of a model's blocks, placement of stages on ranks and nodes, and plans of token slices. Pure.

Token slices cut sequences into parts that run one after the other (TeraPipe, Li et al., ICML 2021, section 3.2). This
works for causal models, where a token attends only to earlier ones and itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
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


def ranks_in_a_row(hosts: Sequence[str], local_sizes: Sequence[int | None]) -> int:
    """Return the largest length whose multiples all start and end on one node; K must divide it.

    `local_sizes` are the ranks per node according to each rank's launcher; None where it gave no number.
    """
    return math.gcd(*map(len, nodes_of(hosts)), *(size for size in local_sizes if size))


def nodes_of(hosts: Sequence[str]) -> list[range]:
    """Split the ranks into ranges of neighbors on one machine, given each rank's machine name."""
    ends = list(accumulate(len(list(node)) for _, node in groupby(hosts)))
    return [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def why_no_spanning(hosts: Sequence[str], local_sizes: Sequence[int | None]) -> str | None:
    """Return why no pipeline may span nodes, for the arguments of `ranks_in_a_row`; None if one may."""
    nodes, length = nodes_of(hosts), ranks_in_a_row(hosts, local_sizes)
    if len(nodes) > len(set(hosts)):
        return (
            "The ranks of a node are not in a row: let the launcher fill one node after the other (mpirun --map-by "
            "slot, srun --distribution=block)."
        )
    if {length} in ({len(node) for node in nodes}, set(local_sizes)):
        return None
    return (
        f"A pipeline spans equal nodes only, found nodes of {', '.join(str(len(node)) for node in nodes)} processes."
    )


def broadcast_route(position: int, pipeline_size: int, node_size: int) -> tuple[int | None, list[int]]:
    """Return from where a position of a pipeline gets what the first one reads, None there, and where it passes it on.

    It travels once to each node: from the first position to the first of every node, and from there to the others.
    """
    # One message a node: the links between nodes are the slow ones, and the others pass it on meanwhile.
    firsts = range(0, pipeline_size, node_size)
    first = position - position % node_size
    own = list(range(first + 1, min(first + node_size, pipeline_size)))
    if position == 0:
        return None, [*own, *firsts[1:]]
    return (0, own) if position == first else (first, [])


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
        # Within a chunk `rank_of` is its own inverse: stages run up the ranks, or down.
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
            # The first round in which neither rank has a boundary yet: two of one rank would make it wait for itself.
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
