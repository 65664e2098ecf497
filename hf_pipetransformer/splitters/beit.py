"""BEiT: ViT's layers with a scale for each half, stochastic depth and, in some, relative position biases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.vit import ViTSplitter


class BeitSplitter(ViTSplitter):
    """Cuts BEiT between attention and MLP."""

    model_types = ("beit",)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        # Without layer scale the factor is a plain number.
        scale = [layer.lambda_2] if isinstance(layer.lambda_2, nn.Parameter) else []
        return [*super().mlp_parts(layer), *scale]

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = args[0] if args else kwargs.pop("attention_mask", None)
        interpolates, resolution = kwargs.pop("interpolate_pos_encoding", False), kwargs.pop("resolution", None)
        if layer.relative_position_bias is not None:
            height, width = resolution
            window = (height // layer.patch_size, width // layer.patch_size)
            bias = layer.relative_position_bias(window, interpolates, dim_size=hidden.shape[1])
            mask = bias if mask is None else bias + mask
        attention, _ = layer.attention(layer.layernorm_before(hidden), attention_mask=mask, **kwargs)
        return hidden + layer.drop_path(layer.lambda_1 * layer.dropout(attention))

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        mlp = layer.mlp(layer.layernorm_after(hidden))
        return hidden + layer.drop_path(layer.lambda_2 * layer.dropout(mlp))
