"""The only room that knows `transformers.Trainer`: overrides, no algorithm."""

from hf_pipetransformer.trainer.training import PipeTransformerTrainer


__all__ = ["PipeTransformerTrainer"]
