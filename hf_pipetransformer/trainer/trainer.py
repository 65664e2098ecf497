"""`PipeTransformerTrainer`: `transformers.Trainer` over a pipeline."""

from __future__ import annotations

from transformers import Trainer

from hf_pipetransformer.trainer.mixin import PipeTransformerMixin


class PipeTransformerTrainer(PipeTransformerMixin, Trainer):
    """A `Trainer` whose model is split into K pipeline stages and R replicas, with the same numbers as `Trainer`.

    Start it with `accelerate launch`; `K * R` is the number of processes. Takes everything that `Trainer` takes.

    Args:
        args ([`PipeTransformerArguments`]): `TrainingArguments` with the pipeline's options.
        policy ([`FreezePolicy`], *optional*): decides what freezes; it wins over `freeze_policy`.
        splitter ([`Splitter`], *optional*): how the model falls into layers, for models that the library does not
            know; by default it is found by `config.model_type`.

    Raises:
        ValueError: an option, model or data set that cannot work with a pipeline; the text says what to change.
    """
