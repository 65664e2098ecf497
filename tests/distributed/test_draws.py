"""What data sets and collators draw at random is the same under every layout: what one process of Trainer draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from tests.distributed.draws_worker import CASES, train
from tests.distributed.scenarios import run
from tests.support.drawing import losses, trainer_of


OF_TRAINER = ("train_sampling_strategy", "dataloader_num_workers")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Losses of each case on two processes."""
    records = run(train, tmp_path_factory.mktemp("draws"), 2, {"names": list(CASES)}, timeout=200)
    losses_of: dict[str, list[Any]] = records[0]
    return losses_of


@pytest.mark.parametrize("name", CASES)
def test_data_draw_what_they_draw_in_one_process(name: str, found: dict[str, list[Any]], tmp_path: Path) -> None:
    data, runs = CASES[name]
    plain = trainer_of(data, Trainer, tmp_path, **{key: value for key, value in runs[0].items() if key in OF_TRAINER})
    plain.train()
    assert_equal(found[name], losses(plain))


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert [tuple(entry[:2]) for entry in found] == [entry[:2] for entry in expected]
    assert [entry[2] for entry in found] == pytest.approx([entry[2] for entry in expected], rel=1e-5)
