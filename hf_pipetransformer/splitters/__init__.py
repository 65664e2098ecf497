"""How a model falls into embeddings | sublayers | head, and the view of one stage of it."""

from __future__ import annotations

from typing import Any

from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError, layers_of
from hf_pipetransformer.splitters.beit import BeitSplitter
from hf_pipetransformer.splitters.bert import BertSplitter
from hf_pipetransformer.splitters.deberta_v2 import DebertaV2Splitter
from hf_pipetransformer.splitters.dinov2 import Dinov2Splitter
from hf_pipetransformer.splitters.distilbert import DistilBertSplitter
from hf_pipetransformer.splitters.generic import GenericSplitter, StackSplitter
from hf_pipetransformer.splitters.gpt2 import GPT2Splitter
from hf_pipetransformer.splitters.llama import LlamaSplitter
from hf_pipetransformer.splitters.modernbert import ModernBertSplitter
from hf_pipetransformer.splitters.mpnet import MPNetSplitter
from hf_pipetransformer.splitters.siglip import SiglipSplitter
from hf_pipetransformer.splitters.vit import ViTSplitter


__all__ = [
    "BertSplitter",
    "GenericSplitter",
    "Splitter",
    "UnsupportedModelError",
    "ViTSplitter",
    "find_splitter",
    "layers_of",
]

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
    """The splitter of the model's family, by `config.model_type`; the generic one for families without their own.

    Models without such a config get one that looks for a stack alone.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return StackSplitter() if model_type is None else _SPLITTERS.get(model_type, GenericSplitter)()
