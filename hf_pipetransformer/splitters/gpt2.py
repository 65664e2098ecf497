"""GPT-2: pre-norm layers with `ln_1`, `attn`, `ln_2` and `mlp`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

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
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        attention, _ = layer.attn(layer.ln_1(hidden), past_key_values, attention_mask, **kwargs)
        hidden = hidden + attention
        if encoder_hidden_states is None:
            return hidden
        across, _ = layer.crossattention(
            layer.ln_cross_attn(hidden),
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
        )
        return cast(torch.Tensor, hidden + across)

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer.mlp(layer.ln_2(hidden))
