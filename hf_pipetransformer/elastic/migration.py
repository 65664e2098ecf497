"""Moving weights, buffers and optimizer state between ranks when the layout changes (PipeTransformer section 3.3).

What moves together is a bundle: the parameters and buffers that the same units use. That is one bundle a unit, and one
for each set of tied weights. A bundle travels as one flat message, point to point, from a rank that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_pipetransformer.comm.errors import PipelineError, guarded
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.comm.transfers import Parcel, carry, in_rounds, pack, unpack
from hf_pipetransformer.schedules.layout import Layout


Bundle = tuple[int, ...]
"""The units that use it, in increasing order."""
Content = tuple[Bundle, bool]
"""A bundle, with its optimizer state or without."""


@dataclass(frozen=True)
class Move:
    """One bundle that a rank needs and does not have.

    Args:
        bundle: which.
        source: rank that has it under the old layout.
        destination: rank that needs it under the new one.
        with_state: whether optimizer state goes with it.
    """

    bundle: Bundle
    source: int
    destination: int
    with_state: bool

    @property
    def content(self) -> Content:
        """What is sent: moves with equal content carry the same tensors."""
        return self.bundle, self.with_state


def plan_moves(bundles: Sequence[Bundle], old: Layout, new: Layout) -> list[Move]:
    """Who sends what to whom, the same list on every rank. Pure.

    A bundle has its optimizer state at its first user, if it is active. A rank that has what it needs gets nothing;
    the others are served in turn by the ranks that have it.
    """
    ranks = range(old.pipeline_size * old.num_replicas)
    moves: list[Move] = []
    for bundle in bundles:
        had, need = old.ranks_of(bundle), new.ranks_of(bundle)
        is_active = bundle[0] >= new.first_active_unit
        with_weights = [rank for rank in ranks if rank % old.pipeline_size in had]
        with_state = [rank for rank in with_weights if rank % old.pipeline_size == had[0]]
        num_served = 0
        for rank in ranks:
            position = rank % new.pipeline_size
            if position not in need:
                continue
            needs_state = is_active and position == need[0]
            sources = with_state if needs_state else with_weights
            if rank not in sources:
                moves.append(Move(bundle, sources[num_served % len(sources)], rank, needs_state))
                num_served += 1
    return moves


Collect = Callable[[Sequence[Move]], list[dict[str, Any]]]
"""What this rank sends for each of some moves: a tree of tensors and JSON values."""
TakeIn = Callable[[Sequence[Bundle], list[dict[str, Any]]], None]
"""Called after each round: the bundles that have been moved, and what came of them."""


def exchange(
    moves: Sequence[Move], collect: Collect, take_in: TakeIn, topology: Topology, device: torch.device
) -> int:
    """Carry out `moves`, in rounds of whole bundles. A collective call of all ranks.

    Tensors travel from where they are to where they are needed, on the device's own backend; what describes them, and
    small tensors on the CPU, over the control group. A rank makes one copy at most of what it sends, however many it
    sends it to.

    Args:
        moves: from `plan_moves`.
        collect: called once, with one move of each content that this rank sends.
        take_in: what came lies on `device`, or on the CPU if it did so at its source.
        topology: the ranks.
        device: where this rank computes.

    Returns:
        The bytes that all ranks sent.
    """
    if not moves:
        return 0
    own = {move.content: move for move in moves if move.source == topology.rank}
    leaving = {content: _split(tree) for content, tree in zip(own, collect(list(own.values())), strict=True)}
    sizes = _sizes(moves, leaving, topology)
    messages = _send_descriptions(moves, [size for size, _ in sizes], leaving, topology)
    by_bundle: dict[Bundle, list[tuple[Move, int]]] = {}
    for move, (_, size) in zip(moves, sizes, strict=True):
        by_bundle.setdefault(move.bundle, []).append((move, size))
    bundles = list(by_bundle)
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
        # Nothing here may keep the memory of what the caller lets go.
        parcels.clear()
        for content_key in [key for key in leaving if key[0] in done]:
            del leaving[content_key]
        take_in(done, [_joined(tree, large) for tree, large in arrived])
    return sum(small + large for small, large in sizes)


def _sizes(moves: Sequence[Move], leaving: Mapping[Content, _Split], topology: Topology) -> list[tuple[int, int]]:
    """Bytes of each move, on every rank: of its description, and of its tensors."""
    own = [leaving[m.content] if m.source == topology.rank else None for m in moves]
    sizes = torch.tensor([[s.message.numel(), _num_bytes(s.large)] if s is not None else [0, 0] for s in own])
    guarded(lambda: dist.all_reduce(sizes, group=topology.control), "agreeing on what moves between the ranks")
    return [(small, large) for small, large in sizes.tolist()]


def _send_descriptions(
    moves: Sequence[Move], sizes: Sequence[int], leaving: Mapping[Content, _Split], topology: Topology
) -> dict[Move, torch.Tensor]:
    """The descriptions of what comes to this rank."""
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
    what = f"units {move.bundle} from rank {move.source} to rank {move.destination}"
    return [Parcel(tensor, peer, is_leaving, what) for tensor in tensors]


LARGE_BYTES = 2**16
"""Tensors from this size on travel by themselves, out of and into their own memory; smaller ones share a message."""

_LARGE = "large tensor"
_PACKED = "packed tensor"
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Split:
    """A tree without its large tensors, packed, and these in order; on a device the last one holds the small ones."""

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
        if node.numel() * node.element_size() >= LARGE_BYTES:
            large.append(node.detach().contiguous())
            return {_LARGE: len(large) - 1}
        if _travels_in_description(node):
            return node
        start, piece = num_packed, node.detach().contiguous().reshape(-1).view(torch.uint8)
        num_packed += -(-piece.numel() // _ALIGNMENT) * _ALIGNMENT
        packed.append(torch.nn.functional.pad(piece, (0, num_packed - start - piece.numel())))
        return {_PACKED: [start, _dtype_name(node), list(node.shape)]}

    without = visit(tree)
    if packed:
        large.append(torch.cat(packed))
    shapes = [[_dtype_name(tensor), list(tensor.shape), tensor.is_cpu] for tensor in large]
    return _Split(pack({"tree": without, "large": shapes}), large)


def _travels_in_description(tensor: torch.Tensor) -> bool:
    """Small tensors do if they are on the CPU: a description never makes a device wait."""
    return tensor.is_cpu


def _joined(tree: Any, large: Sequence[torch.Tensor]) -> Any:
    """The inverse of `_split`; small tensors get memory of their own."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if not isinstance(tree, dict):
        return tree
    if _LARGE in tree:
        return large[tree[_LARGE]]
    if _PACKED in tree:
        start, dtype_name, shape = tree[_PACKED]
        dtype = getattr(torch, dtype_name)
        piece = large[-1][start : start + torch.Size(shape).numel() * dtype.itemsize]
        return piece.clone().view(dtype).view(shape)
    return {key: _joined(value, large) for key, value in tree.items()}


def _empty(shapes: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    return [
        torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if is_cpu else device)
        for dtype, shape, is_cpu in shapes
    ]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class OptimizerState:
    """The optimizer of this rank, whose parameters come and go; groups are kept by the names of their members.

    Args:
        optimizer: this rank's optimizer, not wrapped.
        named: the model's parameters by name, in its order, those of other ranks too.
        topology: the ranks; together they know the group of every parameter. A collective call.
        may_move: whether parameters may come from other ranks.
        group_of: name to group of parameters that the optimizer does not hold now.

    Raises:
        ValueError: parameters may move, and the ranks have different groups: which group a parameter of another rank
            belongs to is then unknown.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.nn.Parameter],
        topology: Topology,
        may_move: bool,
        group_of: Mapping[str, int],
    ) -> None:
        self.optimizer = optimizer
        name_of = {id(parameter): name for name, parameter in named.items()}
        self.group_of = dict(group_of)
        # A user's optimizer may train parameters that are not the model's (a loss's, say): they stay.
        self._foreign: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) in name_of:
                    self.group_of[name_of[id(parameter)]] = index
                else:
                    self._foreign[index].append(parameter)
        if may_move:
            options = [{key: str(group[key]) for key in group if key != "params"} for group in optimizer.param_groups]
            self._learn_groups(topology.gather({"options": options, "group_of": self.group_of}), named)

    def _learn_groups(self, answers: Sequence[Any], order: Iterable[str]) -> None:
        for rank, answer in enumerate(answers):
            if answer["options"] != answers[0]["options"]:
                raise ValueError(
                    f"The optimizer has {len(answer['options'])} parameter groups on rank {rank} and "
                    f"{len(answers[0]['options'])} on rank 0, or groups with other options: expected the same groups "
                    "on every stage, empty ones too, so that a layer can move to another stage. Build them so in "
                    "create_optimizer, or set elastic=False."
                )
            self.group_of.update(answer["group_of"])
        if any(list(answer["group_of"]) != list(answers[0]["group_of"]) for answer in answers):
            # Each made its own part: an optimizer for the whole model has them in the model's order.
            place = {name: index for index, name in enumerate(order)}
            self.group_of = dict(sorted(self.group_of.items(), key=lambda item: place[item[0]]))

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """The state of one parameter: tensors and plain numbers."""
        state: dict[str, Any] = dict(self.optimizer.state.get(parameter, {}))
        return state

    def let_go(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Free parameters that this rank no longer trains, and their state, before others come; `hold` follows."""
        gone = set(parameters)
        for parameter in gone:
            self.optimizer.state.pop(parameter, None)
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in gone]

    def hold(self, named: Mapping[str, torch.nn.Parameter], received: Mapping[str, dict[str, Any]]) -> None:
        """Train exactly the parameters `named`; state of others is dropped, `received` state is taken in."""
        groups = [list(foreign) for foreign in self._foreign]
        for name, index in self.group_of.items():  # In the order of an optimizer that one stage made.
            if name in named:
                groups[index].append(named[name])
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        kept = {id(parameter) for parameters in groups for parameter in parameters}
        for dropped in [p for p in self.optimizer.state if id(p) not in kept]:
            del self.optimizer.state[dropped]
        for name, state in received.items():
            if state:
                group = self.optimizer.param_groups[self.group_of[name]]
                beside = bool(group.get("fused") or group.get("capturable"))
                self.optimizer.state[named[name]] = {
                    key: _to(value, named[name], beside) for key, value in state.items()
                }


def keep_parameters(
    optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], kept: Mapping[str, torch.nn.Parameter]
) -> dict[str, int]:
    """Leave a rank what it trains of an optimizer that was built for the whole model.

    Groups stay with their options, empty ones too, and so does a scheduler that knows them.

    Args:
        optimizer: changed in place.
        name_of: id of each parameter of the model to the parameter's name.
        kept: what this rank trains, by name.

    Returns:
        Name of each parameter that was in the optimizer to its group.

    Raises:
        ValueError: the optimizer trains parameters that are not the model's.
    """
    group_of: dict[str, int] = {}
    num_foreign = sum(id(p) not in name_of for group in optimizer.param_groups for p in group["params"])
    if num_foreign:
        raise ValueError(
            f"The optimizer trains {num_foreign} parameters that are not the model's, which no stage would own. Make "
            "them parameters of the model, or set pipeline_parallel_size=1."
        )
    for index, group in enumerate(optimizer.param_groups):
        names = [name_of[id(parameter)] for parameter in group["params"]]
        group_of.update(dict.fromkeys(names, index))
        group["params"] = [kept[name] for name in names if name in kept]
    ids = {id(parameter) for parameter in kept.values()}
    for dropped in [parameter for parameter in optimizer.state if id(parameter) not in ids]:
        del optimizer.state[dropped]
    return group_of


def _to(value: Any, parameter: torch.nn.Parameter, are_scalars_beside: bool) -> Any:
    """Received state where torch's optimizers keep it: beside the parameter, but for scalars (step counts).

    Those stay on the CPU, unless a fused or capturable optimizer counts on the device.
    """
    is_tensor = isinstance(value, torch.Tensor)
    return value.to(parameter.device) if is_tensor and (value.dim() or are_scalars_beside) else value


def digests(named: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, int]:
    """By name a sum over the bits of its tensors, as 64-bit words: unequal sums prove unequal bits.

    Sums are taken where the tensors are, and each device is read once.
    """
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensors in named.items():
        for tensor in tensors:
            sums.setdefault(tensor.device, []).append((name, _sum_of_words(tensor.detach())))
    found = dict.fromkeys(named, 0)
    for entries in sums.values():
        values = torch.stack([value for _, value in entries]).tolist()
        for (name, _), value in zip(entries, values, strict=True):
            found[name] = (found[name] + value) % _MODULUS
    return found


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    """A sum modulo 2**64, as an int64 scalar on the tensor's device."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()  # A view of words must begin at a word.
    num_whole = flat.numel() // _WORD_BYTES * _WORD_BYTES
    return flat[:num_whole].view(torch.int64).sum() + flat[num_whole:].sum(dtype=torch.int64)


_WORD_BYTES = 8
_MODULUS = 2**62


def check_replicas(digests: Mapping[str, int], place: Any) -> None:
    """Compare what should be bit-identical on the replicas of a stage. A collective call of theirs.

    Args:
        digests: name to digest.
        place: this rank's `PipelineGroups`.

    Raises:
        PipelineError: names the first tensor that differs.
    """
    if place.replica_control is None:
        return
    names = sorted(digests)
    lowest = torch.tensor([digests[name] for name in names], dtype=torch.int64)
    highest = lowest.clone()
    what = f"comparing weights over {place.replicas}"
    guarded(lambda: dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=place.replica_control), what)
    guarded(lambda: dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=place.replica_control), what)
    differing = [name for name, low, high in zip(names, lowest.tolist(), highest.tolist(), strict=True) if low != high]
    if differing:
        raise PipelineError(
            f"{differing[0]} (one of {len(differing)}) differs between {place.replicas}, which must hold the same "
            "bits. A callback or hook changed weights on one rank only, or a device computes wrongly."
        )
