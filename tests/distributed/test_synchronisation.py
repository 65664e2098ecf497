"""A step never waits for the device, whatever it freezes, stores, reads or reduces, nor for all ranks at once.

The device is a stand-in (`tests/doubles/device.py`), or a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.engine.timing import WARMUP_STEPS
from tests.distributed.scenarios import RANK, run, scenario
from tests.doubles.device import DEVICE, DeviceStandIn, RealDevice
from tests.support.models import build_model, collate, make_rows
from tests.support.trainings import our_arguments


NUM_SAMPLES = 40
GLOBAL_BATCH = 8
EPOCHS = 4
STEPS_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH
FREEZE_AT = "2:1,12:2"


class NoteSteps(TrainerCallback):
    """The calls of each step, up to the end of its update: waits for the device, and gathers over ranks."""

    def __init__(self, watched: DeviceStandIn | RealDevice) -> None:
        self.watched = watched
        self.steps: dict[int, list[str]] = {}
        self.num_gathers: dict[int, int] = {}
        self._gather, self._num_gathered = dist.all_gather, 0
        dist.all_gather = self._counted

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self._num_gathered += 1
        return self._gather(*args, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps[state.global_step - 1] = self.watched.taken()
        self.num_gathers[state.global_step - 1], self._num_gathered = self._num_gathered, 0


@scenario
def waits(
    folder: Path, num_stages: int, model: str, batches: int = 1, schedule: str = "1f1b", cuda: bool = False
) -> dict[str, Any]:
    """Return the calls of each optimizer step, and what happened."""
    set_seed(0)
    watched = RealDevice() if cuda else DeviceStandIn()
    noted = NoteSteps(watched)
    if not cuda:
        PipeTransformerArguments.device = property(lambda self: (self._setup_devices, DEVICE)[1])
    trainer = PipeTransformerTrainer(
        model=build_model(model, 11),
        args=our_arguments(
            folder / "run",
            num_stages,
            batch=GLOBAL_BATCH // batches,
            gradient_accumulation_steps=batches,
            num_train_epochs=EPOCHS,
            learning_rate=1e-3,
            logging_strategy="no",
            use_cpu=not cuda,
            seed=7,
            pipeline_parallel_num_microbatches=2,
            elastic=False,
            freeze_policy="fixed",
            freeze_at=FREEZE_AT,
            freeze_min_active_layers=0,
            activation_cache="auto" if schedule == "async_1f1b" else "on",
            pipeline_schedule=schedule,
            activation_cache_dir=str(folder / "cache"),
        ),
        train_dataset=make_rows(model, NUM_SAMPLES),
        data_collator=collate,
        callbacks=[noted],
    )
    with watched.active():
        trainer.train()
    events = (folder / "run" / "pipetransformer_events.jsonl") if RANK == 0 else None
    cache = [json.loads(line) for line in events.read_text().splitlines()] if events is not None else []
    trainer.end()
    return {
        "steps": noted.steps,
        "num_gathers": noted.num_gathers,
        "mixtures": watched.mixtures,
        "transitions": [event["step"] for event in cache if event["event"] == "transition"],
        "cache": [event for event in cache if event["event"] == "cache"],
    }


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
