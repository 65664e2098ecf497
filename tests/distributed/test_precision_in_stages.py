"""Weights that are saved in bfloat16: cast on their stages to float32, or trained as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_model
from torch import nn
from transformers import BertForMaskedLM, Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.runtime import wiring
from tests.distributed.launches import (
    Launches,
    Layout,
    Outcome,
    Run,
    assert_trained_alike,
    far_steps,
    launches_of,
    run_listed,
    slow_unless,
)
from tests.distributed.scenarios import WORLD_SIZE, scenario
from tests.support.adapted import lora
from tests.support.models import build_model, collate, has_zero_gradient, make_dataset
from tests.support.trainings import End, end_of, our_arguments, plain_arguments


STEPS, SAVED_AT = 6, 3
MASTERS = {"pipeline_master_dtype": "float32"}
SUMS = {"pipeline_gradient_dtype": "float32"}
ELASTIC = {"freeze_policy": "fixed", "freeze_at": "2:1,4:3", "elastic": True}
CASES: dict[str, dict[str, Any]] = {
    "tied": MASTERS,
    "autocast": MASTERS | {"bf16": True},
    "elastic": MASTERS | ELASTIC,
    "adapters": MASTERS | {"bf16": True},
    "bfloat16": SUMS,
    "bfloat16-weights": {"pipeline_gradient_dtype": "weights"},
}
"""Options of our trainer by name."""
RESUMED = "-resumed"
"""Ends the name of a run that goes on from a checkpoint of another one."""


def load(case: str, dtype: torch.dtype) -> Any:
    """Load the model of a case in a dtype; what the adapters train has that dtype too, their base is bfloat16."""
    if case.startswith("bfloat16"):
        return build_model("vit", seed=5).bfloat16()  # Images: micro-batches of any layout have the same shapes.
    base = torch.bfloat16 if case == "adapters" else dtype
    whole = build_model("bert_masked", seed=5).bfloat16()
    with TemporaryDirectory() as saved:
        whole.config.save_pretrained(saved)
        save_model(whole, f"{saved}/model.safetensors", {"format": "pt"})  # `save_pretrained` writes on rank 0 only.
        model = BertForMaskedLM.from_pretrained(saved, dtype=base)
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


def train(name: str, layout: Layout | None, output: Path) -> End:
    """Train in a pipeline; the reference is of plain Trainer, or of one stage, and loads in float32 what others cast.

    What is resumed goes on in the folder of the whole run.
    """
    case = name.removesuffix(RESUMED)
    own, notes, is_vit = CASES[case], Notes(), case.startswith("bfloat16")
    where = output.with_name(output.name.replace(RESUMED, ""))
    options = {
        "max_steps": STEPS, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": SAVED_AT,
        "bf16": bool(own.get("bf16")),
    }  # fmt: skip
    model = load(case, torch.float32 if layout is None and not is_vit else torch.bfloat16)
    dataset = make_dataset("vit" if is_vit else "bert_masked", 29)
    data = {"train_dataset": dataset, "data_collator": collate, "callbacks": [notes]}
    trainer: Any
    if layout is None and case in ("tied", "autocast", "adapters"):
        trainer = Trainer(model, plain_arguments(where, **options), **data)
    else:
        num_stages = 1 if layout is None else layout[0]
        own = {"activation_cache": "off", "pipeline_gather_at_end": "always", **options, **own}
        if layout is None:
            own.pop("pipeline_master_dtype", None)
        args = our_arguments(where, num_stages, pipeline_parallel_num_microbatches=8 * num_stages // WORLD_SIZE, **own)
        trainer = PipeTransformerTrainer(model, args, **data)
    trainer.model_accepts_loss_kwargs = False
    notes.watch(trainer)
    held: list[float] = []
    with noting_casts(held):
        trainer.train(resume_from_checkpoint=str(where / f"checkpoint-{SAVED_AT}") if name != case else None)
    return end_of(trainer, dtypes=notes.dtypes, sizes=notes.sizes, held=held)


@contextmanager
def noting_casts(held: list[float]) -> Iterator[None]:
    """Note the share of the model's weights that a rank holds whenever it casts inside."""
    cast = wiring.cast_masters

    def noting(model: nn.Module, *args: Any) -> None:
        cast(model, *args)
        sizes = [(p.numel(), p.is_meta) for p in model.parameters()]
        held.append(sum(size for size, is_meta in sizes if not is_meta) / sum(size for size, _ in sizes))

    wiring.cast_masters = noting
    try:
        yield
    finally:
        wiring.cast_masters = cast


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)


TOLERANCE = {"tied": 1e-5, "elastic": 1e-5, "autocast": 2e-2, "adapters": 2e-2, "bfloat16": 1e-5}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

launches = launches_of(run_all)


def layouts(case: str) -> list[Layout]:
    return [*([(1, 1)] if case == "tied" else []), (2, 1), (4, 1), (2, 2)]


def runs() -> list[Any]:
    return [slow_unless(k * r <= 2, Run(case, (k, r))) for case in TOLERANCE for k, r in layouts(case)]


@pytest.mark.parametrize("run", runs())
def test_the_numbers_are_those_of_one_process(ours: Outcome, plain: Outcome, run: Run) -> None:
    tolerance, ignored = TOLERANCE[run.case], partial(has_zero_gradient, "bert_masked")
    assert len(plain.logged("loss")) == STEPS
    assert_trained_alike(ours, plain, tolerance, ("grad_norm",), ignored, floor=1e-3)
    # A loss in bfloat16 has 8 bits itself.
    assert (
        far_steps(ours.logged("loss"), plain.logged("loss"), "loss", max(tolerance, 2**-8 * (run.case == "bfloat16")))
        == {}
    )


def resumed_runs() -> list[Any]:
    found = []
    for case in TOLERANCE.keys() - {"bfloat16"}:
        for layout in layouts(case):
            run, again = Run(case, layout), Run(f"{case}{RESUMED}", layout, plain=case)
            marks = [pytest.mark.slow] if run.num_ranks == 4 else []
            found.append(pytest.param(run, again, id=str(run), marks=marks))
    return sorted(found, key=lambda param: param.id)


@pytest.mark.parametrize(("run", "again"), resumed_runs())
def test_a_stage_alone_is_cast_and_saved_so_and_resumed_alike(
    ours: Outcome, launches: Launches, run: Run, again: Run
) -> None:
    for rank in ours.ranks:
        assert rank["dtypes"] == [["torch.float32"]] * STEPS
        # One part of several, the tied vocabulary being in the first and the last.
        assert rank["held"] == [1.0] if run.layout[0] == 1 else max(rank["held"]) < 0.8
    if run.case == "elastic" and run.num_ranks > 1:
        assert ours.ranks[0]["sizes"][0] > ours.ranks[0]["sizes"][-1]
    resumed = launches.outcome(again)
    assert resumed.values("loss") == ours.values("loss")
    assert resumed.weights.keys() == ours.weights.keys()
    for key, weight in ours.weights.items():
        assert torch.equal(resumed.weights[key], weight), key
    saved = ours.output / f"checkpoint-{SAVED_AT}"
    if run.case == "adapters":
        assert {each.dtype for each in load_file(saved / "adapter_model.safetensors").values()} == {torch.float32}
        return
    assert {each.dtype for each in load_file(saved / "model.safetensors").values()} == {torch.float32}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("run", "other"),
    [
        pytest.param(Run("bfloat16", layout), Run("bfloat16-weights", layout, "bfloat16"), id=name, marks=marks)
        for layout, name, marks in (((2, 1), "2x1", []), ((2, 2), "2x2", [pytest.mark.slow]))
    ],
)
def test_adding_the_gradients_in_bfloat16_gives_other_numbers(
    ours: Outcome, plain: Outcome, launches: Launches, other: Run
) -> None:
    """Without it, the comparison above would show nothing about `pipeline_gradient_dtype`."""
    expected = plain.values("grad_norm")[0]
    near, far = (abs(each.values("grad_norm")[0] - expected) for each in (ours, launches.outcome(other)))
    assert near < far / 10
