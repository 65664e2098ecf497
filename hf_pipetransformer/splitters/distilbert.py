"""DistilBERT: post-norm layers with `attention`, `sa_layer_norm`, `ffn` and `output_layer_norm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from hf_pipetransformer.splitters.base import Splitter


class DistilBertSplitter(Splitter):
    """Cuts DistilBERT between attention and MLP."""

    model_types = ("distilbert",)
    cuts_inside_layers = True

    def layers(self, model: Any) -> list[nn.Module]:
        return list(model.base_model.transformer.layer)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.ffn, layer.output_layer_norm)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention, _ = layer.attention(hidden, *args, **kwargs)
        return cast(torch.Tensor, layer.sa_layer_norm(attention + hidden))

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.output_layer_norm(layer.ffn(hidden) + hidden))
