"""Train a few epochs with freezing and the activation cache, and note where the host waits for the device.

The device is a stand-in (`tests/doubles/device.py`), or a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.distributed.scenarios import RANK, WORLD_SIZE, scenario
from tests.doubles.device import DEVICE, DeviceStandIn, RealDevice
from tests.support.models import build_model, collate, make_rows


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
        args=PipeTransformerArguments(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=GLOBAL_BATCH // WORLD_SIZE // batches,
            gradient_accumulation_steps=batches,
            num_train_epochs=EPOCHS,
            learning_rate=1e-3,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not cuda,
            seed=7,
            pipeline_parallel_size=num_stages,
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
