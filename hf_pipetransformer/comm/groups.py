"""Process groups of one rank: how they are made, connected and rehearsed."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hf_pipetransformer.comm.errors import guarded
from hf_pipetransformer.comm.transfers import close_connections, complete, receiving, reduced, sending


_OPEN_FILES = 4096
_OPEN_FILES_OF_A_RANK = 8
"""gloo opens a socket per other member and group: for all ranks together, then for the replicas of each K."""

_GROUP_THREADS_SECONDS = 0.2


class GroupMaker:
    """Process groups of this rank. Each rank makes only the groups it belongs to, and keeps them.

    With groups that all ranks make together, start-up takes minutes in large worlds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timedelta(seconds=timeout)
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.control: Any = None
        self.made: list[Any] = []
        if self.is_distributed:
            _allow_open_files(_OPEN_FILES + _OPEN_FILES_OF_A_RANK * dist.get_world_size())
            # With gloo on GPUs too: control messages are made on the host, and NCCL sends from devices only.
            self.control = dist.new_group(timeout=self.timeout, backend="gloo")
            # With the world's: Trainer itself waits in it, under the same limit and the same abort.
            self.made = [dist.group.WORLD, self.control]
            # Transfers in the world group need its communicator, which only all ranks together can make.
            self._connect(None, "all ranks")

    def make(self, parts: Sequence[Sequence[int]], backend: str | None = None) -> Any:
        """Make and connect one group per set of ranks; return this rank's, or None. Collective: call on every rank."""
        if not parts or not self.is_distributed:
            return None
        own = next((list(part) for part in parts if self.rank in part), None)
        if backend is None and own is not None and self._uses_nccl():
            # A communicator allocates past torch's allocator, which may hold all of the memory.
            torch.cuda.empty_cache()
        # Before any group is made here, also by non-members: the names of the new groups depend on the count.
        self._level()
        world: Any = dist.group.WORLD
        group = None
        if backend is None and self._uses_nccl() and world.bound_device_id is not None:
            # With a bound `device_id`, torch splits the communicator off the world's: non-members must take part too.
            group = dist.split_group(split_ranks=[list(part) for part in parts], timeout=self.timeout)
        elif own is not None:
            group = guarded(
                lambda: dist.new_group(own, timeout=self.timeout, backend=backend, use_local_synchronization=True),
                f"making the group of ranks {own}",
            )
        if group is not None:
            self.made.append(group)
            if backend is None:
                self._connect(group, f"ranks {own}")
        return group

    def rehearse(self, group: Any, source: int, destination: int) -> None:
        """Transfer one token over a link, because the first transfer may block both hosts."""
        what = f"rehearsing the link from rank {source} to rank {destination}"
        token = torch.zeros(1, device=self.device)
        transfer = sending(token, destination, group) if self.rank == source else receiving(token, source, group)
        complete([transfer], self.timeout.total_seconds(), what)
        # On a GPU `complete` only orders streams: here the link has to be there before the host goes on.
        synchronize(self.device)

    def abort(self) -> None:
        """End all waits in the groups, on the device or the host, with an error; later calls raise. Any thread may.

        One thread each, because an abort of NCCL frees memory, which waits for the kernels of the other communicators.
        """
        for group in self.made:
            # gloo's own abort does nothing, see `close_connections`.
            end = group.abort if "nccl" in dist.get_backend(group) else partial(close_connections, group)
            threading.Thread(target=end, daemon=True).start()

    @property
    def device(self) -> torch.device:
        """Device of the tensors that the training backend transfers."""
        return torch.device("cuda", torch.cuda.current_device()) if self._uses_nccl() else torch.device("cpu")

    def _uses_nccl(self) -> bool:
        return self.is_distributed and "nccl" in dist.get_backend()

    def _connect(self, group: Any, members: str) -> None:
        """Create the group's communicator with a tiny all-reduce, which may block the host."""
        token = torch.zeros(1, device=self.device)
        guarded(lambda: dist.all_reduce(token, group=group), f"connecting {members}")
        # NCCL connects while the device runs; the host waits until that is over.
        synchronize(self.device)

    def _level(self) -> None:
        """Bring every rank to the same number of process groups.

        With `use_local_synchronization`, torch derives a group's name from its members and the number of groups the
        caller already has. Ranks with different counts would wait for each other under different names.
        """
        num_groups = len(dist.distributed_c10d._world.pg_names)
        most = torch.tensor(num_groups)
        # Over gloo, because this group is there on every rank before any other is.
        reduced(most, self.control, "counting the groups of all ranks", dist.ReduceOp.MAX)
        for _ in range(int(most) - num_groups):
            # A group of this rank alone waits for nobody; it only counts.
            dist.new_group([self.rank], backend="gloo", use_local_synchronization=True)


def let_group_threads_finish() -> None:
    """Sleep briefly, with the GIL released, before groups or the interpreter are torn down.

    The thread of a gloo group drops the tensors of its last collective shortly after the caller has returned, and
    needs the GIL to do so. If the interpreter exits at that moment, the process aborts after a successful run; if the
    group is destroyed at that moment, the two deadlock.
    """
    time.sleep(_GROUP_THREADS_SECONDS)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def why_not_reached() -> str | None:
    """Return why other hosts of this launch may not reach this one over gloo; None if there is no such reason.

    gloo listens at the address that the host's own name resolves to, or at the loopback if it resolves to none.
    """
    # On one machine the loopback serves, and an interface named by the user is taken at its word.
    several = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) < int(os.environ.get("WORLD_SIZE") or 0)
    if not several or os.environ.get("GLOO_SOCKET_IFNAME") or _loopback_of(os.environ.get("MASTER_ADDR", "")):
        return None
    name = socket.gethostname()
    address = _loopback_of(name)
    if address is None:
        return None
    return (
        f"The name of this host, {name}, resolves to {address or 'no address'}, so gloo listens where no other host "
        "reaches it: expected an address of the network between the hosts. Set GLOO_SOCKET_IFNAME to the interface of "
        "that network (`ip -brief address` lists them), or correct /etc/hosts."
    )


def _loopback_of(name: str) -> str | None:
    """Return the address of a host if it is a loopback address, "" if it has none, else None."""
    try:
        address = str(socket.getaddrinfo(name or None, 0)[0][4][0])
    except OSError:
        return ""
    return address if ipaddress.ip_address(address.partition("%")[0]).is_loopback else None


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit of open files to `count`, or as far as it may; it is 1024 on most systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Beyond the hard limit only root may go.
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


OVER_SOCKETS = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
SAID_OF_SOCKETS = "NCCL over sockets, {} for {} processes: order and numbers, not speed and not NVLink"


def share_gpus(num_gpus: int) -> bool:
    """Let the processes of this machine share its GPUs over NCCL if there are too few; return True if they do.

    NCCL refuses two ranks on one GPU, but only if both name one host. With a name of its own for each, all communicate
    over sockets. Call before NCCL makes its first communicator.
    """
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 0 < num_gpus < num_here:
        return False
    os.environ.update(OVER_SOCKETS)
    os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    if num_here == int(os.environ["WORLD_SIZE"]):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return True
