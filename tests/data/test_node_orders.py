"""Which orders of samples can be kept on nodes, and which part of the samples is whose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_pipetransformer.cache.opening import num_samples_here, samples_here, why_not_on_nodes
from hf_pipetransformer.data.node_shares import NodeOrder
from hf_pipetransformer.data.sampler import order_of_run
from hf_pipetransformer.schedules.placement import nodes_of


DATA = range(12)


class Backwards(SequentialSampler):
    """A user's own."""


def topology_of(hosts: str, rank: int) -> Any:
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    spans = len(here) < len(hosts)
    return SimpleNamespace(nodes=nodes_of(hosts), ranks_here=here, world_size=len(hosts), spans_nodes=spans)


@pytest.mark.parametrize(
    ("order", "is_kept"),
    [
        (RandomSampler(DATA), True),
        (SeedableRandomSampler(DATA, generator=torch.Generator(), data_seed=3), True),
        (SequentialSampler(DATA), True),
        (LengthGroupedSampler(2, lengths=list(DATA)), True),
        (RandomSampler(DATA, replacement=True), False),
        (SeedableRandomSampler(DATA, replacement=True, generator=torch.Generator(), data_seed=3), False),
        (RandomSampler(DATA, num_samples=5), False),
        (RandomSampler(DATA, num_samples=24), False),
        (SequentialSampler(DATA[:5]), False),
        (WeightedRandomSampler([1.0] * 12, 12), False),
        (Backwards(DATA), False),
    ],
)
def test_orders_that_draw_each_sample_once_are_kept_and_others_told(order: Any, is_kept: bool) -> None:
    loader: Any = SimpleNamespace(sampler=order, dataset=DATA)
    assert why_not_on_nodes(loader, topology_of("aa", 0)) is None
    reason = why_not_on_nodes(loader, topology_of("ab", 0))
    assert (reason is None) == is_kept
    if reason is not None:
        assert f"found a {type(order).__name__} of {len(order)} draws for 12 samples. Use one of Trainer" in reason


@pytest.mark.parametrize(
    ("size", "generator", "found"), [(4, None, 8), (8, None, 8), (4, torch.Generator(), 4), (3, torch.Generator(), 6)]
)
def test_groups_of_a_scripts_own_sampler_keep_their_size(size: int, generator: Any, found: int) -> None:
    sampler = LengthGroupedSampler(size, lengths=list(DATA), generator=generator)
    args: Any = SimpleNamespace(
        data_seed=None, seed=1, world_size=2, train_batch_size=2, gradient_accumulation_steps=2, eval_batch_size=3
    )
    args.global_batch_size = lambda batch_size: 2 * batch_size
    assert order_of_run(DATA, sampler, args, args.global_batch_size, None).batch_size == found


@pytest.mark.parametrize("hosts", ["aabb", "aab", "abab", "aa"])
def test_each_sample_is_stored_on_one_machine(hosts: str) -> None:
    """Also where a machine's ranks are not neighbours."""
    devices = tuple(map(len, nodes_of(hosts)))
    loader: Any = SimpleNamespace(dataset=range(50), nodes=None if hosts == "aa" else NodeOrder(3, devices, 12))
    parts = [samples_here(topology_of(hosts, hosts.index(host)), loader).tolist() for host in sorted(set(hosts))]
    assert sorted(sum(parts, [])) == list(range(50))
    rows = [num_samples_here(topology_of(hosts, hosts.index(host)), range(50)) for host in sorted(set(hosts))]
    assert all(abs(count - len(part)) <= 2 for count, part in zip(rows, parts, strict=True))
