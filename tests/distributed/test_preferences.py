"""TRL's RewardTrainer and DPOTrainer keep their numbers in a pipeline, also all that they log beside the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from trl import DPOTrainer, RewardTrainer

from tests.distributed.scenarios import WORLD_SIZE, run, scenario
from tests.support.adapted import lora
from tests.support.decoders import make_decoder
from tests.support.preferences import OURS, assert_logged_alike, logged, make_pairs, make_preference_trainer


REWARD: dict[str, Any] = {"kind": RewardTrainer, "center_rewards_coefficient": 0.01}
DPO: dict[str, Any] = {"kind": DPOTrainer}
ADAPTERS: dict[str, Any] = {**DPO, "peft_config": "gpt2"}
M = "pipeline_parallel_num_microbatches"

ON_EVERY_CHANGE: dict[str, dict[str, Any]] = {
    "reward": {**REWARD, "model": "llama", M: "4", "has_margins": True},
    "adapters": {**ADAPTERS, M: "3", "gradient_accumulation_steps": 2},
    "precomputed": {**DPO, "model": "qwen2", M: "2", "precompute_ref_log_probs": True},
}
FREEZING: dict[str, Any] = {"freeze_policy": "fixed", "freeze_at": "4:2,9:3", "pipeline_compression": "throughput"}
# With larger steps TRL's own numbers differ as much between one batch of 8 and two of 4.
TRAINED_BEFORE: dict[str, Any] = {**DPO, "model": "trained-adapters", M: "2", "learning_rate": 1e-5}
OTHERS: dict[str, dict[str, Any]] = {
    "reward-frozen": {**REWARD, "model": "gpt2", M: "2", "freeze_policy": "fixed", "freeze_at": "6:1"},
    "reward-stream": {**REWARD, "model": "llama", M: "2", "is_stream": True},
    "reward-elastic": {**REWARD, "model": "llama", M: "2", **FREEZING, "learning_rate": 1e-4},
    "adapters-elastic": {**ADAPTERS, M: "2", **FREEZING},
    "reward-adapters": {**REWARD, "model": "llama", M: "1", "peft_config": "llama"},
    "reward-interleaved": {**REWARD, "model": "qwen2", M: "4", "pipeline_schedule": "interleaved_1f1b"},
    "one-part": {**ADAPTERS, M: "1"},
    "four-parts": {**ADAPTERS, M: "4", "loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5]},
    "recomputed": {**ADAPTERS, M: "2", "pipeline_checkpoint": "always", "ld_alpha": 0.5},
    "by-layers": {**DPO, "peft_config": "llama", M: "2", "gradient_checkpointing": True},
    "adapters-precomputed": {**DPO, "peft_config": "llama", M: "3", "precompute_ref_log_probs": True},
    "adapters-frozen": {**ADAPTERS, M: "2", "freeze_policy": "fixed", "freeze_at": "6:1,11:2", "elastic": False},
    "trained-before": TRAINED_BEFORE,
    "trained-before-frozen": {**TRAINED_BEFORE, "freeze_policy": "fixed", "freeze_at": "6:1,11:2"},
    "weighted": {**DPO, "model": "qwen2", M: "2", "precompute_ref_log_probs": True, "use_weighting": True},
}
CASES = ON_EVERY_CHANGE | OTHERS


def trained_adapters() -> Any:
    """A model with adapters that are not zero, whose copies are the reference."""
    torch.manual_seed(0)
    return get_peft_model(make_decoder("gpt2"), lora("gpt2", init_lora_weights=False))


def make_trainer(name: str, folder: Path, pipeline_size: int, **more: Any) -> Any:
    """TRL's trainer on one process, unless layers freeze, which it does not do."""
    options = {**CASES[name], **more}
    kind = options.pop("kind")
    if "peft_config" in options:
        family = options["peft_config"]
        task = {"task_type": "SEQ_CLS"} if kind is RewardTrainer else {}
        options |= {"model": options.get("model", family), "peft_config": lora(family, **task)}
    if options.get("model") == "trained-adapters":
        options["model"] = trained_adapters()
    batches = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 8 // WORLD_SIZE)
    if WORLD_SIZE > 1:
        own = {"freeze_policy": "none", "activation_cache": "off", "pipeline_parallel_size": pipeline_size}
        return make_preference_trainer(OURS[kind], folder, **own | options | batches)
    if "freeze_policy" in options:
        return make_preference_trainer(OURS[kind], folder, activation_cache="off", **options | {M: "1"})
    kept = {key: value for key, value in options.items() if not key.startswith("pipeline")}
    return make_preference_trainer(kind, folder, **kept)


def move_on(model: torch.nn.Module) -> None:
    """Change all weights a little, so that the model is none of which the reference is known.

    Otherwise all rewards of the first step are ties. On replicas the reference is asked in smaller batches, with less
    padding, and rounding breaks a tie there that TRL's accuracy counts as a loss.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


@scenario
def resume(folder: Path, names: list[str], pipeline_size: int = 1) -> dict[str, Any]:
    """Return the log of a run of each case that goes on from the middle of another."""
    found: dict[str, Any] = {}
    for name in names:
        where, saving = folder / f"{name}-{WORLD_SIZE}", {"save_strategy": "steps", "save_steps": 8}
        make_trainer(name, where, pipeline_size, **saving).train()
        trainer = make_trainer(name, where, pipeline_size, **saving)
        trainer.train(resume_from_checkpoint=str(where / "checkpoint-8"))
        found[name] = {"logged": logged(trainer)}
    return found


@scenario
def train(folder: Path, names: list[str], pipeline_size: int = 1) -> dict[str, Any]:
    """Return the log of each case, and the last layout; what one model predicts afterwards."""
    found: dict[str, Any] = {}
    for name in names:
        trainer = make_trainer(name, folder / f"{name}-{WORLD_SIZE}-{pipeline_size}", pipeline_size)
        # Pairs that the trainer has not seen: what the reference says of them is not known yet.
        before = trainer.evaluate(make_pairs(9, seed=2)) if name == "precomputed" else {}
        if name in ("precomputed", "weighted"):
            move_on(trainer.model)
        trainer.train()
        found[name] = {"logged": logged(trainer), "before": before}
        if WORLD_SIZE > 1:
            found[name]["layout"] = trainer.layout.as_event()
        if name == "reward":
            found[name]["predictions"] = trainer.predict(trainer.eval_dataset).predictions.flatten().tolist()
    return found


TOLERANCE = 1e-5
LAYOUTS = {
    (2, 1): tuple(ON_EVERY_CHANGE),
    (1, 2): ("reward", "precomputed", "reward-frozen", "adapters-frozen"),
    (2, 2): tuple(CASES),
    (4, 1): tuple(CASES),
}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a launch on K stages and R replicas found of its cases, launched once."""
    known: dict[tuple[int, int], dict[str, Any]] = {}

    def of(layout: tuple[int, int], names: tuple[str, ...]) -> dict[str, Any]:
        new = [name for name in names if name not in known.setdefault(layout, {})]
        if new:
            options = {"names": new, "pipeline_size": layout[0]}
            folder: Path = tmp_path_factory.mktemp("preferences")
            known[layout] |= run(train, folder, layout[0] * layout[1], options, timeout=600, strict_nccl=True)[0]
        return known[layout]

    return of


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        pytest.param(
            layout, name, id=f"{layout[0]}x{layout[1]}-{name}", marks=() if layout == (2, 1) else pytest.mark.slow
        )
        for layout, names in LAYOUTS.items()
        for name in names
    ],
)
def test_all_that_is_logged_is_that_of_trl(layout: tuple[int, int], name: str, ends: Any) -> None:
    names = LAYOUTS[layout]
    found, expected = ends(layout, names)[name], ends((1, 1), names)[name]
    largest = assert_logged_alike(found["logged"], expected["logged"], TOLERANCE)
    print(f"{name}: largest relative difference {largest:.2g}")
    for metric in ("loss", "logps/chosen", "entropy") if name == "precomputed" else ():
        assert found["before"][f"eval_{metric}"] == pytest.approx(expected["before"][f"eval_{metric}"], rel=TOLERANCE)
    if name == "reward":
        # Of the last batch, 5 pairs, TRL keeps as many rows as pairs: its chosen texts.
        assert (len(found["predictions"]), len(expected["predictions"])) == (26, 21)
        largest = max(map(abs, expected["predictions"]))
        assert found["predictions"][:21] == pytest.approx(expected["predictions"], abs=TOLERANCE * largest)
    last = found["layout"]
    if name.endswith("elastic"):
        assert last["num_frozen_layers"] == 3 and last["num_replicas"] > layout[1]
    elif "freeze_policy" not in CASES[name]:
        assert (last["num_stages"] // last["num_chunks"], last["num_replicas"]) == layout


@pytest.mark.slow
def test_a_run_goes_on_from_the_middle_of_another(tmp_path: Path) -> None:
    names = ("reward", "adapters", "precomputed")
    plain, ours = (
        run(resume, tmp_path, count, {"names": names, "pipeline_size": 2}, timeout=300, strict_nccl=True)[0]
        for count in (1, 2)
    )
    for name in names:
        assert ours[name]["logged"][-1]["step"] == 16
        assert_logged_alike(ours[name]["logged"], plain[name]["logged"], TOLERANCE)
