"""Which rank stands where in which pipeline, and the process groups between them."""

from __future__ import annotations

import atexit
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, groupby
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from hf_pipetransformer.comm.errors import PipelineError, guarded, set_present_limit
from hf_pipetransformer.comm.transfers import complete, pack, receiving, sending, unpack
from hf_pipetransformer.schedules.placement import Placement


T = TypeVar("T")

_MEASURED_BYTES = 2**22
_MEASUREMENTS = 4
_GROUP_THREADS_SECONDS = 0.2


@dataclass(frozen=True)
class PipelineGroups:
    """This rank's place and process groups for one pipeline length.

    Args:
        pipeline_size: K.
        num_replicas: R.
        position: this rank's position in the pipeline, 0 to K - 1.
        replica: this rank's replica.
        pipeline_ranks: global ranks of this pipeline, by position.
        replica_ranks: global ranks of this position, by replica.
        replica_group: ranks of this position, on the training backend; None if R is 1.
        pipeline_group: ranks of this pipeline, on the training backend; None if K is 1.
        pipeline_control: ranks of this pipeline, gloo; None if K is 1.
        replica_control: ranks of this position, gloo; None if R is 1.
        links: `(stage, direction)` to the group of the ranks that hold `stage` and `stage + 1`, direction "forward" or
            "backward"; none for two stages of one rank.
        last_position: of the rank that holds the last stage.
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

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage, and so reads the data."""
        return self.position == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, and so has the loss."""
        return self.position == self.last_position

    @property
    def replicas(self) -> str:
        """Who holds the same stages as this rank in words, for error texts."""
        ranks = ", ".join(f"rank {rank}" for rank in self.replica_ranks)
        return f"the replicas of position {self.position} in the pipeline ({ranks})"

    @property
    def last_rank(self) -> int:
        """Global rank of this pipeline's last stage."""
        return self.pipeline_ranks[self.last_position]


class Topology:
    """The ranks of a run. Groups are made once, in the same order on every rank, and kept to the end.

    Each rank makes only the groups that it is in: groups that all ranks make together take minutes in large worlds.

    Pipeline `r` of length K is the ranks `r * K` to `r * K + K - 1`: neighbours in rank, so a K that divides the
    devices of a node never spans nodes.

    Args:
        timeout: seconds that any rank may wait for another, whatever it does.
        local_world_size: ranks on this node as the launcher said; None if it did not.
    """

    def __init__(self, timeout: float, local_world_size: int | None) -> None:
        self.timeout = timeout
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.world_size = dist.get_world_size() if self.is_distributed else 1
        self.control: Any = None
        if self.is_distributed:
            self.control = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
            # Transfers between any two ranks go over the world's communicator, which only all ranks together make.
            self._warm_up(None, "all ranks")
        self._places: dict[int, PipelineGroups] = {}
        self._groups: dict[Placement, PipelineGroups] = {}
        self._shared_groups: dict[tuple[int, tuple[int, ...]], tuple[Any, Any]] = {}
        self.limit_waits(timeout)
        hosts = self.gather([host_name(), local_world_size])
        names = [host for host, _ in hosts]
        self.local_world_size = ranks_in_a_row(names, [size for _, size in hosts])
        self.nodes = nodes_of(names)
        """The ranks by node: neighbours on one machine."""
        self.ranks_here = [rank for rank, name in enumerate(names) if name == names[self.rank]]
        """Those on this machine."""
        self._are_scattered = len(self.nodes) > len(set(names))
        self.num_ranks_here = local_world_size or len(self.ranks_here)

    @property
    def is_first_here(self) -> bool:
        """Whether this rank does what one on each machine must do."""
        return self.rank == self.ranks_here[0]

    @property
    def spans_nodes(self) -> bool:
        """Whether there are ranks on other machines."""
        return len(self.ranks_here) < self.world_size

    def limit_waits(self, seconds: float) -> None:
        """From now on no wait of this rank for another may take longer, Trainer's own in the world group included.

        On GPUs the groups' watchdog holds this limit for what is posted from now on, on CPU tensors the waits do.
        """
        set_present_limit(seconds)
        for group in self._all_groups():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def _all_groups(self) -> list[Any]:
        """The world's and those made here that this rank is in, each once."""
        found = [dist.group.WORLD, self.control] if self.is_distributed else []
        for groups in self._groups.values():
            found += [*groups.links.values(), groups.replica_group, groups.pipeline_group]
            found += [groups.pipeline_control, groups.replica_control]
        for pair in self._shared_groups.values():
            found += pair
        return list({id(group): group for group in found if group is not None}.values())

    def check_pipeline_size(self, pipeline_size: int) -> None:
        """Refuse a pipeline length that leaves ranks idle or spans nodes.

        Raises:
            ValueError: K does not divide the devices of a node.
        """
        if pipeline_size < 1 or self.local_world_size % pipeline_size or self.world_size % pipeline_size:
            valid = [k for k in range(1, self.local_world_size + 1) if self.local_world_size % k == 0]
            scattered = ""
            if self._are_scattered:
                scattered = (
                    "The ranks of a node are not in a row: let the launcher fill one node after the other (mpirun "
                    "--map-by slot, srun --distribution=block). "
                )
            raise ValueError(
                f"pipeline_parallel_size={pipeline_size} does not divide the {self.local_world_size} processes of "
                f"this node (world size {self.world_size}); a pipeline never spans nodes and no rank stays idle. "
                f"{scattered}Choose one of {valid}, or start another number of processes: "
                "`accelerate launch --multi_gpu --num_processes N script.py` "
                "(on CPU add `--use_cpu true` after the script's name)."
            )

    def groups(self, placement: Placement) -> PipelineGroups:
        """The groups for pipelines of K ranks with V stages each, made on first use; a collective call then."""
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
        """Groups of the ranks at some positions: over all replicas, and in this rank's pipeline.

        A collective call of all ranks on first use; None for a group that this rank is not in.
        """
        key = (pipeline_size, positions)
        if key not in self._shared_groups:
            pipelines = range(0, self.world_size, pipeline_size)
            members = [[first + position for position in positions] for first in pipelines]
            over_replicas = self._own_group([sorted(rank for part in members for rank in part)])
            own = self._own_group(members)
            for group in (over_replicas, own):
                if group is not None:
                    self._warm_up(group, "the ranks that share a parameter")
            self._shared_groups[key] = (over_replicas, own)
        return self._shared_groups[key]

    def gather(self, value: Any) -> list[Any]:
        """Everybody's `value` (a tree of tensors and JSON values), by rank."""
        return all_gather_trees(value, self.control, self.world_size)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """`value` of rank `source` on every rank."""
        return broadcast_tree(value, source, self.control, self.rank)

    def decide(self, call: Callable[[], Any], where: dict[str, Any] | None = None) -> Any:
        """What a call gives on rank 0, on every rank: the others never make it.

        All that layouts hang on comes this way: a rank's own measurement counts once rank 0 has gathered it and
        decided. A collective call.

        Args:
            call: gives a tree of tensors and JSON values.
            where: this rank's place in the run, JSON values, which must be rank 0's too.

        Raises:
            ValueError: on every rank, what the call refused on rank 0.
            PipelineError: this rank is elsewhere than rank 0.
        """
        answer: dict[str, Any] = {"where": where or {}}
        refusal = None
        if self.rank == 0:
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
                    "with each other, so the run cannot go on."
                )
        if "refusal" in answer:
            raise refusal or ValueError(answer["refusal"])
        return answer["value"]

    def together(self, call: Callable[[], T]) -> T:
        """Make a call on every rank; what one rank refuses is refused on all, in the same words. A collective call.

        Raises:
            ValueError: the call raised one on some rank.
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
        """Replace a CPU tensor by its maximum over all ranks, in place."""
        if self.is_distributed:
            what = "comparing a value over all ranks"
            guarded(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control), what)

    def barrier(self, what: str = "waiting for all ranks at a barrier") -> None:
        """Wait for all ranks."""
        if self.is_distributed:
            guarded(lambda: dist.barrier(group=self.control), what)

    def measure(self, message_bytes: int) -> tuple[float, float]:
        """How fast the ranks talk: seconds of one message between neighbours, and of an all-reduce by byte over two.

        A collective call; every rank gets rank 0's answer. Zeros for a single rank.
        """
        if self.world_size == 1:
            return 0.0, 0.0
        device = self._device
        message = torch.zeros(max(1, message_bytes // 4), device=device)
        reduced = torch.zeros(_MEASURED_BYTES // 4, device=device)
        ring = 2 * (self.world_size - 1) / self.world_size
        hops, reductions = [], []
        for _ in range(_MEASUREMENTS):
            # First the reduction: it makes the communicator that the transfers use.
            call = partial(guarded, partial(dist.all_reduce, reduced), "measuring an all-reduce over all ranks")
            reductions.append(_seconds(device, call))
            if self.rank < 2:
                hops.append(_seconds(device, lambda: self._ping(message)) / 2)
        hop = min(hops) if hops else 0.0
        answer = self.broadcast([hop, min(reductions) / (_MEASURED_BYTES * ring)])
        return float(answer[0]), float(answer[1])

    def _ping(self, message: torch.Tensor) -> None:
        """There and back between ranks 0 and 1."""
        what = "measuring the way between ranks 0 and 1"
        for sender in (0, 1):
            transfer = sending if self.rank == sender else receiving
            complete([transfer(message, 1 - self.rank, None)], self.timeout, what)

    def _make_place(self, pipeline_size: int) -> PipelineGroups:
        """The groups for one K without its links."""
        self.check_pipeline_size(pipeline_size)
        replica, position = divmod(self.rank, pipeline_size)
        pipelines = [range(first, first + pipeline_size) for first in range(0, self.world_size, pipeline_size)]
        holders = [range(first, self.world_size, pipeline_size) for first in range(pipeline_size)]
        pipeline_group = pipeline_control = replica_group = replica_control = None
        if pipeline_size > 1:
            pipeline_group, pipeline_control = self._own_group(pipelines), self._own_group(pipelines, "gloo")
            self._warm_up(pipeline_group, f"the ranks of pipeline {replica}")
        if len(pipelines) > 1:
            replica_group, replica_control = self._own_group(holders), self._own_group(holders, "gloo")
            self._warm_up(replica_group, f"the replicas of position {position}")
        return PipelineGroups(
            pipeline_size=pipeline_size,
            num_replicas=len(pipelines),
            position=position,
            replica=replica,
            pipeline_ranks=tuple(pipelines[replica]),
            replica_ranks=tuple(holders[position]),
            replica_group=replica_group,
            pipeline_group=pipeline_group,
            pipeline_control=pipeline_control,
            replica_control=replica_control,
        )

    def _make_links(self, placement: Placement) -> dict[tuple[int, str], Any]:
        """This rank's links, made and rehearsed in one order on every rank.

        No rank has two links of one round, so none waits for a rank that waits.
        """
        links: dict[tuple[int, str], Any] = {}
        firsts = range(0, self.world_size, placement.pipeline_size)
        for boundaries in placement.rounds():
            pairs = [
                (lower, first + placement.rank_of(lower), first + placement.rank_of(lower + 1))
                for first in firsts
                for lower in boundaries
            ]
            own = next((pair for pair in pairs if self.rank in pair[1:]), None)
            for direction in ("forward", "backward"):
                group = self._own_group([sorted(pair[1:]) for pair in pairs])
                if own is not None:
                    lower, below, above = own
                    links[lower, direction] = group
                    source, destination = (below, above) if direction == "forward" else (above, below)
                    self._rehearse(group, source, destination)
        return links

    def _rehearse(self, group: Any, source: int, destination: int) -> None:
        """One transfer over a link, from end to end: connecting two ranks may block both hosts, and does it here."""
        what = f"rehearsing the link from rank {source} to rank {destination}"
        self._warm_up(group, f"ranks {source} and {destination}")
        token = torch.zeros(1, device=self._device)
        transfer = sending(token, destination, group) if self.rank == source else receiving(token, source, group)
        complete([transfer], self.timeout, what)
        _synchronize(self._device)

    def _warm_up(self, group: Any, members: str) -> None:
        """A first, tiny collective: it makes the communicator of a group, which may block the host."""
        token = torch.zeros(1, device=self._device)
        guarded(lambda: dist.all_reduce(token, group=group), f"connecting {members}")
        _synchronize(self._device)

    @property
    def _device(self) -> torch.device:
        """Where tensors of the training backend's groups live."""
        return torch.device("cuda", torch.cuda.current_device()) if self._uses_nccl() else torch.device("cpu")

    def _uses_nccl(self) -> bool:
        return self.is_distributed and "nccl" in dist.get_backend()

    def _own_group(self, parts: Sequence[Sequence[int]], backend: str | None = None) -> Any:
        """Make one group of each of some disjoint sets of ranks; a collective call of all ranks.

        Returns:
            The group of this rank, None if it is in no part.
        """
        if not parts or not self.is_distributed:
            return None
        timeout = timedelta(seconds=self.timeout)
        own = next((list(part) for part in parts if self.rank in part), None)
        self._level()
        world: Any = dist.group.WORLD
        if backend is None and self._uses_nccl() and world.bound_device_id is not None:
            # The launcher gave `device_id`: communicators are then split from the world's, which takes all ranks.
            return dist.split_group(split_ranks=[list(part) for part in parts], timeout=timeout)
        if own is None:
            return None
        return guarded(
            lambda: dist.new_group(own, timeout=timeout, backend=backend, use_local_synchronization=True),
            f"making the group of ranks {own}",
        )

    def _level(self) -> None:
        """Let every rank have made the same number of groups.

        Torch names a group that only its members make by them and by the number of groups that the caller has: ranks
        with unequal numbers would wait for each other under different names.
        """
        num_groups = len(dist.distributed_c10d._world.pg_names)
        most = torch.tensor(num_groups)
        self.largest(most)
        for _ in range(int(most) - num_groups):
            dist.new_group([self.rank], backend="gloo", use_local_synchronization=True)


def host_name() -> str:
    """The name of this machine, and what tells it from another of the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"


def ranks_in_a_row(hosts: Sequence[str], local_sizes: Sequence[int | None]) -> int:
    """The largest length of which every multiple begins and ends on one node: what a K must divide.

    Args:
        hosts: name of each rank's machine.
        local_sizes: ranks on each rank's node as the launcher said; None where it did not.
    """
    return math.gcd(*map(len, nodes_of(hosts)), *(size for size in local_sizes if size))


def nodes_of(hosts: Sequence[str]) -> list[range]:
    """The ranks, cut where a machine ends.

    Args:
        hosts: name of each rank's machine.
    """
    ends = list(accumulate(len(list(node)) for _, node in groupby(hosts)))
    return [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


_TOPOLOGIES: dict[tuple[Any, float, int | None], Topology] = {}


def get_topology(timeout: float, local_world_size: int | None) -> Topology:
    """The topology of this process: groups cost threads and sockets, so several trainers share them."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    key = (world, timeout, local_world_size)
    if key not in _TOPOLOGIES:
        if world is not None and not _TOPOLOGIES:
            atexit.register(let_group_threads_finish)
        _TOPOLOGIES[key] = Topology(timeout, local_world_size)
    return _TOPOLOGIES[key]


def let_group_threads_finish() -> None:
    """Wait, without the interpreter's lock, before the groups or the interpreter end.

    The thread of a gloo group drops the tensors of its last collective a moment after the caller was told that it is
    done, and needs the lock for that. If the interpreter ends in that moment, the process aborts after a good run; if
    the group is destroyed in that moment, the two wait for each other for ever.
    """
    time.sleep(_GROUP_THREADS_SECONDS)


def _seconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Seconds that a call takes until the device is done."""
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def broadcast_tree(value: Any, source: int, group: Any, rank: int) -> Any:
    """`value` of global rank `source` on every rank of a gloo `group`; the source gets its own object back."""
    if group is None:
        return value
    what = f"receiving a message from rank {source}"
    message = pack(value) if rank == source else None
    size = torch.tensor([0 if message is None else message.numel()])
    guarded(lambda: dist.broadcast(size, src=source, group=group), what)
    if message is None:
        message = torch.empty(int(size), dtype=torch.uint8)
    guarded(lambda: dist.broadcast(message, src=source, group=group), what)
    return value if rank == source else unpack(message)


def all_gather_trees(value: Any, group: Any, group_size: int) -> list[Any]:
    """Everybody's `value` over a gloo `group`, by rank in the group."""
    if group is None:
        return [value]
    message = pack(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group_size)]
    what = "gathering messages of all ranks"
    guarded(lambda: dist.all_gather(sizes, torch.tensor([message.numel()]), group=group), what)
    largest = max(int(size) for size in sizes)
    padded = torch.zeros(largest, dtype=torch.uint8)
    padded[: message.numel()] = message
    messages = [torch.empty(largest, dtype=torch.uint8) for _ in range(group_size)]
    guarded(lambda: dist.all_gather(messages, padded, group=group), what)
    return [unpack(m[: int(size)]) for m, size in zip(messages, sizes, strict=True)]


def check_agreement(topology: Topology, what: str, values: dict[str, Any]) -> None:
    """Compare `values` over all ranks before anything depends on them.

    Raises:
        ValueError: on every rank, names the rank that differs from rank 0, and both values.
    """
    answers = topology.gather(values)
    for rank, answer in enumerate(answers):
        for key in sorted({*answer, *answers[0]}):
            found, expected = answer.get(key), answers[0].get(key)
            if found != expected:
                raise ValueError(
                    f"The {what} differ between ranks: {key} is {found} on rank {rank} and {expected} on rank 0. "
                    "Every process must run the same script with the same arguments and data."
                )
