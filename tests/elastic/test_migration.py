"""Who sends what to whom when the layout changes, for any two layouts; and what tells that replicas differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_pipetransformer.comm import transfers as rounds
from hf_pipetransformer.comm.transfers import in_rounds
from hf_pipetransformer.elastic import migration
from hf_pipetransformer.elastic.migration import Move, exchange, plan_moves
from hf_pipetransformer.runtime.optimizer_state import OptimizerState, check_replicas, digests
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import PLACEMENTS
from tests.support.one_process import together
from tests.support.wires import Wires


Bundle = tuple[int, ...]
ALONE = SimpleNamespace(gather=lambda value: [value])


@st.composite
def transitions(draw: st.DrawFn) -> tuple[list[Bundle], Layout, Layout]:
    """Bundles of a model and two layouts of it on the same ranks; F may only grow."""
    num_layers = draw(st.integers(1, 6))
    num_blocks = 2 * num_layers + 2
    world_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    frozen = sorted(draw(st.lists(st.integers(0, num_layers), min_size=2, max_size=2)))

    def layout(num_frozen: int) -> Layout:
        size = draw(st.sampled_from([k for k in range(1, world_size + 1) if world_size % k == 0]))
        size = size if size <= num_blocks else 1
        num_chunks = draw(st.integers(1, min(3, num_blocks // size))) if size > 1 else 1
        placement = draw(st.sampled_from(PLACEMENTS))
        num_stages = size * num_chunks
        cuts = draw(st.sets(st.integers(1, num_blocks - 1), min_size=num_stages - 1, max_size=num_stages - 1))
        boundaries = (0, *sorted(cuts), num_blocks)
        return Layout(
            num_layers,
            num_frozen,
            num_stages,
            world_size // size,
            boundaries,
            1,
            "1f1b",
            num_chunks=num_chunks,
            placement=placement,
        )

    tied = draw(st.lists(st.sets(st.integers(0, num_blocks - 1), min_size=2, max_size=3), max_size=2))
    bundles = {(block,) for block in range(num_blocks)} | {tuple(sorted(blocks)) for blocks in tied}
    return sorted(bundles), layout(frozen[0]), layout(frozen[1])


def blocks(rank: int, layout: Layout) -> set[int]:
    return {block for part in layout.blocks_of_rank(rank % layout.pipeline_size) for block in part}


def has_weights(rank: int, bundle: Bundle, layout: Layout) -> bool:
    return not blocks(rank, layout).isdisjoint(bundle)


def has_state(rank: int, bundle: Bundle, layout: Layout) -> bool:
    """Of an active bundle the rank with its first block keeps the state."""
    return bundle[0] in blocks(rank, layout) and bundle[0] >= layout.first_active_block


@settings(max_examples=300)
@given(transitions())
def test_every_rank_ends_with_what_its_stages_need_and_gets_nothing_else(
    transition: tuple[list[Bundle], Layout, Layout],
) -> None:
    bundles, old, new = transition
    moves = plan_moves(bundles, old, new)
    arrived = {(move.destination, move.bundle): move for move in moves}
    assert len(arrived) == len(moves), "nothing comes twice"
    for rank in range(old.pipeline_size * old.num_replicas):
        for bundle in bundles:
            move = arrived.get((rank, bundle))
            has = has_weights(rank, bundle, old)
            needs_state = has_state(rank, bundle, new)
            lacks_state = needs_state and not has_state(rank, bundle, old)
            needs = has_weights(rank, bundle, new) and (not has or lacks_state)
            assert (move is not None) == needs, (rank, bundle)
            assert move is None or move.with_state == needs_state


@settings(max_examples=300)
@given(transitions(), st.sampled_from([1, 2, 3, 4]))
def test_what_a_rank_of_the_node_has_comes_from_there(
    transition: tuple[list[Bundle], Layout, Layout], node_size: int
) -> None:
    bundles, old, new = transition

    def node_of(rank: int) -> int:
        return rank // node_size

    moves = plan_moves(bundles, old, new, node_of)
    # The same moves, from other sources.
    anywhere = {(move.destination, move.content) for move in plan_moves(bundles, old, new)}
    assert {(move.destination, move.content) for move in moves} == anywhere
    served: Counter[tuple[Bundle, int, bool, int]] = Counter()
    for move in moves:
        having = [
            rank
            for rank in range(old.pipeline_size * old.num_replicas)
            if has_weights(rank, move.bundle, old)
            and (not move.with_state or old.ranks_of(move.bundle)[0] == rank % old.pipeline_size)
        ]
        assert move.source in having and move.source != move.destination
        near = [rank for rank in having if node_of(rank) == node_of(move.destination)]
        assert not near or move.source in near
        served[move.bundle, node_of(move.destination) if near else -1, move.with_state, move.source] += 1
    for (bundle, node, with_state, _), count in served.items():
        # In turn: none of those that serve a node does more than its share.
        same = [own for (b, n, w, _), own in served.items() if (b, n, w) == (bundle, node, with_state)]
        assert node < 0 or count <= min(same) + 1


@given(transitions())
def test_nothing_moves_where_nothing_changes(transition: tuple[list[Bundle], Layout, Layout]) -> None:
    bundles, old, _ = transition
    assert plan_moves(bundles, old, old) == []


@settings(max_examples=200)
@given(transitions())
def test_those_that_have_a_bundle_share_the_sending(transition: tuple[list[Bundle], Layout, Layout]) -> None:
    bundles, old, new = transition
    moved = [(bundle, plan_moves([bundle], old, new)) for bundle in bundles]
    alike = [(bundle, moves) for bundle, moves in moved if len({move.with_state for move in moves}) == 1]
    assume(alike)
    for bundle, moves in alike:
        sent = [move.source for move in moves]
        able = has_state if moves[0].with_state else has_weights
        num_sources = sum(able(rank, bundle, old) for rank in range(old.pipeline_size * old.num_replicas))
        assert max(map(sent.count, sent)) <= -(-len(moves) // num_sources)


def test_a_tied_bundle_has_its_state_at_its_first_user() -> None:
    old = Layout(2, 0, 2, 1, (0, 3, 6), 1, "1f1b")
    new = Layout(2, 0, 1, 2, (0, 6), 1, "1f1b")
    assert old.ranks_of((0, 5)) == (0, 1)
    # Rank 1 has the weights, for its head, but not the state.
    assert plan_moves([(0, 5)], old, new) == [Move((0, 5), 0, 1, True)]
    frozen = Layout(2, 1, 1, 2, (0, 6), 1, "1f1b")
    assert plan_moves([(0, 5)], old, frozen) == []


# ---- rounds ----


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 150))
def test_rounds_hold_everything_in_order_within_their_bound(sizes: list[int], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "ROUND_BYTES", limit)
        found = in_rounds(sizes)
    assert [index for indices in found for index in indices] == list(range(len(sizes)))
    for indices in found:
        assert sum(sizes[index] for index in indices) <= limit or len(indices) == 1


def blocked(programs: dict[int, list[dict[int, int]]]) -> set[int]:
    """The ranks that never end, if a post blocks its host until the peers of the post have posted their parts too.

    `programs` are the posts of each rank in order: peer to number of messages exchanged with it.
    """
    next_post = dict.fromkeys(programs, 0)

    def met(rank: int) -> bool:
        post = programs[rank][next_post[rank]]
        for peer in post:
            before = sum(1 for earlier in programs[rank][: next_post[rank]] if peer in earlier)
            with_rank = [index for index, other in enumerate(programs[peer]) if rank in other]
            if before >= len(with_rank) or with_rank[before] > next_post[peer]:
                return False
        return True

    while ready := [rank for rank in programs if next_post[rank] < len(programs[rank]) and met(rank)]:
        for rank in ready:
            next_post[rank] += 1
    return {rank for rank in programs if next_post[rank] < len(programs[rank])}


def posts(moves: Sequence[Move], world_size: int, limit: int) -> dict[int, list[dict[int, int]]]:
    """What each rank posts for `moves` if every bundle has as many bytes as its first block plus one."""
    bundles = list(dict.fromkeys(move.bundle for move in moves))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "ROUND_BYTES", limit)
        cut = in_rounds([bundle[0] + 1 for bundle in bundles])
    programs: dict[int, list[dict[int, int]]] = {rank: [] for rank in range(world_size)}
    for indices in cut:
        done = {bundles[index] for index in indices}
        for rank in range(world_size):
            post: dict[int, int] = defaultdict(int)
            for move in moves:
                if move.bundle in done and rank in (move.source, move.destination):
                    post[move.destination if move.source == rank else move.source] += 1
            programs[rank] += [dict(post)] if post else []
    return programs


@settings(max_examples=300)
@given(transitions(), st.integers(1, 40))
def test_no_rank_waits_in_a_circle_if_every_first_transfer_blocks_its_host(
    transition: tuple[list[Bundle], Layout, Layout], limit: int
) -> None:
    bundles, old, new = transition
    moves = plan_moves(bundles, old, new)
    assert blocked(posts(moves, old.num_stages * old.num_replicas, limit)) == set()


def test_posts_in_another_order_wait_in_a_circle() -> None:
    """Three ranks in a ring, each of which serves its right neighbour before it hears from the left one."""
    assert blocked({0: [{1: 1}, {2: 1}], 1: [{2: 1}, {0: 1}], 2: [{0: 1}, {1: 1}]}) == {0, 1, 2}
    assert blocked({0: [{1: 1, 2: 1}], 1: [{2: 1, 0: 1}], 2: [{0: 1, 1: 1}]}) == set()


LARGE_BYTES = 2**16


def content(bundle: Bundle, with_state: bool) -> dict[str, Any]:
    """A large tensor, small ones of several dtypes and none, and numbers."""
    large = torch.arange(bundle[0], bundle[0] + LARGE_BYTES // 4, dtype=torch.float32)
    small = {"half": torch.full((3, 5), bundle[0], dtype=torch.bfloat16), "count": torch.tensor(bundle[-1])}
    empty = {"empty": torch.zeros(0, 4), "flags": torch.tensor([True, False, True])}
    # As bitsandbytes keeps it: blocks of bytes, a table, and a step that is no tensor.
    blocks = torch.full((LARGE_BYTES,), bundle[0], dtype=torch.uint8)
    state = {"step": 3, "state1": blocks, "qmap1": torch.linspace(-1, 1, 256), "absmax1": torch.ones(2)}
    return {"parameters": {"large": large, **small}, "buffers": empty, "state": state if with_state else {}}


@settings(max_examples=8)
@given(transitions())
def test_what_moves_arrives_bit_by_bit_and_is_collected_once(transition: tuple[list[Bundle], Layout, Layout]) -> None:
    bundles, old, new = transition
    moves, world_size = plan_moves(bundles, old, new), old.num_stages * old.num_replicas
    wires = Wires(world_size)
    collected: list[tuple[int, Bundle, bool]] = []
    taken: dict[int, list[tuple[list[Bundle], int]]] = defaultdict(list)

    def run(rank: int) -> None:
        topology = SimpleNamespace(rank=rank, control=rank, timeout=10, gather=partial(wires.gather, rank))
        expected = [move for move in moves if move.destination == rank]

        def collect(own: Sequence[Move]) -> list[dict[str, Any]]:
            collected.extend((rank, *move.content) for move in own)
            return [content(*move.content) for move in own]

        def take_in(done: Sequence[Bundle], contents: list[dict[str, Any]]) -> None:
            due = [move for move in expected if move.bundle in done]
            assert len(contents) == len(due)
            for found, move in zip(contents, due, strict=True):
                assert_same_tree(found, content(*move.content))
            taken[rank].append((list(done), len(due)))

        try:
            num_bytes[rank] = exchange(moves, collect, take_in, topology, torch.device("cpu"))
        except BaseException:
            wires.barrier.abort()
            raise

    num_bytes: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "ROUND_BYTES", 3 * LARGE_BYTES)
        patch.setattr(migration, "carry", wires.carry)
        together([partial(run, rank) for rank in range(world_size)])
    assert len(collected) == len(set(collected)), "one copy, whatever the number of destinations"
    assert set(num_bytes.values()) == {num_bytes[0]} and bool(num_bytes[0]) == bool(moves)
    orders = [[done for done, _ in taken[rank]] for rank in range(world_size)]
    assert all(order == orders[0] for order in orders), "all ranks go through the same rounds"
    assert [bundle for done in orders[0] for bundle in done] == list(dict.fromkeys(move.bundle for move in moves))
    assert all(num <= 3 for rank in taken for _, num in taken[rank]), "a round is bounded"


def assert_same_tree(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same_tree(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        assert found == expected


# ---- digests ----


def digest(tensors: Sequence[torch.Tensor]) -> int:
    return digests({"": tensors})[""]


def test_digests_are_read_from_the_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {str(size): [torch.ones(size), torch.tensor(float(size))] for size in range(1, 9)}
    expected = {name: digest(tensors) for name, tensors in named.items()}
    reads = []
    real = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        reads.append(tensor)
        return real(tensor)

    def refuse(*_: Any) -> None:
        raise AssertionError("a device would have to be waited for")

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    for name in ("__int__", "__float__", "__bool__", "item", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    assert digests(named) == expected
    assert len(reads) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (4, 4)])
def test_a_flipped_bit_changes_the_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = digest([tensor])
    assert before == digest([tensor.clone()])
    assert digest([tensor, tensor]) != before or before == 0
    for byte in range(tensor.numel() * tensor.element_size()):
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[byte] ^= 1
        assert digest([changed]) != before, byte


def test_what_an_optimizer_lets_go_is_freed_before_others_come() -> None:
    decayed, plain, gone = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = optimizer_of(decayed, plain, gone)
    holder = OptimizerState(optimizer, {"decayed": decayed, "plain": plain, "gone": gone}, ALONE, True, {})
    holder.let_go([gone, decayed])
    assert [group["params"] for group in optimizer.param_groups] == [[], [plain]]
    assert set(optimizer.state) == {plain}


def test_a_single_replica_has_nobody_to_differ_from() -> None:
    check_replicas({"weight": 1}, SimpleNamespace(replica_control=None))


def optimizer_of(*parameters: torch.nn.Parameter) -> torch.optim.Optimizer:
    """AdamW as Trainer makes it: weights that decay, weights that do not; one step taken."""
    optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_an_optimizer_lets_go_and_takes_in_by_name() -> None:
    decayed, plain, gone = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = optimizer_of(decayed, plain, gone)
    holder = OptimizerState(optimizer, {"decayed": decayed, "plain": plain, "gone": gone}, ALONE, True, {})
    state = holder.state_of(plain)
    arrived = torch.nn.Parameter(torch.ones(3))
    holder.hold({"decayed": decayed, "plain": arrived, "unknown": torch.nn.Parameter(torch.ones(1))}, {"plain": state})
    assert [group["params"] for group in optimizer.param_groups] == [[decayed], [arrived]]
    assert set(optimizer.state) == {decayed, arrived}
    assert set(state) >= {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(optimizer.state[arrived][key], value) for key, value in state.items())
    assert holder.state_of(gone) == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_from_two_stages_stand_in_the_order_of_the_model(rank: int) -> None:
    """So plain Trainer reads them, by position: what an early stage uses may be registered behind later layers."""
    model = {
        name: torch.nn.Parameter(torch.ones(1)) for name in ("early", "early.bias", "late", "late.bias", "shared")
    }
    stages = (["early", "early.bias", "shared"], ["late", "late.bias"])
    groups = [{name: int(name.endswith("bias")) for name in names} for names in stages]
    optimizer = torch.optim.AdamW(
        [{"params": [model[name] for name in stages[rank] if groups[rank][name] == index]} for index in range(2)]
    )

    def gather(value: Any) -> list[Any]:
        return [{**value, "group_of": group} for group in groups]

    topology: Any = SimpleNamespace(gather=gather)
    holder = OptimizerState(optimizer, model, topology, True, {})
    holder.hold(model, {})
    names = {id(parameter): name for name, parameter in model.items()}
    held = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    assert held == [["early", "late", "shared"], ["early.bias", "late.bias"]]


def test_the_order_of_an_optimizer_that_was_made_for_the_whole_model_is_kept() -> None:
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.AdamW([second, first])
    topology: Any = SimpleNamespace(gather=lambda value: [value, value])
    OptimizerState(optimizer, {"first": first, "second": second}, topology, True, {}).keep(
        {"first": first, "second": second}
    )
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == [id(second), id(first)]


@pytest.mark.parametrize("other_options", [[{}] * 5, [{"lr": "0.5"}, {"lr": "0.5"}]], ids=["more", "others"])
def test_ranks_whose_optimizers_have_other_groups_are_refused_if_layers_may_move(other_options: list) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    others = SimpleNamespace(gather=lambda value: [value, {"options": other_options, "group_of": {}}])
    with pytest.raises(ValueError, match=f"{len(other_options)} parameter groups on rank 1 and 2 on rank 0"):
        OptimizerState(optimizer_of(parameter), {"weight": parameter}, others, True, {})
    OptimizerState(optimizer_of(parameter), {"weight": parameter}, others, False, {})


def test_an_optimizer_that_pages_its_state_is_refused_if_layers_may_move() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizer_of(parameter)
    optimizer.is_paged = True
    with pytest.raises(ValueError, match=r"AdamW pages its state.*adamw_bnb_8bit.*elastic=False"):
        OptimizerState(optimizer, {"weight": parameter}, ALONE, True, {})
    OptimizerState(optimizer, {"weight": parameter}, ALONE, False, {})


def test_a_users_optimizer_keeps_groups_and_state_of_what_a_stage_trains() -> None:
    named = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b", "c")}
    groups = [{"params": [named["a"], named["b"]], "lr": 0.1}, {"params": [named["c"]]}]
    optimizer = torch.optim.Adagrad(groups, lr=0.5)  # It has state from the start.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    now = {**named, "a": torch.nn.Parameter(torch.empty(2, device="meta"))}
    state = OptimizerState(optimizer, now, ALONE, False, {id(p): name for name, p in named.items()})
    state.keep({"b": named["b"]})
    assert state.group_of == {"a": 0, "b": 0, "c": 1}
    assert [group["params"] for group in optimizer.param_groups] == [[named["b"]], []]
    assert set(optimizer.state) == {named["b"]}
    named["b"].grad = torch.ones(2)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.25]
    assert torch.equal(named["a"], torch.ones(2)) and not torch.equal(named["b"], torch.ones(2))
