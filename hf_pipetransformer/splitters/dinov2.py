"""DINOv2, with and without registers: pre-norm layers whose halves are scaled and may be dropped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.base import Splitter


class Dinov2Splitter(Splitter):
    """Cuts DINOv2 between attention and MLP."""

    model_types = ("dinov2", "dinov2_with_registers")
    cuts_inside_layers = True

    def layers(self, model: Any) -> list[nn.Module]:
        return list(model.base_model.encoder.layer)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.norm2, layer.mlp, layer.layer_scale2)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention, _ = layer.attention(layer.norm1(hidden), *args, **kwargs)
        return hidden + layer.drop_path(layer.layer_scale1(attention))

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer.drop_path(layer.layer_scale2(layer.mlp(layer.norm2(hidden))))
