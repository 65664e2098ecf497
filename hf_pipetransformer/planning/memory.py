"""Memory model of a layout: bytes that each rank of a pipeline holds, computed from the costs of each block. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hf_pipetransformer.planning.blocks import (
    BlockCosts,
    by_rank,
    by_stage,
    gradient_bytes,
    of_active,
    trained_elements,
)
from hf_pipetransformer.schedules.actions import GRADIENTS_ARE_WHOLE, Op
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import attention_of, mlp_of, num_layers
from hf_pipetransformer.schedules.tables import find_schedule
from hf_pipetransformer.schedules.weight_kinds import weights_under


# For what no formula here counts, such as the fragments of an allocator.
MEMORY_RESERVE = 0.1
"""Share of a device's memory that a plan leaves free."""

BLOCKWISE = 4 / 256
"""Bytes per element of the scales of an optimizer state in 8 or 4 bits: one float32 for 256 elements."""

_NUM_STATES = {"ademamix": 3, "grokadamw": 3, "adafactor": 0, "adagrad": 1, "lion": 1, "rmsprop": 1, "sgd": 1}
"""States per weight by a part of the optimizer's name; two, as of Adam, for all others. SGD has one at most, and
Adafactor's rows and columns are not counted."""


@dataclass(frozen=True)
class MemoryRules:
    """Settings of a run, besides its layout, that its memory depends on.

    Args:
        optim: Trainer's name of the optimizer.
        recompute: a value of `pipeline_checkpoint`.
        casts: True if autocast keeps a copy of the float32 weights in 16 bits.
        sums: True if the gradients of half-precision weights are added in float32.
        loss_sees: samples that the head and the loss see at once: `parts` for those of a micro-batch, `replica` or
            `batch` for those of one replica or of all.
        head_slices: parts of a micro-batch whose logits are in memory one after the other.
    """

    optim: str = "adamw_torch"
    recompute: str = "never"
    casts: bool = False
    sums: bool = False
    loss_sees: str = "parts"
    head_slices: int = 1

    def state_bytes(self, elements: float, weight_bytes: float) -> float:
        """Return the bytes of the optimizer's state for `elements` trained weights that take `weight_bytes`.

        bitsandbytes keeps the states of embeddings and small tensors in float32, which is not counted.
        """
        name = self.optim
        if "8bit" in name:
            size = (1 + BLOCKWISE) * elements
        elif "4bit" in name:
            size = (0.5 + BLOCKWISE) * elements
        elif "32bit" in name or name in ("ademamix", "rmsprop_bnb"):
            size = 4 * elements
        else:
            size = weight_bytes  # torch makes states like the weights.
        return size * next((count for part, count in _NUM_STATES.items() if part in name), 2)


@dataclass
class RankMemory:
    """Bytes that a rank holds at the fullest moment of a step, by what they hold.

    `copies` are casts and other versions of weights; `gradients` include float32 sums and the buffers of reductions.
    `communicators` are those of NCCL, which only the plan of a whole run counts.
    """

    activations: float
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    copies: float = 0.0
    communicators: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


def rank_memory(
    layout: Layout,
    costs: BlockCosts,
    samples_per_pipeline: int,
    accumulation: int = 1,
    weights: str = "pipeoptim",
    memory: MemoryRules = MemoryRules(),
) -> list[RankMemory]:
    """Return what each rank of a pipeline needs for training.

    Backwards free activations while they make gradients, so that the fullest moment may have all activations and no
    gradients. With replicas, reduced gradients lie in flat buffers, into which the last backward of a step moves those
    of each block; earlier ones leave theirs beside the buffers. A rank that uses a parameter but is not its first user
    has a copy and a gradient, without optimizer state. If steps overlap, stages keep several versions of the weights
    they train, by `weights` (a value of `pipeline_weights`). A pipeline's batch has `samples_per_pipeline` samples.
    """
    microbatches = max(1, min(layout.num_microbatches, samples_per_pipeline))
    samples = samples_per_pipeline / microbatches
    in_each = replace(
        costs,
        activation_bytes=_times(samples, costs.activation_bytes),
        boundary_bytes=_times(samples, costs.boundary_bytes),
        working_bytes=_times(samples, costs.working_bytes),
    )
    if memory.head_slices > 1 and memory.loss_sees == "parts":
        # The head keeps what one slice needs, and the gradient of what enters it.
        in_each = _with_head(in_each, 1 / memory.head_slices, 1, 1 / memory.head_slices)
    if memory.loss_sees != "parts":
        # The head runs once, on all micro-batches of these replicas, each of which computes it for all. What it keeps
        # counts as a share of each micro-batch, since all forwards come first.
        num_replicas = layout.num_replicas if memory.loss_sees == "batch" else 1
        in_each = _with_head(in_each, num_replicas, num_replicas, num_replicas * microbatches)
    sums = _times(memory.sums, sum_bytes(costs))
    made = of_active(layout, [sum(both) for both in zip(costs.trained_bytes, sums, strict=True)])
    _move_shared(made, layout, costs)
    late, (table_bytes, table_samples) = 0.0, costs.table
    if layout.num_stages > 1 and 0 < samples_per_pipeline <= table_samples:
        # With the float32 sum of a table in half precision.
        late = made[0] and min(made[0], table_bytes * made[0] / costs.trained_bytes[0])
    rows = late * samples / table_samples if late else 0.0
    found = _fullest(layout, in_each, microbatches, made, accumulation == 1, not any(sums), (late, rows))
    if memory.recompute != "never":
        recomputed = _recomputed(layout, in_each, microbatches, memory.recompute)
        gradients = by_rank(layout, by_stage(layout, made))
        # The estimate with recomputation has all gradients beside all activations. Where it is above the one of a run
        # that keeps everything, it is too high.
        whole = [RankMemory(each, gradients=more) for each, more in zip(recomputed, gradients, strict=True)]
        found = [min(pair, key=lambda rank: rank.total) for pair in zip(found, whole, strict=True)]
    trained, active = trained_elements(layout, costs), gradient_bytes(layout, costs)
    reduced = active.copy()
    sizes = [sum(both) for both in zip(costs.trained_bytes, costs.kept_bytes, strict=True)]
    casts = by_rank(layout, by_stage(layout, of_active(layout, _cast_bytes(costs))))
    for rank, size in enumerate(by_rank(layout, by_stage(layout, sizes))):
        found[rank].weights = size
        found[rank].optimizer = memory.state_bytes(trained[rank], active[rank])
        found[rank].copies = memory.casts * casts[rank]
    _add_shared(found, reduced, layout, costs)
    kind, num_stages = weights_under(layout.abilities, weights), layout.num_stages
    if kind is not None:
        # A window has one stage a rank, so that stages are ranks here.
        for stage, own in enumerate(active):
            found[stage].copies += own * kind.copies_beside(
                stage, num_stages, accumulation * microbatches, memory.optim
            )
    if layout.num_replicas > 1:
        for rank, size in enumerate(reduced):
            found[rank].gradients += size
    return found


def _with_head(costs: BlockCosts, kept: float, entering: float, at_once: float) -> BlockCosts:
    """Return the costs of a micro-batch whose head keeps and works with other multiples of what it has.

    Args:
        kept: of the activations that it keeps; `entering` of what enters it, which it keeps besides.
        at_once: of what it works with.
    """
    activation, working = list(costs.activation_bytes), list(costs.working_bytes)
    activation[-1] = kept * activation[-1] + entering * costs.boundary_bytes[-1]
    working[-1] *= at_once
    return replace(costs, activation_bytes=tuple(activation), working_bytes=tuple(working))


def _move_shared(gradients: list[float], layout: Layout, costs: BlockCosts) -> None:
    """Move the gradient of a weight that several blocks of one rank share to the block whose backward is the first."""
    for blocks, elements in costs.shared:
        if len(layout.ranks_of(blocks)) == 1 and costs.trained[blocks[0]]:
            # Bytes of shared elements are not known apart: the average of the block is taken.
            size = gradients[blocks[0]] * elements / costs.trained[blocks[0]]
            gradients[blocks[0]] -= size
            gradients[blocks[-1]] += size


def _add_shared(found: Sequence[RankMemory], reduced: list[float], layout: Layout, costs: BlockCosts) -> None:
    """Add the copies of parameters that several ranks use, and take them out of the `reduced` bytes by rank."""
    shared = [
        *((entry, True, costs.trained_bytes, costs.trained) for entry in costs.shared),
        *((entry, False, costs.kept_bytes, costs.kept) for entry in costs.kept_shared),
    ]
    for (blocks, elements), is_trained, size_of, count_of in shared:
        first, *others = layout.ranks_of(blocks)
        is_trained = is_trained and blocks[0] >= layout.first_active_block
        # Only the number of elements is known here: assume the average element size of the first block.
        copy = elements * size_of[blocks[0]] / count_of[blocks[0]] if others else 0.0
        for rank in others:
            found[rank].weights += copy
            found[rank].gradients += copy if is_trained else 0.0
        if others and is_trained:
            # A shared parameter has an all-reduce outside the flat buffers.
            reduced[first] -= copy


def _fullest(
    layout: Layout,
    costs: BlockCosts,
    microbatches: int,
    gradients: Sequence[float],
    is_alone: bool,
    sums_in_place: bool,
    kept_back: tuple[float, float],
) -> list[RankMemory]:
    """Return the activations and gradients of each rank at its fullest moment; `costs` has those of one micro-batch.

    `gradients` are bytes by block. `is_alone` says that a step has one batch, at whose begin there are none,
    `sums_in_place` that gradients are summed in the precision of the weights. `kept_back` are the bytes of block 0's
    gradients that are made after the last backward, and those that are kept for them from each backward.
    """
    shape = layout.pipeline_size, microbatches, layout.num_chunks, layout.first_active_stage
    table, found = find_schedule(layout.schedule).fullest_table(*shape), list[RankMemory]()
    # A table with updates goes on into the next step, whose gradients are there already.
    is_alone = is_alone and all(action.op is not Op.UPDATE for actions in table for action in actions)
    # The only backward of a step puts its gradients into the flat buffers at once, which `rank_memory` adds.
    is_moved = is_alone and sums_in_place and microbatches == 1 and layout.num_replicas > 1
    for rank, actions in enumerate(table):
        chunks = layout.blocks_of_rank(rank)
        blocks = [[block for block in each if block >= layout.first_active_block] for each in chunks]
        made: set[int] = set() if is_alone else {block for each in blocks for block in each}
        held = 0.0
        moments = [RankMemory(0.0, gradients=sum(gradients[block] for block in made))]
        for op, _, chunk in actions:
            if op is Op.FORWARD:
                for block in chunks[chunk]:
                    held += costs.activation_bytes[block] if block in blocks[chunk] else 0.0
                    moments.append(RankMemory(held + costs.working_bytes[block], gradients=moments[-1].gradients))
            elif op is Op.BACKWARD_INPUT:
                # Activations stay: the gradients of the weights need them still.
                most = max((costs.working_bytes[block] for block in blocks[chunk]), default=0.0)
                moments.append(RankMemory(held + most, gradients=moments[-1].gradients))
            elif op in GRADIENTS_ARE_WHOLE:
                for block in reversed(blocks[chunk]):
                    before = 0.0 if is_moved else moments[-1].gradients
                    moments.append(RankMemory(held + costs.working_bytes[block], gradients=before))
                    held -= costs.activation_bytes[block]
                    # With several batches all gradients are there from the beginning, that of the table too.
                    late, rows = kept_back if block == 0 and is_alone else (0.0, 0.0)
                    more = rows + (gradients[block] - late) * (block not in made)
                    moments.append(RankMemory(held, gradients=before + more))
                    made |= {block} if not is_moved else set()
        if is_alone and 0 in made:
            moments.append(RankMemory(held, gradients=moments[-1].gradients + kept_back[0]))
        found.append(max(moments, key=lambda moment: moment.total))
    return found


def _recomputed(layout: Layout, costs: BlockCosts, microbatches: int, recompute: str) -> list[float]:
    """Return the most bytes of activations that each rank holds if it recomputes; `costs` are of one micro-batch."""
    shape = layout.pipeline_size, microbatches, layout.num_chunks, layout.first_active_stage
    peaks, sizes = find_schedule(layout.schedule).peaks, of_active(layout, costs.activation_bytes)
    whole, working = by_stage(layout, sizes), costs.working_bytes
    # Every micro-batch in flight keeps inputs. Besides, one is recomputed at a time, and one may be left whole.
    inputs, at_once = [], []
    for stage, size in enumerate(whole):
        active = [block for block in layout.blocks_of(stage) if block >= layout.first_active_block]
        layers = [block for block in active if 0 < block < len(sizes) - 1]
        if recompute == "layers":
            # A stage's part of a layer is recomputed as one. Embeddings and head are not.
            parts = [[b for b in layers if mlp_of(layer) - b in (0, 1)] for layer in range(layout.num_layers)]
            kept = sum(sizes[block] for block in active if block not in layers)
            inputs.append(kept + sum(costs.boundary_bytes[part[0]] for part in parts if part))
            at_once.append(max(sum(sizes[block] + working[block] for block in part) for part in parts))
        else:
            inputs.append(costs.boundary_bytes[active[0]] if active else 0.0)
            most = max((working[block] for block in active), default=0.0)
            at_once.append(size * (2 if recompute == "except_last" else 1) + most)
    largest = [max(at_once[stage] for stage in layout.places.stages_of(rank)) for rank in range(layout.pipeline_size)]
    return [sum(both) for both in zip(peaks(inputs, *shape), largest, strict=True)]


def _cast_bytes(costs: BlockCosts) -> list[float]:
    """Return the bytes of 16-bit copies of the float32 weights of each block."""
    kinds = ((costs.trained, costs.trained_bytes), (costs.kept, costs.kept_bytes))
    # Autocast copies float32 weights only; a block of mixed dtypes counts as none.
    whole = [[size if size == 4 * count else 0 for count, size in zip(*kind, strict=True)] for kind in kinds]
    return [sum(both) / 2 for both in zip(*whole, strict=True)]


def sum_bytes(costs: BlockCosts) -> list[float]:
    """Return the bytes of float32 sums of the gradients of each block's half-precision weights."""
    return [4.0 * count * (size < 4 * count) for count, size in zip(costs.trained, costs.trained_bytes, strict=True)]


def _times(factor: float, values: Sequence[float]) -> tuple[float, ...]:
    return tuple(factor * value for value in values)


# ---- sharded data parallelism ----

GATHERED_LAYERS = 2
"""Layers whose weights are whole at a time: one that runs, and the next one, which is fetched beside it."""


def shard_memory(alone: RankMemory, costs: BlockCosts, world_size: int, casts: bool) -> RankMemory:
    """Return what a process holds, from what one that holds the whole model does.

    Args:
        alone: of a process that neither shards nor reduces gradients, at the moment of most activations.
        casts: True if float32 weights are gathered in 16 bits.
    """
    sizes = [trained + kept for trained, kept in zip(costs.trained_bytes, costs.kept_bytes, strict=True)]
    layers = [sizes[attention_of(n)] + sizes[mlp_of(n)] for n in range(num_layers(len(sizes)))]
    # Embeddings and head belong to the outermost module, whose weights stay gathered from its forward to its backward.
    gathered = sizes[0] + sizes[-1] + GATHERED_LAYERS * max(layers)
    scale, outermost = 0.5 if casts else 1.0, costs.trained_bytes[0] + costs.trained_bytes[-1]
    trained = max(costs.trained_bytes[attention_of(n)] + costs.trained_bytes[mlp_of(n)] for n in range(len(layers)))
    return replace(
        alone,
        weights=alone.weights / world_size,
        # Those of the outermost module are whole until the backward ends, those of a layer until they are summed.
        gradients=sum(costs.trained_bytes) / world_size + scale * (trained + outermost),
        optimizer=alone.optimizer / world_size,
        copies=scale * gathered,
    )
