"""Rank layout of pipelines and replicas, and the process groups between ranks."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from hf_pipetransformer.comm.errors import LAUNCH_HINT, PipelineError, guarded, set_present_limit
from hf_pipetransformer.comm.groups import GroupMaker, let_group_threads_finish, synchronize
from hf_pipetransformer.comm.transfers import all_gather_trees, broadcast_tree, complete, receiving, reduced, sending
from hf_pipetransformer.schedules.placement import (
    Placement,
    broadcast_route,
    nodes_of,
    pipeline_sizes,
    ranks_in_a_row,
    why_no_spanning,
)


T = TypeVar("T")

# Large enough that the bytes outweigh the start of an all-reduce, small enough to be over at once on slow links.
_MEASURED_BYTES = 2**22
_MEASUREMENTS = 4


@dataclass(frozen=True)
class PipelineGroups:
    """Position and process groups of this rank for one pipeline length K.

    Replica groups are None with one replica, pipeline groups are None with K = 1. `*_control` groups use gloo, the
    others the training backend. `links` maps `(stage, direction)`, direction "forward" or "backward", to the group of
    the two ranks that own `stage` and `stage + 1`; no entry if this rank owns both or neither. All links from one rank
    to another share a group. What the first rank of the pipeline reads comes from `batch_source` and is passed on to
    `batch_peers`, see `broadcast_route`.
    """

    pipeline_size: int
    num_replicas: int
    position: int
    replica: int
    pipeline_ranks: tuple[int, ...]
    replica_ranks: tuple[int, ...]
    replica_group: Any
    pipeline_group: Any
    pipeline_control: Any
    replica_control: Any
    links: Mapping[tuple[int, str], Any] = field(default_factory=dict)
    last_position: int = 0
    batch_source: int | None = None
    batch_peers: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """True if this rank owns the first stage, and so reads the data."""
        return self.position == 0

    @property
    def is_last(self) -> bool:
        """True if this rank owns the last stage, and so computes the loss."""
        return self.position == self.last_position

    @property
    def replicas(self) -> str:
        """Description of the ranks that own the same stages, for error messages."""
        ranks = ", ".join(f"rank {rank}" for rank in self.replica_ranks)
        return f"the replicas of position {self.position} in the pipeline ({ranks})"

    @property
    def last_rank(self) -> int:
        return self.pipeline_ranks[self.last_position]


class Peers:
    """Processes that do the same, by number: all of a run, or those at one position of their pipelines.

    Args:
        ranks_here: those on this node.
        control: their gloo group; None if there is one of them.
    """

    rank: int
    world_size: int
    is_distributed: bool
    ranks_here: list[int]
    control: Any

    @property
    def is_first_here(self) -> bool:
        """True on the one rank of each machine that does per-machine work."""
        return self.rank == self.ranks_here[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, a tree of tensors and JSON values. Collective: call on every rank."""
        return all_gather_trees(value, self.control, self.world_size)


class ReplicaPeers(Peers):
    """Ranks that hold the same stages as this one, numbered by their replicas."""

    def __init__(self, groups: PipelineGroups, ranks_of_node: list[int]) -> None:
        self.rank, self.world_size, self.control = groups.replica, groups.num_replicas, groups.replica_control
        self.is_distributed = self.world_size > 1
        self.ranks_here = [number for number, rank in enumerate(groups.replica_ranks) if rank in ranks_of_node]


class Topology(Peers):
    """Ranks of a run and their process groups, which are made once, in the same order on every rank, and kept.

    Pipeline `r` of length K is made of ranks `r * K` to `r * K + K - 1`. These are neighbors, so a K that divides the
    number of devices of a node stays inside a node, and whole nodes make up any other.

    Args:
        timeout: seconds that any rank may wait for another.
        local_world_size: ranks on this node according to the launcher; None if it gave no number.
    """

    def __init__(self, timeout: float, local_world_size: int | None) -> None:
        self.timeout = timeout
        self._maker = GroupMaker(timeout)
        self.is_distributed, self.rank = self._maker.is_distributed, self._maker.rank
        self.control = self._maker.control
        self.world_size = dist.get_world_size() if self.is_distributed else 1
        self._places: dict[int, PipelineGroups] = {}
        self._groups: dict[Placement, PipelineGroups] = {}
        self._shared_groups: dict[tuple[int, tuple[int, ...]], tuple[Any, Any]] = {}
        self._ways: dict[tuple[int, int], Any] = {}
        """Groups of two ranks for messages from the first to the second; None for those of other ranks."""
        # Before the gather below, which waits for all ranks.
        self.limit_waits(timeout)
        hosts = self.gather([host_name(), local_world_size])
        names = [host for host, _ in hosts]
        self._machines = [names.index(name) for name in names]
        told = [size for _, size in hosts]
        self.local_world_size = ranks_in_a_row(names, told)
        self.nodes = nodes_of(names)
        """Ranges of neighboring ranks on one machine."""
        self.ranks_here = [rank for rank, name in enumerate(names) if name == names[self.rank]]
        self.why_no_spanning = why_no_spanning(names, told)
        """Why no pipeline may span nodes, in a sentence; None if one may."""
        self.num_ranks_here = local_world_size or len(self.ranks_here)

    @property
    def spans_nodes(self) -> bool:
        return len(self.ranks_here) < self.world_size

    def machine_of(self, rank: int) -> int:
        """Return the lowest rank on the machine of `rank`, which stands for it."""
        return self._machines[rank]

    @property
    def pipeline_sizes(self) -> list[int]:
        """Every length of a pipeline that the nodes allow, in increasing order."""
        most = self.world_size if self.why_no_spanning is None else self.local_world_size
        return pipeline_sizes(most, self.local_world_size)

    def limit_waits(self, seconds: float) -> None:
        """Set the timeout of every wait for another rank, including Trainer's waits in the world group.

        On GPUs the groups' watchdog enforces it for operations posted from now on; on CPU tensors the waits do.
        """
        set_present_limit(seconds)
        # The public function is there from torch 2.14 on.
        set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for group in self._maker.made:
            set_timeout(timedelta(seconds=seconds), group)

    def abort(self) -> None:
        """End all waits for other ranks with an error; no group can be used afterwards."""
        self._maker.abort()

    def check_pipeline_size(self, pipeline_size: int) -> None:
        """Reject a pipeline length that leaves ranks idle or begins or ends inside a node.

        Raises:
            ValueError: K neither divides the number of ranks of a node nor is a whole number of equal nodes.
        """
        if pipeline_size in self.pipeline_sizes:
            return
        if pipeline_size > 1 and self.world_size == 1:
            raise ValueError(
                f"pipeline_parallel_size={pipeline_size} takes {pipeline_size} processes or a multiple, and one "
                f"was started. Start the script so: {LAUNCH_HINT.replace(' N ', f' {pipeline_size} ')}."
            )
        more = self.why_no_spanning or "Pipelines over several nodes take whole ones and leave no rank idle."
        raise ValueError(
            f"pipeline_parallel_size={pipeline_size} does not divide the {self.local_world_size} processes of a node "
            f"(world size {self.world_size}). {more} Choose one of {self.pipeline_sizes}, leave it out (the "
            f"shortest that fits is taken), or start another number of processes: {LAUNCH_HINT}."
        )

    def groups(self, placement: Placement) -> PipelineGroups:
        """Return the groups for a placement. Collective on first use: call on every rank."""
        if placement not in self._groups:
            size = placement.pipeline_size
            if size not in self._places:
                self._places[size] = self._make_place(size)
            last_position = placement.rank_of(placement.num_stages - 1)
            links = self._make_links(placement)
            self._groups[placement] = replace(self._places[size], links=links, last_position=last_position)
            self.barrier()
        return self._groups[placement]

    def shared_groups(self, pipeline_size: int, positions: tuple[int, ...]) -> tuple[Any, Any]:
        """Return the groups of the ranks at these positions, across all replicas and within this rank's pipeline.

        Collective on first use: call on every rank. An entry is None if this rank is not a member.
        """
        key = (pipeline_size, positions)
        if key not in self._shared_groups:
            pipelines = range(0, self.world_size, pipeline_size)
            members = [[first + position for position in positions] for first in pipelines]
            # Over all replicas first, on every rank: making a group is collective.
            over_replicas = self._maker.make([sorted(rank for part in members for rank in part)])
            # With one pipeline the members are the same, and a second group would cost a second communicator.
            here = self._maker.make(members) if len(members) > 1 else over_replicas
            self._shared_groups[key] = (over_replicas, here)
        return self._shared_groups[key]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of rank `source` on every rank. Collective: call on every rank."""
        return broadcast_tree(value, source, self.control, self.rank)

    def decide(self, call: Callable[[], Any], where: dict[str, Any] | None = None) -> Any:
        """Run `call` on rank 0 only and return its result on every rank. Collective: call on every rank.

        Every decision about layouts goes through here: local measurements differ, and ranks must not disagree.

        Args:
            where: this rank's progress in the run, as JSON values. Must equal rank 0's.

        Raises:
            ValueError: on every rank, if `call` raised one on rank 0.
            PipelineError: `where` differs from rank 0's.
        """
        answer: dict[str, Any] = {"where": where or {}}
        refusal = None
        if self.rank == 0:
            # A refusal is an answer for all ranks; any other error is a fault, which the fault board tells them.
            try:
                answer["value"] = call()
            except ValueError as error:
                refusal, answer["refusal"] = error, str(error)
        answer = self.broadcast(answer)
        for key, expected in answer["where"].items():
            found = (where or {}).get(key)
            if found != expected:
                raise PipelineError(
                    f"Rank {self.rank} is at {key} {found} while rank 0 is at {expected}: the ranks have lost step "
                    "with each other, so the run cannot go on. Look for a callback or a loop over a loader that runs "
                    "on one rank only, or another number of times there."
                )
        # Rank 0 raises the error that it caught, with its traceback.
        if "refusal" in answer:
            raise refusal or ValueError(answer["refusal"])
        return answer["value"]

    def together(self, call: Callable[[], T]) -> T:
        """Run `call` on every rank; if one fails, fail on all. Collective: call on every rank.

        Raises:
            ValueError: `call` raised one on some rank.
        """
        value, refusal = None, None
        try:
            value = call()
        except ValueError as error:
            refusal = str(error)
        for text in self.gather(refusal):
            if text is not None:
                raise ValueError(text)
        return cast(T, value)

    def largest(self, tensor: torch.Tensor) -> None:
        """Replace a CPU tensor in place by its maximum over all ranks. Collective: call on every rank."""
        reduced(tensor, self.control, "comparing a value over all ranks", dist.ReduceOp.MAX)

    def barrier(self, what: str = "waiting for all ranks at a barrier") -> None:
        if self.is_distributed:
            guarded(lambda: dist.barrier(group=self.control), what)

    def measure(self, message_bytes: int) -> dict[str, float]:
        """Measure messages of `message_bytes` and all-reduces. Collective: call on every rank; all get one result.

        Returns:
            Seconds by fields of `planning.costs.Overheads`: `hop` of a message between neighbors on a node,
            `reduction_per_byte` that a rank sends in a ring all-reduce, and `ring_step` of each of the 2 (W - 1) steps
            of the ring besides; where pipelines may span nodes, also `node_hop` and `node_hop_per_byte` of a message
            between two.
        """
        if self.world_size == 1:
            return {}
        hops, reductions = self.time_transfers(message_bytes, _MEASURED_BYTES)
        # What an all-reduce of four bytes takes are the steps of its ring; the rest of a large one are its bytes.
        least = min(self.time_transfers(4, 4)[1])
        per_byte = max(0.0, min(reductions) - least) / self.ring_bytes(_MEASURED_BYTES)
        ring_step = least / (2 * (self.world_size - 1))
        found = {"hop": min(hops), "reduction_per_byte": per_byte, "ring_step": ring_step}
        if self.why_no_spanning is not None or self.local_world_size == self.world_size:
            return found
        between = self.local_world_size - 1, self.local_world_size
        # The sizes of messages between nodes decide where a pipeline is cut, so their two parts are told apart.
        alone, whole = (min(self.time_transfers(size, 4, between)[0]) for size in (4, message_bytes))
        per_byte = max(0.0, whole - alone) / max(1, message_bytes)
        return {**found, "node_hop": alone, "node_hop_per_byte": per_byte}

    def ring_bytes(self, reduced_bytes: int) -> float:
        """Return the bytes that a rank sends in a ring all-reduce of a tensor: 2 (W - 1) / W of it over W ranks."""
        return reduced_bytes * 2 * (self.world_size - 1) / self.world_size

    def time_transfers(
        self, message_bytes: int, reduced_bytes: int, pair: tuple[int, int] = (0, 1)
    ) -> tuple[list[float], list[float]]:
        """Time a message between the ranks of a pair, and an all-reduce over all ranks, a few times, in seconds.

        Collective: call on every rank of two or more; all get the result of the pair's first rank.
        """
        device = self._maker.device
        # In float32, which every backend takes.
        message = torch.zeros(max(1, message_bytes // 4), device=device)
        reduced = torch.zeros(max(1, reduced_bytes // 4), device=device)
        hops, reductions = [], []
        for _ in range(_MEASUREMENTS):
            # The all-reduce comes first because it makes the communicator that the transfers use.
            call = partial(guarded, partial(dist.all_reduce, reduced), "measuring an all-reduce over all ranks")
            reductions.append(_seconds(device, call))
            if self.rank in pair:
                # There and back: one clock cannot time a single way.
                hops.append(_seconds(device, lambda: self._ping(message, pair)) / 2)
        hops, reductions = self.broadcast([hops, reductions], pair[0])
        return hops, reductions

    def _ping(self, message: torch.Tensor, pair: tuple[int, int]) -> None:
        what = f"measuring the way between ranks {pair[0]} and {pair[1]}"
        for sender in pair:
            transfer = sending if self.rank == sender else receiving
            complete([transfer(message, sum(pair) - self.rank, None)], self.timeout, what)

    def _make_place(self, pipeline_size: int) -> PipelineGroups:
        self.check_pipeline_size(pipeline_size)
        replica, position = divmod(self.rank, pipeline_size)
        source, peers = broadcast_route(position, pipeline_size, self.local_world_size)
        pipelines = [range(first, first + pipeline_size) for first in range(0, self.world_size, pipeline_size)]
        holders = [range(first, self.world_size, pipeline_size) for first in range(pipeline_size)]
        make = self._maker.make
        replica_control = None
        if len(pipelines) > 1:
            # A gloo group costs each rank a socket per member, so all ranks share one.
            replica_control = make(holders, "gloo") if pipeline_size > 1 else self.control
        # The arguments make groups in the order in which they stand here, which is that of every rank.
        return PipelineGroups(
            pipeline_size=pipeline_size,
            num_replicas=len(pipelines),
            position=position,
            replica=replica,
            pipeline_ranks=tuple(pipelines[replica]),
            replica_ranks=tuple(holders[position]),
            pipeline_group=make(pipelines) if pipeline_size > 1 else None,
            pipeline_control=make(pipelines, "gloo") if pipeline_size > 1 else None,
            replica_group=make(holders) if len(pipelines) > 1 else None,
            replica_control=replica_control,
            batch_source=None if source is None else pipelines[replica][source],
            batch_peers=tuple(pipelines[replica][peer] for peer in peers),
        )

    def _make_links(self, placement: Placement) -> dict[tuple[int, str], Any]:
        """Make the groups that no earlier placement has made, at most one of this rank's per round.

        So no rank waits for one that is itself waiting. Two ranks have one group for each way that messages travel,
        whatever boundaries they cross: a group per boundary would cost a communicator each. This needs tables whose
        messages between two ranks are sent and received in one order.
        """
        links: dict[tuple[int, str], Any] = {}
        firsts = range(0, self.world_size, placement.pipeline_size)
        for boundaries in placement.rounds():
            for direction in ("forward", "backward"):
                ways: dict[tuple[int, int], int] = {}
                for first, lower in product(firsts, boundaries):
                    below, above = first + placement.rank_of(lower), first + placement.rank_of(lower + 1)
                    ways[(below, above) if direction == "forward" else (above, below)] = lower
                new = [way for way in ways if way not in self._ways]
                group = self._maker.make([sorted(way) for way in new])
                self._ways |= {way: group if self.rank in way else None for way in new}
                own = next((way for way in ways if self.rank in way), None)
                if own is not None:
                    links[ways[own], direction] = self._ways[own]
                    if own in new:
                        self._maker.rehearse(group, *own)
        return links


def host_name() -> str:
    """Return this machine's name plus its boot id, which separates machines of the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"


_TOPOLOGIES: dict[tuple[Any, float, int | None], Topology] = {}


def get_topology(timeout: float) -> Topology:
    """Return this process's topology, shared between trainers because groups cost threads and sockets."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or None
    # Groups belong to one process group: after it was left and made again, they are made anew.
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    key = (world, timeout, local_world_size)
    if key not in _TOPOLOGIES:
        if world is not None and not _TOPOLOGIES:
            atexit.register(_leave_at_exit)
        _TOPOLOGIES[key] = Topology(timeout, local_world_size)
    return _TOPOLOGIES[key]


def _leave_at_exit() -> None:
    """Leave the process group of a script that has not called `trainer.end()`."""
    if not dist.is_initialized():
        return
    let_group_threads_finish()
    # Python sets it for an error that nobody caught: leaving may wait for peers that are gone.
    if getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def check_connected() -> None:
    """Refuse to go on once the process group of an earlier trainer was left: to join it again would wait for ever.

    Raises:
        ValueError: on every rank.
    """
    if any(world is not None for world, *_ in _TOPOLOGIES) and not dist.is_initialized():
        raise ValueError(
            "The processes have parted: an earlier trainer's end() has left the process group, and a new trainer "
            "needs it. Leave end() out, or call it on the last trainer of the script."
        )


def _seconds(device: torch.device, call: Callable[[], Any]) -> float:
    # Work queued before must not count.
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def check_agreement(topology: Topology, what: str, values: dict[str, Any]) -> None:
    """Compare `values` across all ranks. Collective: call on every rank.

    Raises:
        ValueError: on every rank; names the rank that differs from rank 0, and both values.
    """
    answers = topology.gather(values)
    for rank, answer in enumerate(answers):
        for key in sorted({*answer, *answers[0]}):
            found, expected = answer.get(key), answers[0].get(key)
            if found != expected:
                raise ValueError(
                    f"The {what} differ between ranks: {key} is {found} on rank {rank} and {expected} on rank 0. "
                    "Every process must run the same script with the same arguments and data, and make none of them "
                    "from the time, the host's name or the rank."
                )
