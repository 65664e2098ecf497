"""The options: Trainer's, and those of the pipeline."""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass, field, fields

import torch
from transformers import TrainingArguments

from hf_pipetransformer.options.combinations import check_combinations
from hf_pipetransformer.options.reading import (
    Reader,
    choice,
    count_or,
    freeze_table,
    interval,
    lengths_or,
    number,
    optional,
    path,
    truth,
    whole_number,
)
from hf_pipetransformer.schedules import SCHEDULE_NAMES, find_schedule
from hf_pipetransformer.schedules.placement import Plans


logger = logging.getLogger(__name__)

RECOMPUTE_MODES = ("always", "except_last", "never")
FREEZE_POLICIES = ("gradient_norm", "schedule", "fixed", "none")
FREEZE_RULES = ("inclusive", "exclusive")
WEIGHTS = ("pipeoptim", "vanilla", "stashing", "double_buffer", "spectrain", "xpipe")
CLIPS = ("stage", "last")
COMPRESSIONS = ("throughput", "memory")
CACHE_MODES = ("auto", "on", "off")
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16")

LONGEST_WAIT = 1e9
"""Seconds; a longer limit would overflow in the transports."""

_is_wait = number(f"a number of seconds from 0.001 to {LONGEST_WAIT:.0f}", lambda x: 1e-3 <= x <= LONGEST_WAIT)

READERS: dict[str, Reader] = {
    "pipeline_parallel_size": count_or("auto"),
    "pipeline_parallel_num_microbatches": count_or("auto", "measured"),
    "pipeline_schedule": choice(SCHEDULE_NAMES),
    "pipeline_token_slices": lengths_or("auto"),
    "pipeline_chunks": optional(whole_number("a number of stages, 1 or more", least=1)),
    "pipeline_weights": choice(WEIGHTS),
    "pipeline_clip": choice(CLIPS),
    "pipeline_drain_interval": optional(whole_number("a number of optimizer steps, 1 or more", least=1)),
    "pipeline_checkpoint": choice(RECOMPUTE_MODES, on="always", off="never"),
    "pipeline_timeout": _is_wait,
    "freeze_policy": choice(FREEZE_POLICIES, off="none", null="none"),
    "freeze_alpha": number("between 0 and 1, both excluded", lambda alpha: 0 < alpha < 1),
    "freeze_rule": choice(FREEZE_RULES),
    "freeze_interval": interval,
    "freeze_warmup": number("a share of the run in [0, 1)", lambda share: 0 <= share < 1),
    "freeze_min_active_layers": whole_number("a number of layers, 0 or more", least=0),
    "freeze_at": optional(freeze_table),
    "elastic": truth,
    "pipeline_compression": choice(COMPRESSIONS),
    "layout_plan": optional(path),
    "activation_cache": choice(CACHE_MODES, on="on", off="off"),
    "activation_cache_dir": optional(path),
    "activation_cache_max_gb": optional(number("a positive number of gigabytes", lambda size: size > 0)),
    "activation_cache_dtype": choice(CACHE_DTYPES),
    "activation_cache_keep": truth,
    "activation_cache_views": whole_number("a number of views, 0 or more", least=0),
}
"""How each option of the pipeline is read, whatever a script, a YAML file or a sweep gave."""

_at_least_one = whole_number("a positive whole number", least=1)
_whole = whole_number("a whole number", least=-(10**18))
_any_number = number("a number")
_not_negative = number("a number, 0 or more", lambda x: x >= 0)
_decay = number("a number in [0, 1)", lambda x: 0 <= x < 1)

TRAINERS_NUMBERS: dict[str, Reader] = {
    "gradient_accumulation_steps": _at_least_one,
    "per_device_train_batch_size": _at_least_one,
    "per_device_eval_batch_size": _at_least_one,
    "eval_accumulation_steps": optional(_at_least_one),
    "max_steps": _whole,
    "num_train_epochs": number("a number of epochs, 0 or more", lambda x: x >= 0),
    "learning_rate": optional(_not_negative),  # Adafactor may go without.
    "warmup_steps": _not_negative,
    "weight_decay": _any_number,
    "adam_beta1": _decay,
    "adam_beta2": _decay,
    "adam_epsilon": _not_negative,
    "max_grad_norm": optional(number("a number", may_be_infinite=True)),
    "label_smoothing_factor": _any_number,
    "neftune_noise_alpha": optional(_not_negative),
    "logging_steps": optional(_any_number),
    "eval_steps": optional(_any_number),
    "save_steps": optional(_any_number),
    "eval_delay": optional(number("a number", may_be_infinite=True)),
    "save_total_limit": optional(_whole),
    "seed": whole_number(f"a whole number from 0 to {2**32 - 1}", least=0, most=2**32 - 1),
    "data_seed": optional(_whole),
    "dataloader_num_workers": whole_number("a whole number, 0 or more", least=0),
}
"""What numbers of Trainer's own may be. Of others it trains nothing without a word, trains to NaN, or fails late."""


_NO_PIPELINE = (
    "PipeTransformerArguments were given to a Trainer without a pipeline, which ignores pipeline_*, freeze_* and "
    "activation_cache*. Use PipeTransformerTrainer."
)


@dataclass
class PipeTransformerArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the options of the pipeline.

    `per_device_train_batch_size * world size * gradient_accumulation_steps` samples make one optimizer step, whatever
    the pipeline length is. In evaluation a pipeline takes `per_device_eval_batch_size * pipeline_parallel_size`.
    With `split_batches` of `accelerator_config` both batch sizes are those of all processes, as with Trainer.

    Parameters that control the pipeline:
        pipeline_parallel_size (`str` or `int`, *optional*, defaults to `"auto"`): K.
        pipeline_parallel_num_microbatches (`str` or `int`, *optional*, defaults to `"auto"`): M.
        pipeline_schedule (`str`, *optional*, defaults to `"1f1b"`): order of the micro-batches.
        pipeline_chunks (`int`, *optional*): V; by default the schedule's.
        pipeline_token_slices (`str` or `int`, *optional*, defaults to `"auto"`): S, with the schedule `"token"`.
        pipeline_weights (`str`, *optional*, defaults to `"pipeoptim"`): with the schedule `"async_1f1b"`, the weights
            that forwards and backwards see (PipeOptim, Table II).
        pipeline_clip (`str`, *optional*, defaults to `"stage"`): with that schedule, the norm to clip gradients by.
        pipeline_drain_interval (`int`, *optional*): with that schedule, optimizer steps between two drains.
        pipeline_checkpoint (`str`, *optional*, defaults to `"never"`): activation recomputation.
        pipeline_timeout (`float`, *optional*, defaults to 300): seconds that ranks wait for each other in a
            step; between steps `ddp_timeout`.

    Parameters that control freezing (PipeTransformer section 3.1):
        freeze_policy (`str`, *optional*, defaults to `"none"`): who decides how many layers are frozen.
        freeze_alpha (`float`, *optional*, defaults to 1/3): alpha of Eq. 1.
        freeze_rule (`str`, *optional*, defaults to `"inclusive"`): reading of the argmin in Eq. 1.
        freeze_interval (`str`, *optional*, defaults to `"epoch"`): time between two decisions.
        freeze_warmup (`float`, *optional*, defaults to 0.5): share of the run without freezing.
        freeze_min_active_layers (`int`, *optional*, defaults to 2): layers that are never frozen, but by `"fixed"`.
        freeze_at (`str`, *optional*): the table of the policy `"fixed"`.

    Parameters that control the elastic pipeline (sections 3.2 and 3.3):
        elastic (`bool`, *optional*, defaults to `True`): let the pipeline shrink and multiply as layers freeze.
        pipeline_compression (`str`, *optional*, defaults to `"throughput"`): how the new length is chosen.
        layout_plan (`str`, *optional*): events file of an earlier run whose decisions are replayed.

    Parameters that control the activation cache (section 3.4):
        activation_cache (`str`, *optional*, defaults to `"auto"`): store what frozen layers give, and read it back.
        activation_cache_dir (`str`, *optional*): where; by default the temporary folder of this machine.
        activation_cache_max_gb (`float`, *optional*): bound on its size; by default half of the free space.
        activation_cache_dtype (`str`, *optional*, defaults to `"auto"`): precision of what is stored.
        activation_cache_keep (`bool`, *optional*, defaults to `False`): leave it for a later run.
        activation_cache_views (`int`, *optional*, defaults to 0): views that it stores of each random sample.

    Raises:
        ValueError: an option that cannot be read or is outside its range, found and expected values in the text.
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
            "help": "Micro-batches per mini-batch of one pipeline, M: a number, or 'measured': 6K, 4K, 3K, "
            "2K and K are tried on the first training steps of each pipeline length (1 without a pipeline). 'auto' "
            "measures too, but not where clocks would then change a seeded run: with dropout, whose masks depend on "
            "M, and with full_determinism, M is 4K or what leaves a micro-batch four samples."
        },
    )
    pipeline_schedule: str = field(
        default="1f1b", metadata={"help": "Schedule of the micro-batches.", "choices": SCHEDULE_NAMES}
    )
    pipeline_token_slices: str = field(
        default="auto",
        metadata={
            "help": "Slices of the tokens of each sequence, for the schedule 'token': their number, their lengths "
            "('512,512,1024'; sequences of another length are cut in proportion), or 'auto' for what is planned from "
            "measured times."
        },
    )
    pipeline_chunks: int | None = field(
        default=None,
        metadata={
            "help": "Stages on each rank of a pipeline, V; by default what the schedule says. Schedules that "
            "interleave stages take 2 or more, others one number only."
        },
    )
    pipeline_weights: str = field(
        default="pipeoptim",
        metadata={
            "help": "With pipeline_schedule='async_1f1b', the weights that a forward and a backward see: predicted "
            "and current ('pipeoptim'), current and current ('vanilla'), the forward's in both ('stashing'), "
            "those before the last update in both ('double_buffer'), or predicted in both "
            "('spectrain', and 'xpipe', which predicts as Adam does).",
            "choices": WEIGHTS,
        },
    )
    pipeline_clip: str = field(
        default="stage",
        metadata={
            "help": "With pipeline_schedule='async_1f1b', what max_grad_norm bounds: the gradient norm of each stage "
            "('stage'), or of the model, by its norm in the last step that all stages have done ('last').",
            "choices": CLIPS,
        },
    )
    pipeline_drain_interval: int | None = field(
        default=None,
        metadata={
            "help": "With pipeline_schedule='async_1f1b', optimizer steps after which all stages come to the same "
            "weights; by default only where it is needed: to evaluate, to save, to change the layout, and at the end "
            "of an epoch."
        },
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
        default=300.0,
        metadata={
            "help": "Seconds that any rank may wait for another in a training step before the run ends in an error. "
            "Between steps (saving, evaluating, logging, preparing), and with torch_compile in steps too, it is "
            "ddp_timeout if that is longer."
        },
    )
    freeze_policy: str = field(
        default="none",
        metadata={
            "help": "How layers are frozen, from the bottom, while training: not at all ('none'), by 'gradient_norm' "
            "(PipeTransformer, Eq. 1), by 'schedule' (the upper bound of Eq. 1 alone), or 'fixed' by "
            "freeze_at. Pass `policy=` for a policy of your own.",
            "choices": FREEZE_POLICIES,
        },
    )
    freeze_alpha: float = field(
        default=1 / 3,
        metadata={"help": "alpha of Eq. 1, in (0, 1): the share of the active layers that one decision may freeze."},
    )
    freeze_rule: str = field(
        default="inclusive",
        metadata={
            "help": "Whether 'gradient_norm' freezes up to the layer with the smallest gradient norm, that layer too "
            "('inclusive') or not ('exclusive').",
            "choices": FREEZE_RULES,
        },
    )
    freeze_interval: str = field(
        default="epoch",
        metadata={
            "help": "Time between two freeze decisions: 'epoch', a number of optimizer steps, or a share of "
            "the run such as 0.1."
        },
    )
    freeze_warmup: float = field(
        default=0.5, metadata={"help": "Share of the run, in [0, 1), before the first freeze decision."}
    )
    freeze_min_active_layers: int = field(
        default=2, metadata={"help": "Layers, counted from the top, that are never frozen, but by freeze_at."}
    )
    freeze_at: str | None = field(
        default=None,
        metadata={
            "help": "For freeze_policy='fixed': 'step:layers,...', before optimizer step number step (0 is the first) "
            "the first layers layers are frozen; a smaller number later on unfreezes the others, 0 all of them."
        },
    )
    elastic: bool = field(
        default=True,
        metadata={
            "help": "Let the pipeline shrink and the number of replicas grow as layers freeze. False keeps the stages."
        },
    )
    pipeline_compression: str = field(
        default="throughput",
        metadata={
            "help": "New pipeline length when layers froze: halved while the largest stage is no larger than at the "
            "start ('memory', Eq. 2), or the divisor with the best predicted step time that fits ('throughput').",
            "choices": COMPRESSIONS,
        },
    )
    layout_plan: str | None = field(
        default=None,
        metadata={
            "help": "Events file (pipetransformer_events.jsonl) of an earlier run: its decisions are replayed, none "
            "are taken."
        },
    )

    activation_cache: str = field(
        default="auto",
        metadata={
            "help": "Store the activations that frozen layers give and read them back instead of computing them: "
            "'auto' where that is expected to be faster, 'on' wherever it is possible, or 'off'.",
            "choices": CACHE_MODES,
        },
    )
    activation_cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder on a local disk for the activation cache, in a folder _activation_cache of its own; the "
            "temporary folder of the machine by default. A network file system is refused."
        },
    )
    activation_cache_max_gb: float | None = field(
        default=None,
        metadata={
            "help": "Most gigabytes that the activation cache may take on a machine; half of the free space by "
            "default. Samples that do not fit are computed."
        },
    )
    activation_cache_dtype: str = field(
        default="auto",
        metadata={
            "help": "Precision of stored activations; 'auto' is the autocast precision if there is one, else the "
            "activation's own.",
            "choices": CACHE_DTYPES,
        },
    )
    activation_cache_keep: bool = field(
        default=False,
        metadata={
            "help": "Leave the activation cache on the disk: a later run over the same data with the same frozen "
            "weights reads it."
        },
    )
    activation_cache_views: int = field(
        default=0,
        metadata={
            "help": "Samples that a transform or the collator draws at random (crops, flips, masked tokens): store so "
            "many views of each, as they are drawn, and take them in turn; a part of them is drawn anew in each "
            "epoch. 0 keeps the activation cache off where samples are random."
        },
    )

    # No options: whether a trainer of this library reads them, and whether it puts the model on its devices itself.
    is_taken = False
    recomputes_for_trainer = False
    places_model = False

    def __post_init__(self) -> None:
        if self.deepspeed:
            raise ValueError(
                "deepspeed: the DeepSpeed engine owns model and optimizer itself, a pipeline stage does so here. "
                "Remove deepspeed, or use Trainer."
            )
        for name, read in READERS.items():
            setattr(self, name, read(name, getattr(self, name)))
        self.ddp_timeout = _is_wait("ddp_timeout", self.ddp_timeout)
        self._read_trainers_numbers()
        check_combinations(self)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
            # There is nothing else; without the word accelerate would make each process a world of its own.
            self.use_cpu = True
        super().__post_init__()
        self._recompute_in_pipeline()

    def _read_trainers_numbers(self) -> None:
        """Refuse numbers that no run can use; those in text become numbers.

        Raises:
            ValueError: names the option, what was found and what is expected.
        """
        for name, read in TRAINERS_NUMBERS.items():
            value = getattr(self, name)
            if name == "num_train_epochs" and isinstance(self.max_steps, int) and self.max_steps > 0:
                continue  # It is not read then.
            found = read(name, value)
            if isinstance(found, float) and isinstance(value, str) and found.is_integer():
                found = int(found)
            if isinstance(found, int) or isinstance(value, str):
                setattr(self, name, found)

    def _recompute_in_pipeline(self) -> None:
        if self.activation_checkpointing and (self.pipeline_parallel_size != "1" or self.cuts_tokens):
            if self.pipeline_checkpoint != "never":
                raise ValueError(
                    f"activation_checkpointing=True and pipeline_checkpoint={self.pipeline_checkpoint!r} say the same "
                    "thing twice: set only one of them."
                )
            if self.world_size > 1 or self.cuts_tokens:
                # The engine recomputes; the model must not do so a second time.
                self.pipeline_checkpoint = "always"
                self.activation_checkpointing = False
                self.recomputes_for_trainer = True

    def leave_recomputing_to_trainer(self) -> None:
        """Of a run without a pipeline: `activation_checkpointing` as it was asked for."""
        if self.recomputes_for_trainer:
            self.pipeline_checkpoint, self.activation_checkpointing = "never", True
            self.recomputes_for_trainer = False

    @property
    def place_model_on_device(self) -> bool | None:
        """False where a rank's stage, not the whole model, goes to its device.

        Trainer asks when it is made, one without a pipeline too: it ignores the options of this class.
        """
        if not self.is_taken:
            logger.warning(_NO_PIPELINE)
        return False if self.places_model else None

    @property
    def pipeline_size(self) -> int | None:
        """The asked pipeline length K; None for "auto"."""
        return None if self.pipeline_parallel_size == "auto" else int(self.pipeline_parallel_size)

    @property
    def splits_batches(self) -> bool:
        """Whether batch sizes are those of all processes together, as accelerate's `split_batches` has it."""
        return bool(self.accelerator_config.split_batches)

    @property
    def train_samples_per_device(self) -> int:
        """Training samples of a batch that fall to one process, the same for every layout."""
        return int(self.per_device_train_batch_size) // (self.world_size if self.splits_batches else 1)

    def global_batch_size(self, batch_size: int) -> int:
        """Samples of a batch over all processes, of a loader that Trainer is asked for with `batch_size`."""
        return batch_size * (1 if self.splits_batches else self.world_size)

    @property
    def num_chunks(self) -> int:
        """Stages of each rank, V, where a pipeline has several ranks."""
        return self.pipeline_chunks or find_schedule(self.pipeline_schedule).default_chunks

    @property
    def cuts_tokens(self) -> bool:
        """Whether sequences are cut into slices of their tokens."""
        return find_schedule(self.pipeline_schedule).in_token_slices is not None

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages update themselves without waiting for the others."""
        return find_schedule(self.pipeline_schedule).is_asynchronous

    @property
    def token_slices(self) -> Plans | None:
        """How sequences are cut, as the user wants it; None for "auto"."""
        if self.pipeline_token_slices == "auto":
            return None
        lengths = tuple(int(length) for length in self.pipeline_token_slices.split(","))
        return ((1,) * lengths[0] if len(lengths) == 1 else lengths,)

    @property
    def num_microbatches(self) -> int | None:
        """The asked number of micro-batches M; None for "auto" and "measured"."""
        count = self.pipeline_parallel_num_microbatches
        return int(count) if count.isdecimal() else None


def with_pipeline_options(args: TrainingArguments) -> PipeTransformerArguments:
    """Arguments as a pipeline reads them: plain ones get the default of each of its options."""
    if isinstance(args, PipeTransformerArguments):
        args._read_trainers_numbers()
        args.is_taken = True
        return args
    kind = type(args)
    # Their own options stay: those of `Seq2SeqTrainingArguments`, say.
    both = PipeTransformerArguments
    if kind is not TrainingArguments:
        both = dataclass(type(f"Pipeline{kind.__name__}", (PipeTransformerArguments, kind), {}))
    # Not made anew: what Trainer's arguments work out from each other is done.
    taken = copy.copy(args)
    taken.__class__ = both
    for option in fields(PipeTransformerArguments):
        if option.name not in vars(taken):
            setattr(taken, option.name, READERS[option.name](option.name, option.default))
    taken._read_trainers_numbers()
    taken.is_taken = True
    taken._recompute_in_pipeline()
    return taken
