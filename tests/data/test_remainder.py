"""What is left of an epoch is dealt anew: every sample comes once, whatever the sizes of the batches were and are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler

from hf_pipetransformer.data.sampler import FROM_FIRST, EpochOrder, EpochStart
from hf_pipetransformer.state.description import are_other_data, describe_data
from hf_pipetransformer.state.run_state import Epoch, find_remainder


def make_sampler(num_samples: int, batch_size: int, drops_last: bool) -> EpochOrder:
    order = SeedableRandomSampler(range(num_samples), generator=torch.Generator(), data_seed=5)
    return EpochOrder(BatchSampler(order, batch_size, drops_last))


CASES = list(itertools.product((1, 16, 37), (1, 4, 8, 16), (1, 3, 4, 8), (1, 2, 3), (False, True)))


@pytest.mark.parametrize(("num_samples", "before", "now", "accumulation", "drops_last"), CASES)
def test_every_sample_of_an_epoch_comes_once(
    num_samples: int, before: int, now: int, accumulation: int, drops_last: bool
):
    old, new = make_sampler(num_samples, before, drops_last), make_sampler(num_samples, now, drops_last)
    for num_batches in range(0, len(old), accumulation):
        old.begin_epoch(FROM_FIRST)
        done = [index for batch in old.batches()[:num_batches] for index in batch]
        # Steps of epochs before this one are not those of batches of the size that they have now.
        step = 1_000 + num_batches // accumulation
        place = {"epoch": 7, "samples": len(done)}
        rest = find_remainder(place, step, Epoch(num_samples, now, drops_last, accumulation), skips=True)
        if not len(new):
            assert rest is None
            continue
        assert rest is not None
        new.begin_epoch(EpochStart(num_done=rest.num_done))
        left = new.batches()[rest.first :]
        drawn = [index for batch in left for index in batch]
        assert len(left) == rest.num_batches and rest.num_updates == math.ceil(len(left) / accumulation)
        assert all(0 < len(batch) <= now for batch in left)
        if rest.epoch == 7:
            missing = set(range(num_samples)) - {*done, *drawn}
            assert len({*done, *drawn}) == len(done) + len(drawn)
            assert len(missing) < now if drops_last else not missing
        else:
            assert drops_last and num_samples - len(done) < now and rest.num_done == 0
        assert rest.epoch_at(1.0) == rest.epoch + 1
        assert rest.epoch_at(0.0) == pytest.approx(rest.epoch + rest.first / len(new))


def test_where_trainers_count_of_steps_leads_to_the_same_place_nothing_is_dealt_anew():
    # Five batches an epoch: 7 steps are one epoch and two batches.
    assert find_remainder({"epoch": 1, "samples": 16}, 7, Epoch(37, 8, False, 1), skips=True) is None
    assert find_remainder({"epoch": 2, "samples": 0}, 10, Epoch(37, 8, False, 1), skips=True) is None
    assert find_remainder({"epoch": 1, "samples": 16}, 7, Epoch(37, 8, False, 1), skips=False) is None
    assert find_remainder({"epoch": 1, "samples": 8}, 7, Epoch(37, 8, False, 1), skips=True) is not None


def test_a_run_ends_with_its_epochs():
    # Two epochs of 5 batches of 8; after 7 steps 21 samples are left: 6 batches of 4, 2 of 16.
    for now, updates_per_epoch, expected in ((4, 10, 7 + 6), (16, 3, 7 + 2)):
        rest = find_remainder({"epoch": 1, "samples": 16}, 7, Epoch(37, now, False, 1), skips=True)
        assert rest is not None
        assert rest.last_step(7, 2, updates_per_epoch) == expected
        assert rest.last_step(7, 1, updates_per_epoch) == 7
        assert rest.last_step(7, 4, updates_per_epoch) == expected + 2 * updates_per_epoch
        assert rest.num_epochs(7, expected + 1, updates_per_epoch) == 3
        assert rest.num_epochs(7, expected, updates_per_epoch) == 2


class Samples(list):
    """Samples by index that are not the same twice if `noise` is not zero."""

    noise = 0.0

    def __getitem__(self, index):
        return {"x": super().__getitem__(index) + self.noise * torch.rand(20), "name": "a"}


def test_other_data_of_equal_length_are_noticed():
    first, same = Samples(torch.eye(20)), Samples(torch.eye(20))
    other = Samples(2 * torch.eye(20))
    assert not are_other_data(describe_data(first), describe_data(same))
    assert are_other_data(describe_data(first), describe_data(other))
    # The fingerprint of equal content may differ: what the samples hold counts.
    processed = {**describe_data(same), "fingerprint": "b"}
    assert not are_other_data({**describe_data(first), "fingerprint": "a"}, processed)


def test_samples_drawn_at_random_are_no_other_data():
    noisy, again = Samples(torch.eye(20)), Samples(torch.eye(20))
    noisy.noise = again.noise = 1.0
    assert describe_data(noisy)["samples"] is None
    assert not are_other_data(describe_data(noisy), describe_data(again))


class SortedInGroups:
    """An order that hangs on the size of a batch, as `group_by_length` has it."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self):
        order = torch.randperm(self.num_samples, generator=self.generator).tolist()
        size = 2 * self.batch_size
        return iter([i for first in range(0, len(order), size) for i in sorted(order[first : first + size])])


def grouped(batch_size: int) -> EpochOrder:
    return EpochOrder(BatchSampler(SortedInGroups(40, batch_size), batch_size, False))


def test_an_order_that_hangs_on_the_batch_survives_two_resumes_with_other_batches():
    first = grouped(8)
    drawn = [index for batch in first.batches() for index in batch]
    second = grouped(4)
    second.begin_epoch(EpochStart(0, 16, first.rng_state(is_mid_epoch=True), first.arrangement))
    assert second.arrangement.group_size == 8
    third = grouped(2)
    third.begin_epoch(EpochStart(0, 24, second.rng_state(is_mid_epoch=True), second.arrangement))
    left = [index for batch in third.batches() for index in batch]
    assert left == drawn[24:]
    third.begin_epoch(FROM_FIRST)
    assert third.arrangement.group_size == 2
