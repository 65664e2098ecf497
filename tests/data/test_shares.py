"""Samples that stay on their node: who owns them, how an epoch is arranged, and what each replica gets."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from hf_pipetransformer.data.node_shares import NodeOrder, replica_slice
from hf_pipetransformer.data.sampler import EpochOrder, Position
from hf_pipetransformer.schedules.json_values import as_json, read_as
from hf_pipetransformer.schedules.placement import pipeline_sizes


def lengths_of(devices: tuple[int, ...]) -> list[int]:
    """Every K that divides the devices of each node, or takes whole nodes of equally many."""
    if len(set(devices)) == 1:
        return pipeline_sizes(sum(devices), devices[0])
    return pipeline_sizes(math.gcd(*devices), math.gcd(*devices))


devices_of_nodes = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple),
    st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3).map(tuple),
)


@settings(max_examples=50)
@given(st.integers(0, 400), devices_of_nodes, st.integers(1, 6), st.integers(0, 9), st.integers(0, 9))
def test_each_sample_comes_once_an_epoch_and_on_its_own_node_whatever_k(
    num_samples: int, devices: tuple[int, ...], a_device: int, seed: int, epoch: int
) -> None:
    batch_size = a_device * sum(devices)
    order = NodeOrder(seed, devices, batch_size)
    owners = order.owners(num_samples).tolist()
    assert [owners.count(node) for node in range(len(devices))] == order.counts(num_samples)
    drawn = random.Random(epoch).sample(range(num_samples), num_samples)
    arranged = order.arranged(drawn)
    assert sorted(arranged) == list(range(num_samples))
    for node in range(len(devices)):
        # What is drawn for a node keeps its order.
        assert [i for i in arranged if owners[i] == node] == [i for i in drawn if owners[i] == node]
    for size in lengths_of(devices):
        num_replicas = sum(devices) // size
        ranks = [node for node, count in enumerate(devices) for _ in range(count)]
        on_nodes = [set(ranks[first : first + size]) for first in range(0, len(ranks), size)]
        for first in range(0, num_samples, batch_size):
            batch = arranged[first : first + batch_size]
            parts = [batch[order.part(len(batch), replica, num_replicas)] for replica in range(num_replicas)]
            assert [sample for part in parts for sample in part] == batch
            assert all(owners[i] in nodes for nodes, part in zip(on_nodes, parts, strict=True) for i in part)
            if len(batch) == batch_size:
                assert {len(part) for part in parts} == {a_device * size}
            for nodes in on_nodes:
                own = [len(part) for others, part in zip(on_nodes, parts, strict=True) if others == nodes]
                assert max(own) - min(own) <= 1


@given(st.integers(0, 60), st.integers(1, 8))
def test_on_one_node_replicas_share_as_ever(num_samples: int, num_replicas: int) -> None:
    order = NodeOrder(0, (num_replicas,), num_replicas)
    for replica in range(num_replicas):
        assert order.part(num_samples, replica, num_replicas) == replica_slice(num_samples, replica, num_replicas)


@pytest.mark.parametrize("devices", [(6, 6), (2, 6), (4, 4), (3, 5, 4)])
@pytest.mark.parametrize("num_samples", [1, 5, 12, 24])
def test_replicas_over_parts_of_nodes_share_without_gap_or_double(devices: tuple[int, ...], num_samples: int) -> None:
    world = sum(devices)
    order = NodeOrder(0, devices, world)
    for num_replicas in (each for each in range(1, world + 1) if world % each == 0):
        parts = [order.part(num_samples, replica, num_replicas) for replica in range(num_replicas)]
        assert parts[0].start == 0 and parts[-1].stop == num_samples
        assert all(before.stop == after.start for before, after in pairwise(parts))


def test_owners_hang_on_the_seed_and_on_the_nodes_only() -> None:
    owners = NodeOrder(3, (2, 2), 8).owners(50)
    assert torch.equal(owners, NodeOrder(3, (2, 2), 8).owners(50))
    assert not torch.equal(owners, NodeOrder(4, (2, 2), 8).owners(50))
    assert NodeOrder(3, (2, 1, 1), 8).counts(50) == [25, 13, 12]


class Shuffled(RandomSampler):
    """Trainer's order, from a generator of its own."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(range(num_samples), generator=torch.Generator().manual_seed(5))


def sampler_over(devices: tuple[int, ...] | None, num_samples: int, batch_size: int, drops: bool = False):
    sampler = EpochOrder(BatchSampler(Shuffled(num_samples), batch_size, drops))
    sampler.nodes = None if devices is None else NodeOrder(1, devices, batch_size)
    return sampler


def flat(sampler: EpochOrder) -> list[int]:
    return [index for batch in sampler.batches() for index in batch]


def test_a_last_batch_that_is_left_out_leaves_out_other_samples_each_epoch() -> None:
    sampler = sampler_over((2, 1), 20, 6, drops=True)
    epochs = []
    for _ in range(2):
        sampler.begin_epoch()
        assert [len(batch) for batch in sampler.batches()] == [6, 6, 6]
        epochs.append(set(flat(sampler)))
    assert [len(epoch) for epoch in epochs] == [18, 18] and epochs[0] != epochs[1]


@pytest.mark.parametrize("then", [(1, 2), None])
@pytest.mark.parametrize("now", [(2, 2), (1, 2), None])
def test_an_epoch_ends_as_it_was_begun_on_other_nodes_and_in_other_batches(
    then: tuple[int, ...] | None, now: tuple[int, ...] | None
) -> None:
    """And the next one is the present nodes' own; saved and read again in between, as in a checkpoint."""
    first = sampler_over(then, 50, 12)
    flat(first)
    first.begin_epoch()
    # Not the first epoch, which a new generator would draw, too.
    drawn = flat(first)

    def left_at(order: EpochOrder, samples: int) -> Position:
        place = Position(0, samples, 12, 50, order.group_size, order.epochs_nodes)
        saved = read_as(Position, json.loads(json.dumps(as_json(place))), "place")
        assert saved == place
        return replace(saved, order_state=order.rng_state(is_mid_epoch=True))

    size = sum(now or (5,))
    second = sampler_over(now, 50, size)
    second.begin_epoch(left_at(first, 24))
    assert flat(second) == drawn[24:]
    assert sum(map(len, second.batches()[: -math.ceil(26 / size)])) == 0
    third = sampler_over((2, 4), 50, 12)
    third.begin_epoch(left_at(second, 12))
    assert flat(third) == drawn[12:]
    third.begin_epoch()
    assert third.epochs_nodes == third.nodes
    owners = third.nodes.owners(50).tolist()
    assert all([owners[i] for i in batch] == [0] * 4 + [1] * 8 for batch in third.batches()[:4])
