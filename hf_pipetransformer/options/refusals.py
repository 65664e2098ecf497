"""Checks before training for options, models and data sets that cannot work with a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import psutil
import torch
import yaml  # type: ignore[import-untyped]
from accelerate.commands.config import default_config_file
from accelerate.utils import parse_flag_from_env
from transformers.training_args import OptimizerNames, TrainingArguments

from hf_pipetransformer.comm.errors import LAUNCH_HINT, ModelSettingError
from hf_pipetransformer.comm.topology import check_connected
from hf_pipetransformer.options.combinations import Refusal, raise_first


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments


_PRECISIONS = ("bf16", "fp16", "fp32")
VERIFIED_ON_NCCL: frozenset[tuple[int, int, str, str, str]] = frozenset(
    {
        *((2, 1, schedule, precision, "sockets") for schedule in ("1f1b", "gpipe") for precision in _PRECISIONS),
        *((2, 1, schedule, "fp32", "sockets") for schedule in ("interleaved_1f1b", "zb_h1", "zb_v")),
        *((size, 4 // size, "1f1b", precision, "sockets") for size in (2, 4) for precision in _PRECISIONS),
        (2, 2, "interleaved_1f1b", "fp32", "sockets"),
        *((4, 1, schedule, "fp32", "sockets") for schedule in ("token", "async_1f1b")),
    }
)
"""Runs that passed `make gpu-check`: number of stages K and of replicas R, schedule, precision, and NCCL's transport:
"sockets", over which ranks share a GPU, or "direct", what NCCL chooses between GPUs (P2P, NVLink, shared memory).
A test compares benchmarks/gpu_check.json."""


def check_arguments(args: PipeTransformerArguments) -> None:
    """Raise if an option cannot work with a pipeline.

    Raises:
        ValueError: names the option, the reason and the remedy.
    """
    raise_first([*_refused_always(args), *_refused_with_processes(args), *_refused_with_stages(args)])


def _refused_always(args: PipeTransformerArguments) -> list[Refusal]:
    optimizer = OptimizerNames(args.optim).value
    # `accelerate launch` says in the environment what its config asks for: the arguments show nothing of it.
    return [
        (
            bool(args.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP"),
            f"fsdp={args.fsdp or 'in the config of accelerate'!r}: FSDP shards every layer over all ranks, a pipeline "
            "gives each rank its own layers. Remove fsdp (in a config of accelerate set distributed_type: MULTI_GPU): "
            "more stages (pipeline_parallel_size) hold fewer weights each, and "
            "pipeline_checkpoint='layers' keeps fewer activations. Or use Trainer.",
        ),
        (
            parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"),
            "accelerate was told to use DeepSpeed, whose engine owns model and optimizer itself. Remove deepspeed "
            "from the accelerate config, or use Trainer.",
        ),
        (
            getattr(args, "parallelism_config", None) is not None
            or parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG")
            or parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"),
            "parallelism_config: tensor and context parallelism are not combined with the pipeline. Remove "
            "parallelism_config: more stages hold fewer weights each, and pipeline_schedule='token' with "
            "pipeline_checkpoint='layers' takes long sequences.",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True: it restarts the run with a smaller batch on one rank, while the others wait. "
            "Set per_device_train_batch_size yourself; pipeline_checkpoint='layers' saves memory.",
        ),
        (
            any(name in optimizer for name in ("lomo", "galore", "apollo")),
            f"optim={optimizer!r}: LOMO, GaLore and APOLLO update or project whole layers of a whole model. Choose an "
            "optimizer with one state per parameter, such as 'adamw_torch'.",
        ),
        (
            args.train_sampling_strategy == "batch_rebalance",
            "train_sampling_strategy='batch_rebalance' gives ranks different numbers of samples. Use 'random' or "
            "'group_by_length'.",
        ),
        (
            args.eval_use_gather_object,
            "eval_use_gather_object=True: predictions are gathered over replicas as tensors. Remove it.",
        ),
        (
            not args.dataloader_in_order,
            "dataloader_in_order=False: which samples form a step would depend on the workers' speed, and differ from "
            "rank to rank. Remove it.",
        ),
        (
            args.activation_checkpointing_kwargs is not None and args.pipeline_checkpoint != "never",
            "activation_checkpointing_kwargs have no effect on the pipeline's own recomputation. Remove them.",
        ),
    ]


def _refused_with_processes(args: PipeTransformerArguments) -> list[Refusal]:
    """List what would be wrong with several processes or devices."""
    return [
        (
            args.n_gpu > 1,
            f"One process sees {args.n_gpu} GPUs and Trainer would use nn.DataParallel. Start one process a GPU: "
            f"{LAUNCH_HINT}.",
        ),
        (
            args.splits_batches and args.per_device_train_batch_size % args.world_size != 0,
            "accelerator_config: split_batches=True splits a batch of per_device_train_batch_size="
            f"{args.per_device_train_batch_size} samples over {args.world_size} processes, which takes a multiple of "
            f"{args.world_size}. Change per_device_train_batch_size.",
        ),
        (
            args.world_size > 1 and not args.accelerator_config.use_seedable_sampler,
            "accelerator_config: use_seedable_sampler=False takes the order from each process's own generator. "
            "Remove it.",
        ),
    ]


def _refused_with_stages(args: PipeTransformerArguments) -> list[Refusal]:
    """List what would be wrong, or have no effect, with several stages."""
    # With one stage each rank has the whole model, for which all of these mean what they mean in Trainer.
    compiles, mode, backend = args.torch_compile, args.torch_compile_mode, args.torch_compile_backend
    refusals = [
        (
            args.bf16_full_eval or args.fp16_full_eval,
            "bf16_full_eval and fp16_full_eval cast a whole model, a stage holds a part of it. Use bf16=True, or "
            "pipeline_parallel_size=1.",
        ),
        (
            compiles and (mode in ("reduce-overhead", "max-autotune") or backend == "cudagraphs"),
            f"torch_compile_backend={backend!r}, torch_compile_mode={mode!r}: CUDA graphs use the memory of a layer's "
            "output again, while micro-batches in flight need it. Use another mode, or pipeline_parallel_size=1.",
        ),
        (
            compiles and args.abilities.splits_backward,
            f"pipeline_schedule={args.pipeline_schedule!r} computes the weight gradients of linear layers apart; "
            "torch_compile=True compiles them into the backward. Use pipeline_schedule='1f1b' or 'interleaved_1f1b', "
            "or do without torch_compile.",
        ),
        (
            args.save_on_each_node,
            "save_on_each_node=True: the whole model is put together on rank 0 only. Save to a shared folder, or use "
            "pipeline_parallel_size=1.",
        ),
        (
            bool(args.debug),
            f"debug={args.debug}: it inspects the weights of the whole model. Use pipeline_parallel_size=1 for it.",
        ),
    ]
    return refusals if _may_have_stages(args) else []


def _may_have_stages(args: PipeTransformerArguments) -> bool:
    return args.world_size > 1 and args.pipeline_size != 1


def warn_about_options(args: PipeTransformerArguments) -> list[str]:
    """Return warnings about options that work differently than in Trainer."""
    # With "auto" K is not known yet: the longest pipeline stands for it.
    size = args.pipeline_size or args.world_size
    run = (size, args.world_size // size, args.pipeline_schedule, precision_of(args))
    able = args.abilities
    uses_nccl = args.device.type == "cuda" and args.ddp_backend != "gloo"
    missing, known = "NCCL", "on gloo and under NCCL's rules"
    if (*run, "sockets") in VERIFIED_ON_NCCL:
        missing, known = "NCCL over P2P or NVLink", "on NCCL over sockets"
    warnings = [
        (
            not args.average_tokens_across_devices,
            "average_tokens_across_devices=False: losses are always averaged over the items of all replicas, as in "
            "one process.",
        ),
        (
            not args.accelerator_config.even_batches,
            "accelerator_config.even_batches has no effect: no sample is ever repeated or dropped.",
        ),
        (
            args.pipeline_size == 1 and args.pipeline_checkpoint in ("always", "except_last"),
            f"pipeline_checkpoint={args.pipeline_checkpoint!r} recomputes a whole stage, which saves no memory with "
            "only one stage: use pipeline_checkpoint='layers', which recomputes layer by layer.",
        ),
        (
            1 in (args.world_size, args.pipeline_size) and (able.splits_backward or able.min_chunks > 1),
            f"pipeline_schedule={args.pipeline_schedule!r} does nothing with one stage, which waits for no other.",
        ),
        (
            any(value is not None for value in _of_ddp(args).values()),
            f"{', '.join(f'{name}={value}' for name, value in _of_ddp(args).items() if value is not None)}: "
            "options of DistributedDataParallel do nothing here, where replicas of a stage add their gradients "
            "without it.",
        ),
        (
            bool(args.neftune_noise_alpha) and args.freeze_policy != "none",
            f"neftune_noise_alpha={args.neftune_noise_alpha}: the embeddings freeze first, and frozen layers run in "
            "evaluation mode, in which NEFTune adds no noise. Trainer adds it to frozen embeddings, too.",
        ),
        (
            args.fp16 and args.device.type == "cpu",
            "fp16=True has no effect on a CPU, where accelerate computes in float32: use bf16=True, or leave it out.",
        ),
        (
            _may_have_stages(args) and uses_nccl and (*run, _transport()) not in VERIFIED_ON_NCCL,
            "K={} x R={} with pipeline_schedule={!r} in {} has not been verified on {} yet, only {}: start "
            "`hf-pipetransformer selftest` on your GPUs as you start this run, which compares it with one process, or "
            "set pipeline_parallel_size=1.".format(*run, missing, known),
        ),
    ]
    return [text for is_due, text in warnings if is_due]


def _transport() -> str:
    """Return "sockets" if the environment leaves NCCL nothing else, otherwise "direct"."""
    is_off = all(os.environ.get(f"NCCL_{name}_DISABLE", "0") == "1" for name in ("P2P", "SHM", "IB"))
    return "sockets" if is_off else "direct"


def _of_ddp(args: TrainingArguments) -> dict[str, Any]:
    names = ("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
    return {name: getattr(args, name) for name in names}


def check_communication_hook(accelerator: Any) -> None:
    """Raise if accelerate was given a communication hook of DistributedDataParallel.

    Raises:
        ValueError: names the hook and what takes its place.
    """
    hook = str(getattr(accelerator.ddp_handler, "comm_hook", "no"))
    if hook != "no" and accelerator.num_processes > 1:
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={hook!r}): replicas of a stage add their gradients without "
            "DistributedDataParallel, and the hook would not be called. Remove it; with weights in bfloat16, "
            "pipeline_gradient_dtype='weights' sends half the bytes."
        )


def precision_of(args: TrainingArguments) -> str:
    """Return the training precision: "fp32", "bf16" or "fp16"."""
    return "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"


def check_launch(args: TrainingArguments) -> None:
    """Raise if the launched processes would run as independent trainings.

    Raises:
        ValueError: names the number of processes and the right launch command.
    """
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if asked != args.world_size:
        raise ValueError(
            f"{asked} processes were started (WORLD_SIZE={asked}), but each believes in a world of {args.world_size}: "
            f"{asked} independent trainings would run. To train on CPUs set ACCELERATE_USE_CPU=true. Else start so: "
            f"{LAUNCH_HINT}."
        )
    # Again: the arguments may have been made before an earlier trainer left the process group.
    check_connected()
    wanted = _processes_asked_of_accelerate()
    if args.world_size == 1 and wanted > 1:
        raise ValueError(
            f"`accelerate launch` for {wanted} processes started one process only, as it does with --cpu and for "
            f"MULTI_CPU. Start it so: {LAUNCH_HINT}."
        )


def check_output_dir(args: TrainingArguments) -> None:
    """Raise on a rank that saves if the folder of the run can be neither made nor written into.

    Raises:
        ValueError: names the folder and why.
    """
    if not args.should_save:
        return
    reason: object = "it may not be written into"
    try:
        os.makedirs(args.output_dir, exist_ok=True)
        is_open = os.access(args.output_dir, os.W_OK)
    except OSError as error:
        is_open, reason = False, error.strerror
    if not is_open:
        raise ValueError(f"output_dir={args.output_dir!r} cannot be used ({reason}): name a folder of yours.")


def _processes_asked_of_accelerate() -> int:
    """Return the processes that the `accelerate launch` which is the parent process was to start; 1 without one."""
    try:
        # From its command line: accelerate tells a lone process on CPUs by no variable how many were asked for.
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent is not None else []
    # It may have ended, or belong to another user.
    except psutil.Error:
        return 1
    is_launch = any(word == "launch" or "accelerate.commands.launch" in word for word in words)
    if not is_launch or not any("accelerate" in word for word in words):
        return 1
    options = {}
    for position, word in enumerate(words):
        name, _, value = word.partition("=")
        # accelerate takes `--num_processes 4` and `--num-processes=4` alike.
        options[name.replace("-", "_")] = value or words[min(position + 1, len(words) - 1)]
    text = options.get("__num_processes") or _processes_on_cpus(options.get("__config_file"))
    return int(text) if text.isdigit() else 1


def _processes_on_cpus(config_file: str | None) -> str:
    """Return the number of processes in a configuration of accelerate for CPUs, of which it starts one only."""
    path = config_file or default_config_file
    if not os.path.isfile(path):
        return "1"
    with open(path, encoding="utf-8") as file:
        found = yaml.safe_load(file)
    is_for_cpus = isinstance(found, dict) and found.get("distributed_type") == "MULTI_CPU"
    return str(found.get("num_processes", 1)) if is_for_cpus else "1"


def check_model(model: Any, pipeline_size: int | None, is_undivided: bool, optimizers: tuple[Any, Any]) -> None:
    """Raise if a model or optimizer cannot be split into stages.

    Args:
        pipeline_size: number of ranks of a pipeline K; None for "auto".
        is_undivided: True with one process and one micro-batch, where batch norms are allowed.
        optimizers: the user's (optimizer, scheduler).

    Raises:
        ModelSettingError: LayerDrop, batch norms, or outputs of all layers, which work in Trainer.
        ValueError: device_map, a distributed_config, a quantized model, or an optimizer that cannot be split.
    """
    if getattr(model, "is_distributed_loading_by_transformers", False):
        sizes = model.config.distributed_config
        raise ValueError(
            f"The model was loaded with distributed_config (pp_size={sizes.pp_size}, tp_size={sizes.tp_size}, "
            f"fsdp_size={sizes.fsdp_size}), so each rank has a part of it already; load it without distributed_config "
            "and tp_plan, stages are placed by the pipeline."
        )
    # A device_map that names a single device cuts nothing.
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise ValueError("The model was loaded with device_map; load it without, stages are placed by the pipeline.")
    if not is_undivided:
        _check_statistics(model)
    # One stage has all parameters, and steps the optimizer as Trainer does.
    if optimizers[0] is not None and pipeline_size != 1:
        _check_divisible(optimizers[0])
    config = getattr(model, "config", None)
    for option, reason, other in (
        ("layerdrop", "layers that are skipped at random cannot be stages", 0),
        ("output_hidden_states", "a stage knows its own layers only", False),
        ("output_attentions", "a stage knows its own layers only", False),
    ):
        value = getattr(config, option, other)
        if pipeline_size != 1 and value:
            raise ModelSettingError(f"config.{option}={value}: {reason}. Set it to {other}.")
    if pipeline_size != 1 and getattr(config, "model_type", None) == "prophetnet":
        raise ModelSettingError(
            "ProphetNet reads weights of its embeddings behind them, which later stages do not have: set "
            "pipeline_parallel_size=1."
        )


def keeps_statistics(module: Any) -> bool:
    """Return True if a module computes from statistics of its batch in training, and keeps them for evaluations.

    Batch normalization does so, and I-BERT's tracking of ranges, also without quantizing them.
    """
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) or type(module).__name__ == "QuantAct"


def _check_statistics(model: Any) -> None:
    """Raise if a layer keeps statistics of whole batches, which micro-batches and replicas would not have."""
    for name, module in model.named_modules():
        if not keeps_statistics(module):
            continue
        found = f"The model tracks the ranges of its activations ({name}) batch by batch"
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            found = f"The model has batch normalization ({name}), whose statistics run over a whole batch"
        raise ModelSettingError(
            f"{found}; micro-batches and replicas would each have their own. Use one process with "
            "pipeline_parallel_num_microbatches=1, or transformers.Trainer."
        )


def _check_divisible(optimizer: Any) -> None:
    """Raise if the user's optimizer cannot be split by parameters over several stages."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizers=(...): LBFGS keeps one state for all parameters and asks for several forwards a step. Choose "
            "an optimizer with one state per parameter."
        )
    num_with_state = sum(parameter in optimizer.state for parameter in parameters)
    # None before the first step, all after a training on one stage.
    if num_with_state not in (0, len(parameters)):
        raise ValueError(
            f"optimizers=(...): the optimizer has state for {num_with_state} of {len(parameters)} parameters, as "
            "after a training in a pipeline, where each stage keeps its own. Make a new one for another training."
        )


def check_dataset(dataset: Any, what: str) -> None:
    """Check a data set; None passes.

    Raises:
        ValueError: it has no length and indices, and is no `IterableDataset` of torch or datasets.
    """
    # Here alone: the import takes a second, which a plan from a config does not need.
    import datasets

    if dataset is None or isinstance(dataset, (torch.utils.data.IterableDataset, datasets.IterableDataset)):
        return
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"The {what} data set is a {type(dataset).__name__} without a length and indices. Use a data set with "
            "`__len__` and `__getitem__`, or a torch.utils.data.IterableDataset."
        )


def comparable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments to JSON values that can be compared: other types and NaN become text."""
    plain = (bool, int, float, str, type(None))
    # `value == value` is false for NaN.
    return {
        name: value if isinstance(value, plain) and value == value else str(value) for name, value in arguments.items()
    }
