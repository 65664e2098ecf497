"""PipeTransformer for Hugging Face Trainer: a fine-tuning run split into pipeline stages and replicas."""

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.splitters import Splitter
from hf_pipetransformer.trainer import PipeTransformerMixin, PipeTransformerTrainer


__all__ = ["Layout", "PipeTransformerArguments", "PipeTransformerMixin", "PipeTransformerTrainer", "Splitter"]
__version__ = "0.1.0"
