"""Float32 weights that half-precision ones of a checkpoint are trained as (`pipeline_master_dtype`)."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

import torch
from torch import nn

from hf_pipetransformer.splitters.adapters import has_adapters
from hf_pipetransformer.splitters.quantized import is_packed


HALVES = (torch.float16, torch.bfloat16)


def master_names(model: nn.Module) -> set[str]:
    """Name the parameters and buffers that `pipeline_master_dtype` casts: all of half precision.

    Of a model with adapters only those that are trained: the base model gets no updates that its precision could lose.
    """
    only_trained = has_adapters(model)
    return {
        name
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if tensor.dtype in HALVES and not is_packed(tensor) and (tensor.requires_grad or not only_trained)
    }


def cast_masters(model: nn.Module, names: Collection[str], device: torch.device | None = None) -> None:
    """Cast the named parameters and buffers to float32, one by one, and move those that are held to `device`."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in names:
            # Meta tensors stand for weights of other stages, and have nothing to move.
            target = tensor.device if device is None or tensor.is_meta else device
            # The tensor stays the same object, which tied modules share.
            tensor.data = tensor.data.to(target, torch.float32)
