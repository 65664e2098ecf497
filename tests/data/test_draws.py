"""What data sets and collators draw at random, in one process: that of Trainer, whatever is looked at before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.data.rng import (
    SharedRngState,
    draws_from_now_on,
    fetch_samples,
    generators_kept,
    random_state,
    set_random_state,
)
from tests.support.drawing import Augmented, Masked, losses, masking, trainer_of
from tests.support.models import collate, make_dataset


IMAGES, TEXTS = make_dataset("vit", 5), make_dataset("bert_masked", 5)


class Seeded:
    """Holds a generator of its own, which one call may make."""

    def __init__(self, generator: Any, inner: Any = None) -> None:
        self.generator = generator
        self.inner = inner

    def __call__(self, rows: Any, scale: float = 1.0) -> Any:
        if self.inner is not None:
            return self.inner(rows)
        if self.generator is None:
            self.generator = np.random.default_rng(3)
        if isinstance(self.generator, torch.Generator):
            return scale * torch.rand(1, generator=self.generator)
        return scale * self.generator.random()

    def method(self, rows: Any) -> Any:
        return self(rows)


def drawn_by(dataset: Any, collator: Any) -> bool:
    has_drawn = draws_from_now_on(dataset, collator)
    rows = fetch_samples(dataset, range(min(4, len(dataset))))
    if rows:
        collator(rows)
    return has_drawn()


def a_state() -> str:
    return str([str(part.tolist()) for part in random_state()[0].values()]) + str(random_state()[1])


@pytest.mark.parametrize(
    ("dataset", "collator"),
    [
        (Augmented(IMAGES), collate),
        (Masked(TEXTS), masking()),
        (Masked(TEXTS), masking(seed=3)),
        (Masked(TEXTS), Seeded(torch.Generator())),
        (Masked(TEXTS), Seeded(np.random.default_rng(1))),
        (Masked(TEXTS), Seeded(random.Random(1))),
        (Masked(TEXTS), Seeded(None)),
        (Masked(TEXTS), Seeded(None, partial(Seeded(None).method))),
        (Masked(TEXTS), partial(Seeded(None), scale=2.0)),
        (Masked(TEXTS), lambda rows: np.random.rand()),
        (Masked(TEXTS), lambda rows: random.random()),
    ],
)
def test_data_that_draw_are_found_and_nothing_is_drawn_from_them(dataset: Any, collator: Any) -> None:
    before, rows = a_state(), [dataset.rows[0]]
    expected = None if dataset.__class__ is Augmented else str(_called(collator, rows))
    with generators_kept(dataset, collator):
        assert drawn_by(dataset, collator)
    assert a_state() == before
    if expected is not None:
        assert str(_called(collator, rows)) == expected


def _called(collator: Any, rows: Any) -> Any:
    """What it gives now; nothing is drawn."""
    with generators_kept(collator):
        return collator([dict(row) for row in rows])


@pytest.mark.parametrize("dataset", [Masked(TEXTS), IMAGES, Masked([])])
def test_data_that_draw_nothing_are_found(dataset: Any) -> None:
    assert not drawn_by(dataset, collate)


def test_what_is_drawn_inside_is_drawn_from_the_shared_generators_and_goes_on_there() -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    start = random_state()
    expected = [drawn(), drawn()]
    shared = SharedRngState(start)
    found = []
    for _ in range(2):
        drawn()  # As models do.
        before = a_state()
        with shared.drawing():
            found.append(drawn())
        assert a_state() == before
    assert found == expected
    set_random_state(*shared.states)
    assert a_state() != before


@pytest.mark.parametrize("data", ["images", "masks", "seeded masks"])
def test_a_run_that_will_freeze_draws_as_trainer_does(data: str, tmp_path: Path) -> None:
    """Data, evaluations in the middle of an epoch and dropout draw in turn."""
    ours = trainer_of(
        data, PipeTransformerTrainer, tmp_path / "ours", dropout=0.1, freeze_policy="fixed", freeze_at="5:1",
        activation_cache="auto",
    )  # fmt: skip
    ours.train()
    plain = trainer_of(data, Trainer, tmp_path / "plain", dropout=0.1)
    plain.train()
    assert ours.layout.num_frozen_layers == 1
    found, expected = ([entry for entry in losses(run) if entry[0] <= 5] for run in (ours, plain))
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert [entry[2] for entry in found] == pytest.approx([entry[2] for entry in expected], rel=1e-5)


class Drawing(torch.utils.data.Sampler[int]):
    """A sampler of a script's, which draws from the numbers of all when an epoch begins."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())

    def __len__(self) -> int:
        return self.size


class OfScript:
    def _get_train_sampler(self, train_dataset: Any = None) -> Drawing:
        return Drawing(len(self.train_dataset if train_dataset is None else train_dataset))  # type: ignore[attr-defined]


@pytest.mark.parametrize("own_loader", [False, True])
def test_an_evaluation_before_the_first_step_draws_before_it(own_loader: bool, tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, PipeTransformerTrainer):
        own = type("Own", (OfScript, kind), {})
        trainer = trainer_of("images", own, tmp_path / kind.__name__, eval_on_start=True, **_parts(kind))
        if own_loader:
            loader = trainer.get_train_dataloader()
            trainer.get_train_dataloader = lambda loader=loader: loader
        trainer.train()
        found.append(losses(trainer))
    assert [entry[2] for entry in found[1]] == pytest.approx([entry[2] for entry in found[0]], rel=1e-5)


def _parts(kind: type[Trainer]) -> dict[str, int]:
    return {"pipeline_parallel_num_microbatches": 2} if kind is PipeTransformerTrainer else {}
