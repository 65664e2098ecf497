"""Access to Trainer internals that are not public API, and the list of all patches of other libraries.

Names that are read or overridden are listed in `tests/support/private_names.py`. What the package sets on objects or
modules of other libraries is here:

- metrics and token counts of TRL's trainers, and `DPOTrainer.precompute_ref_logps` (`compat/trl_compat.py`): parts of
  a batch overlap and are averaged apart; the loss takes from the batch what a pass of the reference over the stages
  has computed. Way out: a hook for metrics in TRL, and a method that its loss asks for the reference.
- `is_quantized`, `hf_quantizer` of a model from a GGUF file (`drop_marks_of_gguf`): they stay although its weights are
  plain, and Trainer refuses it. Way out: transformers removing them.
- `Trainer.gather_function`, `preprocess_logits_for_metrics`, `compute_metrics` and `compute_loss` (`with_attributes`):
  in an evaluation each replica has another number of samples, the last stage preprocesses micro-batch by micro-batch,
  rank 0 may compute the metrics, and a loss that is not the model's own runs inside of each stage. Way out: none
  needed: all are restored after each evaluation.
- `Trainer.model_accepts_loss_kwargs` (`training/builder.py`): the model accepts `num_items_in_batch` and ignores it.
  Way out: transformers#47688.
- `Trainer._tr_loss` and its counts (`restore_loss`, `_finalize_training`): unlogged loss of a resumed run; the mean
  over all ranks. Way out: Trainer saving them in its state.
- `Trainer.callback_handler`, `JITCheckpointCallback.jit_manager` (`training/callbacks.py`): callbacks get the whole
  model, and a step ends after the last of them; ranks agree before they save on a signal. Way out: events that all
  ranks reach together.
- `transformers.trainer.rotate_checkpoints`, `Trainer._push_from_checkpoint` (`ending_checkpoints_with`): complete a
  checkpoint before it is pushed, and before old ones are deleted, by their step. Way out: a method between saving and
  rotation, and the option to sort by step in Trainer.
- `transformers.modeling_utils.safe_save_file`, `safetensors.torch.save_file` (`writing_tensors_with`): fetch weights
  from other stages while a file is written. Way out: `save_pretrained` taking tensors that are loaded as it writes.
- `torch.set_autocast_enabled` (`startup/model.py`): the probe runs in float32 whatever the model enables. Way out: a
  context that forbids autocast.
- layers of bitsandbytes (`prepare_quantized` of `splitters/quantized.py`). `Linear4bit.support_avx512bf16_for_cpu`:
  in inference some CPUs pack the bytes in another way, and other ranks may not. `forward`, `state` and `weight.CB` of
  `Linear8bitLt`: its state would keep the bytes of the weight when a stage releases them. Way out: packing a copy, and
  a layer that reads its weight.
- `forward` of a model's modules (`splitters/view.py`), and `generate` of a causal language model
  (`runtime/generation.py`): run a part of the model, or all stages, as its own method. Way out: none: removed after
  every run.

Two tensors of classes of our own answer what would sync the device: a loss for Trainer's check for nan
(`SelfFilteringLoss`), and an attention mask for transformers' mask functions (`KnownMask` of `comm/staging.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import datasets
import safetensors.torch
import torch
import transformers.trainer as stock
from accelerate.utils import send_to_device
from transformers import PreTrainedModel, Trainer, TrainingArguments, modeling_utils
from transformers.trainer import TRAINER_STATE_NAME as TRAINER_STATE_NAME
from transformers.utils.quantization_config import QuantizationMethod

from hf_pipetransformer.comm.staging import KnownMask, is_apart
from hf_pipetransformer.data.batches import count_items
from hf_pipetransformer.report import announce
from hf_pipetransformer.splitters.adapters import bare_model, has_adapters
from hf_pipetransformer.splitters.base import CACHE_NAME, config_value
from hf_pipetransformer.splitters.script_code import names_in


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology


_MASK = "attention_mask"


def dataset_and_collator(trainer: Trainer, dataset: Any, description: str) -> tuple[Any, Any]:
    """Return the data set and collator without the columns that the model does not accept."""
    # As in Trainer's own loaders: columns of a `datasets.Dataset` are dropped once, of other samples by the collator.
    if isinstance(dataset, datasets.Dataset):
        return trainer._remove_unused_columns(dataset, description=description), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)


def drop_marks_of_gguf(model: Any) -> None:
    """Remove what says "quantized" from a model that was read from a GGUF file into plain weights.

    Transformers leaves its marks on a model whose weights it has dequantized while loading, and Trainer refuses such a
    model. A model that still holds blocks of the file, as bytes, stays as it is.
    """
    bare = bare_model(model)
    if getattr(bare, "quantization_method", None) != QuantizationMethod.GGUF:
        return
    if any(parameter.dtype == torch.uint8 for parameter in bare.parameters()):
        return
    bare.hf_quantizer.remove_quantization_config(bare)
    # From the environment: only the model is given here, before the trainer exists.
    if int(os.environ.get("RANK", "0")) == 0:
        announce("The model's weights were dequantized when its GGUF file was read: they train and save as they are.")


def eval_sampler(trainer: Trainer) -> Callable[[Any], Any]:
    """Return Trainer's function that makes an evaluation's sampler."""
    return trainer._get_eval_sampler


def preparation(trainer: Trainer) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return Trainer's function that moves a batch to the device; the mask takes along what the host knows of it."""
    attention = config_value(bare_model(trainer.model), "_attn_implementation")
    # Compiled code reads no mask on the host, and takes plain tensors only; user code may give the batch another mask.
    is_compiled = trainer.args.torch_compile or attention == "flex_attention"
    # A method of the user's gets what Trainer would give it: the batch as it was collated.
    if _has_users_preparation(trainer):
        return trainer._prepare_inputs
    return partial(_prepare, trainer, not is_compiled)


def sent(trainer: Trainer, inputs: dict[str, Any]) -> dict[str, Any]:
    """Copy a batch to the device without blocking, where Trainer's preparation would block for each tensor."""
    if _has_users_preparation(trainer) or not is_apart(trainer.args.device):
        return inputs
    copied: dict[str, Any] = send_to_device(inputs, trainer.args.device, non_blocking=True)
    return copied


def _has_users_preparation(trainer: Trainer) -> bool:
    return is_overridden(trainer, "_prepare_inputs") or is_overridden(trainer, "_prepare_input")


def _prepare(trainer: Trainer, knows_mask: bool, inputs: dict[str, Any]) -> dict[str, Any]:
    moved: dict[str, Any] = trainer._prepare_inputs(sent(trainer, inputs))
    mask = inputs.get(_MASK) if knows_mask else None
    # In each forward transformers' mask functions ask if the mask is all ones, and the host would wait for the device.
    if isinstance(mask, torch.Tensor) and not is_apart(mask.device) and is_apart(moved[_MASK].device):
        return {**moved, _MASK: KnownMask.of(moved[_MASK], mask)}
    return moved


def shifts_labels(trainer: Trainer) -> bool:
    """Return True if the loss predicts the next token."""
    return bool(trainer._loss_shifts_labels)


def items_of(trainer: Trainer, inputs: Any) -> int:
    """Count the items that the loss averages over."""
    return count_items(inputs, shifts_labels(trainer)) if inputs else 0


def items_of_own_mean(trainer: Trainer, inputs: Any) -> int:
    """Count the items of a loss that computes its own mean, without `num_items_in_batch`.

    For causal models whose loss it does not recognize (GPT-2), Trainer counts one label per sequence too many.
    """
    shifts = shifts_labels(trainer) or type(bare_model(trainer.model)).__name__.endswith("LMHeadModel")
    return count_items(inputs, shifts) if inputs else 0


def takes_num_items(trainer: Trainer) -> bool:
    """Return True if Trainer passes `num_items_in_batch` of the whole step to the loss."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def is_divided(trainer: Trainer, num_items: Any) -> bool:
    """Return True, by Trainer's rule, if the loss is already divided over the accumulation."""
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    return (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func is not None


def has_plain_loss(trainer: Trainer) -> bool:
    """Return True if the loss is the model's own, and no user code reads batch or output."""
    is_models = trainer.compute_loss_func is None and trainer.label_smoother is None
    return is_models and not is_overridden(trainer, "compute_loss")


def shows_batches(trainer: Trainer) -> bool:
    """Return True if code that is not Trainer's sees batches of the training between the loader and the model."""
    methods = ("get_train_dataloader", "get_batch_samples", "training_step", "_prepare_inputs", "compute_loss")
    return trainer.compute_loss_func is not None or any(is_overridden(trainer, name) for name in methods)


NOT_OF_A_LOSS = (
    *("model", "model_wrapped", "accelerator", "callback_handler", "optimizer", "lr_scheduler", "optimizers"),
    *("train_dataset", "eval_dataset", "data_collator", "processing_class", "pipeline_run", "hp_space", "deepspeed"),
    *("state", "_tr_loss", "_total_loss_scalar", "current_flos"),
)
"""Attributes of a trainer that a loss reads but does not write: large ones, and what Trainer itself counts."""

_KNOWN_CODE = ("transformers", "trl", "liger_kernel")
"""Packages whose losses are known. Those of Liger take the place of transformers' (`use_liger_kernel`)."""


def kind_with(trainer: Trainer, name: str) -> type:
    """Return the class, none of this library's, whose method of a name a trainer has."""
    return next(kind for kind in type(trainer).__mro__ if not is_own(kind) and name in vars(kind))


def has_known_loss(trainer: Trainer) -> bool:
    """Return True if code of transformers and TRL alone computes the loss."""
    model = bare_model(trainer.model)
    # What is set on an instance hides the class's own: transformers' `loss_function` is assigned so.
    instances = vars(trainer).get("compute_loss"), vars(model).get("_loss_function"), trainer.compute_loss_func
    code = [kind_with(trainer, "compute_loss"), type(model).forward, vars(model).get("forward"), *instances]
    return all(each is None or is_known_code(each) for each in code)


def is_known_code(code: Any) -> bool:
    """Return True for a class or function of transformers or TRL."""
    return str(getattr(code, "__module__", "")).partition(".")[0] in _KNOWN_CODE


def is_overridden(trainer: Trainer, name: str) -> bool:
    """Return True if a class outside this library, or the trainer instance itself, overrides a method of Trainer."""
    return name in vars(trainer) or kind_with(trainer, name) is not Trainer


def changer_of_batches(trainer: Trainer) -> str | None:
    """Return a method of the script's that prepares batches, and may change them; None without."""
    for name in ("_prepare_inputs", "_prepare_input"):
        kind = next(kind for kind in type(trainer).__mro__ if not is_own(kind) and name in vars(kind))
        if name in vars(trainer) or kind.__module__.partition(".")[0] not in _KNOWN_CODE:
            return f"{kind.__name__}.{name}"
    return None


def is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def why_gathered_to_save(trainer: Trainer) -> str | None:
    """Return why the whole model must be on rank 0 before Trainer saves it; None if it need not.

    It need not where all it does with weights is to pass them to `safetensors.torch.save_file`, or to save adapters.
    """
    model: Any = trainer.model
    kinds = type(trainer).__mro__
    below = kinds[1 + max(index for index, kind in enumerate(kinds) if is_own(kind)) :]
    # Above the pipeline's own `save_model`, another one runs outside of it.
    if next(kind for kind in below if "save_model" in vars(kind)) is not Trainer or is_overridden(trainer, "_save"):
        return f"{type(trainer).__name__} saves in a way of its own"
    if has_adapters(model):
        return None
    save = getattr(model, "save_pretrained", None)
    while isinstance(save, partial):  # A user's, with a `max_shard_size`: Trainer passes none.
        save = save.func
    is_transformers = isinstance(model, PreTrainedModel)
    if is_transformers and getattr(save, "__func__", None) is not PreTrainedModel.save_pretrained:
        return f"{type(model).__name__} has its own save_pretrained"
    if not is_transformers and trainer.accelerator.unwrap_model(model, keep_torch_compile=False) is not model:
        return f"{type(model).__name__} is wrapped around the model"
    # `save_pretrained` then asks its quantizer for the tensors, whatever state dict it is given.
    if getattr(model, "hf_quantizer", None) is not None:
        return "the model is quantized"
    # `save_pretrained` then takes meta tensors for offloaded ones, which it loads itself.
    if {"cpu", "disk"} & {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}:
        return "it was loaded with parts of it offloaded"
    return None


def generates(trainer: Trainer) -> bool:
    """Return True if evaluations generate tokens, as those of `Seq2SeqTrainer` may."""
    return bool(getattr(trainer.args, "predict_with_generate", False))


_NOT_CALLED_BELOW = (
    "training_step",
    "get_batch_samples",
    "_clip_grad_norm",
    "_get_num_items_in_batch",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
)
"""Trainer methods that a pipeline replaces without calling them, or that it needs as they are."""

_DOES_SOMETHING_UNDER = {
    f"trl.trainer.{name}_trainer.{kind}Trainer.training_step": "activation_offloading"
    for name, kind in (("sft", "SFT"), ("reward", "Reward"), ("dpo", "DPO"))
}
"""Methods of other trainers that only call Trainer's unless the named option is set."""


def check_taken_over(below: Any, args: TrainingArguments) -> None:
    """Refuse a trainer, given as the mixin's `super()`, whose overrides the pipeline would silently replace."""
    for name in _NOT_CALLED_BELOW:
        method = getattr(below, name).__func__
        option = _DOES_SOMETHING_UNDER.get(f"{method.__module__}.{method.__qualname__}")
        if option is not None and getattr(args, option):
            raise ValueError(f"{option}=True is not supported with a pipeline: use pipeline_checkpoint='layers'.")
        if option is None and method is not getattr(Trainer, name):
            raise ValueError(
                f"{getattr(below, name).__qualname__} would not run as in Trainer: PipeTransformerMixin stands before "
                f"it and runs the steps on stages. Override compute_loss, or override {name} in a class that stands "
                "before the mixin and calls super()."
            )


_MAKERS = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")
_DATALOADER = "_get_dataloader"


def check_loaders(kind: type, num_stages: int) -> None:
    """Refuse a class that builds its own DataLoader, as far as its code shows: the pipeline uses its own loaders.

    Others are refused once they have built one.
    """
    for name in _MAKERS:
        method = getattr(kind, name)
        names = names_in(method.__code__) if isinstance(method, FunctionType) else set()
        if method is not getattr(Trainer, name) and "DataLoader" in names and not names & {*_MAKERS, _DATALOADER}:
            raise ValueError(
                f"{method.__qualname__} makes a DataLoader, which knows nothing of the {num_stages} stages: build it "
                "with self._get_dataloader, override the sampler or the data collator instead, or set "
                "pipeline_parallel_size=1."
            )


def place_model(trainer: Trainer) -> None:
    """Move the whole model to this rank's device, as Trainer does without a pipeline."""
    trainer._move_model_to_device(trainer.model, trainer.args.device)


def torch_optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """Return the optimizer without accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def learning_rate(trainer: Trainer) -> float:
    """Return the first group's learning rate for the next step; 0 if it has none, like Adafactor by default."""
    return float(torch_optimizer(trainer).param_groups[0].get("lr") or 0.0)


def has_unlogged_steps(trainer: Trainer) -> bool:
    """Return True if Trainer would make a log entry now: it makes none twice for a step."""
    return bool(trainer.state.global_step > trainer._globalstep_last_logged)


def unlogged_loss(trainer: Trainer) -> dict[str, Any]:
    """Return this rank's loss since the last log entry, and the step of that entry."""
    return {"unlogged_loss": trainer._tr_loss.item(), "last_logged_step": trainer._globalstep_last_logged}


def restore_loss(
    trainer: Trainer, topology: Topology, unlogged_loss: float, last_logged_step: int, **_others: Any
) -> None:
    """Restore unlogged loss, for the next log entry but not for this call's mean. Collective: call on every rank."""
    trainer._tr_loss += unlogged_loss
    trainer._globalstep_last_logged = last_logged_step
    # Trainer adds all of `_tr_loss` to this total: at the next log entry, or at the end of the training.
    trainer._total_loss_scalar -= sum(topology.gather(unlogged_loss)) / topology.world_size


@contextmanager
def writing_tensors_with(write: Callable[..., None]) -> Iterator[None]:
    """Make `save_pretrained` and Trainer write their safetensors files with another function."""
    # One function, two names: `save_pretrained` has imported it, and Trainer calls it for other models.
    with (
        with_attributes(modeling_utils, {"safe_save_file": write}),
        with_attributes(safetensors.torch, {"save_file": write}),
    ):
        yield


@contextmanager
def ending_checkpoints_with(
    trainer: Trainer, complete: Callable[[], None], rotate: Callable[[str, int | None, str | None], None]
) -> Iterator[None]:
    """Have Trainer call `complete` once it has written a checkpoint's files, on the processes that save.

    The checkpoint is pushed after that, and `rotate` deletes old ones: in `output_dir`, beyond a limit, but the best.
    """
    push, pushed = trainer._push_from_checkpoint, list[str]()

    def end(
        output_dir: str, save_total_limit: int | None = None, best_model_checkpoint: str | None = None, **_: Any
    ) -> None:
        complete()
        for folder in pushed:
            push(folder)
        rotate(output_dir, save_total_limit, best_model_checkpoint)

    # In the module of Trainer, which has imported the function by name.
    with (
        with_attributes(stock, {"rotate_checkpoints": end}),
        with_attributes(trainer, {"_push_from_checkpoint": pushed.append}),
    ):
        yield


def alone_reads_outputs(trainer: Trainer) -> bool:
    """Return True if in an evaluation only Trainer's own code comes between the model's output and the metrics."""
    methods = "prediction_step", "evaluation_loop"
    return has_plain_loss(trainer) and not any(is_overridden(trainer, name) for name in methods)


@contextmanager
def with_attributes(holder: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of an object inside, whatever becomes of them there. A method among them hides the class's."""
    own = vars(holder)
    # Only what the instance itself has: what the class has shows again as soon as ours is deleted.
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)


def preprocessed(
    trainer: Trainer,
    preprocess: Callable[[Any, Any], Any],
    ignore_keys: list[str] | None,
    output: Any,
    inputs: dict[str, Any],
) -> Any:
    """Return the loss and the preprocessed logits of a model's output, chosen as in `Trainer.prediction_step`."""
    labels: Any = tuple(inputs.get(name) for name in trainer.label_names)
    has_loss = all(each is not None for each in labels)
    if not labels:
        has_loss = bool(inputs.get("return_loss", trainer.can_return_loss))
    if ignore_keys is None:
        config = getattr(trainer.model, "config", None)
        ignore_keys = [] if config is None else getattr(config, "keys_to_ignore_at_inference", [CACHE_NAME])
    if isinstance(output, dict):
        loss = {"loss": output["loss"]} if has_loss else {}
        logits = tuple(value for key, value in output.items() if key not in [*ignore_keys, *loss])
    else:
        loss, logits = {"loss": output[0]} if has_loss else {}, output[has_loss:]
    if not has_loss:
        labels = None
    elif len(labels) == 1:
        (labels,) = labels
    return {**loss, "preprocessed": preprocess(logits[0] if len(logits) == 1 else logits, labels)}


class SelfFilteringLoss(torch.Tensor):
    """Loss that Trainer can add up without a device sync.

    Trainer checks each loss for nan and inf, two device syncs per batch, and replaces a bad one by the mean loss since
    the last log. This tensor answers False to both checks and does the replacement on the device when it is added.
    """

    num_logged: int

    @staticmethod
    def of(loss: torch.Tensor, num_logged: int) -> SelfFilteringLoss:
        """Wrap a scalar loss; `num_logged` is Trainer's divisor of the summed losses since the last log."""
        filtering = loss.as_subclass(SelfFilteringLoss)
        filtering.num_logged = num_logged
        return filtering

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.isnan, torch.isinf):
            # On the host, where Trainer's `if` reads the answer without a wait.
            return torch.zeros(args[0].shape, dtype=torch.bool)
        # Otherwise each result would be of this class again, Trainer's sum of losses too.
        with torch._C.DisableTorchFunctionSubclass():
            # `+=` may arrive as either method.
            if function in (torch.Tensor.add_, torch.Tensor.__iadd__) and isinstance(args[1], cls):
                total, loss = args
                loss, count = loss.as_subclass(torch.Tensor), loss.num_logged
                return total.add_(torch.where(loss.isfinite(), loss, total / count))
            return function(*args, **(kwargs or {}))
