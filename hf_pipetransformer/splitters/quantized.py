"""Base weights in the 4 or 8 bits of bitsandbytes, under adapters.

These are QLoRA (Dettmers et al., 2023, section 3) and LLM.int8() (Dettmers et al., 2022). Such a parameter holds
bytes, and refers to the tensors that scale them. Stages release and move the bytes like any weights; the scales, at
most an eighth as large, stay on every rank, those of other stages on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


def why_not_moved(model: Any) -> str | None:
    """Return why quantized weights cannot be put on stages; None if they can, or if there are none."""
    known = ("is_loaded_in_4bit", "is_loaded_in_8bit")
    if not getattr(model, "is_quantized", False) or any(getattr(model, name, False) for name in known):
        return None
    method = getattr(model, "quantization_method", None)
    return (
        f"a model quantized by {getattr(method, 'value', method)} is not split: only 4 and 8 bits of bitsandbytes are "
        "(BitsAndBytesConfig with load_in_4bit or load_in_8bit)"
    )


def like(parameter: nn.Parameter, data: torch.Tensor, requires_grad: bool = False) -> nn.Parameter:
    """Return a parameter of the same class and with the same attributes, such as its scales, that holds `data`."""
    if type(parameter) is nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad)
    # Not by the class's constructor, whose arguments differ from class to class.
    made: nn.Parameter = data.detach().as_subclass(type(parameter))
    vars(made).update(vars(parameter))
    made.requires_grad_(requires_grad)
    return made


def move_scales(parameter: torch.Tensor, device: torch.device) -> None:
    """Move what scales a parameter's bytes to `device`, in place."""
    own: Any = parameter
    if is_packed(parameter):
        own.quant_state.to(device)
    elif (scale := _row_scales(parameter)) is not None:
        own.SCB = scale.to(device)


def _row_scales(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what scales the rows of a weight in 8 bits; None for other parameters."""
    return vars(parameter).get("SCB")


def scales_of(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that scale a parameter's bytes, by name."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        scale = _row_scales(parameter)
        return {} if scale is None else {"SCB": scale}
    found = {"absmax": state.absmax, "code": state.code}
    if state.nested:
        found |= {"offset": state.offset, "absmax of absmax": state.state2.absmax, "code of absmax": state.state2.code}
    return found


def named_scales(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the scales of a model: the name of their parameter, their own, and the tensor."""
    for name, parameter in model.named_parameters():
        for key, scale in scales_of(parameter).items():
            yield name, f"{name}: {key}", scale


_BLOCK = 64
"""Weights that share a scale, unless a configuration says otherwise."""


def plan_in_4_bits(layers: Iterable[nn.Module]) -> None:
    """Let `num_bytes` count the linear weights of layers as if they were in 4 bits, without double quantization."""
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, (nn.Linear, Conv1D)):
            size = module.weight.numel()
            # Half a byte a weight, and a scale in float32 for each block of them.
            vars(module.weight)[_PLANNED] = size // 2 + 4 * -(-size // _BLOCK)


_PLANNED = "bytes in 4 bits"


def num_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter with its scales."""
    # For a plan from a config, whose weights are not quantized.
    if _PLANNED in vars(parameter):
        return int(vars(parameter)[_PLANNED])
    tensors = [parameter, *scales_of(parameter).values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_packed(parameter: torch.Tensor | None) -> bool:
    """Return True if a parameter's elements are bytes of several weights, of whatever dtype they are."""
    return getattr(parameter, "quant_state", None) is not None


def num_weights(parameter: torch.Tensor) -> int:
    """Return how many weights a parameter has."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(torch.Size(state.shape).numel())


def prepare_quantized(model: nn.Module) -> bool:
    """Bring quantized layers into the one form that all ranks and all forwards leave as it is.

    In inference, CPUs with AVX512 would pack 4 bits in another way, without gradients, and for good. And a forward
    casts the bias to the dtype that it computes in, on the ranks that run it.

    Returns:
        True if plain Trainer would pack 4 bits anew in the first evaluation, and compute other numbers from then on.
    """
    would_pack = False
    for module in model.modules():
        if is_in_8_bits(module):
            _prepare_8_bits(module)
        # Not the attribute, which a parametrization computes anew, in training mode with another power iteration.
        if not is_packed(module._parameters.get("weight")):
            continue
        if vars(module).get("support_avx512bf16_for_cpu"):
            module.state_dict()  # Unpacks in place.
            vars(module)["support_avx512bf16_for_cpu"] = False
            would_pack = True
        dtype, bias = vars(module).get("compute_dtype"), getattr(module, "bias", None)
        if isinstance(dtype, torch.dtype) and isinstance(bias, nn.Parameter):
            # As the first forward would do, on the ranks that run it only.
            bias.data = bias.data.to(dtype)
    return would_pack


def is_in_8_bits(module: nn.Module) -> bool:
    """Return True for a linear layer of LLM.int8() whose weight is held in 8 bits."""
    state: Any = vars(module).get("state")
    return type(state).__name__ == "MatmulLtState" and not state.has_fp16_weights


def _prepare_8_bits(module: Any) -> None:
    """Let a layer multiply by the bytes that its weight holds: its state would keep those that were released."""
    weight, state = module.weight, module.state
    if state.SCB is not None:
        # After its first forward a layer has moved the scales from its weight to its state.
        weight.SCB = state.SCB
    weight.CB = state.CB = state.SCB = None
    module.forward = MethodType(_multiply_8_bits, module)


def _multiply_8_bits(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    library: Any = import_module("bitsandbytes")  # Optional, and needed for such layers alone.
    weight, bias = module.weight, module.bias
    state = library.MatmulLtState(CB=weight.data, SCB=weight.SCB)
    state.has_fp16_weights, state.threshold, state.is_training = False, module.state.threshold, module.training
    bias = None if bias is None else bias.to(hidden.dtype)
    product: torch.Tensor = library.matmul(hidden, weight, bias=bias, state=state)
    return product


def put_in_evaluation_mode(module: nn.Module) -> None:
    """Put a module into evaluation mode, except for layers in 8 bits, which have nothing random.

    There they would round their inputs to 8 bits, but for columns with an outlier in any row of the batch: a row's
    output would depend on its micro-batch.
    """
    module.eval()
    for part in module.modules():
        if is_in_8_bits(part):
            part.training = True


@contextmanager
def float32_products(model: nn.Module) -> Iterator[None]:
    """Multiply dequantized weights in float32 inside."""
    own = [vars(m) for m in model.modules() if isinstance(vars(m).get("compute_dtype"), torch.dtype)]
    dtypes = [attributes["compute_dtype"] for attributes in own]
    try:
        for attributes in own:
            attributes["compute_dtype"] = torch.float32
        yield
    finally:
        for attributes, dtype in zip(own, dtypes, strict=True):
            attributes["compute_dtype"] = dtype
