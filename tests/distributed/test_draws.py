"""What data sets and collators draw at random is the same under every layout: what one process of Trainer draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.resume_worker import write_plan
from tests.distributed.scenarios import run, scenario
from tests.support.drawing import losses, trainer_of


# Data, and the options of the runs: the second goes on from the checkpoint of the first.
CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "images-2x1": ("images", [{"pipeline_parallel_size": 2}]),
    "masks-1x2": ("masks", [{"pipeline_parallel_size": 1}]),
    "seeded-masks-1x2": ("seeded masks", [{"pipeline_parallel_size": 1}]),
    # In the middle of the first epoch two stages become two replicas.
    "masks-2x1-1x2": ("masks", [{"layout_plan": {0: (2, 0), 2: (1, 0)}}]),
    "images-2x1-then-1x2": ("images", [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 1}]),
    "masks-1x2-by-length": ("masks", [{"pipeline_parallel_size": 1, "train_sampling_strategy": "group_by_length"}]),
    "masks-2x1-workers": ("masks", [{"pipeline_parallel_size": 2, "dataloader_num_workers": 1}]),
}
SAVED_AT = 4


@scenario
def train(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return the losses of each case."""
    found: dict[str, Any] = {}
    for name in names:
        data, runs = CASES[name]
        for index, options in enumerate(runs):
            options = {"freeze_policy": "none", **options}
            if "layout_plan" in options:
                plan = folder / f"{name}.jsonl"
                write_plan(plan, options["layout_plan"])
                options["layout_plan"] = str(plan)
            saves = SAVED_AT if len(runs) > 1 else None
            trainer = trainer_of(data, PipeTransformerTrainer, folder / name, 2, save_at=saves, **options)
            trainer.train(resume_from_checkpoint=index > 0)
            found[name] = losses(trainer)
    return found


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
