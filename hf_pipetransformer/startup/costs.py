"""Measurement of a model's blocks and token slices (seconds, bytes), and of device memory.

Functions of a `ProbeTarget` run on one rank, without communication.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.engine.embeddings import EmbeddingGradients, embeddings_of
from hf_pipetransformer.engine.timing import settled_seconds
from hf_pipetransformer.planning.blocks import BlockCosts
from hf_pipetransformer.schedules.placement import attention_of, mlp_of
from hf_pipetransformer.splitters.base import shapes_of
from hf_pipetransformer.splitters.quantized import is_packed, num_bytes, num_weights
from hf_pipetransformer.startup.model import ProbeTarget, gradients_discarded, run_stage


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.splitters.structure import Structure
    from hf_pipetransformer.splitters.view import StageView
    from hf_pipetransformer.startup.twin import ProbeSubmodel


NUM_REPEATS = 5
PROFILE_SECONDS = 10.0
"""Time budget of a measurement; for slow models it is met by measuring with fewer samples."""
MEMORY_SHARE = 0.5
"""Share of the free memory that a measurement may use."""

ReadBatch = Callable[[int], SampleBatch]
"""Function from a number of samples to a batch of the first samples of the run."""


@dataclass
class BlockProfile:
    """Costs of each block for one sample, in seconds and bytes.

    Args:
        edge_backward: seconds of the backward if the block's input needs no gradient.
        activation_bytes: bytes saved for the backward, weights not counted.
        working_bytes: bytes needed for a moment besides those, gradients of weights not counted.
        boundary_bytes: bytes of the activation between two blocks.
        num_samples: number of samples in the batch that was measured.
        table: see `BlockCosts`.
        passing: seconds of a forward and of a backward through no block: the model's code around its blocks, such as
            attention masks, and the launch of a backward. Blocks' times are without it.
    """

    forward: list[float]
    backward: list[float]
    edge_backward: list[float]
    activation_bytes: list[float]
    boundary_bytes: float = 0.0
    working_bytes: list[float] = field(default_factory=list)
    num_samples: int = 1
    table: tuple[float, float] = (0.0, 0.0)
    passing: tuple[float, float] = (0.0, 0.0)


# ---- blocks ----


def measure_blocks(
    target: ProbeTarget, structure: Structure, wanted: int, num_ranks_here: int, read: ReadBatch | None
) -> BlockProfile:
    """Measure with `wanted` samples, or fewer if that takes too much time or memory.

    Args:
        read: reads the batch to measure with; None measures the target's.
    """
    with trained_as_given(target.model, structure):
        if read is None:
            return profile_blocks(target, structure)
        if target.inputs.sequences is not None:
            target = with_batch(target, read(1))  # A sample may be several sequences, and plans count samples.
        size = target.inputs.size
        if wanted > size:
            # First with the few samples of the checks: a run of the full size could already be too large.
            pilot = profile_blocks(target, structure, num_repeats=1)
            num_blocks_run = len(blocks_run_alone(target.twin, structure))
            free = _free_bytes(target.device, num_ranks_here)
            # The pilot has run with `size` samples, so that these fit at least.
            wanted = max(size, affordable_samples(wanted, pilot, num_blocks_run, free))
        return profile_blocks(with_batch(target, read(wanted)), structure)


def affordable_samples(wanted: int, pilot: BlockProfile, num_blocks_run: int, free_bytes: float) -> int:
    """Return the number of samples to measure with: `wanted`, or fewer if that takes too much time or memory.

    Args:
        wanted: samples of the run's micro-batch.
        pilot: profile measured on fewer samples.
        num_blocks_run: number of blocks timed alone; the forward of all blocks below runs once before each.
    """
    # Timed with and without a gradient of the input, each after a warm-up, and run again for its bytes.
    runs = 2 * (NUM_REPEATS + 1) + 1
    slowest = max(f + b for f, b in zip(pilot.forward, pilot.backward, strict=True))
    seconds = num_blocks_run * (sum(pilot.forward) + runs * slowest)
    # Saved activations, their gradients, and as much again for temporaries.
    needed = 3 * max(pilot.activation_bytes)
    limits = [
        PROFILE_SECONDS / seconds if seconds else wanted,
        MEMORY_SHARE * free_bytes / needed if needed else wanted,
    ]
    return max(1, min(wanted, int(min(limits))))


def profile_blocks(target: ProbeTarget, structure: Structure, num_repeats: int = NUM_REPEATS) -> BlockProfile:
    """Time the embeddings, one middle layer of each kind, which stands for the others, and the head."""
    size, num_blocks, cuts = target.inputs.size, structure.num_blocks, structure.block_starts()
    forward, backward, edge_backward, saved, working = ([0.0] * num_blocks for _ in range(5))
    profile = BlockProfile(forward, backward, edge_backward, saved, working_bytes=working, num_samples=size)
    profile.table = kept_back(target, structure)
    alone = blocks_run_alone(target.twin, structure)
    with target.view(structure) as view:
        runner = _Runner(target, view, num_repeats)
        # On a GPU that computes a block faster than Python launches it, the code around blocks takes as long as one.
        profile.passing = runner.time(range(1, 1), runner.hidden_before(1), needs_input_gradient=True)
        for start, end in pairwise(cuts):
            if start not in alone:
                continue
            blocks, hidden = range(start, end), runner.hidden_before(start)
            whole = runner.time(blocks, hidden, needs_input_gradient=True)
            _, edge = runner.time(blocks, hidden, needs_input_gradient=False)
            seconds = [without(each, around) for each, around in zip(whole, profile.passing, strict=True)]
            edge_seconds = without(edge, profile.passing[1])
            saved_bytes = runner.saved_bytes(blocks, hidden)
            working_bytes = runner.working_bytes(blocks, hidden, saved_bytes)
            for block in alone[start]:
                forward[block], backward[block] = (each / size for each in seconds)
                edge_backward[block] = edge_seconds / size
                saved[block], working[block] = saved_bytes / size, working_bytes / size
            if hidden is not None:
                profile.boundary_bytes = hidden.numel() * hidden.element_size() / size
    return profile


def without(seconds: float, around: float) -> float:
    """Return the part of a block's run that is its own; a tenth at least, so that no disturbed clock makes it 0."""
    return max(0.1 * seconds, seconds - around)


def kept_back(target: ProbeTarget, structure: Structure) -> tuple[float, float]:
    """Return `BlockCosts.table`: the largest one that ids are looked up in."""
    ids = target.inputs[target.main_input]
    tables = {each.weight: each for each in embeddings_of(target.model, structure.layers)}
    kept = EmbeddingGradients(tables.values()).parameters
    # An image looks up no rows.
    if not kept or ids.is_floating_point():
        return 0.0, 0.0
    largest = max(kept, key=torch.Tensor.numel)
    return float(num_bytes(largest)), tables[largest].num_embeddings * target.inputs.size / ids.numel()


def middle_layers(twin: ProbeSubmodel, structure: Structure) -> dict[int, list[int]]:
    """Map the layers to measure to those that they stand for: all with weights of the same shapes.

    Each is like the middle one of the trained layers of its kind, or of all if none is trained.
    """
    kinds: dict[Any, list[int]] = {}
    for index, layer in enumerate(structure.layers):
        kinds.setdefault(frozenset(shapes_of(layer).items()), []).append(index)
    trained = set(_trained_layers(structure))
    found = {}
    for layers in kinds.values():
        candidates = [layer for layer in layers if layer in trained] or layers
        found[twin.representative(candidates[len(candidates) // 2])] = layers
    return found


def blocks_run_alone(twin: ProbeSubmodel, structure: Structure) -> dict[int, list[int]]:
    """Map the blocks to measure to those that they stand for.

    They are the embeddings, attention and MLP (one piece if uncut) of a layer of each kind, and the head.
    """
    halves = (attention_of, mlp_of) if structure.cuts_inside_layers else (attention_of,)
    layers = middle_layers(twin, structure).items()
    middle = {half(layer): [half(other) for other in others] for layer, others in layers for half in halves}
    return {0: [0], **middle, structure.num_blocks - 1: [structure.num_blocks - 1]}


class _Runner:
    """Runs of some blocks alone, timed."""

    def __init__(self, target: ProbeTarget, view: StageView, num_repeats: int) -> None:
        self.target = target
        self.view = view
        self.num_repeats = num_repeats
        self._kept = EmbeddingGradients(embeddings_of(target.model, view.structure.layers))

    def stages(self, cuts: Sequence[int]) -> Iterator[tuple[range, torch.Tensor | None]]:
        """Yield the blocks between cuts with the activation that enters them, which the blocks below have computed."""
        hidden = None
        for start, end in pairwise(cuts):
            yield range(start, end), hidden
            if end < cuts[-1]:
                with torch.no_grad():
                    hidden = self._run(range(start, end), hidden).detach()

    def hidden_before(self, block: int) -> torch.Tensor | None:
        if block == 0:
            return None
        with torch.no_grad():
            return self._run(range(block), None).detach()

    def time(self, blocks: range, hidden: torch.Tensor | None, needs_input_gradient: bool) -> tuple[float, float]:
        """Return the median seconds of the forward and of the backward of `blocks`, after one warm-up run.

        Gradients add up, as they do over the micro-batches of a step; those of embeddings are kept back, and what
        adding them takes once a step is left out.
        """
        device, times = self.target.device, []
        for _ in range(self.num_repeats + 1):
            # A leaf for each run: gradients of the input do not add up, as they do not in a pipeline.
            received = None if hidden is None else hidden.clone().requires_grad_(needs_input_gradient)
            start = settled_seconds(device)
            output = self._run(blocks, received)
            middle = settled_seconds(device)
            if output.requires_grad:
                torch.autograd.backward(output, torch.ones_like(output))
            times.append((middle - start, settled_seconds(device) - middle))
            self._kept.clear()
        for parameter in self.target.parameters:
            parameter.grad = None
        forward, backward = zip(*times[1:], strict=True)
        return statistics.median(forward), statistics.median(backward)

    def saved_bytes(self, blocks: range, hidden: torch.Tensor | None, copies: Iterable[torch.Tensor] = ()) -> float:
        """Return the bytes saved for the backward, each storage counted once, weights not counted."""
        # Kept, so that no other storage gets the identity of one that was freed; meta tensors have no address.
        weights = {
            id(each): each for each in (p.untyped_storage() for p in chain(self.target.model.parameters(), copies))
        }
        storages: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in weights:
                storages[id(storage)] = storage
            # Detach: if a node saves its own output, the graph would reference itself and never be freed.
            return tensor.detach()

        received = None if hidden is None else hidden.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = self._run(blocks, received)
        del output
        return float(sum(storage.nbytes() for storage in storages.values()))

    def working_bytes(self, blocks: range, hidden: torch.Tensor | None, saved: float) -> float:
        """Return the most bytes that forward and backward hold at once, beyond the `saved` ones."""
        with _LiveBytes() as live:
            received = None if hidden is None else hidden.clone().requires_grad_()
            output = self._run(blocks, received)
            if received is not None and output.requires_grad:
                # Gradients of weights are counted with the weights.
                torch.autograd.grad(output, received, torch.ones_like(output), allow_unused=True)
        return max(0.0, live.most - saved)

    def _run(self, blocks: range, received: torch.Tensor | None) -> torch.Tensor:
        # As in a run, in which a stage with the head too keeps no gradients of embeddings back.
        is_first = blocks.start == 0 and blocks.stop < self.view.structure.num_blocks
        with self._kept.keeping() if is_first else nullcontext():
            return run_stage(self.view, blocks, received, lambda: self.target.loss(dict(self.target.inputs)))


class _LiveBytes(TorchDispatchMode):
    """Count of the bytes of tensors that were made inside and are still there, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0.0
        self.num_operations = 0
        """How many operations made a tensor that is no view."""
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An output that shares the storage of an input is a view.
        given = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        output, makes = func(*args, **(kwargs or {})), False
        for each in tree_leaves(output):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and id(storage) not in given and id(storage) not in self._known:
                size, key = storage.nbytes(), id(storage)
                # A weak reference tells when the storage is freed, and does not keep it.
                self._known[key] = weakref.ref(storage, partial(self._drop, key, size))
                self.now += size
                makes = True
        self.most = max(self.most, self.now)
        self.num_operations += makes
        return output

    def _drop(self, key: int, size: int, _: Any) -> None:
        del self._known[key]
        self.now -= size


def count_blocks(
    target: ProbeTarget, structure: Structure, copies: Collection[torch.Tensor], num_casts: Callable[[], int]
) -> tuple[int, list[int], list[float], list[float]]:
    """Count without timing: operations that make tensors, and bytes per sample, of blocks that compute.

    Stages of several blocks count at the first.

    Args:
        copies: tensors whose bytes do not count, like the weights'.
        num_casts: returns how many weights autocast has cast since the beginning, which are operations too.

    Returns:
        Operations around the blocks of a forward, and by block: operations, bytes that it keeps for its backward,
        working bytes.
    """
    operations = [0] * structure.num_blocks
    saved, working = [0.0] * structure.num_blocks, [0.0] * structure.num_blocks
    size = target.inputs.size

    def count(runner: _Runner, blocks: range, hidden: torch.Tensor | None) -> int:
        before = num_casts()
        with _LiveBytes() as live:
            runner._run(blocks, hidden)
        return live.num_operations + num_casts() - before

    with target.view(structure) as view:
        runner, around = _Runner(target, view, num_repeats=0), 0
        for blocks, hidden in runner.stages(target.twin.cut_positions(structure)):
            # No block at all, which takes an activation to pass on.
            if around == 0 and hidden is not None:
                around = count(runner, range(blocks.start, blocks.start), hidden)
            operations[blocks.start] = count(runner, blocks, hidden)
            whole = runner.saved_bytes(blocks, hidden, copies)
            saved[blocks.start], working[blocks.start] = (
                whole / size,
                runner.working_bytes(blocks, hidden, whole) / size,
            )
    return around, [max(0, number - around) for number in operations], saved, working


def _trained_layers(structure: Structure) -> list[int]:
    return [index for index, layer in enumerate(structure.layers) if any(p.requires_grad for p in layer.parameters())]


@contextmanager
def trained_as_given(model: nn.Module, structure: Structure) -> Iterator[None]:
    """Train what the user trains inside the context, or everything if no layer is trained; discard its gradients."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    if not _trained_layers(structure):
        for parameter in flags:
            # Quantized weights have no gradient.
            parameter.requires_grad_(parameter.is_floating_point() and not is_packed(parameter))
    try:
        with gradients_discarded(model):
            yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def block_costs(
    model: nn.Module, structure: Structure, profile: BlockProfile, masters: Collection[str] = ()
) -> BlockCosts:
    """Add the model's parameter counts to measured seconds and bytes; `masters` will be held in float32."""
    parameters, kept, trained_bytes, kept_bytes = ([0] * structure.num_blocks for _ in range(4))
    shared: dict[bool, list[tuple[tuple[int, ...], int]]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        blocks = structure.blocks_of_parameter[name]
        # The first block that uses a tied weight owns its optimizer state and steps it.
        count = num_weights(parameter)
        parameters[blocks[0]] += count
        kept[blocks[0]] += 0 if parameter.requires_grad else count
        sizes = trained_bytes if parameter.requires_grad else kept_bytes
        sizes[blocks[0]] += 4 * parameter.numel() if name in masters else num_bytes(parameter)
        if len(blocks) > 1:
            shared[parameter.requires_grad].append((blocks, parameter.numel()))
    return BlockCosts(
        parameters=tuple(parameters),
        shared=tuple(shared[True]),
        kept=tuple(kept),
        kept_shared=tuple(shared[False]),
        trained_bytes=tuple(trained_bytes),
        kept_bytes=tuple(kept_bytes),
        forward=tuple(profile.forward),
        backward=tuple(profile.backward),
        edge_backward=tuple(profile.edge_backward),
        activation_bytes=tuple(profile.activation_bytes),
        working_bytes=tuple(profile.working_bytes),
        # No activation enters the embeddings; that between all other blocks has one shape.
        boundary_bytes=(0.0, *[profile.boundary_bytes] * (structure.num_blocks - 1)),
        table=(profile.table[0], profile.table[1]),
    )


# ---- batches and memory ----


def affordable_sequences(blocks: BlockCosts, device: torch.device, num_ranks_here: int) -> int:
    """Return the number of samples, at least 1, that fit through the whole model in this device's free memory."""
    kept = sum(blocks.activation_bytes)
    return max(1, int(MEMORY_SHARE * _free_bytes(device, num_ranks_here) / kept)) if kept else 1


def with_batch(target: ProbeTarget, batch: SampleBatch) -> ProbeTarget:
    """Return the target with another batch, moved to the model's device and completed."""
    device = target.device
    return replace(target, inputs=target.complete(batch.mapped(lambda each: each.to(device))))


def smallest_device_bytes(device: torch.device, topology: Topology) -> float:
    """Return the bytes of the run's smallest device, which plans must fit. Collective: call on every rank."""
    return min(topology.gather(_device_bytes(device, topology.num_ranks_here)))


def _free_bytes(device: torch.device, num_ranks_here: int) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free)
    return float(psutil.virtual_memory().available) / num_ranks_here


def _device_bytes(device: torch.device, num_ranks_here: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    # Ranks of a host share its memory.
    return float(psutil.virtual_memory().total) / num_ranks_here
