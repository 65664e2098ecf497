"""Memory and time of sharded data parallelism (FSDP2's full shard, DeepSpeed's ZeRO-3), by formula. Pure.

Every process holds a share of the weights, gradients and optimizer state. Before a layer runs, its weights are
gathered, and its gradients are summed into shares after its backward. Rajbhandari et al., *ZeRO* (2020), section 7.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hf_pipetransformer.schedules.placement import attention_of, mlp_of, num_layers


if TYPE_CHECKING:
    from hf_pipetransformer.planning.costs import BlockCosts, Overheads, Prediction
    from hf_pipetransformer.planning.memory import RankMemory


GATHERED_LAYERS = 2
"""Layers whose weights are whole at a time: one that runs, and the next one, which is fetched beside it."""

NUM_GATHERS = 2
"""Of all weights in a batch: before the forward, and again before the backward. Gradients are summed once."""


def shard_memory(alone: RankMemory, costs: BlockCosts, world_size: int, casts: bool) -> RankMemory:
    """Return what a process holds, from what one that holds the whole model does.

    Args:
        alone: of a process that neither shards nor reduces gradients, at the moment of most activations.
        casts: True if float32 weights are gathered in 16 bits.
    """
    sizes = [trained + kept for trained, kept in zip(costs.trained_sizes, costs.kept_sizes, strict=True)]
    layers = [sizes[attention_of(n)] + sizes[mlp_of(n)] for n in range(num_layers(len(sizes)))]
    # Embeddings and head belong to the outermost module, whose weights stay gathered from its forward to its backward.
    gathered = sizes[0] + sizes[-1] + GATHERED_LAYERS * max(layers)
    scale, outermost = 0.5 if casts else 1.0, costs.trained_sizes[0] + costs.trained_sizes[-1]
    trained = max(costs.trained_sizes[attention_of(n)] + costs.trained_sizes[mlp_of(n)] for n in range(len(layers)))
    return replace(
        alone,
        weights=alone.weights / world_size,
        # Those of the outermost module are whole until the backward ends, those of a layer until they are summed.
        gradients=sum(costs.trained_sizes) / world_size + scale * (trained + outermost),
        optimizer=alone.optimizer / world_size,
        copies=scale * gathered,
    )


def shard_seconds(
    alone: Prediction, costs: BlockCosts, overheads: Overheads, world_size: int, accumulation: int, casts: bool
) -> float:
    """Return the seconds of a step whose messages run beside the computation, as far as that takes long enough.

    `alone` is that of a process that neither shards nor reduces.
    """
    scale = 0.5 if casts else 1.0
    all_bytes, trained = scale * (sum(costs.trained_sizes) + sum(costs.kept_sizes)), scale * sum(costs.trained_sizes)
    gathers = NUM_GATHERS + overheads.has_reference
    ring = (world_size - 1) / world_size * overheads.reduction_per_byte
    # Half of an all-reduce's ring each, for every layer and for the outermost module.
    latency = (gathers + 1) * (num_layers(len(costs.parameters)) + 1) * overheads.of_sum(world_size) / 2
    messages = accumulation * (ring * (gathers * all_bytes + trained) + latency)
    return max(alone.pipeline, messages) + alone.optimizer / world_size + alone.other
