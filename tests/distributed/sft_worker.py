"""TRL's SFTTrainer in a pipeline, beside itself on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig
from trl import SFTTrainer

from hf_pipetransformer.splitters.quantized import prepare_quantized
from hf_pipetransformer.trl import SFTPipelineTrainer
from tests.distributed.scenarios import WORLD_SIZE, scenario
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


@scenario
def log_each_step(folder: Path) -> list[dict[str, float]]:
    """Return the log of two steps on two stages, with an evaluation behind each."""
    options = {"max_steps": 2, "logging_steps": 1, "eval_steps": 1, "pipeline_parallel_size": WORLD_SIZE}
    batches = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 8 // WORLD_SIZE)
    trainer = make_sft_trainer(SFTPipelineTrainer, folder, **options, **batches)
    trainer.train()
    return logged(trainer)
