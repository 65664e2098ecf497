"""A real causal language model in a pipeline beside plain `Trainer`: SmolLM2-135M with LoRA over weights in 4 bits."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    default_data_collator,
    set_seed,
)

from hf_pipetransformer.selftest.runs import losses_of
from hf_pipetransformer.splitters.quantized import prepare_quantized

from .measure import Settings, experiment, launch, report
from .models import passages, smollm2, smollm2_files
from .training import Timed, make_trainer


BLOCK, BATCH = 256, 4
STAGES = {"pipeline_parallel_size": 2, "freeze_policy": "none"}
RUNS: dict[str, dict[str, Any]] = {
    "Trainer, QLoRA": {},
    "two stages, QLoRA": STAGES,
    # Where no product is one of a part of the batch, nothing is rounded otherwise than by Trainer.
    "two stages, QLoRA, one micro-batch": {**STAGES, "pipeline_parallel_num_microbatches": 1},
    # What a product of a part of the batch rounds otherwise than one of the whole.
    "Trainer, QLoRA, two batches of two accumulated": {
        "per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2,
    },
}  # fmt: skip


def blocks_of(file: Path, tokenizer: Any, count: int) -> list[dict[str, list[int]]]:
    """The first blocks of the passages of a file, each passage ended by the end of sequence."""
    texts = list(passages(file, 4 * count)["text"])
    words = [word for ids in tokenizer(texts)["input_ids"] for word in [*ids, tokenizer.eos_token_id]]
    blocks = [words[start : start + BLOCK] for start in range(0, count * BLOCK, BLOCK)]
    return [{"input_ids": block, "labels": block} for block in blocks]


def quantize(folder: str) -> None:
    """Save the model's weights in 4 bits."""
    model, _ = smollm2()
    model.save_pretrained("whole")
    # Float32, so that products of parts of a batch are those of the whole.
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained("whole", quantization_config=four_bits).save_pretrained(folder)


def train_adapters(settings: Settings, name: str, folder: str) -> dict[str, Any]:
    """A few steps of LoRA on queries and values of the quantized model, and the perplexity before and after."""
    from peft import LoraConfig, get_peft_model

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(**smollm2_files())
    prepare_quantized(model)  # Plain Trainer's evaluation would pack the weights, for good.
    set_seed(0)
    steps = settings.of(4, 1)
    given = {
        "model": get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")),
        "train_dataset": blocks_of(settings.data / "squad_v1_train_partial.parquet", tokenizer, steps * BATCH),
        "eval_dataset": blocks_of(settings.data / "squad_v1_dev.parquet", tokenizer, 4),
        "data_collator": default_data_collator,
    }
    trainer = make_trainer(
        given, BATCH, Trainer if name.startswith("Trainer") else Timed, max_steps=steps, learning_rate=1e-4,
        logging_strategy="steps", logging_steps=1, **RUNS[name],
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    perplexity = [round(math.exp(loss), 4) for loss in (before, trainer.evaluate()["eval_loss"])]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"losses": losses_of(trainer), "gradient norms": norms, "perplexity": perplexity}


@experiment("causal.json", minutes=6, quick_minutes=3)
def causal(settings: Settings) -> dict[str, Any]:
    """SmolLM2-135M with QLoRA in two stages beside `Trainer`: losses, gradient norms, perplexity."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="bench-causal-") as folder:
        launch(quantize, 1, folder)
        for name in RUNS:
            processes = 2 if name.startswith("two") else 1
            results[name] = launch(train_adapters, processes, settings, name, folder)
            report(name, results[name])
    return results
