"""Which ranks share a machine, from the names of their machines, and which pipelines stand on them."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from hf_pipetransformer.comm import topology
from hf_pipetransformer.comm.topology import PipelineGroups, ReplicaPeers, Topology
from hf_pipetransformer.schedules.placement import broadcast_route, pipeline_sizes, ranks_in_a_row, why_no_spanning


@pytest.mark.parametrize(
    ("hosts", "local_sizes", "length"),
    [
        ("aaaa", None, 4),
        ("aabb", None, 2),
        ("aaaabb", None, 2),
        ("aaabb", None, 1),
        # One rank a node in turn, as mpirun --map-by node deals them.
        ("abab", None, 1),
        ("aabbaa", None, 2),
        # What the launcher says counts where it says less: two launch groups on one machine.
        ("aaaa", 2, 2),
        # It may not say more: a number exported to all nodes alike.
        ("aabb", 4, 2),
        ("a", 1, 1),
    ],
)
def test_a_pipeline_fits_into_the_ranks_of_one_machine_in_a_row(hosts: str, local_sizes: int | None, length: int):
    assert ranks_in_a_row(list(hosts), [local_sizes] * len(hosts)) == length
    for first in range(0, len(hosts), length):
        assert len(set(hosts[first : first + length])) == 1


class OfTwoNodes(Topology):
    """Four ranks whose hosts are as planted."""

    hosts = "aabb"

    def gather(self, value):
        self.world_size = len(self.hosts)
        return [[host, None] for host in self.hosts]


@pytest.mark.parametrize(
    ("hosts", "allowed", "refused", "text"),
    [
        (
            "aabb",
            [1, 2, 4],
            3,
            "does not divide the 2 processes of a node .* take whole ones .* Choose one of .1, 2, 4.",
        ),
        ("abab", [1], 2, "not in a row"),
        (
            "aaaabb",
            [1, 2],
            6,
            "A pipeline spans equal nodes only, found nodes of 4, 2 processes. Choose one of .1, 2.",
        ),
        ("aaabbb", [1, 3, 6], 2, "does not divide the 3 processes of a node"),
    ],
)
def test_a_pipeline_takes_a_whole_part_of_a_node_or_whole_nodes(
    monkeypatch: pytest.MonkeyPatch, hosts: str, allowed: list[int], refused: int, text: str
):
    monkeypatch.setattr(OfTwoNodes, "hosts", hosts)
    monkeypatch.setattr(topology, "host_name", lambda: "a")
    found = OfTwoNodes(timeout=1, local_world_size=None)
    assert found.num_ranks_here == hosts.count("a") and found.spans_nodes and found.is_first_here
    assert found.ranks_here == [rank for rank, host in enumerate(hosts) if host == "a"]
    assert [hosts[node.start : node.stop] for node in found.nodes] == ["".join(run) for _, run in groupby(hosts)]
    with pytest.raises(ValueError, match=text):
        found.check_pipeline_size(refused)
    assert found.pipeline_sizes == allowed
    for size in allowed:
        found.check_pipeline_size(size)
    assert [found.machine_of(rank) for rank in range(len(hosts))] == [hosts.index(host) for host in hosts]


def test_launch_groups_on_one_machine_are_nodes_for_a_pipeline() -> None:
    assert why_no_spanning("aaaa", [2] * 4) is why_no_spanning("aabb", [4] * 4) is None
    assert why_no_spanning("aaaabb", [2] * 6) is None
    assert "found nodes of 4, 2 processes" in str(why_no_spanning("aaaabb", [4] * 4 + [2] * 2))


@pytest.mark.parametrize(("most", "node_size"), [(4, 2), (8, 4), (8, 2), (4, 1), (4, 8), (6, 3), (1, 1)])
def test_what_the_first_rank_reads_travels_once_to_each_node(most: int, node_size: int) -> None:
    for size in pipeline_sizes(most, node_size):
        way = {position: broadcast_route(position, size, node_size) for position in range(size)}
        assert way[0][0] is None
        messages = [(position, peer) for position, (_, peers) in way.items() for peer in peers]
        # Everybody gets it once, from the rank that it waits for.
        assert sorted(peer for _, peer in messages) == list(range(1, size))
        assert all(way[peer][0] == position for position, peer in messages)
        across = [(a, b) for a, b in messages if a // node_size != b // node_size]
        assert len(across) == max(1, size // node_size) - 1
        # Nobody waits for longer than two messages.
        assert all(source in (None, 0) for source, peers in way.values() if peers)


def test_replicas_of_a_position_know_which_of_them_share_a_machine() -> None:
    none = dict.fromkeys(("replica_group", "pipeline_group", "pipeline_control", "replica_control"))
    groups = PipelineGroups(2, 4, position=0, replica=3, pipeline_ranks=(6, 7), replica_ranks=(0, 2, 4, 6), **none)
    peers = ReplicaPeers(groups, [4, 5, 6, 7])
    assert (peers.rank, peers.world_size, peers.ranks_here, peers.is_distributed) == (3, 4, [2, 3], True)
    assert not peers.is_first_here


def test_one_process_for_several_stages_is_told_how_to_start_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfTwoNodes, "hosts", "a")
    monkeypatch.setattr(topology, "host_name", lambda: "a")
    with pytest.raises(
        ValueError, match=r"one was started.*--num_processes 3 script\.py.*--nproc_per_node 3 "
    ) as found:
        OfTwoNodes(timeout=1, local_world_size=None).check_pipeline_size(3)
    assert "--use_cpu" not in str(found.value) and "Choose one of" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "place"), [("set_timeout", topology.dist), ("_set_pg_timeout", topology.dist.distributed_c10d)]
)
def test_groups_get_the_timeout_by_the_public_function_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, name: str, place: Any
):
    monkeypatch.delattr(topology.dist, "set_timeout", raising=False)
    one, told = Topology(60, None), []
    monkeypatch.setattr(place, name, lambda *given: told.append(given), raising=False)
    one._maker.made = ["group"]
    one.limit_waits(5)
    assert told == [(timedelta(seconds=5), "group")]
    one.limit_waits(60)


ENDS = """
import atexit, sys
import torch.distributed as dist
from hf_pipetransformer.comm.topology import get_topology

atexit.register(lambda: print("left" if not dist.is_initialized() else "still there"))
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
get_topology(60)
get_topology(30)
if sys.argv[2] == "fails":
    raise KeyError("planted")
"""


@pytest.mark.parametrize(("how", "said"), [("ends", "left"), ("fails", "still there")])
def test_a_script_that_does_not_leave_the_process_group_leaves_it_at_its_exit(
    how: str, said: str, tmp_path: Path
) -> None:
    """Not after an error, where peers may be gone for which leaving would wait."""
    command = [sys.executable, "-c", ENDS, str(tmp_path / "store"), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split("\n")[0] == said and ended.returncode == (how == "fails"), ended.stderr
