"""Splitters of model families that can be cut between the attention and the MLP of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from hf_pipetransformer.splitters.base import (
    GenericSplitter,
    Splitter,
    StackSplitter,
    UnsupportedModelError,
    config_value,
)


class BertSplitter(Splitter):
    """Splitter of BERT-like encoders."""

    model_types: tuple[str, ...] = ("bert", "roberta", "xlm-roberta", "electra")
    cuts_inside_layers = True

    def layers(self, model: Any) -> list[nn.Module]:
        # Some families, encoder only, have neither option in their config.
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


class MPNetSplitter(BertSplitter):
    """Splitter of MPNet, whose attention takes other arguments than BERT's."""

    model_types = ("mpnet",)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cast(torch.Tensor, layer.attention(hidden, *args, **kwargs)[0])


class DebertaV2Splitter(BertSplitter):
    """Splitter of DeBERTa-v2 and v3 models without a convolution."""

    model_types = ("deberta-v2",)

    def layers(self, model: Any) -> list[nn.Module]:
        if model.base_model.encoder.conv is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has a convolution beside its first layer (config.conv_kernel_size="
                f"{model.config.conv_kernel_size}), which belongs to no layer: expected a DeBERTa without one, such "
                "as DeBERTa-v3. Use transformers.Trainer for this model."
            )
        return super().layers(model)


class DistilBertSplitter(Splitter):
    """Splitter of DistilBERT."""

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


class ModernBertSplitter(Splitter):
    """Splitter of ModernBERT. Its layers with global and with local attention have the same shapes."""

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


class ViTSplitter(Splitter):
    """Splitter of ViT-like encoders of images or audio spectrograms."""

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


class BeitSplitter(ViTSplitter):
    """Splitter of BEiT, which adds layer scale, drop path and a relative position bias per layer."""

    model_types = ("beit",)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        # lambda_2 is a plain number if layer scale is off.
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


class Dinov2Splitter(Splitter):
    """Splitter of DINOv2."""

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


class SiglipSplitter(Splitter):
    """Splitter of SigLIP's image classifier."""

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


class LlamaSplitter(GenericSplitter):
    """Splitter of Llama-like decoders, including those with a mixture of experts as the MLP."""

    model_types = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "mixtral", "qwen2_moe", "qwen3_moe")
    cuts_inside_layers = True

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.post_attention_layernorm, layer.mlp)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention, _ = layer.self_attn(layer.input_layernorm(hidden), *args, **kwargs)
        return hidden + attention

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


class GPT2Splitter(GenericSplitter):
    """Splitter of GPT-2."""

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


_FAMILIES = (
    BertSplitter,
    DistilBertSplitter,
    MPNetSplitter,
    DebertaV2Splitter,
    ModernBertSplitter,
    ViTSplitter,
    BeitSplitter,
    Dinov2Splitter,
    SiglipSplitter,
    LlamaSplitter,
    GPT2Splitter,
)
_SPLITTERS = {model_type: splitter for splitter in _FAMILIES for model_type in splitter.model_types}


def find_splitter(model: Any) -> Splitter:
    """Return the splitter for `config.model_type`; `GenericSplitter` if the family has no splitter here.

    Models without a `model_type` get `StackSplitter`.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return StackSplitter() if model_type is None else _SPLITTERS.get(model_type, GenericSplitter)()
