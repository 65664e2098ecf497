"""On one GPU: LoRA on a Llama of 8 billion parameters, and micro-batches in one process beside accumulation.

    python -m scripts.bench gpu-lora gpu-accumulation

The Llama has Llama-3-8B's shape and random weights in bfloat16; a step is one sequence of 4,096 tokens, without
recomputation. LoRA of rank 16 is in every linear layer, or in those of the upper half of the layers, above outputs of
the lower half that are computed again or read from the store. Steps are timed as in `gpu.py`.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer

from .gpu import SUBJECTS, Subject, Watch, device, named_gpu, on_gpu, run
from .measure import Settings, alternate, experiment, launch_all, ratios, report, summary
from .models import rows_of
from .training import losses_of, make_trainer, without_launch_variables


NUM_TOKENS, NUM_SEQUENCES, NUM_EPOCHS, RANK = 4096, 6, 4, 16
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
NARROW = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip
CONTENDERS: dict[str, tuple[type[Trainer], bool, dict[str, Any]]] = {
    "Trainer": (Trainer, False, {}),
    "ours": (PipeTransformerTrainer, False, {"freeze_policy": "none", "activation_cache": "off"}),
    "Trainer, adapters in the upper half": (Trainer, True, {}),
    "ours, adapters in the upper half, lower half stored": (
        PipeTransformerTrainer, True,
        {"freeze_policy": "none", "activation_cache": "on", "activation_cache_dir": "cache"},
    ),
}  # fmt: skip
"""Class, whether only the upper half has adapters, and options."""
MICRO_BATCHES = 8
LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def adapted(shape: dict[str, int], is_upper: bool) -> Any:
    """The model on the device, with adapters."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(**shape, max_position_embeddings=NUM_TOKENS, use_cache=False)
    with torch.device(device()):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers = range(config.num_hidden_layers // 2 if is_upper else 0, config.num_hidden_layers)
    lora = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=LINEAR, layers_to_transform=list(layers),
        layers_pattern="layers", task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(model, lora)


def train_adapters(contender: str, shape: dict[str, int], num_tokens: int) -> dict[str, Any]:
    """Train once: seconds of a step by epoch but the first, those before the first, peak bytes and losses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    kind, is_upper, options = CONTENDERS[contender]
    words = torch.randint(
        5, shape["vocab_size"], (NUM_SEQUENCES, num_tokens), generator=torch.Generator().manual_seed(0)
    )
    given = {"model": adapted(shape, is_upper), "train_dataset": rows_of({"input_ids": words, "labels": words})}
    trainer = make_trainer(
        given, 1, kind, use_cpu=device() == "cpu", bf16=True, num_train_epochs=NUM_EPOCHS, learning_rate=1e-4,
        logging_strategy="steps", logging_steps=1, **options,
    )  # fmt: skip
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    steps = [each / NUM_SEQUENCES for each in watch.epochs[1:]]
    return {"steps": steps, "start": watch.before, "bytes": peak, "losses": losses_of(trainer)}


def compare_adapters(shape: dict[str, int], num_tokens: int, rounds: int) -> dict[str, Any]:
    without_launch_variables()
    calls = {name: partial(train_adapters, name, shape, num_tokens) for name in CONTENDERS}
    runs = alternate(calls, rounds)
    whole = [step for each in runs["Trainer"] for step in each["steps"]]
    table: dict[str, Any] = {}
    for name, results in runs.items():
        steps = [step for each in results for step in each["steps"]]
        table[name] = {
            "ms of a step": summary([1e3 * step for step in steps], 2),
            "tokens a second": summary([num_tokens / step for step in steps], 0),
            "step over Trainer's": summary(ratios(steps, whole), 3),
            "seconds before the first step": summary([each["start"] for each in results], 2),
            "GiB at most": round(max(each["bytes"] for each in results) / 2**30, 3),
            "last loss": results[0]["losses"][-1],
        }
    return table


@experiment("gpu.json", section="lora", minutes=3, quick_minutes=0.5, processes=1, needs_gpu=True)
def gpu_lora(_settings: Settings) -> dict[str, Any]:
    """LoRA on Llama-3-8B's shape, 4,096 tokens a step, on one GPU."""
    size = (SHAPE, NUM_TOKENS) if torch.cuda.is_available() else (NARROW, 64)
    environment = {"ACCELERATE_USE_CPU": str(not torch.cuda.is_available()).lower()}
    [table] = launch_all(compare_adapters, 1, *size, 1, environment=environment)
    report("lora", table)
    return named_gpu() | table


def compare_accumulation(subject: Subject, rounds: int) -> dict[str, Any]:
    """Ours with M micro-batches in one process beside Trainer that accumulates them."""
    without_launch_variables()
    run(subject, "Trainer", num_train_epochs=2)  # Libraries load kernels and allocate once.
    part = max(subject.batch // MICRO_BATCHES, 1)
    parts = {"gradient_accumulation_steps": MICRO_BATCHES, "per_device_train_batch_size": part}
    runs = alternate({
        "Trainer, accumulation": partial(run, subject, "Trainer", **parts),
        "ours, micro-batches": partial(run, subject, "ours", pipeline_parallel_num_microbatches=MICRO_BATCHES),
        "Trainer, whole batch": partial(run, subject, "Trainer"),
    }, rounds)  # fmt: skip
    seconds = {name: [step for each in results for step in each["steps"]] for name, results in runs.items()}
    return {
        name: {
            "ms of a step": summary([1e3 * step for step in steps], 2),
            "over accumulation": summary(ratios(steps, seconds["Trainer, accumulation"]), 3),
        }
        for name, steps in seconds.items()
    }


@experiment("gpu.json", section="accumulation", minutes=1, quick_minutes=0.5, processes=1, needs_gpu=True)
def gpu_accumulation(settings: Settings) -> dict[str, Any]:
    """BERT-base, 64 sentences of 128 tokens in 8 parts, on one GPU."""
    SUBJECTS["bert-64"] = SUBJECTS["bert"]._replace(batch=64, num_steps=8)
    [table] = on_gpu(compare_accumulation, 1, "bert-64", settings.of(2, 1))
    report("accumulation", table)
    return named_gpu() | table
