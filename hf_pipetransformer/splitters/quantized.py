"""Base weights in the 4 bits of bitsandbytes (QLoRA, Dettmers et al., 2023, section 3), under adapters.

Such a parameter holds packed bytes, and refers to the tensors that scale them. Stages release and move the bytes like
any weights; the scales, at most an eighth as large, stay on every rank, those of other stages on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


def why_not_moved(model: Any) -> str | None:
    """Return why quantized weights cannot be put on stages; None if they can, or if there are none."""
    if not getattr(model, "is_quantized", False) or getattr(model, "is_loaded_in_4bit", False):
        return None
    method = getattr(model, "quantization_method", None)
    kind = str(getattr(method, "value", method)) + (" in 8 bits" if getattr(model, "is_loaded_in_8bit", False) else "")
    return f"a model quantized by {kind} is not split: only 4 bits of bitsandbytes (load_in_4bit=True) are"


def like(parameter: nn.Parameter, data: torch.Tensor, requires_grad: bool = False) -> nn.Parameter:
    """Return a parameter of the same class and with the same attributes, such as its scales, that holds `data`."""
    if type(parameter) is nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad)
    made: nn.Parameter = data.detach().as_subclass(type(parameter))
    vars(made).update(vars(parameter))
    made.requires_grad_(requires_grad)
    return made


def move_scales(parameter: torch.Tensor, device: torch.device) -> None:
    """Move what scales a parameter's bytes to `device`, in place."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        state.to(device)


def scales_of(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that scale a parameter's bytes, by name."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return {}
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
            vars(module.weight)[_PLANNED] = size // 2 + 4 * -(-size // _BLOCK)


_PLANNED = "bytes in 4 bits"


def num_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter with its scales."""
    if _PLANNED in vars(parameter):
        return int(vars(parameter)[_PLANNED])
    tensors = [parameter, *scales_of(parameter).values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_packed(parameter: torch.Tensor) -> bool:
    """Return True if a parameter's elements are bytes of several weights, of whatever dtype they are."""
    return getattr(parameter, "quant_state", None) is not None


def num_weights(parameter: torch.Tensor) -> int:
    """Return how many weights a parameter has."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(torch.Size(state.shape).numel())


def prepare_quantized(model: nn.Module) -> None:
    """Bring quantized layers into the one form that all ranks and all forwards leave as it is.

    In inference, CPUs with AVX512 would pack the bytes in another way, without gradients, and for good. And a forward
    casts the bias to the dtype that it computes in, on the ranks that run it.
    """
    for module in model.modules():
        if not is_packed(getattr(module, "weight", None)):  # type: ignore[arg-type]
            continue
        if vars(module).get("support_avx512bf16_for_cpu"):
            module.state_dict()  # Unpacks in place.
            vars(module)["support_avx512bf16_for_cpu"] = False
        dtype, bias = vars(module).get("compute_dtype"), getattr(module, "bias", None)
        if isinstance(dtype, torch.dtype) and isinstance(bias, nn.Parameter):
            bias.data = bias.data.to(dtype)


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
