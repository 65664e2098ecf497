"""Full precision for checks: what differs there by more than rounding is wrong, on a GPU and under bf16 too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes in float32, whatever the run computes in, and each time to the same bits.

    Weights in half precision are replaced by float32 ones and come back untouched; autocast is off, also where the
    loss of a user turns it on; products of float32 are float32; attention kernels that take no float32 are replaced.
    """
    with ExitStack() as stack:
        stack.enter_context(_float32_weights(model))
        stack.enter_context(_without_autocast())
        stack.enter_context(_float32_products())
        stack.enter_context(_float32_attention(model))
        if any(parameter.is_cuda for parameter in model.parameters()):
            stack.enter_context(_deterministic())
        yield


def in_float32(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch whose tensors of half precision are float32."""
    return {
        key: value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value
        for key, value in inputs.items()
    }


@contextmanager
def _float32_weights(model: nn.Module) -> Iterator[None]:
    own = {tensor: tensor.data for tensor in [*model.parameters(), *model.buffers()] if tensor.dtype in _HALVES}
    gradients = {tensor: tensor.grad for tensor in own}
    try:
        for tensor, data in own.items():
            tensor.grad = None
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in own.items():
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradients[tensor]


@contextmanager
def _without_autocast() -> Iterator[None]:
    switch = torch.set_autocast_enabled
    with ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        # Contexts that are entered inside find the switch stuck.
        torch.set_autocast_enabled = lambda *_: None
        try:
            yield
        finally:
            torch.set_autocast_enabled = switch


@contextmanager
def _float32_products() -> Iterator[None]:
    backends: Any = torch.backends
    kernels = [
        *(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    ]
    own = [kernel.fp32_precision for kernel in kernels]
    try:
        # A CTC loss reads the older switch of cuDNN (`torch.backends.cudnn.flags`), which torch refuses where it says
        # something else than the newer ones.
        allowed_tf32 = backends.cudnn.allow_tf32
    except RuntimeError:
        allowed_tf32 = None  # Its user has set them apart.
    try:
        if allowed_tf32 is not None:
            backends.cudnn.allow_tf32 = False
        for kernel in kernels:
            kernel.fp32_precision = "ieee"
        yield
    finally:
        if allowed_tf32 is not None:
            backends.cudnn.allow_tf32 = allowed_tf32
        for kernel, precision in zip(kernels, own, strict=True):
            kernel.fp32_precision = precision


@contextmanager
def _float32_attention(model: Any) -> Iterator[None]:
    """Flash attention takes half precision only."""
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if own is None or "flash" not in own:
        yield
        return
    try:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        yield
    finally:
        model.set_attn_implementation(own)


@contextmanager
def _deterministic() -> Iterator[None]:
    was_on, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
