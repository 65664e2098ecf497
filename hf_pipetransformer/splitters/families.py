"""Splitters of model families that can be cut between the attention and the MLP of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
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


def _holder(model: Any, path: str, parts: Iterable[str] = ()) -> Any:
    """Return the module of a model that has a stack of layers at `path`, whatever is wrapped around it.

    Args:
        parts: names of modules that each layer has.

    Raises:
        UnsupportedModelError: there is no such module, or there are several.
    """

    def is_holder(module: Any) -> bool:
        try:
            stack = attrgetter(path)(module)
        except AttributeError:
            return False
        is_stack = isinstance(stack, nn.ModuleList)
        # The first layer stands for all.
        return is_stack and all(hasattr(layer, part) for layer in stack[:1] for part in parts)

    # The base model first, since a search through all modules may find several.
    base = getattr(model, "base_model", None)
    found = [base] if is_holder(base) else [module for module in model.modules() if is_holder(module)]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has config.model_type={config_value(model, 'model_type')!r}, and "
            f"{len(found) or 'no'} modules with a stack of layers at {path!r}: expected one. Pass `splitter=` with a "
            "Splitter that names its layers, or leave `config` out of a module of your own."
        )
    return found[0]


class BertSplitter(Splitter):
    """Splitter of BERT-like encoders."""

    model_types: tuple[str, ...] = ("bert", "roberta", "xlm-roberta", "electra")
    cuts_inside_layers = True
    parts = "attention", "intermediate", "output"

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
        return list(_holder(model, "encoder.layer", self.parts).encoder.layer)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.intermediate, layer.output)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention_mask = args[0] if args else kwargs.pop("attention_mask", None)
        # Given to every layer, but meant for the cross-attention of a decoder.
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
        # Its weights run between the first two layers, where no block would own them.
        if _holder(model, "encoder.layer", self.parts).encoder.conv is not None:
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
        parts = "attention", "ffn", "sa_layer_norm", "output_layer_norm"
        return list(_holder(model, "transformer.layer", parts).transformer.layer)

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (layer.ffn, layer.output_layer_norm)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attention, _ = layer.attention(hidden, *args, **kwargs)
        return cast(torch.Tensor, layer.sa_layer_norm(attention + hidden))

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.output_layer_norm(layer.ffn(hidden) + hidden))


class PreNormSplitter(GenericSplitter):
    """Splitter of layers that run `x + attention(norm(x))`, then `x + mlp(norm(x))`. Subclasses name the modules."""

    cuts_inside_layers = True
    stack: str | None = None
    """Path of the layers from the module that holds them; None searches them as `GenericSplitter` does."""
    attention_norm: str
    attention: str
    mlp_norm: str

    def layers(self, model: Any) -> list[nn.Module]:
        if self.stack is None:
            return super().layers(model)
        parts = self.attention_norm, self.attention, self.mlp_norm
        return list(attrgetter(self.stack)(_holder(model, self.stack, parts)))

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (getattr(layer, self.mlp_norm), layer.mlp)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        normed = getattr(layer, self.attention_norm)(hidden)
        attention, _ = getattr(layer, self.attention)(normed, *args, **kwargs)
        return hidden + self.scaled_attention(layer, attention)

    def run_mlp(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scaled_mlp(layer, layer.mlp(getattr(layer, self.mlp_norm)(hidden)))

    def scaled_attention(self, layer: Any, output: torch.Tensor) -> torch.Tensor:
        """Apply what comes between attention and residual connection, such as dropout."""
        return output

    def scaled_mlp(self, layer: Any, output: torch.Tensor) -> torch.Tensor:
        """Apply what comes between MLP and residual connection."""
        return output


class ModernBertSplitter(PreNormSplitter):
    """Splitter of ModernBERT. Its layers with global and with local attention have the same shapes."""

    model_types = ("modernbert",)
    stack = "layers"
    attention_norm, attention, mlp_norm = "attn_norm", "attn", "mlp_norm"


class ViTSplitter(PreNormSplitter):
    """Splitter of ViT-like encoders of images or audio spectrograms."""

    model_types: tuple[str, ...] = ("vit", "deit", "audio-spectrogram-transformer")
    stack = "layers"
    attention_norm, attention, mlp_norm = "layernorm_before", "attention", "layernorm_after"

    def scaled_attention(self, layer: Any, output: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.dropout(output))

    def scaled_mlp(self, layer: Any, output: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.dropout(output))


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
        # BEiT's layer adds its own bias to the mask before the attention runs.
        if layer.relative_position_bias is not None:
            height, width = resolution
            window = (height // layer.patch_size, width // layer.patch_size)
            bias = layer.relative_position_bias(window, interpolates, dim_size=hidden.shape[1])
            mask = bias if mask is None else bias + mask
        return super().run_attention(layer, hidden, attention_mask=mask, **kwargs)

    def scaled_attention(self, layer: Any, output: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.drop_path(layer.lambda_1 * layer.dropout(output)))

    def scaled_mlp(self, layer: Any, output: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.drop_path(layer.lambda_2 * layer.dropout(output)))


class Dinov2Splitter(PreNormSplitter):
    """Splitter of DINOv2."""

    model_types = ("dinov2", "dinov2_with_registers")
    stack = "encoder.layer"
    attention_norm, attention, mlp_norm = "norm1", "attention", "norm2"

    def mlp_parts(self, layer: Any) -> Iterable[nn.Module | nn.Parameter]:
        return (*super().mlp_parts(layer), layer.layer_scale2)

    def scaled_attention(self, layer: Any, output: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.drop_path(layer.layer_scale1(output)))

    def scaled_mlp(self, layer: Any, output: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, layer.drop_path(layer.layer_scale2(output)))


class SiglipSplitter(PreNormSplitter):
    """Splitter of SigLIP's image classifier."""

    model_types = ("siglip",)
    attention_norm, attention, mlp_norm = "layer_norm1", "self_attn", "layer_norm2"

    def layers(self, model: Any) -> list[nn.Module]:
        parts = self.attention_norm, self.attention, self.mlp_norm
        holder = _holder(model, "vision_model.encoder.layers", parts)
        towers = [name for name, _ in holder.named_children() if name.endswith("_model")]
        if towers != ["vision_model"]:
            raise UnsupportedModelError(
                f"{type(model).__name__} has the towers {towers}: expected the vision tower alone. A pipeline has one "
                "stack of layers; use SiglipForImageClassification, or transformers.Trainer for both towers."
            )
        return list(holder.vision_model.encoder.layers)


class LlamaSplitter(PreNormSplitter):
    """Splitter of Llama-like decoders, including those with a mixture of experts as the MLP."""

    model_types = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "mixtral", "qwen2_moe", "qwen3_moe")
    attention_norm, attention, mlp_norm = "input_layernorm", "self_attn", "post_attention_layernorm"


class GPT2Splitter(PreNormSplitter):
    """Splitter of GPT-2."""

    model_types = ("gpt2",)
    attention_norm, attention, mlp_norm = "ln_1", "attn", "ln_2"

    def run_attention(
        self,
        layer: Any,
        hidden: torch.Tensor,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        # By position: its name differs between releases of transformers.
        hidden = super().run_attention(layer, hidden, cache, attention_mask, **kwargs)
        # Cross-attention goes with the attention: a boundary falls before the MLP only.
        if encoder_hidden_states is None:
            return hidden
        across, _ = layer.crossattention(
            layer.ln_cross_attn(hidden),
            cache,
            attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
        )
        return cast(torch.Tensor, hidden + across)


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
