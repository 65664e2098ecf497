"""Migration of weights, buffers and optimizer state between ranks at a layout change (PipeTransformer section 3.3).

The block of transfer is a bundle: the parameters and buffers that the same blocks use. There is one bundle per block,
and one per set of tied weights. A bundle is sent point to point, tensor by tensor, from a rank that has it. Before,
all ranks tell each other what they will send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

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

    Collective: call on every rank. Tensors go from device to device on the device's backend, those on the CPU over the
    control group, over which all ranks get the dtypes and shapes of all tensors before. A rank copies what it sends at
    most once, however many ranks it serves.

    Args:
        collect: called once, with one move of each content that this rank sends.
        install: received tensors are on `device`, or on the CPU if they were there at their source.
    """
    if not moves:
        return 0
    # One entry a content: several ranks that need the same tensors get them from one copy.
    sent = {move.content: move for move in moves if move.source == topology.rank}
    leaving = {content: _split(tree) for content, tree in zip(sent, collect(list(sent.values())), strict=True)}
    # Every rank needs the sizes of all moves: with the same sizes, all cut them into the same rounds.
    messages, sizes = _described(moves, leaving, topology)
    by_bundle: dict[Bundle, list[Move]] = {}
    for move in moves:
        by_bundle.setdefault(move.bundle, []).append(move)
    bundles = list(by_bundle)
    # A rank may get one copy of each bundle, so that the largest of a bundle's moves bounds what it holds at a time.
    for indices in in_rounds([max(map(sizes.__getitem__, by_bundle[bundle])) for bundle in bundles]):
        done = [bundles[index] for index in indices]
        parcels, arrived = [], []
        for move in (move for bundle in done for move in by_bundle[bundle]):
            if move.source == topology.rank:
                parcels += _parcels(move, leaving[move.content].tensors, topology)
            elif move.destination == topology.rank:
                tree, tensors = _announced(messages.pop(move), device)
                parcels += _parcels(move, tensors, topology)
                arrived.append(tree)
        carry(parcels, topology.control, topology.timeout)
        # Drop the references, so that `install` frees the memory of what leaves this rank.
        parcels.clear()
        for content_key in [key for key in leaving if key[0] in done]:
            del leaving[content_key]
        install(done, arrived)
    return sum(sizes.values())


def _described(
    moves: Sequence[Move], leaving: Mapping[Content, _Split], topology: Topology
) -> tuple[dict[Move, torch.Tensor], dict[Move, int]]:
    """Return the descriptions of what this rank gets, and the bytes of all moves. Collective: call on every rank."""
    answers = topology.gather([[each.message, sum(t.nbytes for t in each.tensors)] for each in leaving.values()])
    messages, sizes = dict[Move, torch.Tensor](), dict[Move, int]()
    for source, answer in enumerate(answers):
        theirs = [move for move in moves if move.source == source]
        # Each rank answers for its contents in the order in which its moves name them.
        by_content = dict(zip(dict.fromkeys(move.content for move in theirs), answer, strict=True))
        for move in theirs:
            message, num_bytes = by_content[move.content]
            sizes[move] = message.numel() + num_bytes
            if move.destination == topology.rank:
                messages[move] = message
    return messages, sizes


def _parcels(move: Move, tensors: Sequence[torch.Tensor], topology: Topology) -> list[Parcel]:
    is_leaving = move.source == topology.rank
    peer = move.destination if is_leaving else move.source
    what = f"blocks {move.bundle} from rank {move.source} to rank {move.destination}"
    return [Parcel(tensor, peer, is_leaving, what) for tensor in tensors]


@dataclass(frozen=True)
class _Split:
    """Tree without its tensors, packed, and these."""

    message: torch.Tensor
    tensors: list[torch.Tensor]


def _split(tree: Any) -> _Split:
    tensors = [tensor.detach().contiguous() for tensor in _tensors(tree)]
    # Dtype and shape: of a tensor that has one element in all places, `pack` sends no more.
    shapes = tree_map_only(torch.Tensor, lambda each: torch.zeros((), dtype=each.dtype).expand(each.shape), tree)
    return _Split(pack([shapes, [tensor.is_cpu for tensor in tensors]]), tensors)


def _announced(message: torch.Tensor, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
    """Return the tree of a message, and its tensors, which are still to be received."""
    shapes, are_on_cpu = unpack(message)
    places = iter("cpu" if is_cpu else device for is_cpu in are_on_cpu)
    tree = tree_map_only(
        torch.Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device=next(places)), shapes
    )
    return tree, _tensors(tree)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
