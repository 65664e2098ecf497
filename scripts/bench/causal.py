"""A real causal language model in a pipeline, beside plain `Trainer`: SmolLM2-135M-Instruct on passages of SQuAD.

Each run is a launch of its own, a few steps from the same weights: whole sequences and slices of them in two stages
beside `Trainer`; then LoRA over weights in 4 bits (QLoRA, NF4), which are quantized once. Set side by side are losses,
gradient norms, and the perplexity on passages of the validation questions before and after.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.splitters.quantized import prepare_quantized

from .measure import Settings, experiment, largest_difference, launch, report
from .models import passages, smollm2
from .training import run_options, world_size


BLOCK, BATCH, EVALUATED = 256, 4, 4
QLORA = "Trainer, QLoRA"
RUNS: dict[str, dict[str, Any]] = {
    "Trainer": {},
    "two stages": {"pipeline_parallel_size": 2},
    "two stages, slices": {"pipeline_parallel_size": 2, "pipeline_schedule": "token", "pipeline_token_slices": "4"},
    QLORA: {},
    "two stages, QLoRA": {"pipeline_parallel_size": 2},
    # Where no product is one of a part of the batch, nothing is rounded otherwise than by Trainer.
    "two stages, QLoRA, one micro-batch": {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 1},
    # What a product of a part of the batch rounds otherwise than one of the whole.
    "Trainer, QLoRA, two batches of two accumulated": {
        "per_device_train_batch_size": BATCH // 2, "gradient_accumulation_steps": 2,
    },
}  # fmt: skip


def blocks_of(file: str, tokenizer: Any, count: int) -> list[dict[str, list[int]]]:
    """The first blocks of the passages of a file, each passage ended by the end of sequence."""
    texts = passages(file, 4 * count)["text"]
    words = [word for ids in tokenizer(texts)["input_ids"] for word in [*ids, tokenizer.eos_token_id]]
    blocks = [words[start : start + BLOCK] for start in range(0, count * BLOCK, BLOCK)]
    return [{"input_ids": block, "labels": block} for block in blocks]


def quantize(folder: str) -> None:
    """Save the model's weights in 4 bits."""
    model, _ = smollm2()
    with tempfile.TemporaryDirectory() as plain:
        model.save_pretrained(plain)
        # Float32, so that products of parts of a batch are those of the whole.
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        AutoModelForCausalLM.from_pretrained(plain, quantization_config=four_bits).save_pretrained(folder)


def with_adapters(folder: Path) -> Any:
    """The quantized model with LoRA on queries and values."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(folder)
    prepare_quantized(model)  # Plain Trainer's evaluation would pack the weights, for good.
    set_seed(0)
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(name: str, data: str, steps: int, folder: str) -> dict[str, Any]:
    """One run; its adapters, if it has some, are saved in the folder."""
    model, tokenizer = smollm2()
    given: dict[str, Any] = {
        "model": with_adapters(Path(folder) / "4 bits") if "QLoRA" in name else model,
        "train_dataset": blocks_of(f"{data}/squad_v1_train_partial.parquet", tokenizer, steps * BATCH),
        "eval_dataset": blocks_of(f"{data}/squad_v1_dev.parquet", tokenizer, EVALUATED),
        "data_collator": default_data_collator,
    }
    common = run_options(
        BATCH, max_steps=steps, logging_strategy="steps", logging_steps=1,
        learning_rate=1e-4 if "QLoRA" in name else 2e-5,
    )  # fmt: skip
    if world_size() == 1:
        trainer = Trainer(args=TrainingArguments(**{**common, **RUNS[name]}), **given)
    else:
        args = PipeTransformerArguments(freeze_policy="none", **common, **RUNS[name])
        trainer = PipeTransformerTrainer(args=args, **given)
    before = trainer.evaluate()["eval_loss"]
    result = trainer.train()
    after = trainer.evaluate()["eval_loss"]
    if "QLoRA" in name:
        trainer.save_model(str(Path(folder) / name))
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "losses": [entry["loss"] for entry in logs], "gradient norms": [entry["grad_norm"] for entry in logs],
        "perplexity": [round(math.exp(loss), 4) for loss in (before, after)],
        "seconds": round(result.metrics["train_runtime"], 1),
    }  # fmt: skip


def adapters_beside(found: Path, expected: Path) -> float:
    """The distance of two saved adapters, relative to the way that the expected one went: its B was zero."""
    own, plain = (load_file(folder / "adapter_model.safetensors") for folder in (found, expected))
    distances = [float((own[key] - value).norm()) for key, value in plain.items()]
    return math.hypot(*distances) / math.hypot(*[float(v.norm()) for k, v in plain.items() if "lora_B" in k])


@experiment("causal.json", minutes=8, quick_minutes=6)
def causal(settings: Settings) -> dict[str, Any]:
    """SmolLM2-135M in two stages, whole sequences, slices and QLoRA, beside `Trainer`: losses, norms, perplexity."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-causal-") as folder:
        launch(quantize, 1, Path(folder) / "4 bits")
        for name in RUNS:
            processes = 2 if name.startswith("two") else 1
            found = launch(train, processes, name, settings.data, settings.of(4, 1), folder)
            plain = QLORA if "QLoRA" in name else "Trainer"
            if name != plain:
                pairs = [(found[key], results[plain][key]) for key in ("losses", "gradient norms")]
                found["largest difference to Trainer"] = max(largest_difference(*pair) for pair in pairs)
            if name != plain and plain == QLORA:
                found["difference of the adapters"] = adapters_beside(Path(folder) / name, Path(folder) / plain)
            results[name] = found
            report(name, found)
    return results
