"""Which ranks share a machine, from the names of their machines: no pipeline may span two of them."""

from __future__ import annotations

from itertools import groupby

import pytest

from hf_pipetransformer.comm import topology
from hf_pipetransformer.comm.topology import Topology, ranks_in_a_row


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


@pytest.mark.parametrize(("hosts", "refused", "text"), [("aabb", 4, "never spans nodes"), ("abab", 2, "not in a row")])
def test_without_a_word_of_the_launcher_a_pipeline_over_two_nodes_is_refused(
    monkeypatch: pytest.MonkeyPatch, hosts: str, refused: int, text: str
):
    monkeypatch.setattr(OfTwoNodes, "hosts", hosts)
    monkeypatch.setattr(topology, "host_name", lambda: "a")
    found = OfTwoNodes(timeout=1, local_world_size=None)
    assert found.num_ranks_here == 2 and found.spans_nodes and found.is_first_here
    assert found.ranks_here == [rank for rank, host in enumerate(hosts) if host == "a"]
    assert [hosts[node.start : node.stop] for node in found.nodes] == ["".join(run) for _, run in groupby(hosts)]
    with pytest.raises(ValueError, match=text):
        found.check_pipeline_size(refused)
    found.check_pipeline_size(found.local_world_size)


def test_one_process_for_several_stages_is_told_how_to_start_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfTwoNodes, "hosts", "a")
    monkeypatch.setattr(topology, "host_name", lambda: "a")
    with pytest.raises(
        ValueError, match=r"one was started.*--num_processes 3 script\.py.*--nproc_per_node 3 "
    ) as found:
        OfTwoNodes(timeout=1, local_world_size=None).check_pipeline_size(3)
    assert "--use_cpu" not in str(found.value) and "Choose one of" not in str(found.value)
