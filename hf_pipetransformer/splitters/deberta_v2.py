"""DeBERTa-v2 and v3: BERT's layers, whose attention also takes relative embeddings that all of them share."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.splitters.bert import BertSplitter


class DebertaV2Splitter(BertSplitter):
    """Cuts DeBERTa-v2 between attention and MLP."""

    model_types = ("deberta-v2",)

    def layers(self, model: Any) -> list[nn.Module]:
        if model.base_model.encoder.conv is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has a convolution beside its first layer (config.conv_kernel_size="
                f"{model.config.conv_kernel_size}), which belongs to no layer: expected a DeBERTa without one, such "
                "as DeBERTa-v3. Use transformers.Trainer for this model."
            )
        return super().layers(model)
