"""Tiny models with adapters of PEFT, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
)

from tests.decoders import collate_tokens, make_decoder
from tests.decoders import make_rows as make_tokens
from tests.models import build_model, collate, make_dataset


TARGETS = {"bert": ["query", "output.dense"], "gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "down_proj"]}
ENDS = {"bert": ["word_embeddings"], "gpt2": ["wte", "lm_head"], "llama": ["embed_tokens", "lm_head"]}
TASKS = {"bert": "SEQ_CLS", "gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM"}

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
    return make_decoder(family, **options)


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
