"""The trainer of sentence-transformers with frozen parts computed once, and arguments with the options of both.

    from hf_pipetransformer.sentence_transformers import (
        SentenceTransformerPipelineArguments,
        SentenceTransformerPipelineTrainer,
    )

Needs sentence-transformers (`pip install sentence-transformers`). Its losses compare the texts of a whole batch and
its loaders are its own, so that it runs without stages: `pipeline_parallel_size` is 1, and several processes train
copies of the model as with plain `SentenceTransformerTrainer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.trainer.mixin import PipeTransformerMixin


__all__ = ["SentenceTransformerPipelineArguments", "SentenceTransformerPipelineTrainer"]


@dataclass
class SentenceTransformerPipelineArguments(SentenceTransformerTrainingArguments, PipeTransformerArguments):
    """Options of `SentenceTransformerTrainingArguments`, and those of `PipeTransformerArguments` on the store."""

    pipeline_parallel_size: str = "1"


class SentenceTransformerPipelineTrainer(PipeTransformerMixin, SentenceTransformerTrainer):
    """`SentenceTransformerTrainer` with frozen parts computed once."""
