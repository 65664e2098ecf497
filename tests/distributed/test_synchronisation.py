"""A step never waits for the device, whatever it freezes, stores, reads or reduces, nor for all ranks at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pipetransformer.engine.timing import WARMUP_STEPS
from tests.distributed.scenarios import run
from tests.distributed.sync_worker import EPOCHS, STEPS_PER_EPOCH, waits


# Of a GPU, torch tells of copies that the stand-in takes for asynchronous.
MAX_WAITS_OF_A_GPU = 2
pytestmark = pytest.mark.distributed


def reports(folder: Path, num_processes: int, **options: Any) -> list[dict[str, Any]]:
    use_cpu = str(not options.get("cuda", False)).lower()
    return run(waits, folder, num_processes, options, env={"ACCELERATE_USE_CPU": use_cpu})


def steady_steps(report: dict[str, Any], transitions: list[int]) -> dict[int, list[str]]:
    """Those after the warm-up of their layout; a step that follows a transition brings its own to the device.

    The first batch of an epoch waits: what is stored is compared with what the frozen layers compute.
    """
    warm = {begin + offset for begin in [0, *transitions] for offset in range(WARMUP_STEPS)}
    others = warm | set(range(0, len(report["steps"]), STEPS_PER_EPOCH))
    return {int(step): waits for step, waits in report["steps"].items() if int(step) not in others}


@pytest.mark.parametrize(
    ("num_stages", "num_processes", "model", "options"),
    [
        (1, 1, "vit", {"batches": 2}),
        (1, 2, "vit", {}),
        (2, 2, "bert_masked", {}),
        pytest.param(2, 4, "bert_masked", {}, marks=pytest.mark.slow),
        pytest.param(2, 4, "vit", {"batches": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_step_does_not_wait_for_the_device(
    tmp_path: Path, num_stages: int, num_processes: int, model: str, options: dict[str, Any]
):
    found = reports(tmp_path, num_processes, num_stages=num_stages, model=model, **options)
    epochs = [event for event in found[0]["cache"] if event["what"] == "epoch"]
    assert sum(event["written"] for event in epochs) and sum(event["hits"] for event in epochs)
    check(found)
    for report in found:
        # Nor for all the others at once, which would hold the first stage until the last one has finished a batch.
        gathers = [report["num_gathers"][str(step)] for step in steady_steps(report, found[0]["transitions"])]
        assert min(gathers) == 0 and sum(map(bool, gathers)) <= EPOCHS, gathers


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_step_without_a_flush_waits_no_more(tmp_path: Path, num_processes: int):
    check(reports(tmp_path, num_processes, num_stages=2, model="vit", schedule="async_1f1b"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, found none")
@pytest.mark.parametrize("model", ["vit", "bert_masked"])
def test_a_step_waits_for_a_gpu_at_most_twice(tmp_path: Path, model: str):
    check(reports(tmp_path, 1, num_stages=1, model=model, batches=2, cuda=True), MAX_WAITS_OF_A_GPU)


def check(found: list[dict[str, Any]], most: int = 0) -> None:
    transitions = found[0]["transitions"]
    assert transitions
    for rank, report in enumerate(found):
        assert not report["mixtures"], report["mixtures"]
        steps = steady_steps(report, transitions)
        assert len(steps) > len(report["steps"]) / 3
        worst = max(steps, key=lambda step: len(steps[step]))
        assert len(steps[worst]) <= most, "\n".join(
            [f"rank {rank} waits {len(steps[worst])} times in step {worst}:", *steps[worst]]
        )
