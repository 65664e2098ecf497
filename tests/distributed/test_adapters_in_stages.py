"""Adapters on stages: the numbers and files of Trainer with PEFT, and no bytes for what is frozen.

Beside what it logs, a run notes whether saved adapters give the same logits, and of every rank what it keeps for the
training (see `Holdings`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.planning.blocks import trained_elements
from hf_pipetransformer.splitters.quantized import prepare_quantized
from hf_pipetransformer.state.plain_checkpoint import export_checkpoint
from tests.distributed.launches import (
    Layout,
    Outcome,
    Run,
    assert_trained_alike,
    launches_of,
    run_listed,
    run_params,
    slow_unless,
)
from tests.distributed.scenarios import scenario
from tests.support.adapted import ADDS, METHODS, adapted, base_of, data_of
from tests.support.trainings import End, end_of, losses_of, our_arguments, plain_arguments


STEPS, SAVED_AT = 6, 4


@dataclass(frozen=True)
class AdapterCase:
    """One training.

    Args:
        family: of the model.
        method: of the adapters.
        options: of the pipeline.
        training: other options.
        is_added: the adapter is added to the model, not around it.
        layouts: K and R.
    """

    family: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    is_added: bool = False
    layouts: tuple[tuple[int, int], ...] = ((2, 1),)

    @property
    def freezes(self) -> bool:
        """Whether layers freeze, which plain Trainer does not do."""
        return "freeze_policy" in self.options


FROZEN = {"freeze_policy": "fixed", "freeze_at": "2:1,4:3", "activation_cache": "on", "elastic": True}
EVERYWHERE = ((2, 1), (2, 2), (4, 1))
ON_EVERY_CHANGE = {
    "gpt2-dora": AdapterCase("gpt2", "dora", training={"gradient_accumulation_steps": 2}, layouts=EVERYWHERE),
    "bert-lora": AdapterCase("bert", "lora", layouts=EVERYWHERE),
    "gpt2-frozen": AdapterCase("gpt2", "lora", FROZEN, layouts=EVERYWHERE),
    "nf4": AdapterCase("llama-nf4", "lora", layouts=EVERYWHERE),
    "nf4-frozen": AdapterCase("llama-nf4", "lora", FROZEN, layouts=EVERYWHERE),
    "int8-frozen": AdapterCase("llama-int8", "lora", FROZEN, layouts=EVERYWHERE),
}
OTHERS = {
    "bert-added": AdapterCase("bert", "lora", is_added=True),
    "bert-zero-bubble": AdapterCase("bert", "dora", {"pipeline_schedule": "zb_h1"}),
    "bert-recomputed": AdapterCase("bert", "lora", {"pipeline_checkpoint": "always"}),
    "llama-smoothed": AdapterCase("llama", "lora", training={"label_smoothing_factor": 0.1}),
    "llama-slices": AdapterCase("llama", "lora", {"pipeline_schedule": "token", "pipeline_token_slices": "4"}),
    "llama-upper-stored": AdapterCase("llama", "upper", {"activation_cache": "on"}),
    "gpt2-ends": AdapterCase("gpt2", "ends", layouts=EVERYWHERE),
    "gpt2-whole-ends": AdapterCase("gpt2", "whole-ends"),
    "fp4-upper-stored": AdapterCase("llama-fp4", "upper", {"activation_cache": "on"}),
    # One micro-batch: in bfloat16 products of parts of a batch differ.
    "qwen2-nf4": AdapterCase("qwen2-nf4", "lora", {"pipeline_parallel_num_microbatches": 1}, layouts=((2, 1), (4, 1))),
    "qwen2-float32": AdapterCase("qwen2-float32", "lora", layouts=EVERYWHERE),
    "qwen2-float32-frozen": AdapterCase("qwen2-float32", "lora", FROZEN, layouts=EVERYWHERE),
    "int8": AdapterCase("llama-int8", "lora", layouts=EVERYWHERE),
    "int8-upper-stored": AdapterCase("llama-int8", "upper", {"activation_cache": "on"}),
    "qwen2-int8": AdapterCase("qwen2-int8", "biases", {"pipeline_parallel_num_microbatches": 1}, {"bf16": True}),
    **{f"llama-{method}": AdapterCase("llama", method) for method in METHODS},
}
CASES = ON_EVERY_CHANGE | OTHERS


class Holdings(TrainerCallback):
    """Notes at the end of a step what a rank keeps beside the weights: elements of gradients and optimizer state."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.found: dict[str, Any] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        store = self.trainer.pipeline_run.pipelined.pipeline.stage.store
        self.found["gradients"] = sum(p.grad.numel() for p in store.held().values() if p.grad is not None)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        pipeline = self.trainer.pipeline_run.pipelined.pipeline
        stage, costs = pipeline.stage, pipeline.start_up.plans.costs.blocks
        states = optimizer.optimizer.state.values()
        self.found |= {
            "moments": sum(value.numel() for state in states for value in state.values() if value.dim()),
            "reduced": sum(view.numel() for bucket in stage.reducer.buckets for view in bucket.views),
            "has_replicas": stage.groups.num_replicas > 1,
            "weights": sum(p.numel() for p in stage.store.held().values()),
            "planned": trained_elements(stage.layout, costs)[stage.groups.position],
            "adapters": sum(p.numel() for p in stage.trained_here().values()),
        }


def note_what_is_held(trainer: Any, held: list[int]) -> None:
    """When rank 0 saves: weights of the model that lie there then, in elements."""
    save = trainer.model.save_pretrained

    @wraps(save)
    def noting(*args: Any, **kwargs: Any) -> None:
        held.append(sum(p.numel() for p in trainer.model.parameters() if not p.is_meta))
        save(*args, **kwargs)

    trainer.model.save_pretrained = noting


def make_trainer(case: AdapterCase, output: Path, layout: Layout | None, is_plain: bool = False) -> Any:
    options = {
        "max_steps": STEPS, "learning_rate": 1e-2, "seed": 3, "save_strategy": "steps", "save_steps": SAVED_AT,
        **case.training,
    }  # fmt: skip
    model, data = adapted(case.family, case.method, case.is_added), data_of(case.family)
    if is_plain:
        trainer = Trainer(model, plain_arguments(output, **options), **data)
        if case.family == "bert":
            trainer.model_accepts_loss_kwargs = False  # transformers#47688
        return trainer
    own = {"activation_cache": "off", **case.options}
    args = our_arguments(output, 1 if layout is None else layout[0], **options, **own)
    return PipeTransformerTrainer(model, args, **data)


def loaded(case: AdapterCase, folder: Path) -> Any:
    """What PEFT, or transformers, makes of saved adapters."""
    model = base_of(case.family)
    if not case.is_added:
        return PeftModel.from_pretrained(model, folder)
    model.load_adapter(str(folder))
    return model


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    # As the trained model is: in inference bitsandbytes would multiply in bfloat16 on some CPUs.
    prepare_quantized(model)
    with torch.no_grad():
        return model.eval()(**batch).logits


def train(name: str, layout: Layout | None, output: Path) -> End:
    case = CASES[name]
    trainer = make_trainer(case, output, layout, is_plain=layout is None and not case.freezes)
    holdings = Holdings(trainer)
    if layout is not None:
        trainer.add_callback(holdings)
    held: list[int] = []
    note_what_is_held(trainer, held)
    trainer.train()
    trainer.save_model()
    values, _ = end_of(trainer, held_at_saves=held, kept=holdings.found)
    if trainer.is_world_process_zero():
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        values["loads"] = torch.equal(logits(loaded(case, output), batch), logits(trainer.model, batch))
    return values, {}  # The weights that train are in the saved adapters.


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)


RESUMED_SLOWLY = ("qwen2-float32", "int8")
FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "training_args.bin"}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

launches = launches_of(run_all, strict=())


@pytest.mark.parametrize(
    "run",
    run_params(
        {name: case.layouts for name, case in CASES.items()},
        lambda run: run.case in ON_EVERY_CHANGE and run.num_ranks == 2,
        lambda run: [ADDS] if CASES[run.case].is_added else [],
    ),
)
def test_numbers_files_and_bytes(ours: Outcome, plain: Outcome) -> None:
    assert len(ours.logged("loss")) == STEPS
    assert_trained_alike(ours, plain)
    assert ours.ranks[0]["loads"], "PEFT loads other logits than those of the model that was trained"
    assert_same_files(ours.output, plain.output)
    assert_only_adapters_cost([rank["kept"] for rank in ours.ranks])


def assert_same_files(own: Path, expected: Path) -> None:
    for folder in ("", f"checkpoint-{SAVED_AT}"):
        names = {path.name for path in (own / folder).iterdir() if path.is_file()}
        assert names >= FILES - ({"README.md"} if not (expected / folder / "README.md").exists() else set())
        assert not any(name.startswith("model") for name in names)
        saved, plain = (load_file(path / folder / "adapter_model.safetensors") for path in (own, expected))
        assert saved.keys() == plain.keys()
        for key, value in plain.items():
            torch.testing.assert_close(saved[key], value, rtol=1e-4, atol=1e-5)
        configs = [json.loads((path / folder / "adapter_config.json").read_text()) for path in (own, expected)]
        assert configs[0].keys() == configs[1].keys()
        assert [key for key in configs[0] if not same(configs[0][key], configs[1][key])] == []


def same(one: Any, other: Any) -> bool:
    """Sets are saved in any order."""
    return sorted(map(str, one)) == sorted(map(str, other)) if isinstance(one, list) else bool(one == other)


def assert_only_adapters_cost(ranks: list[dict[str, Any]]) -> None:
    """Gradients, buffers and moments are those of the adapters of a rank's layers, as the layout's plan says."""
    for kept in ranks:
        assert kept["adapters"] == kept["gradients"] == kept["planned"]
        assert kept["moments"] == 2 * kept["adapters"]
        assert kept["reduced"] == (kept["adapters"] if kept["has_replicas"] else 0)
        assert 0 < kept["adapters"] < kept["weights"] / 4


@pytest.mark.parametrize("run", [Run("bert-lora", (2, 1))], ids=str)
def test_only_what_is_saved_comes_to_the_first_rank(ours: Outcome) -> None:
    """In the middle of a run; at its end the model is whole."""
    *during, after = ours.ranks[0]["held_at_saves"]
    first, second = (rank["kept"] for rank in ours.ranks)
    saved = first["weights"] + second["adapters"]
    assert during and all(first["weights"] < held <= saved for held in during) and saved < after


@pytest.mark.parametrize(
    "run", [slow_unless(name not in RESUMED_SLOWLY, Run(name, (2, 1))) for name in ("bert-lora", *RESUMED_SLOWLY)]
)
def test_a_checkpoint_of_two_stages_goes_on_on_one_and_in_plain_trainer(
    ours: Outcome, plain: Outcome, run: Run, tmp_path: Path
) -> None:
    saved = str(ours.output / f"checkpoint-{SAVED_AT}")
    export_checkpoint(saved, str(tmp_path / "exported"))
    on_one = make_trainer(CASES[run.case], tmp_path / "ours", None)
    in_plain = make_trainer(CASES[run.case], tmp_path / "plain", None, is_plain=True)
    for trainer, where in ((on_one, saved), (in_plain, str(tmp_path / "exported"))):
        trainer.train(resume_from_checkpoint=where)
        assert losses_of(trainer)[-2:] == pytest.approx(plain.values("loss")[-2:], rel=1e-5)


@pytest.mark.parametrize("run", [Run("gpt2-frozen", (2, 1))], ids=str)
def test_layers_freeze_move_and_are_read_with_their_adapters(ours: Outcome) -> None:
    last = ours.ranks[0]["layout"]
    assert (last["num_frozen_layers"], last["num_replicas"]) == (3, 2)
    assert [event["shared"] for event in ours.events("freeze")] == [[], []]
    assert sum(event.get("hits", 0) for event in ours.events("cache")) > 0
    before, after = (
        load_file(path / "adapter_model.safetensors") for path in (ours.output / f"checkpoint-{SAVED_AT}", ours.output)
    )
    moved = {key.split(".h.")[1][0] for key in before if not torch.equal(before[key], after[key])}
    assert moved == {"3"}
