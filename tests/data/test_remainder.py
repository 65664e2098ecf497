"""What is left of an epoch is dealt anew: every sample comes once, whatever the sizes of the batches were and are."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler

from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.data.sampler import EpochOrder, Position
from hf_pipetransformer.state.resumption import Resumption
from hf_pipetransformer.state.run_state import are_other_data, describe_data


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
        old.begin_epoch()
        done = [index for batch in old.batches()[:num_batches] for index in batch]
        # Steps of epochs before this one are not those of batches of the size that they have now.
        step = 1_000 + num_batches // accumulation
        start = place(7, len(done), num_samples, before).going_on(new)
        if not len(new):
            assert start.is_counted(step, new, accumulation)
            continue
        assert not start.is_counted(step, new, accumulation)
        new.begin_epoch(start)
        left = new.batches()[start.first :]
        drawn = [index for batch in left for index in batch]
        assert len(new.batches()) == len(new)
        assert all(0 < len(batch) <= now for batch in left)
        if start.epoch == 7:
            missing = set(range(num_samples)) - {*done, *drawn}
            assert len({*done, *drawn}) == len(done) + len(drawn)
            assert len(missing) < now if drops_last else not missing
        else:
            assert drops_last and num_samples - len(done) < now and start.samples == start.first == 0


def place(epoch: int, samples: int, num_samples: int = 37, batch: int = 8, **others: Any) -> Position:
    return Position(epoch, samples, batch, num_samples, **{"group_size": None, "nodes": None, **others})


def test_where_trainers_count_of_steps_leads_to_the_same_place_nothing_is_dealt_anew():
    def is_counted(epoch: int, samples: int, step: int, skips: bool = True) -> bool:
        order = make_sampler(37, 8, False)
        return place(epoch, samples).going_on(order, skips).is_counted(step, order, 1, skips)

    # Five batches an epoch: 7 steps are one epoch and two batches.
    assert is_counted(1, 16, 7) and is_counted(2, 0, 10) and is_counted(1, 16, 7, skips=False)
    assert not is_counted(1, 8, 7)


class Loaded(PipelineLoader):
    def __init__(self, order: EpochOrder) -> None:
        self.order = order


def test_a_run_ends_with_its_epochs():
    # Two epochs of 5 batches of 8; after 7 steps 21 samples are left: 6 batches of 4, 2 of 16.
    for now, updates_per_epoch, expected in ((4, 10, 7 + 6), (16, 3, 7 + 2)):
        loader, values = Loaded(make_sampler(37, now, False)), (2, updates_per_epoch, 37, 74, now, updates_per_epoch)

        def ends(epochs: int = 2, max_steps: int = -1) -> tuple[int, int]:
            """Number of epochs and of steps of the run."""
            args = SimpleNamespace(ignore_data_skip=False, gradient_accumulation_steps=1, max_steps=max_steps)
            run = cast(Any, SimpleNamespace(args=args, step=7, place=place(1, 16)))
            found = Resumption.counts(run, (*values, max_steps), loader, epochs)  # noqa: B023
            return found[0], found[-1]

        assert ends(2) == (2, expected)
        assert ends(1) == (2, 7)
        assert ends(4) == (2, expected + 2 * updates_per_epoch)
        assert ends(max_steps=expected + 1) == (3, expected + 1)
        assert ends(max_steps=expected) == (2, expected)


def test_an_epoch_that_goes_on_ends_as_a_whole_one():
    """Trainer takes the batches that are left for an epoch."""
    state = SimpleNamespace(epoch=7.0)
    description, parts = SimpleNamespace(run=SimpleNamespace(state=state)), SimpleNamespace(epoch=7)
    run = cast(Any, SimpleNamespace(description=description, parts=parts, _skipped=(2, 5)))
    for done, expected in ((1 / 3, 7 + 3 / 5), (2 / 3, 7 + 4 / 5), (1.0, 8.0)):
        state.epoch = 7 + done
        Resumption.correct_epoch(run)
        assert state.epoch == expected


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

    def left_at(order: EpochOrder, samples: int) -> Position:
        return place(0, samples, 40, group_size=order.group_size, order_state=order.rng_state(is_mid_epoch=True))

    second.begin_epoch(left_at(first, 16))
    assert second.group_size == 8
    third = grouped(2)
    third.begin_epoch(left_at(second, 24))
    left = [index for batch in third.batches() for index in batch]
    assert left == drawn[24:]
    third.begin_epoch()
    assert third.group_size == 2
