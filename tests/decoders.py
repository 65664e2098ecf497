"""Tiny causal language models, and text for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
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
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)


VOCABULARY, LONGEST = 60, 48
# What grouped queries, tied embeddings and sliding windows are called is the same in all of these.
_ROTARY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip

DECODERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=128,
            n_embd=32,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )  # fmt: skip
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_ROTARY, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_ROTARY, sliding_window=10)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_ROTARY)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_ROTARY, head_dim=8)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**_ROTARY, head_dim=8, sliding_window=10)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_ROTARY, head_dim=8, sliding_window=10)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_ROTARY, pad_token_id=0)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**_ROTARY)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**_ROTARY, pad_token_id=0)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**{k: v for k, v in _ROTARY.items() if k != "num_key_value_heads"}, hidden_dropout=0.0)
    ),
}


def make_rows(num: int = 64) -> list[dict[str, Any]]:
    """Sequences of different lengths, with themselves as labels."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(LONGEST // 3, LONGEST + 1, (num,), generator=generator).tolist()
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


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
