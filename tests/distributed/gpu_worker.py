"""One process of the GPU check: trains with the pipeline or, alone, with plain Trainer, and writes its numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from tests.models import build_model, collate, make_dataset


def main() -> None:
    kind, model_name, precision, num_stages, schedule, output = sys.argv[1:]
    set_seed(0)
    common: dict[str, Any] = {
        "output_dir": output, "max_steps": 20, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": "none", "seed": 1,
        "fp16": precision == "fp16", "bf16": precision == "bf16",
    }  # fmt: skip
    data: dict[str, Any] = {"train_dataset": make_dataset(model_name, 53), "data_collator": collate}
    model = build_model(model_name)
    if kind == "plain":
        trainer = Trainer(model, TrainingArguments(per_device_train_batch_size=8, **common), **data)
        trainer.model_accepts_loss_kwargs = model_name == "vit"
    else:
        args = PipeTransformerArguments(
            per_device_train_batch_size=4, pipeline_parallel_size=num_stages, pipeline_parallel_num_microbatches="4",
            pipeline_schedule=schedule, pipeline_timeout=60, **common,
        )  # fmt: skip
        trainer = PipeTransformerTrainer(model, args, **data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        Path(output, "losses.json").write_text(json.dumps(losses))
    trainer.end()


if __name__ == "__main__":
    main()
