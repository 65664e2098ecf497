"""The options: Trainer's, and those of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments


RECOMPUTE_MODES = ("always", "except_last", "never")
SCHEDULE_NAMES = ("gpipe", "1f1b")


@dataclass
class PipeTransformerArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the options of the pipeline.

    `per_device_train_batch_size * world size * gradient_accumulation_steps` samples make one optimizer step, whatever
    the pipeline length is. In evaluation a pipeline takes `per_device_eval_batch_size * pipeline_parallel_size`.

    Parameters that control the pipeline:
        pipeline_parallel_size (`str` or `int`, *optional*, defaults to `"auto"`): K.
        pipeline_parallel_num_microbatches (`str` or `int`, *optional*, defaults to `"auto"`): M.
        pipeline_schedule (`str`, *optional*, defaults to `"1f1b"`): order of the micro-batches.
        pipeline_checkpoint (`str`, *optional*, defaults to `"never"`): activation recomputation.
        pipeline_timeout (`float`, *optional*, defaults to 300): seconds that ranks wait for each other.

    Parameters that control freezing:
        freeze_policy (`str`, *optional*, defaults to `"none"`): only `"none"` in this release.

    Raises:
        ValueError: an option outside its range, found and expected values in the text.
    """

    pipeline_parallel_size: str = field(
        default="auto",
        metadata={
            "help": "Pipeline length K: a divisor of the number of devices of one node, or 'auto' for the smallest "
            "K whose stages fit a device."
        },
    )
    pipeline_parallel_num_microbatches: str = field(
        default="auto",
        metadata={
            "help": "Micro-batches per mini-batch of one pipeline, M: a number, or 'auto' for 4K as long as a "
            "micro-batch keeps 4 samples (1 without a pipeline)."
        },
    )
    pipeline_schedule: str = field(
        default="1f1b", metadata={"help": "Schedule of the micro-batches.", "choices": SCHEDULE_NAMES}
    )
    pipeline_checkpoint: str = field(
        default="never",
        metadata={
            "help": "Activation recomputation: run the forward of a micro-batch again in its backward 'always', for "
            "all but the last micro-batch ('except_last'), or 'never'. activation_checkpointing=True means 'always'.",
            "choices": RECOMPUTE_MODES,
        },
    )
    pipeline_timeout: float = field(
        default=300.0, metadata={"help": "Seconds that any rank may wait for another before the run ends in an error."}
    )
    freeze_policy: str = field(
        default="none", metadata={"help": "How layers are frozen while training; only 'none' in this release."}
    )

    def __post_init__(self) -> None:
        if self.deepspeed:
            raise ValueError(
                "deepspeed: the DeepSpeed engine owns model and optimizer itself, a pipeline stage does so here. "
                "Remove deepspeed, or use Trainer."
            )
        super().__post_init__()
        self.pipeline_parallel_size = _auto_or_count("pipeline_parallel_size", self.pipeline_parallel_size)
        self.pipeline_parallel_num_microbatches = _auto_or_count(
            "pipeline_parallel_num_microbatches", self.pipeline_parallel_num_microbatches
        )
        _check_choice("pipeline_schedule", self.pipeline_schedule, SCHEDULE_NAMES)
        _check_choice("pipeline_checkpoint", self.pipeline_checkpoint, RECOMPUTE_MODES)
        if self.freeze_policy != "none":
            raise ValueError(
                f"freeze_policy={self.freeze_policy!r}: this release trains without freezing, expected 'none'."
            )
        if not self.pipeline_timeout > 0:
            raise ValueError(f"pipeline_timeout must be a positive number of seconds, found {self.pipeline_timeout}.")
        if self.activation_checkpointing and self.pipeline_parallel_size != "1":
            if self.pipeline_checkpoint != "never":
                raise ValueError(
                    f"activation_checkpointing=True and pipeline_checkpoint={self.pipeline_checkpoint!r} say the same "
                    "thing twice: set only one of them."
                )
            # The engine recomputes; the model must not do so a second time.
            self.pipeline_checkpoint = "always"
            self.activation_checkpointing = False

    @property
    def place_model_on_device(self) -> bool:
        """False: a rank's stage, not the whole model, goes to its device."""
        return False

    @property
    def num_stages(self) -> int | None:
        """The asked pipeline length K; None for "auto"."""
        return None if self.pipeline_parallel_size == "auto" else int(self.pipeline_parallel_size)

    @property
    def num_microbatches(self) -> int | None:
        """The asked number of micro-batches M; None for "auto"."""
        count = self.pipeline_parallel_num_microbatches
        return None if count == "auto" else int(count)


def _auto_or_count(name: str, value: str | int) -> str:
    text = str(value)
    if text != "auto" and not (text.isdigit() and int(text) > 0):
        raise ValueError(f"{name} must be 'auto' or a positive whole number, found {value!r}.")
    return text


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, found {value!r}.")
