"""Models of a script's own on two stages that freeze and become two replicas, beside one process.

    own_model_worker.py FOLDER

Rank 0 writes `FOLDER/<name>.json` for each model: losses, and the layouts that the run went through.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests import uncommon
from tests.models import collate
from tests.test_own_models import MODELS, OwnSplitter, Stack, rows


ACROSS = ("wav2vec2", "openai_gpt", "longformer", "clip")
"""Families that are in no table, on two stages: entries of any form, lists, padded lengths, a config inside."""

FOLDER = Path(sys.argv[1])
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    for name, kind in MODELS.items():
        torch.manual_seed(0)
        args = PipeTransformerArguments(
            output_dir=str(FOLDER / f"{name}-{WORLD_SIZE}"), per_device_train_batch_size=8 // WORLD_SIZE, max_steps=8,
            use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", freeze_policy="fixed",
            freeze_at="2:1,4:3", activation_cache="off", logging_steps=1, pipeline_parallel_size=WORLD_SIZE,
            pipeline_parallel_num_microbatches=2, pipeline_compression="throughput",
        )  # fmt: skip
        splitter = None if kind is Stack else OwnSplitter()  # That one is found by its only stack.
        trainer = PipeTransformerTrainer(kind(), args, train_dataset=rows(32), splitter=splitter)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"losses": losses, "layout": trainer.layout.as_event()}
        if trainer.is_world_process_zero():
            (FOLDER / f"{name}-{WORLD_SIZE}.json").write_text(json.dumps(found))
    for name in ACROSS:
        args = PipeTransformerArguments(
            output_dir=str(FOLDER / f"{name}-{WORLD_SIZE}"), per_device_train_batch_size=8 // WORLD_SIZE, max_steps=3,
            use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
            pipeline_parallel_size=WORLD_SIZE, pipeline_parallel_num_microbatches=2, learning_rate=1e-3,
        )  # fmt: skip
        trainer = PipeTransformerTrainer(
            uncommon.build(name), args, train_dataset=uncommon.rows(name), data_collator=collate
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"losses": losses, "layout": trainer.layout.as_event()}
        if trainer.is_world_process_zero():
            (FOLDER / f"{name}-{WORLD_SIZE}.json").write_text(json.dumps(found))
    trainer.end()


if __name__ == "__main__":
    main()
