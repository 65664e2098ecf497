"""Stages that skip weight gradients: the numbers of plain Trainer without the same gradients, replicas alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launcher import launch
from tests.skipped import NUM_STEPS, largest_difference, norms_and_losses, plain, write_plan


WORKER = Path(__file__).with_name("skip_worker.py")
ON_TWO = ("2x1-1f1b", "2x1-zb_h1", "1x2-1f1b")
ON_FOUR = ("2x2-1f1b", "2x2-zb_h1", "2x2-gpipe")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.mark.parametrize("cases", [ON_TWO, pytest.param(ON_FOUR, marks=pytest.mark.slow)], ids=["two", "four"])
def test_stages_skip_what_trainer_would_without_these_gradients(tmp_path: Path, cases: tuple[str, ...]) -> None:
    world = 2 if cases is ON_TWO else 4
    for case in cases:
        shape, schedule = case.split("-")
        size, num_replicas = map(int, shape.split("x"))
        write_plan(tmp_path / f"{case}.jsonl", size, num_replicas, schedule)
    launch(WORKER, [tmp_path, *cases], world, timeout=120, strict_nccl=True)
    for case in cases:
        size = int(case[0])
        ranks = [json.loads((tmp_path / f"{case}.rank{rank}.json").read_text()) for rank in range(world)]
        assert all(rank["agreed"] == list(range(1, NUM_STEPS + 1)) for rank in ranks)
        stages = [rank["without"] for rank in ranks[:size]]
        # The replicas of a stage skip the same.
        assert [rank["without"] for rank in ranks] == stages * (world // size)
        assert all(len(stage[0]) == 0 and all(stage[1:]) for stage in stages), case
        without = [sum((stage[step] for stage in stages), []) for step in range(NUM_STEPS)]
        reference = plain(tmp_path / f"plain {case}", without)
        expected = [pytest.approx(each, rel=1e-5) for each in norms_and_losses(reference)]
        assert [tuple(each) for each in ranks[0]["numbers"]] == expected, case
        found = torch.load(tmp_path / f"{case}.pt", weights_only=True)
        assert largest_difference(found, reference.model.state_dict()) < 1e-5, case
