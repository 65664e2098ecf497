"""`PipeTransformerArguments`: Trainer's options and those of the pipeline."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_type_hints

import torch
from transformers import TrainingArguments

from hf_pipetransformer.comm.groups import why_not_reached
from hf_pipetransformer.comm.topology import check_connected
from hf_pipetransformer.options.combinations import check_combinations
from hf_pipetransformer.options.reading import (
    Reader,
    choice,
    closest,
    count_or,
    freeze_table,
    interval,
    layers_or_share,
    number,
    optional,
    path,
    read_trainers_numbers,
    truth,
    whole_number,
)
from hf_pipetransformer.report import failure
from hf_pipetransformer.schedules.abilities import SCHEDULE_NAMES, WEIGHTS_NAMES, Abilities, abilities_of
from hf_pipetransformer.schedules.placement import Plans


logger = logging.getLogger(__name__)

GRADIENT_DTYPES = ("auto", "float32", "weights")
MASTER_DTYPES = ("float32",)
LOSS_SCOPES = ("auto", "parts", "batch", "replica")
RECOMPUTE_MODES = ("always", "except_last", "layers", "never")
FREEZE_POLICIES = ("gradient_norm", "schedule", "fixed", "auto", "none")
FREEZE_RULES = ("inclusive", "exclusive")
CLIPS = ("stage", "last")
COMPRESSIONS = ("throughput", "memory")
CACHE_MODES = ("auto", "on", "off")
GATHER_MODES = ("auto", "always", "never")
METRICS_MODES = ("first_rank", "every_rank")
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16")

LONGEST_WAIT = 1e9
"""Longest timeout in seconds; a longer one would overflow in the transports."""

read_timeout = number(f"a number of seconds from 0.001 to {LONGEST_WAIT:.0f}", lambda x: 1e-3 <= x <= LONGEST_WAIT)

_NO_PIPELINE = (
    "PipeTransformerArguments were given to a Trainer without a pipeline, which ignores pipeline_*, freeze_* and "
    "activation_cache*. Use PipeTransformerTrainer, or `class Mine(PipeTransformerMixin, YourTrainer)`."
)


def option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    """Declare an option: `text` is its help on the command line and its entry in docs/options.md.

    The reader stands in the annotation, because `HfArgumentParser` passes all metadata on to argparse. In `text`,
    "See docs/PAGE.md, HEADING." becomes a link in the docs.
    """
    return field(default=default, metadata={"help": text} | ({"choices": _Listed(choices)} if choices else {}))


class _Listed(tuple[str, ...]):
    """Choices that the command line's help lists; the option's reader refuses a value, and says which one is close."""

    def __contains__(self, _word: object) -> bool:
        return True


class _KnownNames:
    """Refuses a name that is no option, as the constructor would, and says what was meant.

    A base class, so that the signature of arguments is still that of their constructor.
    """

    def __new__(cls, *_args: Any, **named: Any) -> Any:
        known = inspect.signature(cls.__init__).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
        for name in (each for each in named if each not in known and not takes_all):
            owners = (
                kind.__name__
                for kind in _with_subclasses(TrainingArguments)
                if name in {each.name for each in fields(kind)}
            )
            owner = next(owners, None)
            hint = closest(name, known) if owner is None else f" It is one of {owner}."
            raise TypeError(f"{cls.__name__} has no option {name!r}.{hint}")
        return super().__new__(cls)


def _with_subclasses(kind: Any) -> Iterator[Any]:
    """Iterate over the subclasses of a class, those of this library first, then the class."""
    for each in sorted(kind.__subclasses__(), key=lambda each: not issubclass(each, _KnownNames)):
        yield from _with_subclasses(each)
    yield kind


@dataclass
class PipeTransformerArguments(TrainingArguments, _KnownNames):
    """`transformers.TrainingArguments` with the options of the pipeline.

    One optimizer step takes `per_device_train_batch_size * world size * gradient_accumulation_steps` samples,
    independent of the pipeline length. An evaluation batch of a pipeline has
    `per_device_eval_batch_size * pipeline_parallel_size` samples. With `split_batches` in `accelerator_config` both
    batch sizes count all processes together, as in Trainer.

    Each field is the one declaration of an option: its annotation has the reader that parses and checks values from
    scripts, YAML files and sweeps, its `help` the values and units. Sections are those of the PipeTransformer paper.

    Raises:
        ValueError: an option cannot be parsed or is out of range; names the value found and those expected.
    """

    # Pipeline.
    pipeline_parallel_size: Annotated[str, count_or("auto")] = option(
        "auto",
        "Ranks in one pipeline, K: a divisor of the number of processes on a node, the processes of whole nodes if no "
        "process stays idle, or `auto` for the smallest K whose stages fit in memory.",
    )
    pipeline_parallel_num_microbatches: Annotated[str, count_or("auto", "measured")] = option(
        "auto",
        "Micro-batches per mini-batch of one pipeline, M: a number, `measured` or `auto`. `measured` tries 6K, 4K, "
        "3K, 2K and K on the first training steps of each pipeline length (M is 1 without a pipeline). `auto` also "
        "measures, unless measured times would then change the numbers of a seeded run: with dropout, whose masks "
        "depend on M, and with `full_determinism`, M is 4K, or less so that a micro-batch has at least 4 samples.",
    )
    pipeline_schedule: Annotated[str, choice(SCHEDULE_NAMES)] = option(
        "1f1b",
        "Order of the forwards and backwards on each rank. `1f1b` keeps fewer activations in memory than `gpipe`. The "
        "others have smaller bubbles: `interleaved_1f1b` puts several stages on each rank, `zb_h1` and `zb_v` compute "
        "weight gradients later than input gradients, and `token` (causal language models only) pipelines slices of "
        "each sequence. All of these give the same results. `async_1f1b` has no bubble but gives other results, "
        "because stages update their weights without waiting for each other. See docs/how_it_works.md, Asynchronous "
        "1F1B.",
        choices=SCHEDULE_NAMES,
    )
    pipeline_token_slices: Annotated[
        str, count_or("auto", lengths="a number of slices or their lengths, as in '512,512,1024'")
    ] = option(
        "auto",
        "With `pipeline_schedule=token`, how to slice each sequence: a number of slices, their lengths in tokens "
        "(`512,512,1024`; a sequence of another length is cut in proportion), or `auto` to plan slices and M from "
        "measured times. The first line of a run names the lengths, or why sequences stay whole.",
    )
    pipeline_chunks: Annotated[int | None, optional(whole_number("a number of stages, 1 or more", least=1))] = option(
        None,
        "Stages on each rank of a pipeline, V: 2 or more with `interleaved_1f1b` (2 if not set), 2 with `zb_v`, 1 "
        "with the other schedules.",
    )
    pipeline_weights: Annotated[str, choice(WEIGHTS_NAMES)] = option(
        "pipeoptim",
        "With `pipeline_schedule=async_1f1b`, the weights that forward and backward use: predicted and current "
        "(`pipeoptim`), current and current (`vanilla`), the forward's in both (`stashing`, as in PipeDream), those "
        "before the last update in both (`double_buffer`, as in PipeDream-2BW), or predicted in both (`spectrain`, "
        "and `xpipe`, which predicts with Adam's update).",
        choices=WEIGHTS_NAMES,
    )
    pipeline_clip: Annotated[str, choice(CLIPS)] = option(
        "stage",
        "With `pipeline_schedule=async_1f1b`, the gradient norm that `max_grad_norm` limits: that of each `stage`, or "
        "that of the whole model in the `last` step that all stages have finished.",
        choices=CLIPS,
    )
    pipeline_drain_interval: Annotated[
        int | None, optional(whole_number("a number of optimizer steps, 1 or more", least=1))
    ] = option(
        None,
        "With `pipeline_schedule=async_1f1b`, optimizer steps between two drains, after which all stages have done "
        "the same number of updates. If not set, stages drain only when necessary: to evaluate, save or change the "
        "layout, and at the end of an epoch.",
    )
    pipeline_loss: Annotated[str, choice(LOSS_SCOPES)] = option(
        "auto",
        "Samples that one call of the loss sees, where micro-batches or replicas cut a batch: those of the whole "
        "`batch`, as on one process, for any loss; those of a `replica`, as with DDP; or those of a micro-batch "
        "(`parts`), whose losses are added with weights and compared with the loss of the whole batch while the run "
        "goes on. `batch` and `replica` run all forwards before the first backward (`pipeline_schedule=gpipe`), with "
        "the head and the loss once a batch. `auto` is `parts` for losses of transformers and TRL whose arithmetic is "
        "known, else `batch`. See docs/how_it_works.md, The loss of a batch.",
        choices=LOSS_SCOPES,
    )
    pipeline_head_slices: Annotated[str, count_or("auto")] = option(
        "1",
        "Slices of each sequence in which the stage with the head of a causal language model computes logits, loss "
        "and their gradients, one after the other, so that the logits of one slice are all that is in memory: a "
        "vocabulary of 128,000 words takes 4 GB for 8,192 tokens in float32. Same numbers, and nothing is recomputed. "
        "`auto` takes the fewest slices (1, 2, 4, ... 64) with which the first layout fits in memory, and says so; it "
        "leaves the head whole where the loss may read the logits.",
    )
    pipeline_checkpoint: Annotated[str, choice(RECOMPUTE_MODES, on="always", off="never")] = option(
        "never",
        "Activation recomputation: run the forward of a micro-batch again in its backward layer by layer (`layers`: "
        "least memory, what each layer got and the activations of one layer), stage by stage (`always`: what each "
        "stage got and the activations of one micro-batch), so for all but the last micro-batch (`except_last`), or "
        "`never`. `activation_checkpointing=True` means `layers`.",
        choices=RECOMPUTE_MODES,
    )
    pipeline_gradient_dtype: Annotated[str, choice(GRADIENT_DTYPES)] = option(
        "auto",
        "Precision in which the gradients of `bfloat16` weights are added over micro-batches, gradient accumulation "
        "and replicas: `float32` (4 more bytes per trained weight; the optimizer gets the rounded sum), that of the "
        "`weights`, or `auto`, which is `float32` if the first layout fits in memory with it.",
        choices=GRADIENT_DTYPES,
    )
    pipeline_master_dtype: Annotated[str | None, optional(choice(MASTER_DTYPES))] = option(
        None,
        "Precision of the weights in training. With `float32`, weights that were loaded in `bfloat16` or `float16` "
        "are cast when `train()` begins, on each process those of its stage alone; they train, are saved and stay as "
        "if they had been loaded in `float32`. Of a model with adapters, only what is trained is cast. If not set, "
        "weights train in the precision that they were loaded in.",
        choices=MASTER_DTYPES,
    )
    pipeline_timeout: Annotated[float, read_timeout] = option(
        300.0,
        "Seconds that a rank waits for another one in a training step, or for a worker of its data loader, before the "
        "run ends with an error on every rank. Between steps (preparing, logging, evaluating, saving), and everywhere "
        "with `torch_compile`, a rank that is alive may take `ddp_timeout` if that is longer; one that gives no sign "
        "of life for `pipeline_timeout` (killed, hanging, or cut off from the network) ends the run there, too.",
    )
    pipeline_trace_step: Annotated[
        int | None, optional(whole_number("an optimizer step, 0 for the first", least=0))
    ] = option(
        None,
        "Optimizer step to trace (0 is the first): the computations, transfers and waits of every rank are written to "
        "`<output_dir>/trace_step_<step>.json`, which Perfetto and Chrome open. See docs/report.md, Trace of a step.",
    )
    pipeline_gather_at_end: Annotated[str, choice(GATHER_MODES, on="always", off="never")] = option(
        "auto",
        "After training, put the whole model together on every process (`always`), leave it on its stages (`never`), "
        "or put it together if the whole models of a node's processes fit in half of its free memory (`auto`). "
        "`save_model`, `push_to_hub`, `evaluate` and `predict` work on a model that is left on its stages, called on "
        "every process; other code reads it within `trainer.whole_model()`.",
        choices=GATHER_MODES,
    )

    pipeline_compute_metrics: Annotated[str, choice(METRICS_MODES)] = option(
        "first_rank",
        "Processes that call `compute_metrics` in `evaluate()`. With `first_rank` the logits go to rank 0 alone, "
        "which computes the metrics and sends them to all others. With `every_rank` all processes get all logits and "
        "call it, as with `Trainer`; set this if it communicates between processes.",
        choices=METRICS_MODES,
    )

    # Freezing (section 3.1).
    freeze_policy: Annotated[str, choice(FREEZE_POLICIES, off="none", null="none")] = option(
        "none",
        "How layers are frozen during training, from the bottom up: not at all (`none`), by gradient norms "
        "(`gradient_norm`, Eq. 1 of the PipeTransformer paper), by the upper bound of Eq. 1 alone (`schedule`), as "
        "listed in `freeze_at` (`fixed`), or half of them from the first step if the run has 2 or 3 epochs and at "
        "most 200 steps (`auto`). Pass `policy=` to the trainer for a policy of your own. See "
        "docs/how_it_works.md, Your own freeze policy.",
        choices=FREEZE_POLICIES,
    )
    freeze_alpha: Annotated[float, number("between 0 and 1, both excluded", lambda alpha: 0 < alpha < 1)] = option(
        1 / 3, "alpha of Eq. 1, in (0, 1): the largest share of the active layers that one decision freezes."
    )
    freeze_rule: Annotated[str, choice(FREEZE_RULES)] = option(
        "inclusive",
        "With `freeze_policy=gradient_norm`, freeze up to the layer with the smallest gradient norm, including that "
        "layer (`inclusive`) or not (`exclusive`).",
        choices=FREEZE_RULES,
    )
    freeze_interval: Annotated[str, interval] = option(
        "epoch",
        "Time between two freeze decisions: `epoch`, a number of optimizer steps, or a share of the run such as 0.1.",
    )
    freeze_warmup: Annotated[float, number("a share of the run in [0, 1)", lambda share: 0 <= share < 1)] = option(
        0.5, "Share of the run before the first freeze decision, in [0, 1)."
    )
    freeze_min_active_layers: Annotated[int, whole_number("a number of layers, 0 or more", least=0)] = option(
        2, "Layers at the top that are never frozen, except by `freeze_at`."
    )
    freeze_at: Annotated[str | None, optional(freeze_table)] = option(
        None,
        "With `freeze_policy=fixed`, a table `step:layers,...`: before optimizer step `step` (0 is the first), the "
        "first `layers` layers are frozen. A smaller number at a later step unfreezes the others, 0 all of them. Both "
        "may be shares, of the run and of the layers: `0:2/3,1/2:0`. See docs/how_it_works.md, Unfreezing.",
    )
    freeze_layers: Annotated[str | None, optional(layers_or_share)] = option(
        None,
        "Number of layers to freeze, with the embeddings, before the first step, or a share of them such as 2/3: "
        "the same as `freeze_policy=fixed` with this number for step 0 in `freeze_at`.",
    )

    # Elastic pipeline (sections 3.2 and 3.3).
    elastic: Annotated[bool, truth] = option(
        True,
        "Shorten the pipeline and add replicas as layers freeze. `false` keeps the stages; those that are completely "
        "frozen only run forward.",
    )
    pipeline_compression: Annotated[str, choice(COMPRESSIONS)] = option(
        "throughput",
        "Pipeline length after layers froze: the divisor with the shortest predicted step that fits in memory "
        "(`throughput`), or halved as long as no stage becomes larger than at the start (`memory`, Eq. 2).",
        choices=COMPRESSIONS,
    )
    layout_plan: Annotated[str | None, optional(path)] = option(
        None,
        "Events file (`pipetransformer_events.jsonl`) of an earlier run, whose decisions are replayed instead of "
        "taking new ones.",
    )

    # Activation cache (section 3.4).
    activation_cache: Annotated[str, choice(CACHE_MODES, on="on", off="off")] = option(
        "auto",
        "Cache the activations of frozen layers on disk and read them back instead of computing them: `auto` if "
        "measured times say that this is faster, `on` wherever it is possible, or `off`. Without frozen layers, and "
        "while pipelines span nodes, nothing is stored. See docs/how_it_works.md, The activation cache.",
        choices=CACHE_MODES,
    )
    activation_cache_dir: Annotated[str | None, optional(path)] = option(
        None,
        "Folder on a local disk in which the activation cache makes its folder `_activation_cache`; the temporary "
        "folder of the machine if not set. A network file system is refused.",
    )
    activation_cache_max_gb: Annotated[
        float | None, optional(number("a positive number of gigabytes", lambda size: size > 0))
    ] = option(
        None,
        "Gigabytes that the activation cache may use on each machine; half of the free space if not set. Samples that "
        "do not fit are computed.",
    )
    activation_cache_dtype: Annotated[str, choice(CACHE_DTYPES)] = option(
        "auto",
        "Precision of cached activations; `auto` is that of the activations, under autocast mostly float32. "
        "`bfloat16` halves them and rounds: other numbers than Trainer's.",
        choices=CACHE_DTYPES,
    )
    activation_cache_keep: Annotated[bool, truth] = option(
        False,
        "Keep the activation cache for later runs with the same frozen weights. In a pipeline they need the same data "
        "set, and their first epoch still reads each sample. See docs/how_it_works.md, The activation cache.",
    )

    # Before a run.
    plan_only: Annotated[bool, truth] = option(
        False,
        "Print the plan of the run (memory, time and waiting of every layout, what freezing and cache change, with "
        "what is measured at the start), write it to `plan.json` in `output_dir`, and end the script with status 0 "
        "before the first step. See docs/how_it_works.md, Planning a run.",
    )

    # Without annotations these are no dataclass fields, hence no options. They record that a trainer of this library
    # uses the arguments, that its constructor runs and stages come (each rank moves its own to its device), that it
    # recomputes in place of activation_checkpointing, and that the script gave plain TrainingArguments.
    is_taken = False
    is_on_stages = False
    recomputes_for_trainer = False
    was_plain = False

    @failure.recorded()
    def __post_init__(self) -> None:
        # First of all: Trainer's `__post_init__` would join the process group again, and wait for ever if it was left.
        check_connected()
        _check_output_dir(self.output_dir)
        # Here rather than with the other refusals: Trainer's own `__post_init__` reads the file and starts DeepSpeed.
        if self.deepspeed:
            raise ValueError(
                "deepspeed: the DeepSpeed engine owns model and optimizer itself, a pipeline stage does so here. "
                "Remove deepspeed, or use Trainer."
            )
        # Before the checks below, which compare options in the types that the readers give them.
        for name, read in READERS.items():
            setattr(self, name, read(name, getattr(self, name)))
        # Trainer's, but between two steps ranks wait for each other as long as the longer of both timeouts says.
        self.ddp_timeout = read_timeout("ddp_timeout", self.ddp_timeout)
        read_trainers_numbers(self)
        # Before the checks, too: they refuse fp16 of the launcher where they refuse the option.
        self._take_precision(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        check_combinations(self)
        # After the checks, which refuse both ways to say it at once.
        if self.freeze_layers is not None:
            self.freeze_policy, self.freeze_at = "fixed", f"0:{self.freeze_layers}"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
            # Without use_cpu accelerate would make each process a world of size 1 on a machine without GPUs.
            self.use_cpu = True
        # Once a host.
        if os.environ.get("LOCAL_RANK") == "0" and (why := why_not_reached()) is not None:
            logger.warning(why)
        # Before Trainer's part, which may start CUDA: later the variable would come too late.
        self._load_kernels_at_once()
        # TRL's default has the old name, for which Trainer would warn as if the script had set it.
        if self.activation_checkpointing is None and self.gradient_checkpointing is type(self).gradient_checkpointing:
            self.activation_checkpointing = self.gradient_checkpointing
        super().__post_init__()  # It connects the processes.
        # Depends on their number, which is known from here on.
        self._recompute_in_pipeline()

    def _load_kernels_at_once(self) -> None:
        """Let CUDA load all kernels when it starts if transfers are under way whenever ranks wait for each other.

        Else the first call of a kernel loads it, which waits for all that runs on the GPU. A posted receive of NCCL
        waits for its sender, and that, in a collective, for this rank (seen with four stages).

        Raises:
            ValueError: CUDA has started, and loads kernels one by one.
        """
        is_needed = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not self.use_cpu and self.ddp_backend != "gloo"
        if not is_needed or not self.abilities.overlaps_steps or not torch.cuda.is_available():
            return
        if torch.cuda.is_initialized() and os.environ.get("CUDA_MODULE_LOADING") != "EAGER":
            raise ValueError(
                f"pipeline_schedule={self.pipeline_schedule!r} needs CUDA to load all kernels at its start, but a GPU "
                "is in use already: build PipeTransformerArguments before anything goes to a GPU, or start the script "
                "with CUDA_MODULE_LOADING=EAGER."
            )
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"

    def _take_precision(self, of_launcher: str) -> None:
        """Set the option for the precision that `accelerate launch` or its configuration names, unless one is set.

        Trainer leaves `bf16` and `fp16` as they are then, although it computes so.
        """
        if not (self.bf16 or self.fp16):
            self.bf16, self.fp16 = of_launcher == "bf16", of_launcher == "fp16"

    def _recompute_in_pipeline(self) -> None:
        if self.activation_checkpointing and (self.pipeline_parallel_size != "1" or self.abilities.cuts_tokens):
            if self.pipeline_checkpoint != "never":
                raise ValueError(
                    f"activation_checkpointing=True and pipeline_checkpoint={self.pipeline_checkpoint!r} say the same "
                    "thing twice: set only one of them."
                )
            # One process runs the model's own forward, which recomputes as with Trainer.
            if self.world_size > 1 or self.abilities.cuts_tokens:
                # The engine recomputes; the model must not do so a second time.
                self.pipeline_checkpoint = "layers"
                self.activation_checkpointing = False
                self.recomputes_for_trainer = True

    def leave_recomputing_to_trainer(self) -> None:
        """Set `activation_checkpointing` back to the user's value, for a run without a pipeline."""
        if self.recomputes_for_trainer:
            self.pipeline_checkpoint, self.activation_checkpointing = "never", True
            self.recomputes_for_trainer = False

    @property
    def place_model_on_device(self) -> bool | None:
        """False if each rank moves its stage to its device, else None, for Trainer's default.

        Every Trainer reads it in its constructor: the place to warn that a plain one ignores the pipeline's options.
        """
        if not self.is_taken:
            logger.warning(_NO_PIPELINE)
        return False if self.is_on_stages else None

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
        return self.pipeline_chunks or self.abilities.default_chunks

    @property
    def abilities(self) -> Abilities:
        """Abilities of the schedule that was asked for; see `RunPlanner` for the one that runs."""
        return abilities_of(self.pipeline_schedule)

    @property
    def is_undivided(self) -> bool:
        """True if one process computes each batch as a whole."""
        return self.world_size == 1 and self.num_microbatches in (None, 1)

    @property
    def token_slices(self) -> Plans | None:
        """Requested token slices of a sequence, as relative lengths; None for "auto"."""
        if self.pipeline_token_slices == "auto":
            return None
        lengths = tuple(int(length) for length in self.pipeline_token_slices.split(","))
        return ((1,) * lengths[0] if len(lengths) == 1 else lengths,)

    @property
    def head_slices(self) -> int | None:
        """Requested slices of the head; None for "auto"."""
        return None if self.pipeline_head_slices == "auto" else int(self.pipeline_head_slices)

    @property
    def num_microbatches(self) -> int | None:
        """Requested number of micro-batches M; None for "auto" and "measured"."""
        count = self.pipeline_parallel_num_microbatches
        return int(count) if count.isdecimal() else None


READERS: dict[str, Reader] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(PipeTransformerArguments, include_extras=True).items()
    # The hints of Trainer's own options are among them, and have no reader.
    if name in PipeTransformerArguments.__annotations__
}
"""Reader of each option of the pipeline, from its annotation."""


def _check_output_dir(value: Any) -> None:
    if value is not None:  # Trainer has a name for it then.
        path("output_dir", value)


def with_pipeline_options(args: TrainingArguments) -> PipeTransformerArguments:
    """Return arguments with all pipeline options: other `TrainingArguments` are copied and get the defaults."""
    if isinstance(args, PipeTransformerArguments):
        # Once more: a script may have set them since the arguments were made.
        read_trainers_numbers(args)
        args.is_taken = True
        return args
    _check_output_dir(args.output_dir)
    kind = type(args)
    # A combined class keeps the options of a subclass such as Seq2SeqTrainingArguments.
    both = PipeTransformerArguments
    if kind is not TrainingArguments:
        # A dataclass again, as Trainer goes through `fields`, which would lack those of the subclass.
        both = dataclass(type(f"Pipeline{kind.__name__}", (PipeTransformerArguments, kind), {}))
    # Copied, not constructed: Trainer's __post_init__ has derived values already and must not run twice.
    taken = object.__new__(both)
    taken.__dict__.update(vars(args))
    # Through the readers, as defaults are written as a person would.
    for option in fields(PipeTransformerArguments):
        if option.name not in vars(taken):
            setattr(taken, option.name, READERS[option.name](option.name, option.default))
    read_trainers_numbers(taken)
    taken._take_precision(taken.mixed_precision)
    taken.is_taken = taken.was_plain = True
    taken._recompute_in_pipeline()
    return taken
