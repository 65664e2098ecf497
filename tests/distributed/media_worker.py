"""Language models with images beside text, on stages and in plain Trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.launches import Layout, run_listed
from tests.distributed.scenarios import WORLD_SIZE, scenario
from tests.support.media_models import MODELS, Collate, Rows, build, make_rows
from tests.support.processors import PROCESSORS, collator_of, make_conversations
from tests.support.trainings import End, end_of, our_arguments, plain_arguments


STEPS, GLOBAL_BATCH, NUM_ROWS, NUM_EVALUATED = 6, 4, 22, 7


@dataclass(frozen=True)
class MediaCase:
    """One training.

    Args:
        model: one of `MODELS`.
        tower: whether it is `trained` or `frozen`.
        num_microbatches: M.
        adapts: the language model is trained by LoRA alone.
        processes: pictures and conversations go through the family's own processor, in the collator.
        options: of both trainings.
        ours: options of the pipeline.
    """

    model: str
    tower: str = "trained"
    num_microbatches: int = 1
    adapts: bool = False
    processes: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values())

    @property
    def plain(self) -> MediaCase:
        return replace(self, num_microbatches=0, ours={})


def grid(models: Iterable[str] = MODELS, numbers: Sequence[int] = (1, 2)) -> list[MediaCase]:
    """Families with what is trained in turn, in so many micro-batches each."""
    kinds = [("trained", False), ("frozen", False), ("frozen", True)]
    return [MediaCase(model, tower, number, lora) for model in models for tower, lora in kinds for number in numbers]


QUICK = [
    MediaCase("llava", "trained", 2),
    MediaCase("qwen3_vl", "trained", 2),
    MediaCase("smolvlm", "frozen", 2, processes=True),
    MediaCase("llama4", "frozen", 2, adapts=True),
    MediaCase("qwen3_5", "trained", 2),
]
PROCESSED = [MediaCase(model, "frozen", 2, processes=True) for model in PROCESSORS]
ON_FOUR_STAGES = grid(("llava", "qwen3_vl", "qwen3_5", "gemma4"), (2, 4))
"""A projector, features behind several layers, and layers of several kinds, of one form and of two."""
WORKERS = MediaCase("llava", "trained", 2, options={"dataloader_num_workers": 1})
OTHERS = [
    WORKERS,
    MediaCase("gemma3", "trained", 2, options={"dataloader_num_workers": 1}),
    MediaCase("qwen2_vl", "trained", 4),
    MediaCase("smolvlm", "trained", 2, options={"gradient_accumulation_steps": 2}),
    MediaCase("llava", "trained", 2, ours={"pipeline_schedule": "zb_h1"}),
    MediaCase("llava", "trained", 2, ours={"pipeline_schedule": "interleaved_1f1b"}),
    MediaCase("llava", "trained", 2, ours={"pipeline_checkpoint": "always"}),
    MediaCase("llava", "trained", 2, ours={"pipeline_loss": "batch"}),
]
CASES = {case.name: case for case in [*QUICK, *PROCESSED, *grid(), *ON_FOUR_STAGES, *OTHERS]}
PLAIN = {case.plain.name: case.plain for case in CASES.values()}


def make_trainer(case: MediaCase, layout: Layout | None, output: Path) -> Trainer:
    family, model = MODELS[case.model], build(case.model)
    if case.tower == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(family.tower))
    if case.adapts:
        targets = r".*(language_model|text_model).*(q_proj|v_proj)"
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    options = {
        "batch": GLOBAL_BATCH, "max_steps": STEPS, "learning_rate": 1e-3, "adam_epsilon": 1e-6, "seed": 3,
        "remove_unused_columns": False,
        "per_device_eval_batch_size": GLOBAL_BATCH // WORLD_SIZE, "prediction_loss_only": True, **case.options,
    }  # fmt: skip
    make: Callable[..., Rows] = partial(make_rows, family)
    collate: Collate = family.collate
    if case.processes:
        make, collate = make_conversations, collator_of(PROCESSORS[case.model]())
    rows = make(NUM_ROWS)
    data = {"train_dataset": rows, "eval_dataset": make(NUM_EVALUATED, seed=2), "data_collator": collate}
    if layout is None:
        return Trainer(model, plain_arguments(output, **options), **data)
    own = {"pipeline_parallel_num_microbatches": case.num_microbatches, **case.ours}
    return PipeTransformerTrainer(model, our_arguments(output, layout[0], **options, **own), **data)


def train(name: str, layout: Layout | None, output: Path) -> End:
    trainer = make_trainer(PLAIN[name] if layout is None else CASES[name], layout, output)
    trainer.train()
    return end_of(trainer, evaluated=trainer.evaluate()["eval_loss"])


KILLED = MediaCase(
    "qwen2_vl", "frozen", 2, adapts=True, processes=True, options={"save_strategy": "steps", "save_steps": 2}
)
DIES_AT = 5


class Killing(TrainerCallback):
    """End the process with no word to anybody, between two checkpoints."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        if state.global_step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)


@scenario
def die(folder: Path) -> None:
    trainer = make_trainer(KILLED, (WORLD_SIZE, 1), folder / "killed")
    trainer.add_callback(Killing())
    trainer.train()


@scenario
def go_on(folder: Path, source: str) -> dict[str, Any]:
    """Go on from a copy of what the killed run left, on as many stages as there are processes."""
    trainer = make_trainer(KILLED, (WORLD_SIZE, 1), Path(source))
    trainer.train(resume_from_checkpoint=True)
    ended, weights = end_of(trainer, evaluated=trainer.evaluate()["eval_loss"])
    if trainer.is_world_process_zero():
        save_file(weights, folder / "weights.safetensors")
    return ended


@scenario
def undisturbed(folder: Path) -> dict[str, Any]:
    trainer = make_trainer(KILLED.plain, None, folder / "plain")
    trainer.train()
    ended, weights = end_of(trainer, evaluated=trainer.evaluate()["eval_loss"])
    save_file(weights, folder / "weights.safetensors")
    return ended


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)
