"""MPNet: BERT's layers, whose attention also takes a position bias that all of them share."""

from __future__ import annotations

from typing import Any, cast

import torch

from hf_pipetransformer.splitters.bert import BertSplitter


class MPNetSplitter(BertSplitter):
    """Cuts MPNet between attention and MLP."""

    model_types = ("mpnet",)

    def run_attention(self, layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cast(torch.Tensor, layer.attention(hidden, *args, **kwargs)[0])
