"""Gathering of a model that is spread over the ranks of a pipeline: to save or return it, or for user code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.comm.transfers import Parcel, broadcast_tree, carry, in_rounds
from hf_pipetransformer.runtime.ownership import is_whole


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.runtime.stage import Stage


HOST = torch.device("cpu")


def collect_parameters(
    stage: Stage,
    device: torch.device = HOST,
    positions: Sequence[int] | None = None,
    only: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Fetch onto `device` the parameters that this rank does not hold, each from its first user.

    Collective: call on every rank of the pipeline. Each rank must hold exactly the parameters of its own stages, if
    the model is spread at all. Only the ranks at these `positions` get any, None for all, and those named in `only`.

    Transfers go through the device of the held parameters, at most `ROUND_BYTES` at a time, so a model too large for
    it can be gathered on the CPU.
    """
    if not stage.is_spread:
        return {}
    named, owners = stage.store.named(), stage.owners
    wanting = range(stage.groups.pipeline_size) if positions is None else positions
    # Meta tensors stand for parameters of other stages, and their device says nothing.
    run_device = next(p.device for p in named.values() if not p.is_meta)
    names = [name for name in named if only is None or name in only]
    found: dict[str, torch.Tensor] = {}
    # All ranks cut the same names into rounds, by sizes that meta tensors have too, so that their transfers match.
    for indices in in_rounds([named[name].nbytes for name in names]):
        part = [names[index] for index in indices]
        targets = {name: [position for position in wanting if position not in owners[name]] for name in part}
        arriving = _exchanged(stage, named, owners, targets, run_device)
        # Off the device before the next round: only one round at a time must fit there.
        found.update({name: tensor.to(device) for name, tensor in arriving.items()})
    return found


def share_buffers(stage: Stage) -> None:
    """Copy each buffer from its first user to all ranks. Collective: call on every rank of the pipeline."""
    named = dict(stage.view.model.named_buffers())
    targets = dict.fromkeys(named, range(stage.groups.pipeline_size))
    for name, value in _exchanged(stage, named, stage.buffer_owners, targets).items():
        named[name].data.copy_(value)


def _exchanged(
    stage: Stage,
    named: Mapping[str, torch.Tensor],
    owners: Mapping[str, Sequence[int]],
    targets: Mapping[str, Sequence[int]],
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Send tensors from their first owners to the `targets`, positions by name; returns those that arrive here.

    They arrive on `device`, or where this rank has its own. Collective: call on every rank of the pipeline.
    """
    place, parcels, arriving = stage.groups, list[Parcel](), dict[str, torch.Tensor]()
    for name, positions in targets.items():
        source, tensor, rank_of = owners[name][0], named[name].detach(), place.pipeline_ranks
        if source == place.position:
            leaving = tensor.contiguous()
            ranks = [rank_of[position] for position in positions if position != source]
            parcels += [Parcel(leaving, rank, True, f"{name} to rank {rank}") for rank in ranks]
        elif place.position in positions:
            arriving[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device or tensor.device)
            parcels.append(Parcel(arriving[name], rank_of[source], False, f"{name} from rank {rank_of[source]}"))
    carry(parcels, place.pipeline_control, stage.settings.timeout)
    return arriving


def end_training(stage: Stage) -> None:
    """Stop reducing gradients, and unfreeze what the run froze, so that the model goes back as its user gave it."""
    if stage.reducer is not None:
        stage.reducer.remove()
        stage.reducer = None
    stage.shared = []
    stage.store.freeze(frozenset())


def make_whole(stage: Stage) -> None:
    """Hold the whole model on every rank again; on the CPU, if it was spread. Collective: call on every rank."""
    if stage.is_spread:
        stage.store.fill(collect_parameters(stage))
        share_buffers(stage)
        # The rank's own layers follow those that were fetched: the device may be too small for all of them.
        stage.store.move(set(stage.store.held()), HOST)
    stage.store.is_divided = False


@dataclass(frozen=True)
class Room:
    """Memory of one node, or one device: bytes that its ranks would take, and bytes that are free."""

    needed: int
    free: int

    def __str__(self) -> str:
        return f"{self.needed / 2**20:,.1f} MiB needed, {self.free / 2**20:,.1f} MiB free"


def least_room(needed: int, topology: Topology, device: torch.device = HOST) -> Room:
    """Return the room on the node, or device, that is the fullest if each rank takes `needed` bytes of its memory.

    Collective: call on every rank; all get the same answer.
    """
    # The ranks of a node share its memory, so it is known by its first rank; a GPU counts for its own rank alone.
    free, place = psutil.virtual_memory().available, topology.ranks_here[0]
    if device.type == "cuda":
        free, place = torch.cuda.mem_get_info(device)[0], topology.rank
    nodes: dict[int, Room] = {}
    for size, left, node in topology.gather([needed, free, place]):
        before = nodes.get(node, Room(0, left))
        # Ranks measure at slightly different times: the smallest value is the safe one.
        nodes[node] = Room(before.needed + size, min(before.free, left))
    return max(nodes.values(), key=lambda room: room.needed / max(room.free, 1))


def num_bytes_of(named: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of some tensors; meta tensors count as if they were held."""
    return sum(tensor.nbytes for tensor in named.values())


@contextmanager
def whole_on_first_rank(stage: Stage, only: Collection[str] | None = None) -> Iterator[None]:
    """Hold the whole model on rank 0 inside, to save it. Collective: call on every rank of replica 0.

    Other replicas do nothing. With `only`, rank 0 fetches only these parameters from other stages.
    """
    if stage.groups.pipeline_size == 1 or stage.groups.replica != 0:
        yield
        return
    # Noted before the fill, so that only what was fetched is released.
    held = set(stage.store.held())
    stage.store.fill(collect_parameters(stage, HOST, (0,), only))
    share_buffers(stage)
    try:
        yield
    finally:
        stage.store.release(keep=held)


@contextmanager
def fetching(stage: Stage) -> Iterator[Callable[[Sequence[str]], dict[str, torch.Tensor]]]:
    """Let rank 0 fetch parameters by name inside, onto the CPU; the others send them until it is done.

    Collective: call on every rank of replica 0. Yields the function for rank 0. Other ranks send when they leave, so
    they must not wait for rank 0 inside.
    """
    place, rank = stage.groups, stage.settings.topology.rank

    def announced(names: list[str]) -> list[str]:
        told: list[str] = broadcast_tree(names, place.pipeline_ranks[0], place.pipeline_control, rank)
        return told

    def fetch(names: Sequence[str]) -> dict[str, torch.Tensor]:
        named = stage.store.named()
        missing = [name for name in names if named[name].is_meta]
        # Asked only if something is missing: an empty list would end the loop of the other ranks.
        found = collect_parameters(stage, HOST, (0,), announced(missing)) if missing else {}
        return found | {name: named[name].detach().cpu() for name in names if name not in found}

    # No `finally`: after an error the other ranks hear of the fault, and need no end of the loop.
    yield fetch
    # An empty list ends the loop in which the other ranks wait for names.
    if place.is_first:
        announced([])
        return
    while names := announced([]):
        collect_parameters(stage, HOST, (0,), names)


@contextmanager
def whole_on_every_rank(stage: Stage, device: torch.device = HOST) -> Iterator[None]:
    """Hold the whole model on `device` on every rank inside, with its original forward, for user code.

    Collective: call on every rank. Changes to parameters that this rank holds only inside are lost.

    Raises:
        ValueError: on every rank, before anything is sent, if it does not fit on a node or a device.
    """
    if stage.groups.pipeline_size == 1:
        yield
        return
    store, held = stage.store, set(stage.store.held())
    coming = {name: p for name, p in store.named().items() if name not in held or p.device.type != device.type}
    room = least_room(num_bytes_of(coming), stage.settings.topology, device)
    if room.needed > room.free:
        raise ValueError(
            f"The whole model does not fit into the free memory of every {'node' if device == HOST else 'device'} "
            f"({room}). Read it from what save_model writes, or leave out what asks for it: whole_model(), and the "
            "argument `model` of callbacks."
        )
    # Fetched while the stage is still installed: a transfer that fails leaves it able to run.
    fetched = collect_parameters(stage, device)
    share_buffers(stage)
    was_installed = stage.view.is_installed
    stage.view.remove()
    try:
        with store.lent_to(device, held):
            store.fill(fetched)
            # This name would keep the tensors alive when the store releases them.
            del fetched
            try:
                yield
            finally:
                store.release(keep=held)
    finally:
        if was_installed:
            stage.install()


def check_state_dicts(model: nn.Module) -> None:
    """Have `model.state_dict()` refuse to return tensors without values, those of other stages."""
    # Once only: a second training of the same model finds the hook in place.
    if _check_values not in model._state_dict_hooks.values():
        model.register_state_dict_post_hook(_check_values)


def _check_values(model: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    # With `keep_vars`, as this library reads it, the entries are the parameters themselves.
    buffers = {id(buffer) for buffer in model.buffers()}
    missing = [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.is_meta
        and not isinstance(value, nn.Parameter)
        and id(value) not in buffers
    ]
    if missing:
        raise ValueError(
            f"state_dict() of a model on several stages has no values for {len(missing)} of {len(state)} tensors, "
            f"{missing[0]!r} for one, which other stages hold. Call it inside `with trainer.whole_model():`, on every "
            "rank between two steps, or save with trainer.save_model()."
        )


def check_whole(model: nn.Module) -> None:
    """Raise PipelineError if a training has left the model spread over stages."""
    if not is_whole(model):
        raise PipelineError(
            "The model is not whole: each process holds the layers of its own stages only. After a training that "
            "ended well, write it with the trainer's save_model, read it within trainer.whole_model(), or set "
            "pipeline_gather_at_end='always'. After one that ended in an error, load the model again."
        )
