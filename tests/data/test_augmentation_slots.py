"""AugmentationSlots of random samples: which draw an epoch takes, how it is drawn, and trainings that read stored
draws.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cache.opening import seeded_reading
from hf_pipetransformer.data.augmentation import AugmentationSlots, ItemCode, uniform
from hf_pipetransformer.data.rng import PlainRows, SeededCollator, SeededGenerators, SeededReading, SeededSamples
from hf_pipetransformer.planning import search
from hf_pipetransformer.planning import storing as decision
from tests.cache.test_cache_run import cache_events, losses_of
from tests.data.test_loaders import LateGenerator
from tests.support.drawing import Augmented, Masked, masking
from tests.support.models import build_model, collate, make_dataset


NUM_SAMPLES = 10
STEPS_PER_EPOCH = 3


# ---- which draw an epoch takes


def slots_of(num_slots: int, first: int = 0, share: float = 0.0, num_samples: int = 200) -> AugmentationSlots:
    slots = AugmentationSlots(ItemCode(num_samples, num_slots), seed=5)
    slots.epoch = first
    slots.follow(True, share)
    return slots


def course(slots: AugmentationSlots, epochs: range) -> tuple[Any, Any]:
    """Draw and row of each sample in each epoch, `(epochs, samples)` each."""
    draws, rows = [], []
    for slots.epoch in epochs:
        items = np.array(slots.items(list(range(slots.code.num_samples))))
        assert (slots.code.samples_of(items) == np.arange(slots.code.num_samples)).all()
        draws.append(slots.code.draw_numbers(items))
        rows.append(slots.code.records_of(items) - slots.code.num_slots * np.arange(slots.code.num_samples))
    return np.array(draws), np.array(rows)


def test_the_table_of_the_docstring() -> None:
    slots = slots_of(2, share=0.3)
    draws, rows = course(slots, range(6))
    chosen = [uniform(5, epoch, 200) < 0.3 for epoch in range(6)]
    (alike,) = np.where(~chosen[2] & chosen[3] & ~chosen[4] & ~chosen[5])
    assert draws[:, alike[0]].tolist() == [0, 1, 0, 3, 1, 3]
    assert rows[:, alike[0]].tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_without_new_draws_the_first_epochs_come_again_in_turn(num_slots: int) -> None:
    draws, rows = course(slots_of(num_slots, first=4), range(3, 4 + 3 * num_slots))
    assert (draws[0] == 3).all()
    for epoch in range(3 * num_slots):
        assert (draws[1 + epoch] == 4 + epoch % num_slots).all() and (rows[1 + epoch] == epoch % num_slots).all()


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_what_an_epoch_takes_is_the_last_draw_that_was_put_into_its_row(num_slots: int) -> None:
    draws, rows = course(slots_of(num_slots, share=0.3), range(12))
    for sample in range(200):
        stored: dict[int, int] = {}
        for epoch in range(12):
            draw, row = int(draws[epoch, sample]), int(rows[epoch, sample])
            if draw == epoch:
                # The oldest makes room.
                assert row not in stored or stored[row] == min(stored.values())
                stored[row] = draw
            assert stored[row] == draw and len(stored) <= num_slots
    is_new = draws[num_slots:] == np.arange(num_slots, 12)[:, None]
    assert is_new.mean() == pytest.approx(0.3, abs=0.03)


def test_a_share_holds_from_the_next_epoch_on_and_nothing_before_changes() -> None:
    slots, before = slots_of(2, share=0.1), slots_of(2, share=0.1)
    expected = course(before, range(6))
    course(slots, range(5))
    slots.epoch = 5
    slots.follow(True, 1.0)
    assert all((a == b).all() for a, b in zip(course(slots, range(6)), expected, strict=True))
    assert (course(slots, range(6, 8))[0] == [[6], [7]]).all()
    slots.follow(False, 0.0)  # Nothing is stored: nothing is gained by an old draw.
    assert slots.shares[-1] == (6, 1.0)
    slots.epoch = 6
    slots.follow(True, 0.0)
    assert (course(slots, range(8, 10))[0] == [[6], [7]]).all()


def test_views_go_on_from_a_checkpoint_in_any_epoch() -> None:
    slots = slots_of(3, first=2, share=0.2)
    expected = course(slots, range(9, 12))
    again = AugmentationSlots(ItemCode(200, 3), seed=5)
    again.load_state(json.loads(json.dumps(slots.state())), epoch=9)
    assert all((a == b).all() for a, b in zip(course(again, range(9, 12)), expected, strict=True))
    other = AugmentationSlots(ItemCode(200, 2), seed=5)
    other.load_state(slots.state(), epoch=9)
    assert other.first is None and other.epoch == 9


# ---- how it is drawn


class Drawing:
    """A sample is what all generators say: the global ones, one of its own, and one that it makes late."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(3)
        self.late: Any = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[float]:
        self.late = self.late or np.random.default_rng()
        drawn = [random.random(), np.random.rand(), float(torch.rand(())), float(self.late.random())]
        return [index, *drawn, float(torch.rand((), generator=self.own))]


def test_a_draw_hangs_on_nothing_but_seed_sample_and_number() -> None:
    code, found = ItemCode(4, 2), {}
    for order in ([0, 1, 2, 3, 4, 9, 13], [13, 9, 1, 4, 0, 3, 2]):
        data = Drawing()
        samples = SeededSamples(data, code, SeededGenerators([data], 7))
        states = [random.getstate(), torch.get_rng_state().tolist(), data.own.get_state().tolist()]
        for start in range(0, len(order), 3):
            rows = samples.__getitems__(order[start : start + 3])
            assert all(found.setdefault(row.item, row.row) == row.row for row in rows)
        assert states == [random.getstate(), torch.get_rng_state().tolist(), data.own.get_state().tolist()]
    assert [found[item][0] for item in (0, 1, 9, 13)] == [0, 1, 1, 1]
    # Items 9 and 13 are draw 1 of sample 1, in two slots; all else is drawn apart.
    assert found[9] == found[13]
    drawn = [value for item, row in found.items() if item != 13 and item != 4 for value in row[1:]]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("make", [masking, lambda: masking(7), LateGenerator])
def test_a_collator_draws_for_each_sample_apart(make: Callable[[], Any]) -> None:
    rows: Any = Masked(make_dataset("bert_masked", 4)) if make is not LateGenerator else make_dataset("bert_masked", 4)
    code, collator = ItemCode(4, 2), make()
    generators = SeededGenerators([collator], 7)
    samples = SeededSamples(rows, code, SeededGenerators([rows], 7))
    together = SeededCollator(collator, code, generators, "input_ids", 0)
    whole = together(samples.__getitems__([0, 1, 2, 3]))
    assert (whole["labels"][whole["attention_mask"] == 0] == -100).all()
    for index in (3, 1):
        one = together(samples.__getitems__([index]))
        length = one["input_ids"].shape[1]
        assert all(torch.equal(values[0], whole[name][index, :length]) for name, values in one.items())
    assert not torch.equal(
        together(samples.__getitems__([8]))["input_ids"], together(samples.__getitems__([0]))["input_ids"]
    )


# ---- the share of new draws


def test_new_draws_cost_no_more_than_the_budget() -> None:
    costs = decision.CacheCosts(prefix=(0.1, 1.0, 2.0), input=0.5, read=0.1, write=0.2)
    # A new draw costs 2.7 less 0.1 s, a pass that reads all 0.1 and 10 s.
    assert decision.refresh_fraction(costs.beside(10.0), 2) == 0.388
    assert decision.refresh_fraction(costs.beside(0.0), 2) == 0.003
    assert decision.refresh_fraction(costs.beside(1e6), 2) == 1.0


def test_views_cost_a_writing_pass_each() -> None:
    costs = decision.CacheCosts(prefix=(0.1, 1.0), input=0.5, read=0.1, write=0.2)
    slots = decision.SlotCosts(3, 0.5)
    found = decision.decide_cache(costs, 1, decision.StoreContents(), 10.0, "auto", slots)
    assert found.seconds_per_sample["write"] == pytest.approx(3 * 1.7 + 7 * (0.5 * 0.1 + 0.5 * 1.7))
    assert found.way == "write" and found.refresh_fraction == 0.5
    left = decision.decide_cache(costs, 1, decision.StoreContents(), 3.0, "on", slots)
    assert left.way == "compute" and "3 epochs left for 3 slots" in left.reason


# ---- trainings


class Images(Augmented):
    """Images with noise; notes what it gave."""

    def __init__(self) -> None:
        super().__init__(make_dataset("vit", NUM_SAMPLES))
        self.given: dict[int, list[Any]] = defaultdict(list)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.given[index].append(super().__getitem__(index))
        return self.given[index][-1]


class Again(torch.utils.data.Dataset[Any]):
    """What another data set gave, in turn."""

    def __init__(self, given: dict[int, list[Any]]) -> None:
        self.given = given
        self.read: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        return self.given[index][(self.read[index] - 1) % len(self.given[index])]


class Numbered(Masked):
    """Token ids, and the number of the sample, which the collators below take away."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "number": index}


class Masking:
    """The collator of run_mlm; notes what it gave for samples alone."""

    def __init__(self) -> None:
        self.collate = masking()
        self.given: dict[int, list[Any]] = defaultdict(list)

    def __call__(self, rows: list[Any]) -> Any:
        numbers = [row["number"] for row in rows]
        batch = dict(self.collate([{"input_ids": row["input_ids"]} for row in rows]))
        if len(rows) == 1:
            self.given[numbers[0]].append({name: values[0].clone() for name, values in batch.items()})
        return batch


class MaskedAgain:
    """What another collator gave for samples alone, in turn, padded."""

    def __init__(self, given: dict[int, list[Any]]) -> None:
        self.again = Again(given)

    def __call__(self, rows: list[Any]) -> Any:
        found = [self.again[row["number"]] for row in rows]
        fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            name: torch.nn.utils.rnn.pad_sequence([each[name] for each in found], True, fill)
            for name, fill in fills.items()
        }


class Forgets(TrainerCallback):
    """What was read before the training is none of its draws."""

    def __init__(self, *counts: dict[int, Any]) -> None:
        self.counts = counts

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        for count in self.counts:
            count.clear()


def trainer_of(folder: Path, dataset: Any, collator: Any, **changes: Any) -> PipeTransformerTrainer:
    callbacks = changes.pop("callbacks", [])
    name = "vit" if collator is collate else "bert_masked"
    options: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "num_train_epochs": 5, "logging_steps": 1,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3, "freeze_policy": "fixed",
        "freeze_at": "0:2", "activation_cache": "on", "activation_cache_dir": str(folder / "cache"),
        "save_strategy": "no", "remove_unused_columns": False,
    }  # fmt: skip
    set_seed(3)
    return PipeTransformerTrainer(
        build_model(name), PipeTransformerArguments(**(options | changes)), train_dataset=dataset,
        data_collator=collator, callbacks=callbacks,
    )  # fmt: skip


@pytest.fixture
def nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample is drawn anew once its slots are stored."""
    monkeypatch.setattr(decision, "FRESH_BUDGET", 0.0)


SOME_VIEWS = [pytest.param(1, marks=pytest.mark.slow), 2]


@pytest.mark.parametrize("num_slots", SOME_VIEWS)
def test_a_run_with_views_is_one_on_the_draws_of_its_first_epochs(
    num_slots: int, tmp_path: Path, nothing_new: None
) -> None:
    images = Images()
    trainer = trainer_of(
        tmp_path, images, collate, activation_cache_views=num_slots, callbacks=[Forgets(images.given)]
    )
    trainer.train()
    assert {len(given) for given in images.given.values()} == {num_slots}
    hits = [event["hits"] for event in cache_events(trainer, "epoch")]
    assert hits == [0] * num_slots + [NUM_SAMPLES] * (5 - num_slots)
    again = Again(images.given)
    frozen = trainer_of(tmp_path / "off", again, collate, activation_cache="off", callbacks=[Forgets(again.read)])
    frozen.train()
    assert losses_of(trainer) == pytest.approx(losses_of(frozen), rel=1e-5)
    assert len(losses_of(trainer)) == 5 * STEPS_PER_EPOCH


@pytest.mark.parametrize("num_slots", SOME_VIEWS)
def test_rows_hold_the_labels_of_the_tokens_that_were_masked(
    num_slots: int, tmp_path: Path, nothing_new: None
) -> None:
    masks, rows = Masking(), Numbered(make_dataset("bert_masked", NUM_SAMPLES))
    trainer = trainer_of(tmp_path, rows, masks, activation_cache_views=num_slots, callbacks=[Forgets(masks.given)])
    trainer.train()
    assert {len(given) for given in masks.given.values()} == {num_slots}
    assert cache_events(trainer, "epoch")[-1]["hits"] == NUM_SAMPLES
    again = MaskedAgain(masks.given)
    frozen = trainer_of(tmp_path / "off", rows, again, activation_cache="off", callbacks=[Forgets(again.again.read)])
    frozen.train()
    assert losses_of(trainer) == pytest.approx(losses_of(frozen), rel=1e-5)


def test_a_run_that_goes_on_in_an_epoch_takes_the_same_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "refresh_fraction", lambda *_: 0.4)
    options = {"activation_cache_views": 2, "save_strategy": "steps", "save_steps": 10}
    whole = trainer_of(tmp_path, Images(), collate, **options)
    whole.train()
    hits = [event["hits"] for event in cache_events(whole, "epoch")]
    assert hits[:2] == [0, 0] and all(0 < count < NUM_SAMPLES for count in hits[2:])
    again = trainer_of(tmp_path, Images(), collate, **options)
    again.train(str(tmp_path / "checkpoint-10"))
    # Nothing is stored any more: what the run had drawn is drawn again.
    assert cache_events(again, "epoch")[-1]["misses"] > NUM_SAMPLES - hits[-1]
    # Samples that are computed together in one run and apart in the other may differ in the last bit; another draw of
    # a single image changes a loss in the third digit.
    assert losses_of(again) == pytest.approx(losses_of(whole), rel=1e-6)


@pytest.mark.slow
def test_layers_that_freeze_later_bring_each_view_to_their_level(tmp_path: Path, nothing_new: None) -> None:
    options = {"activation_cache_views": 2, "num_train_epochs": 6, "freeze_at": "0:1,7:2"}
    images = Images()
    trainer = trainer_of(tmp_path, images, collate, callbacks=[Forgets(images.given)], **options)
    trainer.train()
    again = Again(images.given)
    frozen = trainer_of(
        tmp_path / "off", again, collate, callbacks=[Forgets(again.read)],
        **{**options, "activation_cache": "off", "activation_cache_views": 0},
    )  # fmt: skip
    frozen.train()
    assert losses_of(trainer) == pytest.approx(losses_of(frozen), rel=1e-5)
    # In the middle of the third epoch: two passes read the first layer's output, then all is stored.
    written = [event["written"] for event in cache_events(trainer, "epoch")]
    assert written[-1] == 0 and sum(written) == 4 * NUM_SAMPLES


class MixedUp:
    """Adds to each image another one of its batch."""

    def __call__(self, rows: list[Any]) -> Any:
        batch = collate(rows)
        partners = torch.randperm(len(rows))
        return {**batch, "pixel_values": 0.7 * batch["pixel_values"] + 0.3 * batch["pixel_values"][partners]}


def reading_of(dataset: Any, collator: Any, main_input: str = "pixel_values") -> SeededReading | None:
    args: Any = SimpleNamespace(activation_cache_views=3, data_seed=None, seed=5)
    probe = SimpleNamespace(activation=SimpleNamespace(main_input=main_input), placeholders=frozenset([main_input]))
    alone: Any = SimpleNamespace(rank=0, decide=lambda decided: decided())
    start_up: Any = SimpleNamespace(probe=probe, pad_token_id=0)
    return seeded_reading(args, alone, start_up, dataset, collator)


@pytest.mark.parametrize(
    ("dataset", "collator", "told"),
    [
        (make_dataset("vit", NUM_SAMPLES), collate, "samples are the same each time they are read"),
        (Images(), MixedUp(), "found that the batch mixes samples (mixup?)"),
    ],
)
def test_views_that_have_no_use_are_told(
    dataset: Any, collator: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert reading_of(dataset, collator) is None
    assert f"activation_cache_views=3 has no effect: {told}" in caplog.text


def test_a_collator_that_draws_nothing_is_given_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    augmented = reading_of(Images(), collate)
    masked = reading_of(Masked(make_dataset("bert_masked", NUM_SAMPLES)), masking(), "input_ids")
    assert augmented is not None and isinstance(augmented.collate, PlainRows)
    assert masked is not None and isinstance(masked.collate, SeededCollator)
    assert all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"activation_cache_views": -1}, "a number of views, 0 or more"),
        ({"activation_cache_views": 2, "activation_cache": "off"}, "leave one of them out"),
        ({"activation_cache_views": 2, "pipeline_schedule": "token"}, "nothing is stored there"),
        ({"activation_cache_views": 2, "pipeline_schedule": "async_1f1b"}, "nothing is stored there"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=found):
        PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, **options)
