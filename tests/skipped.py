"""Runs whose steps skip weight gradients, and plain Trainer with the gradients of the same parameters set to None."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.layout import Layout
from tests.models import NUM_LAYERS, build_model, collate, make_dataset


MODEL, NUM_STEPS, GLOBAL_BATCH = "bert_sequence", 4, 8
SHARES = {1: (0.5,), 2: (0.3, 0.6)}
BOUNDARIES = {1: (0, 10), 2: (0, 4, 10)}


def write_plan(path: Path, size: int, num_replicas: int, schedule: str = "1f1b") -> Path:
    """Events of a run that tries before its second step and skips from its third on."""
    layout = Layout(NUM_LAYERS, 0, size, num_replicas, BOUNDARIES[size], 2, schedule)
    events: list[dict[str, Any]] = [
        {"event": "run", "step": 0, "layout": layout.as_event()},
        {"event": "profile", "step": 0, "what": "skip_trial", "shares": [0.5] * size},
        {"event": "profile", "step": 2, "what": "skip", "shares": list(SHARES[size])},
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": NUM_STEPS, "save_strategy": "no", "logging_steps": 1, "seed": 3,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-3, "weight_decay": 0.1,
        "max_grad_norm": 0.5, **more,
    }  # fmt: skip


class Note(TrainerCallback):
    """Which parameters have no gradient at each step of the optimizer."""

    def __init__(self) -> None:
        self.without: list[list[str]] = []
        self.trainer: Trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = self.trainer.model.named_parameters()
        self.without.append([name for name, p in parameters if p.requires_grad and p.grad is None])


def skipping(folder: Path, plan: Path, **more: Any) -> tuple[PipeTransformerTrainer, Note]:
    """A run of ours under a plan, ready to train."""
    note = Note()
    args = PipeTransformerArguments(**options(folder, layout_plan=str(plan), **more))
    trainer = PipeTransformerTrainer(
        build_model(MODEL), args, train_dataset=make_dataset(MODEL, 12), data_collator=collate, callbacks=[note]
    )
    note.trainer = trainer
    return trainer, note


def norms_and_losses(trainer: Trainer) -> list[tuple[float, float]]:
    return [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]


class _Dropping(Trainer):
    """Plain Trainer that forgets some gradients of each step before it clips them."""

    without: list[list[str]]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        for name in self.without[self.state.global_step]:
            self.model.get_parameter(name).grad = None
        return loss


def plain(folder: Path, without: list[list[str]]) -> Trainer:
    """The same run by plain Trainer on one process, trained."""
    args = TrainingArguments(**options(folder, per_device_train_batch_size=GLOBAL_BATCH))
    trainer = _Dropping(build_model(MODEL), args, train_dataset=make_dataset(MODEL, 12), data_collator=collate)
    trainer.model_accepts_loss_kwargs = False  # transformers#47688
    trainer.without = without
    trainer.train()
    return trainer


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of any weight, relative to the largest of its tensor; keys' biases, whose gradient is zero, left out."""
    return max(
        float((found[name] - value).abs().max() / value.abs().max())
        for name, value in expected.items()
        if not name.endswith("key.bias") and value.is_floating_point()
    )
