"""A notebook's cells, one after the other: a launch on two processes from inside Python, twice.

notebook.py FOLDER PORT PORT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import notebook_launcher
from transformers import AutoModelForSequenceClassification

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.support.models import build_model, collate, make_dataset


# A cell that looks at model and data: torch has its threads already.
folder, first_port, second_port = sys.argv[1:]
data = make_dataset("bert_sequence", 16)
model = build_model("bert_sequence")
with torch.no_grad():
    model(**collate(list(data)[:4]))


# The cell that trains.
def train() -> None:
    args = PipeTransformerArguments(
        output_dir=folder, pipeline_parallel_size=2, freeze_policy="none", per_device_train_batch_size=4, max_steps=4,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    trainer = PipeTransformerTrainer(model, args, train_dataset=data, data_collator=collate)
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        notes = Path(folder, f"notes-{len(list(Path(folder).glob('notes-*.json')))}.json")
        notes.write_text(json.dumps({"losses": losses, "K": trainer.layout.pipeline_size}))
    trainer.end()


notebook_launcher(train, num_processes=2, use_port=first_port)

# The next cells: what was trained, and trained once more.
model = AutoModelForSequenceClassification.from_pretrained(folder)
notebook_launcher(train, num_processes=2, use_port=second_port)
