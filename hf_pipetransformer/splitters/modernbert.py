"""ModernBERT: pre-norm layers with `attn_norm`, `attn`, `mlp_norm` and `mlp`; the first one has no `attn_norm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.base import Splitter


class ModernBertSplitter(Splitter):
    """Cuts ModernBERT between attention and MLP. Layers of global and of local attention have the same shapes."""

    model_types = ("modernbert",)
    cuts_inside_layers = True

    def layers(self, model: Any) -> list[nn.Module]:
        return list(model.base_model.layers)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.mlp_norm, layer.mlp)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention, _ = layer.attn(layer.attn_norm(hidden), *args, **kwargs)
        return hidden + attention

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer.mlp(layer.mlp_norm(hidden))
