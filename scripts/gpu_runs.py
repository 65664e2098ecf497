"""Models and runs of the checks behind `make gpu-check`, and what is compared. See gpu_check.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


Figures = dict[str, Any]

NUM_LAYERS, NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 4, 48, 16, 4
NUM_STEPS = NUM_EPOCHS * NUM_SAMPLES // BATCH_SIZE
FREEZE_STEP, NUM_FROZEN = 3, 2
# Largest relative difference of a loss. A GPU sums float32 in another order; half precisions round every product.
TOLERANCES = {("cpu", "fp32"): 1e-5, ("cuda", "fp32"): 1e-4, ("any", "bf16"): 3e-2, ("any", "fp16"): 1e-2}


def bert() -> tuple[nn.Module, list[dict[str, Any]]]:
    set_seed(0)
    config = BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=NUM_LAYERS, num_attention_heads=4, intermediate_size=128,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    words = torch.randint(5, 500, (NUM_SAMPLES, 24))
    mask = (torch.arange(24) < torch.randint(8, 25, (NUM_SAMPLES, 1))).long()
    rows = [
        {"input_ids": words[i] * mask[i], "attention_mask": mask[i], "labels": int(words[i, 1]) % 2}
        for i in range(NUM_SAMPLES)
    ]
    return BertForSequenceClassification(config), rows


def vit() -> tuple[nn.Module, list[dict[str, Any]]]:
    set_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=64, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4,
    )  # fmt: skip
    images, classes = torch.randn(NUM_SAMPLES, 3, 16, 16), torch.randint(0, 4, (NUM_SAMPLES,)).tolist()
    return ViTForImageClassification(config), [
        {"pixel_values": images[i], "labels": classes[i]} for i in range(NUM_SAMPLES)
    ]


def llama(**options: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
    """A causal language model whose head has the weights of its embeddings; `options` go to its config."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=NUM_LAYERS, num_attention_heads=4, intermediate_size=128,
        tie_word_embeddings=True, **options,
    )  # fmt: skip
    words = torch.randint(5, 500, (NUM_SAMPLES, 24))
    return LlamaForCausalLM(config), [{"input_ids": row, "labels": row} for row in words]


MODELS: dict[str, Callable[[], tuple[nn.Module, list[dict[str, Any]]]]] = {"bert": bert, "vit": vit, "llama": llama}


class FreezeByHand(TrainerCallback):
    """What a user of Trainer writes to freeze the embeddings and the first layers before a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == FREEZE_STEP:
            last = [f".{index}." for index in range(NUM_FROZEN, NUM_LAYERS)]
            for name, parameter in model.named_parameters():
                is_head = name.startswith(("classifier", "bert.pooler", "vit.layernorm"))
                if not is_head and not any(part in name for part in last):
                    parameter.requires_grad_(False)
                    parameter.grad = None


class FrozenBits(TrainerCallback):
    """Copies of the parameters at the step of the freeze."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == FREEZE_STEP + 1:
            named = model.named_parameters()
            self.before = {name: p.detach().clone() for name, p in named if not p.is_meta and not p.requires_grad}


def common(folder: Path, device: str, precision: str, world_size: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "num_train_epochs": NUM_EPOCHS, "learning_rate": 1e-3, "weight_decay": 0.1,
        "per_device_train_batch_size": BATCH_SIZE // world_size, "max_grad_norm": 0.5, "logging_steps": 1, "seed": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": device == "cpu",
        "bf16": precision == "bf16", "fp16": precision == "fp16",
    }  # fmt: skip


def plain(model_name: str, folder: Path, device: str, precision: str, **options: Any) -> Trainer:
    """Trainer, which has not trained yet."""
    model, rows = MODELS[model_name]()
    trainer = Trainer(model, TrainingArguments(**common(folder, device, precision, 1), **options), train_dataset=rows)
    trainer.model_accepts_loss_kwargs = model_name != "bert"
    return trainer


def plain_losses(model_name: str, folder: Path, device: str, precision: str, freezes: bool = False) -> list[float]:
    trainer = plain(model_name, folder, device, precision)
    if freezes:
        trainer.add_callback(FreezeByHand())
    trainer.train()
    return losses_of(trainer)


def ours(model_name: str, folder: Path, device: str, precision: str, **options: Any) -> PipeTransformerTrainer:
    """A trainer that has not trained yet."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model, rows = MODELS[model_name]()
    options = {"freeze_policy": "none", "activation_cache": "off", "pipeline_timeout": 60, **options}
    args = PipeTransformerArguments(**common(folder, device, precision, world_size) | options)
    return PipeTransformerTrainer(model, args, train_dataset=rows, eval_dataset=rows[:10])


FREEZING = {"freeze_policy": "fixed", "freeze_at": f"{FREEZE_STEP}:{NUM_FROZEN}"}


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_close(found: Sequence[float], expected: Sequence[float], device: str, precision: str) -> Figures:
    """The largest relative difference of two runs' losses."""
    tolerance = TOLERANCES.get((device, precision)) or TOLERANCES["any", precision]
    assert len(found) == len(expected) == NUM_STEPS, f"{len(found)} and {len(expected)} losses of {NUM_STEPS} steps"
    largest = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert largest <= tolerance, f"losses differ by {largest:.3g} (relative), expected at most {tolerance:.0e}"
    return {"largest relative difference": float(f"{largest:.3g}"), "tolerance": tolerance}


def remember(folder: Path, name: str, losses: Sequence[float]) -> None:
    (folder / f"{name}.losses.json").write_text(json.dumps(list(losses)))


def recall(folder: Path, name: str) -> list[float]:
    path = folder / f"{name}.losses.json"
    assert path.exists(), f"the run of plain Trainer ({name}) gave no losses"
    losses: list[float] = json.loads(path.read_text())
    return losses
