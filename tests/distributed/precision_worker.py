"""Train models that are saved in bfloat16: loaded so and trained in float32 or in bfloat16, beside plain Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForMaskedLM, Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.runtime import wiring
from tests.distributed.scenarios import WORLD_SIZE, run_case, scenario
from tests.support.adapted import lora
from tests.support.models import build_model, collate, make_dataset


STEPS, SAVED_AT, GLOBAL_BATCH = 6, 3, 8
MASTERS = {"pipeline_master_dtype": "float32"}
SUMS = {"pipeline_gradient_dtype": "float32"}
ELASTIC = {"freeze_policy": "fixed", "freeze_at": "2:1,4:3", "elastic": True}
CASES: dict[str, dict[str, Any]] = {
    "tied": MASTERS,
    "autocast": MASTERS | {"bf16": True},
    "elastic": MASTERS | ELASTIC,
    "adapters": MASTERS | {"bf16": True},
    "bfloat16": SUMS,
}
"""Options of our trainer by name."""


def load(folder: Path, case: str, dtype: torch.dtype) -> Any:
    """Load the model of a case in a dtype; what the adapters train has that dtype too, their base is bfloat16."""
    if case == "bfloat16":
        return build_model("vit", seed=5).bfloat16()  # Images: micro-batches of any layout have the same shapes.
    base = torch.bfloat16 if case == "adapters" else dtype
    model = AutoModelForMaskedLM.from_pretrained(folder / "saved", dtype=base)
    if case != "adapters":
        return model
    torch.manual_seed(1)
    model = get_peft_model(model, lora("bert", task_type=None), autocast_adapter_dtype=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype) if parameter.requires_grad else parameter.data
    return model


class Notes(TrainerCallback):
    """Notes at the end of each step the dtypes of the weights that train, those of other stages too, and K."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.trained: set[str] = set()
        self.dtypes: list[list[str]] = []
        self.sizes: list[int] = []

    def watch(self, trainer: Any) -> None:
        self.trainer = trainer
        self.trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        named = self.trainer.model.named_parameters()
        self.dtypes.append(sorted({str(p.dtype) for name, p in named if name in self.trained}))
        layout = getattr(self.trainer, "layout", None)
        self.sizes.append(1 if layout is None else layout.pipeline_size)


def train(
    folder: Path, case: str, num_stages: int, kind: str, resumes: bool = False, **changes: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train as `pipeline`, or on one process as `single` or `plain`, which load in float32 what others cast.

    Returns what was logged and seen, and the weights on rank 0.
    """
    own, notes = CASES[case] | changes, Notes()
    output = folder / f"{case}-{kind}-{num_stages}x{WORLD_SIZE // num_stages}"
    common: dict[str, Any] = {
        "output_dir": str(output), "per_device_train_batch_size": GLOBAL_BATCH // WORLD_SIZE, "max_steps": STEPS,
        "learning_rate": 1e-3, "logging_steps": 1, "save_steps": SAVED_AT, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "bf16": bool(own.get("bf16")),
    }  # fmt: skip
    model = load(folder, case, torch.bfloat16 if kind == "pipeline" or case == "bfloat16" else torch.float32)
    name = "vit" if case == "bfloat16" else "bert_masked"
    data = {"train_dataset": make_dataset(name, 29), "data_collator": collate, "callbacks": [notes]}
    trainer: Any
    if kind == "plain":
        trainer = Trainer(model, TrainingArguments(**common), **data)
    else:
        options = {"freeze_policy": "none", "activation_cache": "off", "pipeline_gather_at_end": "always", **own}
        if kind == "single":
            options.pop("pipeline_master_dtype", None)
        size = {
            "pipeline_parallel_size": num_stages,
            "pipeline_parallel_num_microbatches": 8 * num_stages // WORLD_SIZE,
        }
        trainer = PipeTransformerTrainer(model, PipeTransformerArguments(**common | size | options), **data)
    trainer.model_accepts_loss_kwargs = False
    notes.watch(trainer)
    trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{SAVED_AT}") if resumes else None)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    seen = {"dtypes": notes.dtypes, "sizes": notes.sizes, "output": str(output)}
    return {key: [step[key] for step in steps] for key in ("loss", "grad_norm")} | seen, {
        name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()
    }


def note_casts(held: list[float]) -> None:
    """Note the share of the model's weights that a rank holds whenever it casts."""
    cast = wiring.cast_masters

    def noting(model: nn.Module, *args: Any) -> None:
        cast(model, *args)
        sizes = [(p.numel(), p.is_meta) for p in model.parameters()]
        held.append(sum(size for size, is_meta in sizes if not is_meta) / sum(size for size, _ in sizes))

    wiring.cast_masters = noting


@scenario
def save(folder: Path) -> None:
    build_model("bert_masked", seed=5).bfloat16().save_pretrained(folder / "saved")


@scenario
def run_all(folder: Path, runs: list[list[Any]], kind: str) -> None:
    """Run `(case, number of stages, options)` one after the other; a pipeline then once more, from its checkpoint."""
    held: list[float] = []
    note_casts(held)
    for case, num_stages, changes in runs:
        name = "-".join([case, kind, f"{num_stages}x{WORLD_SIZE // num_stages}", *changes.values()])
        for resumes in (False, True) if kind == "pipeline" and case != "bfloat16" else (False,):
            held.clear()

            def act() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
                found, weights = train(folder, case, num_stages, kind, resumes, **changes)  # noqa: B023
                return found | {"held": held.copy()}, weights

            run_case(folder, f"{name}-resumed" if resumes else name, act)
