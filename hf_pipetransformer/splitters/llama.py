"""Llama's layer, which many decoders share: pre-norm, with `self_attn`, `post_attention_layernorm` and `mlp`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.generic import GenericSplitter


class LlamaSplitter(GenericSplitter):
    """Cuts Llama-like decoders, also those whose MLP is a mixture of experts, between attention and MLP."""

    model_types = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "mixtral", "qwen2_moe", "qwen3_moe")
    cuts_inside_layers = True

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.post_attention_layernorm, layer.mlp)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention, _ = layer.self_attn(layer.input_layernorm(hidden), *args, **kwargs)
        return hidden + attention

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
