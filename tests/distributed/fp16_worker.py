"""Train in fp16 with a loss scale, on stages or with plain Trainer, and note the scale of every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.training import steps as steps_of_training
from tests.distributed.scenarios import WORLD_SIZE, run_case, scenario
from tests.doubles.fp16 import use_fp16
from tests.support.models import build_model, collate, make_dataset


MODEL = "vit"
STEPS, SAVED_AT, GLOBAL_BATCH, MICRO_BATCH = 8, 4, 8, 2
SCALING = {"init_scale": 2.0**10, "growth_interval": 100}
CASES: dict[str, dict[str, Any]] = {
    "steady": {},
    "grows": {"scaling": {"growth_interval": 3}},
    "too_large": {"scaling": {"init_scale": 2.0**20, "growth_interval": 2}},
    "first_stage": {"infinite": {2: "embeddings.patch_embeddings.projection.bias", 5: "classifier.bias"}},
    "unclipped": {"infinite": {3: "classifier.bias"}, "options": {"max_grad_norm": 0.0}},
    "clipped": {"options": {"max_grad_norm": 0.05}},
    "elastic": {
        "infinite": {3: "classifier.bias"},
        "pipeline": {"freeze_policy": "fixed", "freeze_at": "2:1,5:3", "elastic": True},
    },
}
"""Options of `GradScaler`, of both trainers and of pipelines, and steps at which a parameter's gradient is infinite.

Where layers freeze, which plain Trainer does not do, one stage on one process is compared with.
"""


class Notes(TrainerCallback):
    """Notes the scale after each step, and makes gradients infinite."""

    def __init__(self, infinite: dict[int, str]) -> None:
        self.trainer: Any = None
        self.infinite = infinite
        self.scales: list[float] = []
        self.learning_rates: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        name = self.infinite.get(state.global_step)
        found = [p for key, p in self.trainer.model.named_parameters() if name and key.endswith(name)]
        for parameter in found:
            if not parameter.is_meta and parameter.requires_grad:
                self._spoil(parameter)

    def _spoil(self, parameter: torch.nn.Parameter) -> None:
        def spoil(spoiled: torch.Tensor) -> None:
            assert spoiled.grad is not None
            spoiled.grad.view(-1)[0] = torch.inf
            handle.remove()

        handle = parameter.register_post_accumulate_grad_hook(spoil)

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        self.scales.append(self.trainer.accelerator.scaler.get_scale())
        self.learning_rates.append(self.trainer.lr_scheduler.get_last_lr()[0])


def note_overflows(found: list[bool]) -> None:
    """Note for each step whether this rank's own gradients overflowed."""
    agree = steps_of_training.agree_on_overflow

    def noting(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found.append(not all(bool(grad.isfinite().all()) for grad in grads))
        agree(scaler, optimizer, *args)

    steps_of_training.agree_on_overflow = noting


def train(
    folder: Path, case: str, num_stages: int, is_plain: bool, resumes: bool = False, **changes: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train a case; plain Trainer accumulates the micro-batches that pipelines run. Returns notes and weights."""
    own = CASES[case]
    name = "-".join([case, f"{num_stages}x{WORLD_SIZE // num_stages}", *map(str, changes.values())])
    output = folder / ("plain-" + case if is_plain else name)
    parts = GLOBAL_BATCH // MICRO_BATCH
    common: dict[str, Any] = {
        "output_dir": str(output), "max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1, "fp16": True,
        "per_device_train_batch_size": MICRO_BATCH if is_plain else GLOBAL_BATCH // WORLD_SIZE, "max_grad_norm": 0.5,
        "gradient_accumulation_steps": parts if is_plain else 1, "save_steps": SAVED_AT, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "weight_decay": 0.1,
    }  # fmt: skip
    common |= own.get("options", {})
    notes = Notes(own.get("infinite", {}))
    data = {"train_dataset": make_dataset(MODEL, 32), "data_collator": collate, "callbacks": [notes]}
    model = build_model(MODEL, seed=5)
    trainer: Any
    if is_plain and "pipeline" not in own:
        trainer = Trainer(model, TrainingArguments(**common), **data)
    else:
        common |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": GLOBAL_BATCH // WORLD_SIZE}
        options = {
            "pipeline_parallel_size": num_stages,
            "pipeline_parallel_num_microbatches": parts * num_stages // WORLD_SIZE,
            "freeze_policy": "none", "activation_cache": "off", "pipeline_gather_at_end": "always",
            **own.get("pipeline", {}),
        }  # fmt: skip
        trainer = PipeTransformerTrainer(model, PipeTransformerArguments(**common | options | changes), **data)
    trainer.model_accepts_loss_kwargs = False
    notes.trainer = trainer
    use_fp16(trainer, **SCALING | own.get("scaling", {}))
    trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{SAVED_AT}") if resumes else None)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    layout = getattr(trainer, "layout", None)
    last = None if layout is None else [layout.pipeline_size, layout.num_frozen_layers]
    seen = {"last": last, "scales": notes.scales, "learning_rates": notes.learning_rates}
    return {key: [step[key] for step in steps] for key in ("loss", "grad_norm")} | seen, {
        name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()
    }


@scenario
def run_all(folder: Path, runs: list[list[Any]], is_plain: bool = False) -> None:
    """Run `(case, number of stages, options, whether it resumes)` one after the other."""
    overflows: list[bool] = []
    note_overflows(overflows)
    for case, num_stages, changes, resumes in runs:
        overflows.clear()
        layout = "plain" if is_plain else f"{num_stages}x{WORLD_SIZE // num_stages}"
        name = "-".join([case, layout, *map(str, changes.values()), *["resumed"] * resumes])

        def act() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
            found, weights = train(folder, case, num_stages, is_plain, resumes, **changes)  # noqa: B023
            return found | {"overflows": overflows.copy()}, weights

        run_case(folder, name, act)
