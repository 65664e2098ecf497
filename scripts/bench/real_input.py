"""Real training on real data beside plain `Trainer`: MiniLM on SST-2, a small ViT, and SmolLM2-135M with QLoRA."""

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

from .measure import Settings, experiment, largest_difference, launch, report
from .models import cifar10_images, correct, passages, smollm2, smollm2_files, sst2
from .training import Timed, make_trainer


LOGGED = {"logging_strategy": "steps", "logging_steps": 1}


# ---- classification ----

BATCH, NUM_COMPARED_STEPS = 32, 20


def classify(settings: Settings, task: str, num_stages: int | None) -> tuple[list[float], int, int]:
    """One run: losses, right answers, and of how many; plain `Trainer` has no stages."""
    options: dict[str, Any] = {"weight_decay": 0.01, "seed": 1, **LOGGED}
    if task == "sst2":
        given = sst2(settings.data, settings.of(4_000, 320))
        options |= {"num_train_epochs": 1, "learning_rate": 1e-4, "warmup_steps": 12}
    else:
        parts = cifar10_images(settings.data, settings.models, NUM_COMPARED_STEPS * BATCH, 500)
        given = dict(zip(("model", "train_dataset", "eval_dataset"), parts, strict=True))
        options |= {"max_steps": NUM_COMPARED_STEPS, "learning_rate": 3e-4, "warmup_steps": 5}
        options |= {"remove_unused_columns": False}
    if num_stages is not None:
        options |= {"pipeline_parallel_size": num_stages, "freeze_policy": "none"}
    trainer = make_trainer({**given, "compute_metrics": correct}, BATCH, Timed if num_stages else Trainer, **options)
    trainer.train()
    return losses_of(trainer)[:NUM_COMPARED_STEPS], trainer.evaluate()["eval_correct"], len(given["eval_dataset"])


@experiment("real_input.json", minutes=12, quick_minutes=4)
def real_input(settings: Settings) -> dict[str, Any]:
    """Losses and right answers on SST-2 and CIFAR-10 beside plain `Trainer` in one process."""
    results: dict[str, Any] = {}
    for task in ("cifar10", "sst2"):
        results[task] = {}
        plain, plain_correct, samples = launch(classify, 1, settings, task, None)
        for name, num_stages in (("K=2", 2), ("K=1 x R=2", 1)):
            losses, number, _ = launch(classify, 2, settings, task, num_stages)
            results[task][name] = {
                "largest relative difference of the first losses": largest_difference(losses, plain),
                "correct": f"{number} of {samples}", "difference in correct": number - plain_correct,
            }  # fmt: skip
            report(f"{task}, {name}", results[task][name])
    return results


# ---- QLoRA ----

BLOCK, CAUSAL_BATCH = 256, 4
STAGES = {"pipeline_parallel_size": 2, "freeze_policy": "none"}
RUNS: dict[str, dict[str, Any]] = {
    "Trainer, QLoRA": {},
    "two stages, QLoRA": STAGES,
    # Where no product is one of a part of the batch, nothing is rounded otherwise than by Trainer.
    "two stages, QLoRA, one micro-batch": {**STAGES, "pipeline_parallel_num_microbatches": 1},
    # What a product of a part of the batch rounds otherwise than one of the whole.
    "Trainer, QLoRA, two batches of two accumulated": {
        "per_device_train_batch_size": CAUSAL_BATCH // 2, "gradient_accumulation_steps": 2,
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
        "train_dataset": blocks_of(settings.data / "squad_v1_train_partial.parquet", tokenizer, steps * CAUSAL_BATCH),
        "eval_dataset": blocks_of(settings.data / "squad_v1_dev.parquet", tokenizer, 4),
        "data_collator": default_data_collator,
    }
    options = {"max_steps": steps, "learning_rate": 1e-4, **LOGGED, **RUNS[name]}
    trainer = make_trainer(given, CAUSAL_BATCH, Trainer if name.startswith("Trainer") else Timed, **options)
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
