"""Tiny models with adapters of PEFT, by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version
from peft import (
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from safetensors.torch import save_model
from transformers import BitsAndBytesConfig
from transformers.integrations import peft as integration

from tests.support.decoders import collate_tokens, make_decoder
from tests.support.decoders import make_rows as make_tokens
from tests.support.models import build_model, collate, make_dataset


WHY_NOT_ADDED = (
    f"model.add_adapter of this transformers asks for peft >= {integration.MIN_PEFT_VERSION}, found {version('peft')}"
    if Version(version("peft")) < Version(integration.MIN_PEFT_VERSION)
    else ""
)
ADDS = pytest.mark.skipif(bool(WHY_NOT_ADDED), reason=WHY_NOT_ADDED)
"""The mark of a test that adds an adapter to a model of transformers."""

_DECODER = ["q_proj", "down_proj"]
TARGETS = {"bert": ["query", "output.dense"], "gpt2": ["c_attn", "c_proj"], "llama": _DECODER}
QUANTIZED: dict[str, dict[str, Any]] = {
    "llama-nf4": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "llama-fp4": {"bnb_4bit_quant_type": "fp4"},
    "qwen2-nf4": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "qwen2-float32": {"bnb_4bit_quant_type": "nf4"},
    "llama-stored": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16},
    "llama-int8": {"load_in_8bit": True},
    "qwen2-int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
"""Options of `BitsAndBytesConfig` by family."""
TARGETS |= dict.fromkeys(QUANTIZED, _DECODER)
ENDS = {"bert": ["word_embeddings"], "gpt2": ["wte", "lm_head"], "llama": ["embed_tokens", "lm_head"]}
TASKS = {"bert": "SEQ_CLS", "gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", **dict.fromkeys(QUANTIZED, "CAUSAL_LM")}

Make = Callable[[str], PeftConfig]


def lora(family: str, **options: Any) -> LoraConfig:
    """Inside the layers; on BERT the classifier is trained whole."""
    return LoraConfig(**{"r": 2, "target_modules": TARGETS[family], "task_type": TASKS[family], **options})


METHODS: dict[str, Make] = {
    "lora": lora,
    "dora": lambda family: lora(family, use_dora=True, use_rslora=True),
    "ranks": lambda family: lora(family, rank_pattern={".*[12].*": 3}, init_lora_weights=False),
    "biases": lambda family: lora(family, bias="all"),
    "upper": lambda family: lora(family, layers_to_transform=[2, 3]),
    "scattered": lambda family: lora(family, layers_to_transform=[0, 3]),
    "ends": lambda family: lora(family, target_modules=[*TARGETS[family], *ENDS[family]]),
    "whole-ends": lambda family: lora(family, modules_to_save=ENDS[family]),
    "ia3": lambda family: IA3Config(target_modules=TARGETS[family], feedforward_modules=TARGETS[family][-1:]),
    "vera": lambda family: VeraConfig(r=2, target_modules=TARGETS[family][:1]),
    "loha": lambda family: LoHaConfig(r=2, target_modules=TARGETS[family]),
    "lokr": lambda family: LoKrConfig(r=2, target_modules=TARGETS[family]),
    "oft": lambda family: OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS[family]),
    "hra": lambda family: HRAConfig(r=2, target_modules=TARGETS[family]),
}
"""Adapters whose parameters lie in single modules, by name."""

OUTSIDE: dict[str, Make] = {
    "prompts": lambda family: PromptTuningConfig(task_type=TASKS[family], num_virtual_tokens=3),
    "prefixes": lambda family: PrefixTuningConfig(task_type=TASKS[family], num_virtual_tokens=3),
    "encoded-prompts": lambda family: PromptEncoderConfig(task_type=TASKS[family], num_virtual_tokens=3),
}
"""Adapters that put virtual tokens before a sequence."""


def base_of(family: str, **options: Any) -> Any:
    """The model without adapters, always the same."""
    if family == "bert":
        return build_model("bert_sequence")
    torch.manual_seed(0)
    if family in QUANTIZED:
        wide = {"hidden_size": 64, "intermediate_size": 128}  # Rows of whole blocks of 64 weights.
        model = make_decoder(family.partition("-")[0], **wide, **options)
        return quantized(model, recomputes=family == "qwen2-nf4", **QUANTIZED[family])
    return make_decoder(family, **options)


def quantized(model: Any, recomputes: bool, **options: Any) -> Any:
    """The model in the 4 or 8 bits of bitsandbytes, prepared for adapters by PEFT."""
    in_4_bits = {} if "load_in_8bit" in options else {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    config = BitsAndBytesConfig(**{**in_4_bits, **options})
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)  # As after a pretraining.
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_model(model, f"{folder}/model.safetensors", {"format": "pt"})  # `save_pretrained` writes on rank 0 only.
        loaded = type(model).from_pretrained(folder, quantization_config=config)
    loaded.name_or_path = ""  # Otherwise a part of the saved adapter.
    return prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=recomputes)


def adapted(family: str, method: str, is_added: bool = False, **options: Any) -> Any:
    """A model with adapters, around it or added to it; always the same."""
    model, config = base_of(family, **options), {**METHODS, **OUTSIDE}[method](family)
    torch.manual_seed(1)
    if not is_added:
        return get_peft_model(model, config)
    model.add_adapter(config)
    return model


def data_of(family: str) -> dict[str, Any]:
    """What a trainer of the family takes."""
    if family == "bert":
        return {"train_dataset": make_dataset("bert_sequence", 24), "data_collator": collate}
    return {"train_dataset": make_tokens(24), "data_collator": collate_tokens}
