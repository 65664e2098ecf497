"""Migration of weights, buffers and optimizer state between ranks at a layout change (PipeTransformer section 3.3).

The block of transfer is a bundle: the parameters and buffers that the same blocks use. There is one bundle per block,
and one per set of tied weights. A bundle is sent point to point from a rank that has it: small tensors packed
together, large ones by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.comm.transfers import Parcel, carry, in_rounds, pack, unpack


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.schedules.layout import Layout


Bundle = tuple[int, ...]
"""Blocks that use the bundle, in increasing order."""
Content = tuple[Bundle, bool]
"""A bundle, and True if its optimizer state is included."""


@dataclass(frozen=True)
class Move:
    """Transfer of one bundle from a rank that has it under the old layout to one that needs it under the new."""

    bundle: Bundle
    source: int
    destination: int
    with_state: bool

    @property
    def content(self) -> Content:
        """Content of the message: moves with equal content carry the same tensors."""
        return self.bundle, self.with_state


def plan_moves(
    bundles: Sequence[Bundle], old: Layout, new: Layout, machine_of: Callable[[int], int] = lambda _: 0
) -> list[Move]:
    """Return all moves from the old layout to the new one, the same list on every rank. Pure.

    The optimizer state of an active bundle is kept at its first user. Ranks that lack a bundle are served round-robin
    by the ranks that have it on their machine, or by all that have it if none there has; `machine_of` names machines.
    """
    ranks = range(old.pipeline_size * old.num_replicas)
    moves: list[Move] = []
    for bundle in bundles:
        had, need = old.ranks_of(bundle), new.ranks_of(bundle)
        is_active = bundle[0] >= new.first_active_block
        with_weights = [rank for rank in ranks if rank % old.pipeline_size in had]
        with_state = [rank for rank in with_weights if rank % old.pipeline_size == had[0]]
        num_served: Counter[tuple[int, ...]] = Counter()
        for rank in ranks:
            position = rank % new.pipeline_size
            if position not in need:
                continue
            needs_state = is_active and position == need[0]
            sources = with_state if needs_state else with_weights
            if rank not in sources:
                near = [source for source in sources if machine_of(source) == machine_of(rank)]
                # Sources on the same machine first: a message between machines takes much longer.
                serving = tuple(near or sources)
                moves.append(Move(bundle, serving[num_served[serving] % len(serving)], rank, needs_state))
                num_served[serving] += 1
    return moves


Collect = Callable[[Sequence[Move]], list[dict[str, Any]]]
"""Function that returns what this rank sends for each of some moves: a tree of tensors and JSON values."""
Install = Callable[[Sequence[Bundle], list[dict[str, Any]]], None]
"""Callback after each round: the bundles that have been moved, and the contents that this rank received."""


def exchange(
    moves: Sequence[Move], collect: Collect, install: Install, topology: Topology, device: torch.device
) -> int:
    """Carry out `moves`, in rounds of whole bundles, and return the bytes that all ranks sent together.

    Collective: call on every rank. Tensors go from device to device on the device's own backend; their descriptions,
    and small CPU tensors, go over the control group. A rank copies what it sends at most once, however many ranks it
    serves.

    Args:
        collect: called once, with one move of each content that this rank sends.
        install: received tensors are on `device`, or on the CPU if they were there at their source.
    """
    if not moves:
        return 0
    # One entry a content: several ranks that need the same tensors get them from one copy.
    own = {move.content: move for move in moves if move.source == topology.rank}
    leaving = {content: _split(tree) for content, tree in zip(own, collect(list(own.values())), strict=True)}
    # Every rank needs the sizes of all moves: with the same sizes, all cut them into the same rounds.
    sizes = _sizes(moves, leaving, topology)
    messages = _send_descriptions(moves, [size for size, _ in sizes], leaving, topology)
    by_bundle: dict[Bundle, list[tuple[Move, int]]] = {}
    for move, (_, size) in zip(moves, sizes, strict=True):
        by_bundle.setdefault(move.bundle, []).append((move, size))
    bundles = list(by_bundle)
    # A rank may get one copy of each bundle, so that the largest of a bundle's moves bounds what it holds at a time.
    for indices in in_rounds([max(size for _, size in by_bundle[bundle]) for bundle in bundles]):
        done = [bundles[index] for index in indices]
        parcels, arrived = [], []
        for move in (move for bundle in done for move, _ in by_bundle[bundle]):
            if move.source == topology.rank:
                parcels += _parcels(move, leaving[move.content].large, topology)
            elif move.destination == topology.rank:
                content = unpack(messages.pop(move))
                large = _empty(content["large"], device)
                parcels += _parcels(move, large, topology)
                arrived.append((content["tree"], large))
        carry(parcels, topology.control, topology.timeout)
        # Drop the references, so that `install` frees the memory of what leaves this rank.
        parcels.clear()
        for content_key in [key for key in leaving if key[0] in done]:
            del leaving[content_key]
        install(done, [_joined(tree, large) for tree, large in arrived])
    return sum(small + large for small, large in sizes)


def _sizes(moves: Sequence[Move], leaving: Mapping[Content, _Split], topology: Topology) -> list[tuple[int, int]]:
    """Return the bytes of each move, on every rank: of its description, and of its tensors."""
    own = [leaving[m.content] if m.source == topology.rank else None for m in moves]
    # A move has one source, so that the sum over all ranks is its size.
    sizes = torch.tensor(
        [[s.message.numel(), sum(tensor.nbytes for tensor in s.large)] if s is not None else [0, 0] for s in own]
    )
    guarded(lambda: dist.all_reduce(sizes, group=topology.control), "agreeing on what moves between the ranks")
    return [(small, large) for small, large in sizes.tolist()]


def _send_descriptions(
    moves: Sequence[Move], sizes: Sequence[int], leaving: Mapping[Content, _Split], topology: Topology
) -> dict[Move, torch.Tensor]:
    messages: dict[Move, torch.Tensor] = {}
    parcels = []
    for move, size in zip(moves, sizes, strict=True):
        if move.source == topology.rank:
            parcels += _parcels(move, [leaving[move.content].message], topology)
        elif move.destination == topology.rank:
            messages[move] = torch.empty(size, dtype=torch.uint8)
            parcels += _parcels(move, [messages[move]], topology)
    carry(parcels, topology.control, topology.timeout)
    return messages


def _parcels(move: Move, tensors: Sequence[torch.Tensor], topology: Topology) -> list[Parcel]:
    is_leaving = move.source == topology.rank
    peer = move.destination if is_leaving else move.source
    what = f"blocks {move.bundle} from rank {move.source} to rank {move.destination}"
    return [Parcel(tensor, peer, is_leaving, what) for tensor in tensors]


LARGE_BYTES = 2**16
"""Tensors of at least this size are sent by themselves, without packing; smaller ones share a message."""

_LARGE = "large tensor"
_PACKED = "packed tensor"
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Split:
    """Tree packed without its large tensors, and these in order; the last one may hold the small device tensors."""

    message: torch.Tensor
    large: list[torch.Tensor]


def _split(tree: Any) -> _Split:
    large: list[torch.Tensor] = []
    packed: list[torch.Tensor] = []
    num_packed = 0

    def visit(node: Any) -> Any:
        nonlocal num_packed
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if not isinstance(node, torch.Tensor):
            return node
        if node.nbytes >= LARGE_BYTES:
            large.append(node.detach().contiguous())
            return {_LARGE: len(large) - 1}
        # CPU tensors go into the description; device tensors never do, packing them would synchronize the device.
        if _travels_in_description(node):
            return node
        start, piece = num_packed, node.detach().contiguous().reshape(-1).view(torch.uint8)
        # Padded, as `view` of bytes in another dtype needs an offset that its item size divides.
        num_packed += -(-piece.numel() // _ALIGNMENT) * _ALIGNMENT
        packed.append(torch.nn.functional.pad(piece, (0, num_packed - start - piece.numel())))
        return {_PACKED: [start, _dtype_name(node), list(node.shape)]}

    without = visit(tree)
    if packed:
        # As the last one, where `_joined` looks for it.
        large.append(torch.cat(packed))
    shapes = [[_dtype_name(tensor), list(tensor.shape), tensor.is_cpu] for tensor in large]
    return _Split(pack({"tree": without, "large": shapes}), large)


def _travels_in_description(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def _joined(tree: Any, large: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone()  # A view would keep the whole message alive.
    if not isinstance(tree, dict):
        return tree
    if _LARGE in tree:
        return large[tree[_LARGE]]
    if _PACKED in tree:
        start, dtype_name, shape = tree[_PACKED]
        dtype = getattr(torch, dtype_name)
        piece = large[-1][start : start + torch.Size(shape).numel() * dtype.itemsize]
        # A copy, so that the message's memory is freed.
        return piece.clone().view(dtype).view(shape)
    return {key: _joined(value, large) for key, value in tree.items()}


def _empty(shapes: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    return [
        torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if is_cpu else device)
        for dtype, shape, is_cpu in shapes
    ]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
