"""Moving weights, buffers and optimizer state between ranks when the layout changes (PipeTransformer section 3.3).

What moves together is a bundle: the parameters and buffers that the same units use. That is one bundle a unit, and one
for each set of tied weights. A bundle travels as one flat message, point to point, from a rank that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.errors import PipelineError, guarded, wait_for
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.messages import pack, unpack
from hf_pipetransformer.transfers import post, receiving, sending


Bundle = tuple[int, ...]
"""The units that use it, in increasing order."""


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


def stages_of_bundle(bundle: Bundle, layout: Layout) -> tuple[int, ...]:
    """The stages that use a bundle, first user first."""
    return tuple(dict.fromkeys(layout.stage_of(unit) for unit in bundle))


def plan_moves(bundles: Sequence[Bundle], old: Layout, new: Layout) -> list[Move]:
    """Who sends what to whom, the same list on every rank. Pure.

    A bundle has its optimizer state at its first user, if it is active. A rank that has what it needs gets nothing;
    the others are served in turn by the ranks that have it.
    """
    world_size = old.num_stages * old.num_replicas
    moves: list[Move] = []
    for bundle in bundles:
        old_stages, new_stages = stages_of_bundle(bundle, old), stages_of_bundle(bundle, new)
        is_active = bundle[0] >= new.first_active_unit
        with_weights = [rank for rank in range(world_size) if rank % old.num_stages in old_stages]
        with_state = [rank for rank in with_weights if rank % old.num_stages == old_stages[0]]
        num_served = 0
        for rank in range(world_size):
            stage = rank % new.num_stages
            if stage not in new_stages:
                continue
            needs_state = is_active and stage == new_stages[0]
            sources = with_state if needs_state else with_weights
            if rank not in sources:
                moves.append(Move(bundle, sources[num_served % len(sources)], rank, needs_state))
                num_served += 1
    return moves


def exchange(
    moves: Sequence[Move], collect: Callable[[Move], dict[str, Any]], topology: Topology
) -> tuple[list[tuple[Move, dict[str, Any]]], int]:
    """Carry out `moves`. A collective call of all ranks.

    Args:
        moves: from `plan_moves`.
        collect: what this rank sends for a move: a tree of tensors and JSON values.
        topology: the ranks; the messages use its control group.

    Returns:
        What this rank received, on the CPU, and the bytes that all ranks sent.
    """
    if not moves:
        return [], 0
    own = [move for move in moves if move.source == topology.rank]
    leaving = {move: _split(collect(move)) for move in own}
    messages = {move: pack({"tree": tree, "large": _shapes(large)}) for move, (tree, large) in leaving.items()}
    sizes = torch.tensor(
        [[messages[m].numel(), _num_bytes(leaving[m][1])] if m in messages else [0, 0] for m in moves]
    )
    guarded(lambda: dist.all_reduce(sizes, group=topology.control), "agreeing on what moves between the ranks")
    small = [
        torch.empty(size, dtype=torch.uint8) if move.destination == topology.rank else messages.get(move)
        for move, size in zip(moves, sizes[:, 0].tolist(), strict=True)
    ]
    _transfer([(move, message) for move, message in zip(moves, small, strict=True) if message is not None], topology)
    arrived, transfers = [], []
    for move, message in zip(moves, small, strict=True):
        if move in leaving:
            transfers += [(move, tensor) for tensor in leaving[move][1]]
        elif message is not None:
            content = unpack(message)
            large = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in content["large"]]
            transfers += [(move, tensor) for tensor in large]
            arrived.append((move, content["tree"], large))
    _transfer(transfers, topology)
    return [(move, _joined(tree, large)) for move, tree, large in arrived], int(sizes.sum())


LARGE_BYTES = 2**16
"""Tensors from this size on travel by themselves, out of and into their own memory; smaller ones share a message."""

_LARGE = "large tensor"


def _split(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """A tree without its large tensors, and these in order."""
    large: list[torch.Tensor] = []

    def visit(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: visit(value) for key, value in node.items()}
        if isinstance(node, torch.Tensor) and node.numel() * node.element_size() >= LARGE_BYTES:
            large.append(node.detach().cpu().contiguous())
            return {_LARGE: len(large) - 1}
        return node

    return visit(tree), large


def _joined(tree: Any, large: Sequence[torch.Tensor]) -> Any:
    """The inverse of `_split`; small tensors get memory of their own."""
    if isinstance(tree, dict):
        return large[tree[_LARGE]] if _LARGE in tree else {key: _joined(value, large) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def _shapes(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    return [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _transfer(messages: Sequence[tuple[Move, torch.Tensor]], topology: Topology) -> None:
    """Send and receive all messages of this rank at once; those of one pair of ranks match by their order."""
    group = topology.control
    transfers = [
        sending(tensor, move.destination, group)
        if move.source == topology.rank
        else receiving(tensor, move.source, group)
        for move, tensor in messages
    ]
    for work, (move, _tensor) in zip(post(transfers), messages, strict=True):
        ranks = f"from rank {move.source} to rank {move.destination}"
        wait_for(work, topology.timeout, f"moving units {move.bundle} {ranks}")


class OptimizerState:
    """The optimizer of this rank, whose parameters come and go; groups are kept by the names of their members.

    Args:
        optimizer: this rank's optimizer, not wrapped.
        named: this rank's parameters by name.
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
            self._learn_groups(topology.gather({"options": options, "group_of": self.group_of}))

    def _learn_groups(self, answers: Sequence[Any]) -> None:
        for rank, answer in enumerate(answers):
            if answer["options"] != answers[0]["options"]:
                raise ValueError(
                    f"The optimizer has {len(answer['options'])} parameter groups on rank {rank} and "
                    f"{len(answers[0]['options'])} on rank 0, or groups with other options: expected the same groups "
                    "on every stage, empty ones too, so that a layer can move to another stage. Build them so in "
                    "create_optimizer, or set elastic=False."
                )
            self.group_of.update(answer["group_of"])

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """The state of one parameter: tensors and plain numbers."""
        state: dict[str, Any] = dict(self.optimizer.state.get(parameter, {}))
        return state

    def hold(self, named: Mapping[str, torch.nn.Parameter], received: Mapping[str, dict[str, Any]]) -> None:
        """Train exactly the parameters `named`; state of others is dropped, `received` state is taken in."""
        groups = [list(foreign) for foreign in self._foreign]
        for name, parameter in named.items():
            if name in self.group_of:
                groups[self.group_of[name]].append(parameter)
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


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """A sum over the bits of tensors, as 64-bit words: unequal sums prove unequal bits."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if flat.storage_offset() % _WORD_BYTES:
            flat = flat.clone()  # A view of words must begin at a word.
        num_whole = flat.numel() // _WORD_BYTES * _WORD_BYTES
        total += int(flat[:num_whole].view(torch.int64).sum()) + int(flat[num_whole:].sum(dtype=torch.int64))
    return total % _MODULUS


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
