"""The ViT family: pre-norm layers with `layernorm_before`, `attention`, `layernorm_after` and `mlp`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.base import Splitter


class ViTSplitter(Splitter):
    """Cuts ViT-like encoders, of images or of audio spectrograms, between attention and MLP."""

    model_types: tuple[str, ...] = ("vit", "deit", "audio-spectrogram-transformer")
    cuts_inside_layers = True

    def layers(self, model: Any) -> list[nn.Module]:
        return list(model.base_model.layers)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.layernorm_after, layer.mlp)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention, _ = layer.attention(layer.layernorm_before(hidden), *args, **kwargs)
        return hidden + layer.dropout(attention)

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer.dropout(layer.mlp(layer.layernorm_after(hidden)))
