"""TRL's SFTTrainer keeps its numbers in a pipeline, also those that it logs beside the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from trl import SFTTrainer

from hf_pipetransformer.splitters.quantized import prepare_quantized
from hf_pipetransformer.trl import SFTPipelineTrainer
from tests.distributed.scenarios import WORLD_SIZE, run, scenario
from tests.support.adapted import QUANTIZED, base_of, lora
from tests.support.sft import logged, make_sft_trainer


FROZEN = {"freeze_policy": "fixed", "freeze_at": "6:1,11:2", "pipeline_compression": "throughput"}

ATTENTION_OF_TEXT = r".*(language_model|text_model).*(q_proj|v_proj)"

CASES: dict[str, dict[str, Any]] = {
    "whole": {"gradient_accumulation_steps": 2},
    "slices": {"model": "llama", "pipeline_schedule": "token", "pipeline_token_slices": "4"},
    "frozen": {"model": "qwen2", **FROZEN},
    "adapters": {"model": "gpt2", "peft_config": lora("gpt2")},
    "packed": {"model": "llama", "packing": True, "max_length": 48},
    "padding-free": {"model": "qwen2", "padding_free": True, "max_length": None, "gradient_accumulation_steps": 2},
    "pictures": {"pictures": "smolvlm"},
    "pictures-adapters": {"pictures": "qwen2_vl", "peft_config": LoraConfig(r=4, target_modules=ATTENTION_OF_TEXT)},
    "qlora": {"model": "llama-nf4", "peft_config": lora("llama-nf4")},
    "qlora-qwen2": {"model": "qwen2-float32", "peft_config": lora("qwen2-float32")},
}


def quantized(family: str) -> Any:
    """A model that SFTTrainer, which knows nothing of stages, evaluates with the same products of matrices."""
    model = base_of(family)
    prepare_quantized(model)
    return model


def make_trainer(name: str, folder: Path) -> Any:
    """SFTTrainer itself on one process, unless layers freeze, which it does not do."""
    options = dict(CASES[name])
    if options.get("model") in QUANTIZED:
        options["model"] = quantized(options["model"])
    batches = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 8 // WORLD_SIZE)
    if WORLD_SIZE > 1:
        own = {"freeze_policy": "none", "activation_cache": "off", "pipeline_parallel_size": 2}
        return make_sft_trainer(SFTPipelineTrainer, folder, **own | options | batches)
    is_frozen = "freeze_policy" in options
    kept = {key: value for key, value in options.items() if is_frozen or not key.startswith("pipeline")}
    own = {"activation_cache": "off"} if is_frozen else {}
    return make_sft_trainer(SFTPipelineTrainer if is_frozen else SFTTrainer, folder, **own | kept)


@scenario
def train(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return the log and the last layout of each case."""
    found: dict[str, Any] = {}
    for name in names:
        trainer = make_trainer(name, folder / f"{name}-{WORLD_SIZE}")
        trainer.train()
        found[name] = {"logged": logged(trainer)}
        if isinstance(trainer, SFTPipelineTrainer):
            found[name]["layout"] = trainer.layout.as_event()
    return found


TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def ends(folder: Path, num_processes: int) -> dict[str, Any]:
    found: dict[str, Any] = run(train, folder, num_processes, {"names": list(CASES)}, timeout=420)[0]
    return found


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ends(tmp_path_factory.mktemp("sft"), 1)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ends(tmp_path_factory.mktemp("sft"), 2)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ends(tmp_path_factory.mktemp("sft"), 4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_twenty_steps_are_those_of_sft_trainer(
    name: str, num_processes: int, on_one: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    found, expected = request.getfixturevalue({2: "on_two", 4: "on_four"}[num_processes])[name], on_one[name]
    assert len(found["logged"]) == len(expected["logged"]) == 6
    for own, plain in zip(found["logged"], expected["logged"], strict=True):
        # Copies, as other numbers of processes are compared with the same run of one.
        own, plain = dict(own), dict(plain)
        if CASES[name].get("model") in QUANTIZED:
            # TRL trains the adapters of a quantized model in bfloat16, in which Trainer computes the norm.
            assert own.pop("grad_norm", 0.0) == pytest.approx(plain.pop("grad_norm", 0.0), rel=2**-8)
        assert own == pytest.approx(plain, rel=TOLERANCE)
    last: dict[str, Any] = found["layout"]
    assert last["num_frozen_layers"] == (2 if name == "frozen" else 0)
    if name != "frozen":
        assert (last["num_stages"], last["num_replicas"]) == (2, num_processes // 2)
