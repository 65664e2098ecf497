"""Tiny causal language models, and text for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)


VOCABULARY, LONGEST = 60, 48
# Each config has its own words for some of these, and knows the common ones too.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_KINDS: dict[str, tuple[type[nn.Module], type[PreTrainedConfig], dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "llama": (LlamaForCausalLM, LlamaConfig, {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {**_GROUPED, "sliding_window": 10}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _GROUPED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_GROUPED, "head_dim": 8}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**_GROUPED, "head_dim": 8, "sliding_window": 10}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**_GROUPED, "head_dim": 8, "sliding_window": 10}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {**_GROUPED, "pad_token_id": 0}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, _GROUPED),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {**_GROUPED, "pad_token_id": 0}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {"hidden_dropout": 0.0}),
    "opt": (OPTForCausalLM, OPTConfig, {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**_GROUPED, "num_local_experts": 4}),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**_GROUPED, **_EXPERTS, "head_dim": 8}),
}
DECODERS = tuple(_KINDS)
"""One of each family that is tested."""
CUT_INSIDE = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "mixtral", "qwen2_moe", "qwen3_moe")
"""Those that may be cut between attention and MLP."""


NUM_LABELS = 3
_CLASSIFIERS: dict[str, Any] = {
    "classes": AutoModelForSequenceClassification,
    "tags": AutoModelForTokenClassification,
}


def make_decoder(name: str, task: str = "words", **options: Any) -> Any:
    """A model of a family for the next "words", for "classes" of sequences or "tags" of tokens, without dropout.

    `options` change its config.
    """
    model, config, own = _KINDS[name]
    if task == "words":
        return model(config(**{**_COMMON, **own, **options}))
    classes = {"num_labels": NUM_LABELS, "pad_token_id": 0, "classifier_dropout": 0.0}
    return _CLASSIFIERS[task].from_config(config(**{**_COMMON, **own, **classes, **options}))


def ties_embeddings(name: str) -> bool:
    """Whether the model of a family has one weight for its embeddings and its head, unless told otherwise."""
    _, config, own = _KINDS[name]
    return bool(config(**own).tie_word_embeddings)


def make_rows(num: int = 64, task: str = "words") -> list[dict[str, Any]]:
    """Sequences of different lengths; their labels are themselves, or what can be told from them."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(LONGEST // 3, LONGEST + 1, (num,), generator=generator).tolist()
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": _labels_of(ids, task)} for ids in tokens]


def _labels_of(ids: list[int], task: str) -> Any:
    tags = [token % NUM_LABELS if token % 5 else -100 for token in ids]
    return {"words": ids, "classes": sum(ids) % NUM_LABELS, "tags": tags}[task]


def make_packed_rows(num: int = 64) -> list[dict[str, Any]]:
    """Rows of one length with one, two or three texts each, which `position_ids` alone tell apart."""
    rows = []
    for number, row in enumerate(make_rows(2 * num)[::2]):
        ids = (row["input_ids"] * 3)[:LONGEST]
        starts = [0, *sorted({7 + number % 9, 25} if number % 3 == 2 else {11 + number % 20} if number % 3 else ())]
        lengths = [stop - start for start, stop in zip(starts, [*starts[1:], LONGEST], strict=True)]
        labels = [-100 if place in starts else token for place, token in enumerate(ids)]
        positions = [position for length in lengths for position in range(length)]
        rows.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return rows


def collate_tokens(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: Any, filler: int) -> Any:
        return values + [filler] * (longest - len(values)) if isinstance(values, list) else values

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) for row in rows]),
    }
