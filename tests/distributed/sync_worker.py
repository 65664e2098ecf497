"""Train a few epochs with freezing and the activation cache, and note where the host waits for the device.

    sync_worker.py OUTPUT --num_stages K --model NAME [--batches N] [--cuda] [--schedule NAME]

The device is a stand-in (`tests/doubles/device.py`), or a GPU. Each rank writes `OUTPUT/waits.rank<r>.json`: the calls
of each optimizer step.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.doubles.device import DEVICE, DeviceStandIn, RealDevice
from tests.models import build_model, collate, make_rows


RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

NUM_SAMPLES = 40
GLOBAL_BATCH = 8
EPOCHS = 4
FREEZE_AT = "2:1,12:2"


class NoteSteps(TrainerCallback):
    """The calls of each step: from the fetch of its batches up to the fetch of the next step's."""

    def __init__(self, watched: DeviceStandIn | RealDevice) -> None:
        self.watched = watched
        self.steps: dict[int, list[str]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps[state.global_step - 1] = self.watched.taken()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--num_stages", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--schedule", default="1f1b")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    watched = RealDevice() if parsed.cuda else DeviceStandIn()
    noted = NoteSteps(watched)
    if not parsed.cuda:
        PipeTransformerArguments.device = property(lambda self: (self._setup_devices, DEVICE)[1])
    trainer = PipeTransformerTrainer(
        model=build_model(parsed.model, 11),
        args=PipeTransformerArguments(
            output_dir=str(parsed.output / "run"),
            per_device_train_batch_size=GLOBAL_BATCH // WORLD_SIZE // parsed.batches,
            gradient_accumulation_steps=parsed.batches,
            num_train_epochs=EPOCHS,
            learning_rate=1e-3,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not parsed.cuda,
            seed=7,
            pipeline_parallel_size=parsed.num_stages,
            pipeline_parallel_num_microbatches=2,
            elastic=False,
            freeze_policy="fixed",
            freeze_at=FREEZE_AT,
            freeze_min_active_layers=0,
            activation_cache="auto" if parsed.schedule == "async_1f1b" else "on",
            pipeline_schedule=parsed.schedule,
            activation_cache_dir=str(parsed.output / "cache"),
        ),
        train_dataset=make_rows(parsed.model, NUM_SAMPLES),
        data_collator=collate,
        callbacks=[noted],
    )
    with watched.active():
        trainer.train()
    events = (parsed.output / "run" / "pipetransformer_events.jsonl") if RANK == 0 else None
    cache = [json.loads(line) for line in events.read_text().splitlines()] if events is not None else []
    report = {
        "steps": noted.steps,
        "mixtures": watched.mixtures,
        "transitions": [event["step"] for event in cache if event["event"] == "transition"],
        "cache": [event for event in cache if event["event"] == "cache"],
    }
    (parsed.output / f"waits.rank{RANK}.json").write_text(json.dumps(report))
    trainer.end()


if __name__ == "__main__":
    main()
