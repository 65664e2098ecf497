"""Every transfer is batched, and a rank makes only the groups that it is in."""

from __future__ import annotations

import ast
import re
import resource
from collections.abc import Iterator
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import BatchEncoding

from hf_pipetransformer.comm import transfers
from hf_pipetransformer.comm.errors import PeerLostError
from hf_pipetransformer.comm.groups import GroupMaker, why_not_reached
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.comm.transfers import Parcel, carry
from hf_pipetransformer.schedules.placement import Placement
from tests.project.test_imports import MODULES
from tests.support.schedule_checker import check_first_uses


UNBATCHED = {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"}
BATCHES = {"P2POp", "batch_isend_irecv"}


def unlawful_transfers(tree: ast.Module, may_batch: bool) -> list[str]:
    """Calls of `torch.distributed` that move a tensor between two ranks other than in a batch of `transfers.py`."""
    in_a_batch = {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("P2POp") and node.args
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found += [alias.name for alias in node.names if alias.name in UNBATCHED | BATCHES]
        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) not in ("dist", "torch.distributed"):
            continue
        if node.attr in UNBATCHED and not (may_batch and id(node) in in_a_batch):
            found.append(node.attr)
        if node.attr in BATCHES and not may_batch:
            found.append(node.attr)
    return found


@pytest.mark.parametrize(("name", "tree"), [pytest.param(*module, id=module[0] or "package") for module in MODULES])
def test_every_transfer_is_batched(name: str, tree: ast.Module) -> None:
    assert unlawful_transfers(tree, may_batch=name == "comm.transfers") == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("dist.isend(t, 1)", ["isend"]),
        ("dist.P2POp(dist.isend, t, 1)\ndist.recv(t, 0)", ["recv"]),
        ("call = dist.send if rank else dist.recv", ["send", "recv"]),
        ("import torch\ntorch.distributed.irecv(t, 0)", ["irecv"]),
        ("from torch.distributed import isend", ["isend"]),
        ("dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 1)])", []),
    ],
)
def test_planted_transfers_are_found(source: str, expected: list[str]) -> None:
    assert unlawful_transfers(ast.parse(source), may_batch=True) == expected


def test_only_one_room_makes_batches() -> None:
    source = ast.parse("dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 1)])")
    assert set(unlawful_transfers(source, may_batch=False)) == {"batch_isend_irecv", "P2POp", "isend"}


def test_what_gloo_cannot_send_goes_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on one GPU; a tensor is sent to this very process, and stands for one of a device."""
    posted: list[dist.P2POp] = []

    class Done:
        def wait(self, limit: timedelta) -> bool:
            posted[1].tensor.copy_(posted[0].tensor)
            return limit == timedelta(seconds=3)

    def batch(transfers: list[dist.P2POp]) -> list[Done]:
        posted.extend(transfers)
        return [Done() for _ in transfers]

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        monkeypatch.setattr(dist, "batch_isend_irecv", batch)
        monkeypatch.setattr(transfers, "_goes_through_host", lambda transfer: True)
        leaving, coming = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
        works = transfers.post([transfers.sending(leaving, 1, None), transfers.receiving(coming, 1, None)])
        leaving.zero_()  # A copy is on its way.
        assert all(work.wait(timedelta(seconds=3)) for work in works)
    finally:
        dist.destroy_process_group()
    assert torch.equal(coming, torch.arange(6.0).view(2, 3))
    assert {id(op.tensor) for op in posted}.isdisjoint({id(leaving), id(coming)})


class Made(list[list[int]]):
    """Ranks of the groups that were made, and the sockets that the control groups among them take."""

    num_sockets = 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """The ranks of each group that this process makes, in a world that is not there."""
    groups = Made()
    real = dist.new_group

    def new_group(ranks=None, backend=None, **options):
        groups.append(sorted(ranks) if ranks is not None else list(range(dist.get_world_size())))
        groups.num_sockets += (len(groups[-1]) - 1) * (backend == "gloo")
        return real(ranks, backend="fake", **options)

    monkeypatch.setattr(dist, "new_group", new_group)
    yield groups
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 3, 7, 128, 255])
def test_at_256_ranks_an_elastic_run_makes_few_groups_and_only_its_own(made: Made, rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=256)
    topology = Topology(timeout=5, local_world_size=8)
    for pipeline_size in (8, 4, 2, 1):
        topology.groups(Placement(pipeline_size))
    assert len(made) <= 18
    assert all(rank in ranks for ranks in made)
    assert made.count(list(range(256))) == 2  # Control, and the device's group of the replicas at K=1.
    # Control groups have a socket per other member.
    assert made.num_sockets <= 255 + (31 + 63 + 127) + (7 + 3 + 1)


def test_the_limit_of_open_files_is_raised_as_far_as_it_may(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [64, 5000]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, new: limits.__setitem__(slice(2), new))
    for world_size, expected in ((8, 4096 + 64), (256, 5000), (2, 5000)):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        Topology(timeout=5, local_world_size=world_size)
        dist.destroy_process_group()
        assert limits == [expected, 5000]


@pytest.mark.parametrize("placement", [Placement(4, 2), Placement(4, 3), Placement(4, 2, "v")], ids=str)
@pytest.mark.parametrize("rank", [0, 3, 128])
def test_several_stages_a_rank_need_groups_only_with_new_neighbours(
    made: Made, placement: Placement, rank: int
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=256)
    topology = Topology(timeout=5, local_world_size=8)
    before = topology.groups(Placement(4)).links
    num_before, first = len(made), rank - rank % 4
    links = topology.groups(placement).links
    ends = {s: {placement.rank_of(s), placement.rank_of(s + 1)} for s in range(placement.num_stages - 1)}
    assert {s for s, _ in links} == {s for s, ranks in ends.items() if len(ranks) == 2 and rank % 4 in ranks}
    assert set(map(id, before.values())) <= set(map(id, links.values()))
    # From the last rank to the first, which a rank in the middle has no part in; one group a way.
    has_more = placement.kind == "loop" and rank % 4 in (0, 3)
    assert [ranks for ranks in made[num_before:] if ranks != [rank]] == [[first, first + 3]] * (2 * has_more)
    of_ways: dict[tuple[int, int], set[int]] = {}
    for (lower, direction), group in links.items():
        below, above = first + placement.rank_of(lower), first + placement.rank_of(lower + 1)
        assert dist.get_process_group_ranks(group) == sorted((below, above))
        of_ways.setdefault((below, above) if direction == "forward" else (above, below), set()).add(id(group))
    assert {len(groups) for groups in of_ways.values()} == {1}
    assert len(set().union(*of_ways.values())) == len(of_ways)


@pytest.mark.parametrize(
    ("placements", "most"),
    [
        ([Placement(4)], 4),
        ([Placement(4, 2)], 4),
        # The first and the last of four are neighbours only where each has several stages.
        ([Placement(4, 4), Placement(2, 4), Placement(1)], 4),
        ([Placement(4, 4), Placement(4, 2), Placement(4), Placement(4, 2, "v"), Placement(2, 4), Placement(1)], 4),
    ],
    ids=["1f1b", "interleaved", "elastic", "every-layout"],
)
def test_the_number_of_communicators_does_not_grow_with_stages_or_layouts(
    made: Made, placements: list[Placement], most: int
) -> None:
    """Four neighbours at most, two of them in each direction; the other groups are those of pipelines and replicas."""
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        topology = Topology(timeout=5, local_world_size=4)
        links = {id(group) for placement in placements for group in topology.groups(placement).links.values()}
        assert 0 < len(links) <= most
        sizes = {placement.pipeline_size for placement in placements}
        # Device and control groups of the pipelines and of the replicas; those of one rank a pipeline share control.
        others = sum(4 if size > 1 else 1 for size in sizes) + 1
        assert len([ranks for ranks in made if ranks != [rank]]) == len(links) + others
        made.clear()
        dist.destroy_process_group()


@pytest.mark.parametrize(("num_chunks", "kind"), [(1, "loop"), (2, "loop"), (3, "loop"), (2, "v")])
@pytest.mark.parametrize("size", range(2, 9))
def test_links_are_rehearsed_in_an_order_that_cannot_deadlock(
    made: Made, size: int, num_chunks: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way between two ranks once, also where a layout before has made some of them."""
    placement, rehearsed = Placement(size, num_chunks, kind), []
    monkeypatch.setattr(GroupMaker, "rehearse", lambda _maker, _group, *way: rehearsed.append(way))
    for before in ([], [Placement(size)], [Placement(size // 2, 2)] if size % 2 == 0 else []):
        rows, ways = [], set()
        for first, each in product(range(2 * size), (*before, placement)):
            for lower in filter(each.is_crossed, range(each.num_stages) if first % each.pipeline_size == 0 else ()):
                ends = first + each.rank_of(lower), first + each.rank_of(lower + 1)
                ways |= {ends, ends[::-1]}
        for rank in range(2 * size):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2 * size)
            topology = Topology(timeout=5, local_world_size=size)
            for each in (*before, placement):
                topology.groups(each)
            assert sorted(rehearsed) == sorted(way for way in ways if rank in way)
            rows.append(rehearsed.copy())
            rehearsed.clear()
            dist.destroy_process_group()
        check_first_uses(rows)


@pytest.mark.filterwarnings("ignore:Set timeout")  # Of the fake groups.
def test_with_a_bound_device_all_ranks_split_the_world_alike(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators of a world that was given `device_id` are split from its own, which takes every rank of it."""
    monkeypatch.setattr(GroupMaker, "_uses_nccl", lambda self: True)
    monkeypatch.setattr(GroupMaker, "device", torch.device("cpu"))
    monkeypatch.setattr(Topology, "barrier", lambda self: None)
    split: list[list[list[int]]] = []

    def split_group(split_ranks, timeout):
        split.append(split_ranks)
        own = next((ranks for ranks in split_ranks if dist.get_rank() in ranks), None)
        return None if own is None else dist.new_group(own, use_local_synchronization=True)

    monkeypatch.setattr(dist, "split_group", split_group)
    of_ranks = []
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        Topology(timeout=5, local_world_size=4).groups(Placement(4))
        of_ranks.append(split.copy())
        split.clear()
        dist.destroy_process_group()
    assert all(parts == of_ranks[0] for parts in of_ranks)
    links = [[0, 1], [2, 3], [4, 5], [6, 7]], [[1, 2], [5, 6]]
    pipelines, holders = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert of_ranks[0] == [pipelines, holders, links[0], links[0], links[1], links[1]]


def test_torch_gives_memory_back_before_a_pair_first_exchanges_device_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting a pair allocates past torch's allocator."""
    calls: list[str] = []
    monkeypatch.setattr(transfers, "_connected", set())
    monkeypatch.setattr(transfers, "post", lambda parcels: [calls.append(f"post {len(parcels)}")] * 0)
    monkeypatch.setattr(dist, "P2POp", lambda _op, tensor, _peer, _group: tensor)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("give back"))

    def moved(device: str, *ways: tuple[int, bool]) -> list[str]:
        calls.clear()
        carry([Parcel(torch.ones(1, device=device), *way, "weights") for way in ways], None, 1.0)
        return calls.copy()

    assert moved("cpu", (1, True)) == ["post 1"]
    assert moved("meta", (1, True), (2, False)) == ["give back", "post 2"]
    assert moved("meta", (1, True)) == moved("meta", (2, False)) == ["post 1"]
    assert moved("meta", (1, False)) == moved("meta", (3, True)) == ["give back", "post 1"]


def test_an_error_of_a_broadcast_says_what_this_rank_was_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "broadcast", fail)
    for rank, does in ((2, "sending the logits to other ranks"), (0, "receiving the logits from rank 2")):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with pytest.raises(PeerLostError, match=f"Lost contact while {does}: Connection closed"):
            transfers.broadcast(torch.zeros(1), 2, None, "the logits")


@pytest.mark.parametrize(
    ("address", "changes", "said"),
    [
        ("127.0.1.1", {}, r"The name of this host, node-a, resolves to 127.0.1.1.*Set GLOO_SOCKET_IFNAME"),
        ("::1", {}, "resolves to ::1"),
        ("", {}, "resolves to no address"),
        ("10.0.0.1", {}, None),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, None),
        ("127.0.1.1", {"WORLD_SIZE": "2"}, None),
        ("127.0.1.1", {"MASTER_ADDR": "127.0.0.1"}, None),
    ],
)
def test_a_host_whose_name_is_its_own_loopback_is_told_of(
    monkeypatch: pytest.MonkeyPatch, address: str, changes: dict[str, str], said: str | None
) -> None:
    def resolve(name: str, _port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        found = {"node-a": address}.get(name, name)
        if not found:
            raise OSError("Name or service not known")
        return [(2, 1, 6, "", (found, 0))]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    monkeypatch.setattr("socket.gethostname", lambda: "node-a")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"} | changes).items():
        monkeypatch.setenv(name, value)
    why = why_not_reached()
    assert why is None if said is None else re.search(said, str(why))


def test_a_value_of_a_column_is_packed_whatever_its_stride() -> None:
    column = torch.arange(12).view(2, 6)[1:, 3]
    assert column.stride() == (6,) and column.is_contiguous()
    assert transfers.unpack(transfers.pack(column)).tolist() == [9]


def test_the_batch_of_a_tokenizer_arrives_as_a_dict() -> None:
    """Collators of transformers give one, which is a mapping but no dict."""
    batch = BatchEncoding({"input_ids": torch.tensor([[1, 2]]), "labels": [0]})
    found = transfers.unpack(transfers.pack(batch))
    assert type(found) is dict and found["labels"] == [0]
    assert torch.equal(found["input_ids"], batch["input_ids"])
