"""Tiny models and short runs of the checks, what is compared, and a count of what autograd keeps."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
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

import hf_pipetransformer
from hf_pipetransformer.options.arguments import PipeTransformerArguments


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


def llama(num_rows: int = NUM_SAMPLES, **options: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return a causal language model whose head has the weights of its embeddings; `options` go to its config."""
    set_seed(0)
    values = {
        "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4,
        "intermediate_size": 128, "tie_word_embeddings": True, **options,
    }  # fmt: skip
    words = torch.randint(5, 500, (num_rows, 24))
    return LlamaForCausalLM(LlamaConfig(**values)), [{"input_ids": row, "labels": row} for row in words]


MODELS: dict[str, Callable[[], tuple[nn.Module, list[dict[str, Any]]]]] = {"bert": bert, "vit": vit, "llama": llama}


class FreezeByHand(TrainerCallback):
    """Freezing as a user of Trainer writes it: embeddings and first layers before a step."""

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


class ClassWeights(Trainer):
    """A loss of the whole batch, which those of its parts do not give."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        weights = torch.arange(1.0, logits.shape[-1] + 1, device=logits.device) ** 2
        return nn.functional.cross_entropy(logits.float(), labels, weight=weights)


class ClassWeightsInParts(hf_pipetransformer.PipeTransformerMixin, ClassWeights):
    """The same loss in a pipeline."""


def plain(
    model_name: str, folder: Path, device: str, precision: str, kind: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    """Return a Trainer that has not trained yet."""
    model, rows = MODELS[model_name]()
    trainer = kind(model, TrainingArguments(**common(folder, device, precision, 1), **options), train_dataset=rows)
    trainer.model_accepts_loss_kwargs = model_name != "bert"
    return trainer


def plain_losses(model_name: str, folder: Path, device: str, precision: str, freezes: bool = False) -> list[float]:
    trainer = plain(model_name, folder, device, precision)
    if freezes:
        trainer.add_callback(FreezeByHand())
    trainer.train()
    return losses_of(trainer)


def ours(
    model_name: str,
    folder: Path,
    device: str,
    precision: str,
    kind: Any = hf_pipetransformer.PipeTransformerTrainer,
    **options: Any,
) -> Any:
    """Return a trainer that has not trained yet."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model, rows = MODELS[model_name]()
    options = {"freeze_policy": "none", "activation_cache": "off", "pipeline_timeout": 60, **options}
    args = PipeTransformerArguments(**common(folder, device, precision, world_size) | options)
    return kind(model, args, train_dataset=rows, eval_dataset=rows[:10])


FREEZING = {"freeze_policy": "fixed", "freeze_at": f"{FREEZE_STEP}:{NUM_FROZEN}"}


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_close(found: Sequence[float], expected: Sequence[float], device: str, precision: str) -> Figures:
    """Return the largest relative difference of two runs' losses; raise AssertionError if it is too large."""
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


class SavedBytes(TrainerCallback):
    """Bytes kept for the backward: `now`, and the `most` at any moment of a training step.

    Each storage counts once, those of parameters not.

    Args:
        trainer: the run; this callback is added to it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.now = self.most = 0
        self._trainer = trainer
        self._ignored: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._is_counting = False
        trainer.add_callback(self)

    def hooks(self) -> saved_tensors_hooks:
        """Return the context of the run."""
        return saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to count: what a start-up keeps to look at the model does not."""
        held = [parameter for parameter in self._trainer.model.parameters() if not parameter.is_meta]
        self._ignored = {parameter.untyped_storage().data_ptr() for parameter in held}
        self._is_counting = True

    def keep(self, tensor: torch.Tensor) -> int | None:
        """Count a tensor; return the key that `release` needs, None if it does not count."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if not self._is_counting or key in self._ignored:
            return None
        self._uses[key] += 1
        if self._uses[key] == 1:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
        return key

    def release(self, key: int, num_bytes: int) -> None:
        """Count one use less of the tensor behind `key`."""
        self._uses[key] -= 1
        if not self._uses[key]:
            self.now -= num_bytes


class _Saved:
    def __init__(self, tensor: torch.Tensor, count: SavedBytes) -> None:
        self.tensor, self.count = tensor, count
        self.key = count.keep(tensor)

    def __del__(self) -> None:
        if self.key is not None:
            self.count.release(self.key, self.tensor.untyped_storage().nbytes())
