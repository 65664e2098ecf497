"""The BERT family: post-norm layers with `attention`, `intermediate` and `output`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError, config_value


class BertSplitter(Splitter):
    """Cuts BERT-like encoders between attention and MLP."""

    model_types: tuple[str, ...] = ("bert", "roberta", "xlm-roberta", "electra")
    cuts_inside_layers = True

    def layers(self, model: Any) -> list[nn.Module]:
        # Families that are encoders only have neither option.
        is_decoder = config_value(model, "is_decoder", False)
        add_cross_attention = config_value(model, "add_cross_attention", False)
        if is_decoder or add_cross_attention:
            raise UnsupportedModelError(
                f"{type(model).__name__} is configured as a decoder (is_decoder={is_decoder}, "
                f"add_cross_attention={add_cross_attention}); the pipeline trains encoders. "
                "Load it with is_decoder=False and add_cross_attention=False."
            )
        return list(model.base_model.encoder.layer)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.intermediate, layer.output)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention_mask = args[0] if args else kwargs.pop("attention_mask", None)
        for name in ("encoder_hidden_states", "encoder_attention_mask"):
            kwargs.pop(name, None)
        return cast(torch.Tensor, layer.attention(hidden, attention_mask, **kwargs)[0])

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.output(layer.intermediate(hidden), hidden))
