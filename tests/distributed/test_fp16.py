"""fp16 over stages: the scale, the skipped steps and the weights are those of plain Trainer with its own scaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.training import synchronous as steps_of_training
from tests.distributed.launches import (
    Launches,
    Layout,
    Outcome,
    Run,
    assert_trained_alike,
    launches_of,
    run_listed,
    slow_unless,
)
from tests.distributed.scenarios import WORLD_SIZE, scenario
from tests.doubles.fp16 import use_fp16
from tests.support.models import build_model, collate, has_zero_gradient, make_dataset
from tests.support.trainings import End, end_of, our_arguments, plain_arguments


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
SCHEDULES = ("gpipe", "interleaved_1f1b", "zb_h1", "zb_v")
CASES |= {
    f"first_stage-{schedule}": CASES["first_stage"] | {"pipeline": {"pipeline_schedule": schedule}}
    for schedule in SCHEDULES
}
"""Options of `GradScaler`, of both trainers and of pipelines, and steps at which a parameter's gradient is infinite.

Where layers freeze, which plain Trainer does not do, one stage on one process is compared with.
"""
RESUMED = "-resumed"
"""Ends the name of a run that goes on from a checkpoint of another one."""


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


@contextmanager
def noting_overflows(found: list[bool]) -> Iterator[None]:
    """Note for each step inside whether this rank's own gradients overflowed."""
    agree = steps_of_training.agree_on_overflow

    def noting(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found.append(not all(bool(grad.isfinite().all()) for grad in grads))
        agree(scaler, optimizer, *args)

    steps_of_training.agree_on_overflow = noting
    try:
        yield
    finally:
        steps_of_training.agree_on_overflow = agree


def train(name: str, layout: Layout | None, output: Path) -> End:
    """Train a case; plain Trainer accumulates the micro-batches that pipelines run."""
    case = name.removesuffix(RESUMED)
    own, parts = CASES[case], GLOBAL_BATCH // MICRO_BATCH
    where = output.with_name(output.name.replace(RESUMED, ""))
    options: dict[str, Any] = {
        "max_steps": STEPS, "learning_rate": 1e-3, "fp16": True, "max_grad_norm": 0.5, "weight_decay": 0.1,
        "save_strategy": "steps", "save_steps": SAVED_AT, **own.get("options", {}),
    }  # fmt: skip
    notes = Notes(own.get("infinite", {}))
    data = {"train_dataset": make_dataset(MODEL, 32), "data_collator": collate, "callbacks": [notes]}
    model = build_model(MODEL, seed=5)
    trainer: Any
    if layout is None and "freeze_policy" not in own.get("pipeline", {}):
        args = plain_arguments(where, batch=MICRO_BATCH, gradient_accumulation_steps=parts, **options)
        trainer = Trainer(model, args, **data)
    else:
        num_stages = 1 if layout is None else layout[0]
        options |= {"activation_cache": "off", "pipeline_gather_at_end": "always", **own.get("pipeline", {})}
        num_microbatches = parts * num_stages // WORLD_SIZE
        args = our_arguments(where, num_stages, pipeline_parallel_num_microbatches=num_microbatches, **options)
        trainer = PipeTransformerTrainer(model, args, **data)
    trainer.model_accepts_loss_kwargs = False
    notes.trainer = trainer
    use_fp16(trainer, **SCALING | own.get("scaling", {}))
    overflows: list[bool] = []
    with noting_overflows(overflows):
        trainer.train(resume_from_checkpoint=str(where / f"checkpoint-{SAVED_AT}") if name != case else None)
    return end_of(trainer, scales=notes.scales, learning_rates=notes.learning_rates, overflows=overflows)


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)


# One rounding of float16: the micro-batches are the same, but gradients are added in another order.
TOLERANCE = 2**-11
ON_SCHEDULES = {f"first_stage-{schedule}" for schedule in SCHEDULES}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

launches = launches_of(run_all)


def runs() -> list[Any]:
    found = [slow_unless(True, Run(case, (2, 1), case.partition("-")[0])) for case in CASES]
    layouts = [(case, layout) for case in CASES.keys() - ON_SCHEDULES for layout in ((4, 1), (2, 2))]
    return found + [slow_unless(False, Run(case, layout)) for case, layout in sorted(layouts)]


@pytest.mark.parametrize("run", runs())
def test_stages_scale_and_skip_as_plain_trainer(ours: Outcome, plain: Outcome) -> None:
    for rank in ours.ranks:
        for key in ("scales", "learning_rates"):
            assert rank[key] == plain.ranks[0][key]
    assert len(plain.logged("loss")) == STEPS
    assert_trained_alike(ours, plain, TOLERANCE, ignored=partial(has_zero_gradient, "vit"), floor=1e-3)


@pytest.mark.parametrize("run", [Run("elastic", (2, 1))], ids=str)
def test_the_scale_outlives_a_change_of_the_layout(ours: Outcome) -> None:
    """The case compares nothing otherwise: it ends on one stage, with three layers frozen."""
    for rank in ours.ranks:
        assert (rank["layout"]["num_stages"], rank["layout"]["num_frozen_layers"]) == (1, 3)


@pytest.mark.parametrize("run", [Run("first_stage", (2, 1))], ids=str)
def test_an_overflow_in_one_stage_skips_the_step_of_both(ours: Outcome) -> None:
    """Otherwise the cases would not show that the ranks agree."""
    seen = [[step for step, overflows in enumerate(rank["overflows"]) if overflows] for rank in ours.ranks]
    assert sorted(seen) == [[2], [5]]


@pytest.mark.parametrize(
    ("run", "changes"),
    [
        (Run("steady"), {1.0}),
        (Run("grows"), {1.0, 2.0}),
        (Run("too_large"), {0.5, 1.0, 2.0}),
        (Run("first_stage"), {0.5, 1.0}),
        (Run("unclipped"), {0.5, 1.0}),
    ],
    ids=str,
)
def test_the_cases_grow_and_shrink_the_scale(plain: Outcome, changes: set[float]) -> None:
    assert {later / earlier for earlier, later in pairwise(plain.ranks[0]["scales"])} == changes


@pytest.mark.parametrize(
    ("run", "again"),
    [(Run(case, (2, 1)), Run(f"{case}{RESUMED}", (2, 1), case)) for case in ("too_large", "first_stage")],
    ids=str,
)
def test_a_resumed_run_goes_on_with_its_scale(ours: Outcome, launches: Launches, again: Run) -> None:
    resumed = launches.outcome(again)
    for rank, other in zip(ours.ranks, resumed.ranks, strict=True):
        assert other["scales"] == rank["scales"][SAVED_AT:]
    assert resumed.values("loss") == ours.values("loss")
    assert all(torch.equal(resumed.weights[key], weight) for key, weight in ours.weights.items())
