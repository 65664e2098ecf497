"""Trainings on data that draw random numbers, on two processes: K stages, replicas, both in turn, and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.resume_worker import write_plan
from tests.distributed.scenarios import scenario
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
