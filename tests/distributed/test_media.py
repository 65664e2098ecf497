"""Language models that take images beside text follow plain Trainer on stages, in micro-batches and on replicas."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.launches import Layout, Outcome, Run, assert_trained_alike, launches_of, run_listed, slow_unless
from tests.distributed.scenarios import WORLD_SIZE, scenario
from tests.support.media_models import MODELS, build, make_rows
from tests.support.models import is_key_bias
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
        options: of both trainings.
        ours: options of the pipeline.
    """

    model: str
    tower: str = "trained"
    num_microbatches: int = 1
    adapts: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values())

    @property
    def plain(self) -> MediaCase:
        return replace(self, num_microbatches=0, ours={})


def grid() -> list[MediaCase]:
    """Every family, with what is trained in turn."""
    kinds = [("trained", False), ("frozen", False), ("frozen", True)]
    return [MediaCase(model, tower, number, lora) for model in MODELS for tower, lora in kinds for number in (1, 2)]


QUICK = [
    MediaCase("smolvlm", "frozen"),
    MediaCase("llava", "trained", 2),
    MediaCase("qwen2_vl", "frozen", 2, adapts=True),
    MediaCase("qwen3_vl", "trained", 2),
]
WORKERS = MediaCase("llava", "trained", 2, options={"dataloader_num_workers": 1})
OTHERS = [
    WORKERS,
    MediaCase("qwen2_vl", "trained", 4),
    MediaCase("smolvlm", "trained", 2, options={"gradient_accumulation_steps": 2}),
    MediaCase("llava", "trained", 2, ours={"pipeline_schedule": "zb_h1"}),
    MediaCase("llava", "trained", 2, ours={"pipeline_schedule": "interleaved_1f1b"}),
    MediaCase("llava", "trained", 2, ours={"pipeline_checkpoint": "always"}),
    MediaCase("llava", "trained", 2, ours={"pipeline_loss": "batch"}),
]
CASES = {case.name: case for case in [*QUICK, *grid(), *OTHERS]}
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
    data = {
        "train_dataset": make_rows(family, NUM_ROWS),
        "eval_dataset": make_rows(family, NUM_EVALUATED, seed=2),
        "data_collator": family.collate,
    }
    if layout is None:
        return Trainer(model, plain_arguments(output, **options), **data)
    own = {"pipeline_parallel_num_microbatches": case.num_microbatches, **case.ours}
    return PipeTransformerTrainer(model, our_arguments(output, layout[0], **options, **own), **data)


def train(name: str, layout: Layout | None, output: Path) -> End:
    trainer = make_trainer(PLAIN[name] if layout is None else CASES[name], layout, output)
    trainer.train()
    return end_of(trainer, evaluated=trainer.evaluate()["eval_loss"])


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

launches = launches_of(run_all)


def runs() -> list[Any]:
    quick = [slow_unless(True, Run(case.name, (2, 1), case.plain.name)) for case in QUICK]
    rest = [(case, (2, 1)) for case in CASES.values() if case not in QUICK]
    # One stage and one micro-batch ask for nothing that Trainer does not do.
    rest += [(case, (1, 2)) for case in grid() if case.num_microbatches > 1]
    rest += [(case, (2, 2)) for case in grid()]
    return [*quick, *(slow_unless(False, Run(case.name, layout, case.plain.name)) for case, layout in rest)]


@pytest.mark.parametrize("run", runs())
def test_losses_norms_and_weights_are_those_of_trainer(ours: Outcome, plain: Outcome, run: Run) -> None:
    assert len(ours.logged("loss")) == STEPS
    # The tower of some computes queries, keys and values at once.
    assert_trained_alike(ours, plain, ignored=lambda name: is_key_bias(name) or name.endswith(".qkv.bias"))
    assert ours.ranks[0]["evaluated"] == pytest.approx(plain.ranks[0]["evaluated"], rel=1e-5)
    layout, case = ours.ranks[0]["layout"], CASES[run.case]
    chunks = 2 if case.ours.get("pipeline_schedule") == "interleaved_1f1b" else 1
    assert (layout["num_stages"] // chunks, layout["num_replicas"]) == run.layout
    assert layout["num_microbatches"] == case.num_microbatches
