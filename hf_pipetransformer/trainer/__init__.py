"""The only room that is Trainer: overrides that hand over to the parts of a run, no algorithm."""

from hf_pipetransformer.trainer.mixin import PipeTransformerMixin
from hf_pipetransformer.trainer.trainer import PipeTransformerTrainer


__all__ = ["PipeTransformerMixin", "PipeTransformerTrainer"]
