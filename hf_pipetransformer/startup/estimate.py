"""Costs of a run from a model's config alone, before any weight: operations and bytes instead of measured times.

The model is built of meta tensors, which have shapes and no memory, and its twin runs one sample to count operations
and the activations that its backward would keep. Times follow from assumed rates of a device: they compare layouts.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModel

from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.engine.losses import LossScope
from hf_pipetransformer.planning.blocks import BlockCosts
from hf_pipetransformer.planning.costs import Overheads
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.base import MediaSplitter, Splitter, is_causal_lm, layers_of, media_of
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.masters import cast_masters, master_names
from hf_pipetransformer.splitters.quantized import plan_in_4_bits
from hf_pipetransformer.splitters.structure import ActivationShape, Probe, trace_structure
from hf_pipetransformer.startup.check import run_stages, share_of_media
from hf_pipetransformer.startup.costs import BlockProfile, block_costs, count_blocks, kept_back
from hf_pipetransformer.startup.model import (
    ProbeTarget,
    dropout_from,
    has_dropout,
    num_frozen_by_user,
)
from hf_pipetransformer.startup.planner import MeasuredCosts, RunPlanner, samples_per_microbatch
from hf_pipetransformer.startup.slices import why_whole_by_options
from hf_pipetransformer.startup.twin import as_twin


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.startup.run_plan import Machine


_LABELS = {"labels", "start_positions"}
"""Arguments with which a model computes a loss."""
UPDATE_BYTES = 28
"""Bytes that Adam reads and writes for a float32 parameter: the weight and two moments twice, the gradient once."""


def build_on_meta(path: str, dtype: torch.dtype | None, lora_rank: int | None = None, in_4_bits: bool = False) -> Any:
    """Build the model of a config without memory for its weights, of the class that its checkpoint was saved from.

    With `lora_rank`, only LoRA adapters on all linear layers are trained; `in_4_bits`, the layers below them count as
    bitsandbytes holds them.

    Raises:
        ValueError: `path` has no config, its class has no head, or no adapters would train what is in 4 bits.
    """
    if in_4_bits and lora_rank is None:
        raise ValueError(
            "--load_in_4bit without --lora_rank: weights in 4 bits do not train. Give the adapters' rank."
        )
    try:
        config = AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ValueError(f"{path!r} has no config.json that can be read: {error}") from error
    # The class that the checkpoint was saved from: AutoModel alone would leave out the head, and so the loss.
    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    with torch.device("meta"):
        model: Any = AutoModel.from_config(config) if kind is None else kind(config)
        model = model.to(dtype or config.dtype or torch.float32).eval()
        if not _LABELS & set(inspect.signature(model.forward).parameters):
            head = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "__name__", "")
            example = head if head.endswith("ForCausalLM") else "BertForSequenceClassification"
            raise ValueError(
                f"The config of {path!r} stands for {type(model).__name__}, which has no head and so no loss to train "
                'with. Set "architectures" in its config.json to the class that the run trains, such as '
                f'["{example}"].'
            )
        if in_4_bits:
            plan_in_4_bits(layers_of(_splitter_of(model), model))
        if lora_rank is not None:
            from peft import LoraConfig, get_peft_model  # Optional, and needed for adapters alone.

            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # PEFT's own, of names it reads.
                model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules=_adapted(model)))
    return model


def _adapted(model: Any) -> str | list[str]:
    """Return what has adapters: all linear layers, of a language model that takes images those of its own."""
    media = media_of(model)
    if media is None:
        return "all-linear"
    inside = {id(module) for layer in layers_of(MediaSplitter(), model) for module in layer.modules()}
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside]


def _splitter_of(model: Any) -> Splitter:
    return find_splitter(model) if media_of(model) is None else MediaSplitter()


def batch_on_meta(model: Any, length: int) -> dict[str, torch.Tensor]:
    """Return a batch of one sample: an image of the config's size, or `length` tokens, with labels.

    Images beside text are not in it: see `images_on_meta`.

    Raises:
        ValueError: the model reads something else, or fewer tokens than `length`.
    """
    model = bare_model(model)
    name, config = model.main_input_name, model.config
    whole = partial(torch.zeros, device="meta", dtype=torch.int64)
    labels = whole(1)
    if name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, int) else max(config.image_size)
        shape = (1, getattr(config, "num_channels", 3), size, size)
        return {name: torch.zeros(shape, device="meta", dtype=model.dtype), "labels": labels}
    if name != "input_ids":
        raise ValueError(f"{type(model).__name__} reads {name!r}: expected a model for text or images.")
    longest = getattr(config if media_of(model) is None else config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(f"{type(model).__name__} takes up to {longest} tokens, found a sequence length of {length}.")
    tokens = whole(1, length)
    kind = type(model).__name__
    if kind.endswith("ForQuestionAnswering"):
        return {name: tokens, "start_positions": labels, "end_positions": labels}
    is_of_sequences = kind.endswith(("ForSequenceClassification", "ForMultipleChoice"))
    return {name: tokens, "labels": labels if is_of_sequences else tokens}


def images_on_meta(model: Any, number: int, size: int | None) -> dict[str, torch.Tensor]:
    """Return what a language model's tower takes of images of one sample.

    Args:
        size: height and width in pixels; None for that of the config.

    Raises:
        ValueError: the model takes no images beside text, or none of this size.
    """
    name, dtype, media = type(bare_model(model)).__name__, bare_model(model).dtype, media_of(model)
    vision = getattr(bare_model(model).config, "vision_config", None)
    if media is None or vision is None or "pixel_values" not in media.names:
        raise ValueError(f"--images {number}: {name} takes no images beside text whose size its config tells.")
    (patch, *_), (of_config, *_) = map(_sides, (vision.patch_size, getattr(vision, "image_size", None)))
    side, channels = size or of_config, getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    if side is None:
        raise ValueError(f"--images {number}: {name} takes images of any size. Say theirs with --image_size.")
    taken = inspect.signature(media.module.get_image_features).parameters  # type: ignore[arg-type]
    if "image_grid_thw" in taken:
        merged = vision.spatial_merge_size
        wide = merged * max(1, round(side / (patch * merged)))
        patches = number * wide**2, channels * vision.temporal_patch_size * patch**2
        # Sizes on the host, where the tower reads them.
        sizes = {"image_grid_thw": torch.tensor([[1, wide, wide]] * number)}
        return {"pixel_values": torch.zeros(patches, device="meta", dtype=dtype), **sizes}
    if side != (of_config or side):
        raise ValueError(
            f"--image_size {size}: the tower of {name} takes images and tiles of {of_config} pixels. Leave it out, "
            "and count tiles as --images."
        )
    pixels = torch.zeros(number, channels, side, side, device="meta", dtype=dtype)
    needs_sizes = "image_sizes" in taken and taken["image_sizes"].default is inspect.Parameter.empty
    sizes = {"image_sizes": torch.tensor([[side, side]] * number)} if needs_sizes else {}
    return {"pixel_values": pixels[None] if "pixel_attention_mask" in taken else pixels, **sizes}


def _sides(size: Any) -> Sequence[Any]:
    return size if isinstance(size, (list, tuple)) else (size,)


def freeze_tower(model: Any) -> None:
    """Train nothing of what encodes images beside text.

    Raises:
        ValueError: the model has no such part.
    """
    media = media_of(model)
    if media is None:
        raise ValueError(f"--frozen_tower: {type(bare_model(model)).__name__} takes no images beside text.")
    trained = [parameter for parameter in media.decoder.parameters() if parameter.requires_grad]
    media.module.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_()


@contextmanager
def _seeing(model: Any, images: Mapping[str, torch.Tensor]) -> Iterator[list[int]]:
    """Encode images with the embeddings inside.

    Yields how many tokens they become, and how many layers what was encoded enters again.
    """
    media, latest, told = media_of(model), list[Any](), [0, 0]
    if media is None or not images:
        yield told
        return
    # The outermost modules that encode: a tower, a projector.
    around = [each for each in media.module.modules() if media.decoder in each.modules()]
    children = [child for each in around if each is not media.decoder for child in each.children()]
    encoders = [child for child in children if child not in around]

    def encode(_embeddings: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        latest.clear()
        further: Any = None
        try:
            whole = media.module.get_image_features(**images, return_dict=True)  # type: ignore[operator]
            encoded, further = whole.pooler_output, getattr(whole, "deepstack_features", None)
        except Exception:
            # Behind the encoders tiles are put together by values, which tensors without memory lack.
            if not latest:
                raise
            encoded = latest[-1]
        parts = [each for each in tree_leaves(encoded) if isinstance(each, torch.Tensor)]
        told[:] = sum(each.numel() for each in parts) // output.shape[-1], len(further or ())
        return output + sum(each.sum() for each in parts)

    handles = [each.register_forward_hook(lambda _module, _args, output: latest.append(output)) for each in encoders]
    handles.append(model.get_input_embeddings().register_forward_hook(encode))
    try:
        yield told
    finally:
        for handle in handles:
            handle.remove()


_IN_LOW_PRECISION = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d",
    "conv3d", "conv_transpose2d", "scaled_dot_product_attention", "mv", "prelu",
}  # fmt: skip
_IN_FLOAT32 = {
    "layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss",
    "binary_cross_entropy_with_logits", "exp", "log", "pow", "__pow__", "rsqrt", "cumsum", "sum", "prod", "norm",
}  # fmt: skip
"""Functions that autocast runs in another precision: those that models call, of PyTorch's lists for CUDA."""


class _OnDevice(TorchFunctionMode):
    """Emulation of devices on meta tensors: attention without a matrix of its weights, and autocast to `lower`.

    Autocast itself leaves meta tensors as they are. Masks count as full. Numbers of the host (sizes of images) that
    meet meta tensors become such.
    """

    def __init__(self, lower: torch.dtype | None) -> None:
        super().__init__()
        self.lower = lower
        self.copies: dict[nn.Parameter, nn.Parameter] = {}
        """Weights in `lower`, by the weights themselves: their memory is planned apart."""
        self.num_casts = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), (args, kwargs or {})
        if self.lower is not None:
            if name in _IN_LOW_PRECISION:
                given = tree_map_only(torch.Tensor, self._lowered, given)
            elif name in _IN_FLOAT32:
                given = tree_map_only(torch.Tensor, self._raised, given)
        on_meta = {each.is_meta for each in tree_leaves(given) if isinstance(each, torch.Tensor)}
        if on_meta == {True, False}:
            given = tree_map_only(torch.Tensor, lambda each: each.to("meta"), given)
        args, kwargs = given
        if on_meta == {True} and func is torch.Tensor.__bool__:
            return True
        if True in on_meta and func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) is torch.bool:
            return args[0].flatten(0, args[1].dim() - 1)
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        # On meta tensors attention would otherwise keep the matrix of its weights, which kernels of devices do not.
        return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3])[0]

    def _lowered(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32 or self.lower is None:
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(self.lower)
        self.num_casts += 1
        if tensor not in self.copies:
            self.copies[tensor] = nn.Parameter(tensor.detach().to(self.lower), tensor.requires_grad)
        return self.copies[tensor]

    def _raised(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype is self.lower else tensor


def estimate(
    model: Any,
    batch: Mapping[str, Any],
    args: PipeTransformerArguments,
    machine: Machine,
    images: Mapping[str, torch.Tensor] | None = None,
    num_passes: float = 1.0,
) -> RunPlanner:
    """Return the planner of a run of `model`, on meta tensors, from a `batch` of one sample and assumed rates.

    Args:
        images: of the sample, beside its tokens.
        num_passes: how often the run comes to the same samples.

    Raises:
        ValueError: the images have more tokens than the sample.
    """
    if args.pipeline_master_dtype:
        cast_masters(model, master_names(model))
    splitter = _splitter_of(model)
    lower = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    with as_twin(model, splitter) as twin, _OnDevice(lower) as device, _seeing(model, images or {}) as seen:
        inputs = SampleBatch(batch)
        target = ProbeTarget(model, splitter, inputs, lambda given, _: model(**given).loss, lambda _: 1, twin)
        structure = trace_structure(model, splitter, lambda: target.loss(target.inputs), target.is_text)
        num_tokens, num_layers = seen
        if num_tokens > (length := batch[target.main_input].shape[-1]):
            raise ValueError(
                f"--sequence_length {length}: the images of a sample alone have {num_tokens} tokens. Give the length "
                "of a sequence with theirs."
            )
        with torch.no_grad():
            sent, per_stage = run_stages(target, structure, target.inputs)
            media_share = share_of_media(target, structure)
        flops = twin.of_all_blocks(per_stage)
        stages = pairwise(twin.cut_positions(structure))
        per_block = [
            each.dtype for (start, end), each in zip(stages, sent[:-1], strict=False) for _ in range(end - start)
        ]
        activation = ActivationShape(target.main_input, tuple(batch[target.main_input].shape[1:]), sent[-2].shape[1:])
        boundary = float(sent[-2].numel() * sent[-2].element_size())
        around, operations, *sizes = count_blocks(target, structure, device.copies.values(), lambda: device.num_casts)
        launches, (saved, working) = twin.of_all_blocks(operations), map(twin.of_all_blocks, sizes)
        table = kept_back(target, structure)
    forward = [each / machine.flops for each in flops]
    # `_with_backwards` puts in the times of backwards, which follow from those of the forwards.
    profile = BlockProfile(forward, forward, forward, saved, boundary, working, 1, table)
    recomputes = args.pipeline_checkpoint != "never"
    # A backward has about as many operations as the forward, and those of a forward that is recomputed besides.
    launch = [(machine.launch * each, (1 + recomputes) * machine.launch * each) for each in launches]
    launch[0] = launch[0][0], (1 - media_share) * launch[0][1]
    blocks = _with_backwards(block_costs(model, structure, profile), recomputes, media_share)
    blocks = replace(blocks, launch=tuple(launch))
    per_step = args.train_samples_per_device * args.gradient_accumulation_steps
    overheads = Overheads(
        hop=boundary * samples_per_microbatch(args) / machine.bandwidth,
        per_forward=machine.launch * around,
        # The replicas of a stage are on all nodes.
        reduction_per_byte=1 / min(machine.bandwidth, machine.node_bandwidth or machine.bandwidth),
        optimizer_per_parameter=UPDATE_BYTES / machine.memory_bandwidth,
        # No step has shown what the last backward does not hide: all of it is taken to run beside a reduction.
        hidden_reduction=1.0,
        # Workers read while the devices compute.
        per_step=0.0 if args.dataloader_num_workers else machine.reading * per_step,
        node_size=machine.devices_per_node,
        node_hop_per_byte=1 / (machine.node_bandwidth or machine.bandwidth),
    )
    dtypes = tuple(twin.of_all_blocks(per_block))
    # Cut anywhere until here: what is encoded enters no later layer without memory.
    structure = replace(structure, changed_before=max(structure.changed_before, num_layers))
    probe = Probe(structure, tuple(flops), dtypes, activation, frozenset(), media_share)
    frozen = num_frozen_by_user(model, structure)
    return RunPlanner(
        args,
        # In place of a topology, of which a plan asks the numbers of processes alone.
        cast(Any, machine),
        probe,
        MeasuredCosts(blocks, overheads, 1),
        machine.device_bytes,
        frozen,
        has_dropout(model),
        0,
        dropout_from=dropout_from(model, structure),
        head_slices=args.head_slices or 1,
        why_whole_head=why_whole_by_options(args, LossScope.PARTS)
        or (None if is_causal_lm(model) else f"{type(bare_model(model)).__name__} is no causal language model"),
        num_passes=num_passes,
    )


def _with_backwards(blocks: BlockCosts, recomputes: bool, media_share: float) -> BlockCosts:
    """Return the costs with backwards: a forward's time for the input, one for all weights, one to recompute.

    Frozen encoders, which take `media_share` of the embeddings' forward, have none.
    """
    forward = (1 - media_share) * blocks.forward[0], *blocks.forward[1:]
    counts = zip(forward, blocks.trained, blocks.parameters, strict=True)
    # A frozen weight needs no gradient, and so no product for it.
    weights = [seconds * trained / (number or 1) for seconds, trained, number in counts]
    edge = tuple(weight + recomputes * seconds for weight, seconds in zip(weights, forward, strict=True))
    whole = tuple(sum(both) for both in zip(edge, forward, strict=True))
    return replace(blocks, backward=whole, edge_backward=edge)
