"""`PipeTransformerArguments`: Trainer's options and those of the pipeline."""

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
from hf_pipetransformer.schedules import SCHEDULE_NAMES, Schedule, find_schedule
from hf_pipetransformer.schedules.placement import Plans
from hf_pipetransformer.schedules.weight_kinds import WEIGHTS_NAMES


logger = logging.getLogger(__name__)

RECOMPUTE_MODES = ("always", "except_last", "never")
FREEZE_POLICIES = ("gradient_norm", "schedule", "fixed", "none")
FREEZE_RULES = ("inclusive", "exclusive")
CLIPS = ("stage", "last")
COMPRESSIONS = ("throughput", "memory")
CACHE_MODES = ("auto", "on", "off")
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16")

LONGEST_WAIT = 1e9
"""Longest timeout in seconds; a longer one would overflow in the transports."""

_is_wait = number(f"a number of seconds from 0.001 to {LONGEST_WAIT:.0f}", lambda x: 1e-3 <= x <= LONGEST_WAIT)

READERS: dict[str, Reader] = {
    "pipeline_parallel_size": count_or("auto"),
    "pipeline_parallel_num_microbatches": count_or("auto", "measured"),
    "pipeline_schedule": choice(SCHEDULE_NAMES),
    "pipeline_token_slices": lengths_or("auto"),
    "pipeline_chunks": optional(whole_number("a number of stages, 1 or more", least=1)),
    "pipeline_weights": choice(WEIGHTS_NAMES),
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
"""Parser and range check of each pipeline option, for values from scripts, YAML files and sweeps."""

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
    "learning_rate": optional(_not_negative),  # Adafactor takes None.
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
"""Ranges of Trainer's own numeric options. Outside them Trainer silently trains nothing, gets NaN, or fails late."""


_NO_PIPELINE = (
    "PipeTransformerArguments were given to a Trainer without a pipeline, which ignores pipeline_*, freeze_* and "
    "activation_cache*. Use PipeTransformerTrainer."
)


@dataclass
class PipeTransformerArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the options of the pipeline.

    One optimizer step takes `per_device_train_batch_size * world size * gradient_accumulation_steps` samples,
    independent of the pipeline length. An evaluation batch of a pipeline has
    `per_device_eval_batch_size * pipeline_parallel_size` samples. With `split_batches` in `accelerator_config` both
    batch sizes count all processes together, as in Trainer.

    The `help` of each field describes the option, its values and units. Sections are those of the PipeTransformer
    paper; `pipeline_weights`, `pipeline_clip` and `pipeline_drain_interval` apply to the schedule `"async_1f1b"` only.

    Pipeline: `pipeline_parallel_size` (ranks of a pipeline K), `pipeline_parallel_num_microbatches` (micro-batches per
        mini-batch M), `pipeline_schedule`, `pipeline_chunks` (stages on each rank V), `pipeline_token_slices` (slices
        of a sequence S), `pipeline_weights` (PipeOptim, Table II), `pipeline_clip`, `pipeline_drain_interval`,
        `pipeline_checkpoint`, `pipeline_timeout` (seconds)
    Freezing (section 3.1): `freeze_policy`, `freeze_alpha` (alpha of Eq. 1), `freeze_rule` (reading of the argmin in
        Eq. 1), `freeze_interval`, `freeze_warmup`, `freeze_min_active_layers`, `freeze_at`
    Elastic pipeline (sections 3.2 and 3.3): `elastic`, `pipeline_compression`, `layout_plan`
    Activation cache (section 3.4): `activation_cache`, `activation_cache_dir`, `activation_cache_max_gb`,
        `activation_cache_dtype`, `activation_cache_keep`, `activation_cache_views`

    Raises:
        ValueError: an option cannot be parsed or is out of range; names the value found and those expected.
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
            "choices": WEIGHTS_NAMES,
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

    # Without annotations these are no dataclass fields, hence no options. They record that a trainer of this library
    # uses the arguments, that it recomputes in place of activation_checkpointing, and that it places the model.
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
            # Without use_cpu accelerate would make each process a world of size 1 on a machine without GPUs.
            self.use_cpu = True
        super().__post_init__()
        self._recompute_in_pipeline()

    def _read_trainers_numbers(self) -> None:
        """Check Trainer's numeric options and convert those given as text."""
        for name, read in TRAINERS_NUMBERS.items():
            value = getattr(self, name)
            if name == "num_train_epochs" and isinstance(self.max_steps, int) and self.max_steps > 0:
                continue  # max_steps overrides it.
            found = read(name, value)
            if isinstance(found, float) and isinstance(value, str) and found.is_integer():
                found = int(found)
            if isinstance(found, int) or isinstance(value, str):
                setattr(self, name, found)

    def _recompute_in_pipeline(self) -> None:
        if self.activation_checkpointing and (
            self.pipeline_parallel_size != "1" or self.schedule.abilities.cuts_tokens
        ):
            if self.pipeline_checkpoint != "never":
                raise ValueError(
                    f"activation_checkpointing=True and pipeline_checkpoint={self.pipeline_checkpoint!r} say the same "
                    "thing twice: set only one of them."
                )
            if self.world_size > 1 or self.schedule.abilities.cuts_tokens:
                # The engine recomputes; the model must not do so a second time.
                self.pipeline_checkpoint = "always"
                self.activation_checkpointing = False
                self.recomputes_for_trainer = True

    def leave_recomputing_to_trainer(self) -> None:
        """Set `activation_checkpointing` back to the user's value, for a run without a pipeline."""
        if self.recomputes_for_trainer:
            self.pipeline_checkpoint, self.activation_checkpointing = "never", True
            self.recomputes_for_trainer = False

    @property
    def place_model_on_device(self) -> bool | None:
        """False if the pipeline moves stages to their devices, None for Trainer's default.

        Every Trainer reads it in its constructor: the place to warn that a plain one ignores the pipeline's options.
        """
        if not self.is_taken:
            logger.warning(_NO_PIPELINE)
        return False if self.places_model else None

    @property
    def pipeline_size(self) -> int | None:
        """Requested number of ranks of a pipeline K; None for "auto"."""
        return None if self.pipeline_parallel_size == "auto" else int(self.pipeline_parallel_size)

    @property
    def splits_batches(self) -> bool:
        """True if batch sizes count all processes together (accelerate's `split_batches`)."""
        return bool(self.accelerator_config.split_batches)

    @property
    def train_samples_per_device(self) -> int:
        """Number of training samples of a batch per process, independent of the layout."""
        return int(self.per_device_train_batch_size) // (self.world_size if self.splits_batches else 1)

    def global_batch_size(self, batch_size: int) -> int:
        """Return the samples of a batch over all processes for a data loader with `batch_size`."""
        return batch_size * (1 if self.splits_batches else self.world_size)

    @property
    def num_chunks(self) -> int:
        """Number of stages on each rank V, if the pipeline has several ranks."""
        return self.pipeline_chunks or self.schedule.abilities.default_chunks

    @property
    def schedule(self) -> Schedule:
        return find_schedule(self.pipeline_schedule)

    @property
    def token_slices(self) -> Plans | None:
        """Requested token slices of a sequence, as relative lengths; None for "auto"."""
        if self.pipeline_token_slices == "auto":
            return None
        lengths = tuple(int(length) for length in self.pipeline_token_slices.split(","))
        return ((1,) * lengths[0] if len(lengths) == 1 else lengths,)

    @property
    def num_microbatches(self) -> int | None:
        """Requested number of micro-batches M; None for "auto" and "measured"."""
        count = self.pipeline_parallel_num_microbatches
        return int(count) if count.isdecimal() else None


def with_pipeline_options(args: TrainingArguments) -> PipeTransformerArguments:
    """Return arguments with all pipeline options: other `TrainingArguments` are copied and get the defaults."""
    if isinstance(args, PipeTransformerArguments):
        args._read_trainers_numbers()
        args.is_taken = True
        return args
    kind = type(args)
    # A combined class keeps the options of a subclass such as Seq2SeqTrainingArguments.
    both = PipeTransformerArguments
    if kind is not TrainingArguments:
        both = dataclass(type(f"Pipeline{kind.__name__}", (PipeTransformerArguments, kind), {}))
    # Copied, not constructed: Trainer's __post_init__ has derived values already and must not run twice.
    taken = copy.copy(args)
    taken.__class__ = both
    for option in fields(PipeTransformerArguments):
        if option.name not in vars(taken):
            setattr(taken, option.name, READERS[option.name](option.name, option.default))
    taken._read_trainers_numbers()
    taken.is_taken = True
    taken._recompute_in_pipeline()
    return taken
