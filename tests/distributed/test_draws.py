"""What data sets and collators draw at random is the same under every layout: what one process of Trainer draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Trainer

from tests.distributed.draws_worker import CASES
from tests.distributed.launcher import launch
from tests.drawing import losses, trainer_of


WORKER = Path(__file__).with_name("draws_worker.py")
OF_TRAINER = ("train_sampling_strategy", "dataloader_num_workers")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draws")
    launch(WORKER, [folder, *CASES], num_processes=2, timeout=200)
    return folder


@pytest.mark.parametrize("name", list(CASES))
def test_data_draw_what_they_draw_in_one_process(name: str, folder: Path, tmp_path: Path) -> None:
    data, runs = CASES[name]
    plain = trainer_of(data, Trainer, tmp_path, **{key: value for key, value in runs[0].items() if key in OF_TRAINER})
    plain.train()
    found, expected = json.loads((folder / f"{name}.json").read_text()), losses(plain)
    assert [tuple(entry[:2]) for entry in found] == [entry[:2] for entry in expected]
    assert [entry[2] for entry in found] == pytest.approx([entry[2] for entry in expected], rel=1e-5)
