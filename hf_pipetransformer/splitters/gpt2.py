"""GPT-2: pre-norm layers with `ln_1`, `attn`, `ln_2` and `mlp`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.generic import GenericSplitter


class GPT2Splitter(GenericSplitter):
    """Cuts GPT-2 between attention and MLP."""

    model_types = ("gpt2",)
    cuts_inside_layers = True

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.ln_2, layer.mlp)

    def run_attention(
        self,
        layer: Any,
        hidden: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        *_encoder: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        for name in ("encoder_hidden_states", "encoder_attention_mask"):
            kwargs.pop(name, None)
        attention, _ = layer.attn(layer.ln_1(hidden), past_key_values, attention_mask, **kwargs)
        return hidden + attention

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer.mlp(layer.ln_2(hidden))
