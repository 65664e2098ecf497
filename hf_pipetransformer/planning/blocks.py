"""Costs of each block of a model, and their sums over the stages and ranks of a layout. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_pipetransformer.schedules.placement import first_above


if TYPE_CHECKING:
    from hf_pipetransformer.planning.token_slices import TokenCosts
    from hf_pipetransformer.schedules.layout import Layout


Shared = tuple[tuple[tuple[int, ...], int], ...]
"""Parameters that several blocks use: the blocks, in increasing order, and the number of elements."""


@dataclass(frozen=True)
class BlockCosts:
    """Costs of each block of the model, one entry per block.

    Args:
        forward: seconds per sample of the forward.
        backward: seconds per sample of the whole backward.
        edge_backward: seconds per sample of the backward if the block's input needs no gradient, as in the first
            active block.
        parameters: elements; those of several blocks count at the first one.
        activation_bytes: bytes per sample that the block keeps from its forward for its backward.
        kept: elements of `parameters` that the user froze.
        trained_bytes: bytes of the weights that are trained unless their layer freezes.
        kept_bytes: bytes of the weights that the user froze.
        boundary_bytes: bytes per sample of the activation that enters the block.
        working_bytes: bytes per sample that the block needs for a moment, in its forward or backward, besides those it
            keeps and the gradients of its weights.
        shared: parameters of several blocks, not by block: each stage that uses them has a copy.
        kept_shared: like `shared`, for parameters that the user froze.
        slices: costs of token slices; None where sequences stay whole.
        launch: seconds in which Python launches the operations of the block's forward on a device, and of its whole
            backward: a pass takes at least as long, with however few samples; empty if unknown.
        table: bytes of a table of embeddings whose gradient a first stage without the head makes after its backwards
            (see `EmbeddingGradients`), and the samples of a batch up to which it does.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    edge_backward: tuple[float, ...]
    parameters: tuple[int, ...]
    activation_bytes: tuple[float, ...]
    kept: tuple[int, ...]
    trained_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    boundary_bytes: tuple[float, ...]
    working_bytes: tuple[float, ...]
    shared: Shared = ()
    kept_shared: Shared = ()
    slices: TokenCosts | None = None
    table: tuple[float, float] = (0.0, 0.0)
    launch: tuple[tuple[float, float], ...] = ()

    @property
    def trained(self) -> tuple[int, ...]:
        """Elements by block that are trained unless their layer freezes."""
        return tuple(whole - frozen for whole, frozen in zip(self.parameters, self.kept, strict=True))

    def scaled(self, forward: float, backward: float) -> BlockCosts:
        return replace(
            self,
            forward=tuple(forward * seconds for seconds in self.forward),
            backward=tuple(backward * seconds for seconds in self.backward),
            # The same factor: a step measures both kinds of backward together.
            edge_backward=tuple(backward * seconds for seconds in self.edge_backward),
        )


def block_backwards(costs: BlockCosts, num_frozen_layers: int) -> list[float]:
    """Return each block's backward in seconds per sample; zero below the first active block."""
    first = first_above(num_frozen_layers)
    # Nothing below the first active block is trained, so that its input needs no gradient.
    return [0.0] * first + [costs.edge_backward[first], *costs.backward[first + 1 :]]


def block_forwards(costs: BlockCosts, cache_level: int) -> list[float]:
    """Return each block's forward in seconds per sample; zero for blocks whose stored activations replace it."""
    first = first_above(cache_level)
    return [0.0] * first + list(costs.forward[first:])


def active_seconds(costs: BlockCosts, num_frozen_layers: int) -> float:
    """Return the seconds per sample of forward and backward above the frozen layers."""
    return sum(block_forwards(costs, num_frozen_layers)) + sum(block_backwards(costs, num_frozen_layers))


def block_loads(
    costs: BlockCosts, num_frozen_layers: int, cache_level: int = 0, update_per_parameter: float = 0.0
) -> list[float]:
    """Return the seconds per sample of each block, which a partition balances.

    A frozen block only runs its forward, and not even that for a sample whose activation is stored.
    `update_per_parameter` is in seconds per sample and trained parameter, for schedules whose steps overlap: elsewhere
    all stages wait for the slowest update, which boundaries alone do not determine.
    """
    first, trained = first_above(num_frozen_layers), costs.trained
    updates = [update_per_parameter * count * (block >= first) for block, count in enumerate(trained)]
    parts = block_forwards(costs, cache_level), block_backwards(costs, num_frozen_layers), updates
    return [sum(each) for each in zip(*parts, strict=True)]


# ---- sums over stages and ranks ----


def trained_elements(layout: Layout, costs: BlockCosts) -> list[float]:
    """Return the elements that each rank of a pipeline trains; those of several blocks count at the first."""
    return by_rank(layout, by_stage(layout, of_active(layout, costs.trained)))


def gradient_bytes(layout: Layout, costs: BlockCosts) -> list[float]:
    """Return the bytes of the gradients of each rank of a pipeline, in the dtypes of the weights."""
    return by_rank(layout, by_stage(layout, of_active(layout, costs.trained_bytes)))


def of_active(layout: Layout, values: Sequence[float]) -> list[float]:
    """Return `values`, one for each block, with zeros for the frozen ones."""
    first = layout.first_active_block
    return [0.0] * first + list(values[first:])


def by_stage(layout: Layout, values: Sequence[float]) -> list[float]:
    """Return the sums over each stage's blocks."""
    return [sum(values[block] for block in layout.blocks_of(stage)) for stage in range(layout.num_stages)]


def by_rank(layout: Layout, values: Sequence[float]) -> list[float]:
    """Return the sums over the stages of each rank of a pipeline."""
    return [sum(values[stage] for stage in layout.places.stages_of(rank)) for rank in range(layout.pipeline_size)]
