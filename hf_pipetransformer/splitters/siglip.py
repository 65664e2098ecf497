"""SigLIP's vision tower: pre-norm layers with `layer_norm1`, `self_attn`, `layer_norm2` and `mlp`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError


class SiglipSplitter(Splitter):
    """Cuts SigLIP's image classifier between attention and MLP."""

    model_types = ("siglip",)
    cuts_inside_layers = True

    def layers(self, model: Any) -> list[nn.Module]:
        towers = [name for name, _ in model.named_children() if name.endswith("_model")]
        if towers != ["vision_model"]:
            raise UnsupportedModelError(
                f"{type(model).__name__} has the towers {towers}: expected the vision tower alone. A pipeline has one "
                "stack of layers; use SiglipForImageClassification, or transformers.Trainer for both towers."
            )
        return list(model.vision_model.encoder.layers)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.layer_norm2, layer.mlp)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention, _ = layer.self_attn(layer.layer_norm1(hidden), *args, **kwargs)
        return hidden + attention

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer.mlp(layer.layer_norm2(hidden))
