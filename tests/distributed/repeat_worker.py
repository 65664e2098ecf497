"""Trains several times in one folder, and notes what each training did.

    repeat_worker.py FOLDER RUNS

`RUNS` is a JSON list; each entry has the options of a run, and optionally the `dropout` of its model and the
`device_bytes` of each rank, as its device would report them. Each rank writes `FOLDER/rank<r>.json`: for every run the
loss and the number of micro-batches of each step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.startup import costs
from tests.models import build_model, collate, make_dataset


RANK = int(os.environ.get("RANK", "0"))
FOLDER = Path(sys.argv[1])
MODEL = "bert_sequence"


class Note(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.counts: list[int] = []
        self.trainer: Any = None

    def on_step_end(self, args, state, control, **kwargs):
        self.counts.append(self.trainer.layout.num_microbatches)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def train(options: dict[str, Any], dropout: float = 0.0, device_bytes: list[float] | None = None) -> dict[str, Any]:
    if device_bytes is not None:
        costs._device_bytes = lambda *_: device_bytes[RANK]
    settings = {
        "output_dir": str(FOLDER / "output"),
        "per_device_train_batch_size": 8,
        "max_steps": 20,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "pipeline_parallel_size": 2,
        "pipeline_timeout": 30,
        "freeze_policy": "none",
    }
    torch.manual_seed(0)
    model = build_model(MODEL)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    note = Note()
    trainer = PipeTransformerTrainer(
        model=model,
        args=PipeTransformerArguments(**settings | options),
        train_dataset=make_dataset(MODEL, 53),
        data_collator=collate,
        callbacks=[note],
    )
    note.trainer = trainer
    trainer.train()
    return {"losses": note.losses, "counts": note.counts}


def main() -> None:
    torch.set_num_threads(1)
    found = [train(**run) for run in json.loads(sys.argv[2])]
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
