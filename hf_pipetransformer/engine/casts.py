"""Autocast's low-precision copies of the weights, one for all micro-batches of a batch.

Autocast itself casts the weights once per forward, and the graph of every micro-batch in flight keeps its own copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


_CAST_BY_AUTOCAST = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class SharedCasts:
    """Casts of the weights of a model's matrix products, made once and used by every forward until `clear`.

    Weights must not change in between. Gradients pass through the one cast to the weight in each backward, as they
    would through a cast per micro-batch, so all results are the same to the bit.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        modules = [] if model is None else model.modules()
        # With parametrizations the type is another one, or the weight is no parameter.
        self._layers = [m for m in modules if type(m) in _CAST_BY_AUTOCAST and "weight" in m._parameters]
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def clear(self) -> None:
        """Drop all casts. Call before weights change."""
        self._casts.clear()

    def of(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the cast of a weight, with its link to the weight even under `torch.no_grad()`."""
        key = id(weight), dtype
        if key not in self._casts:
            with torch.enable_grad():
                self._casts[key] = weight.to(dtype)
        return self._casts[key]

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make forwards inside use the shared casts wherever autograd would save a cast."""
        # Leave layers that are already overridden, for example by the stage view.
        own = [each for each in self._layers if "forward" not in vars(each)] if torch.is_grad_enabled() else []
        for layer in own:
            vars(layer)["forward"] = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in own:
                del vars(layer)["forward"]

    def _forward(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward, weight = type(layer).forward, layer._parameters["weight"]
        assert weight is not None
        given, device = next(iter((*args, *kwargs.values()))), weight.device.type
        is_saved = torch.is_grad_enabled() and (weight.requires_grad or given.requires_grad)
        if not is_saved or not torch.is_autocast_enabled(device) or weight.dtype != torch.float32:
            return forward(layer, *args, **kwargs)
        # Shadows the parameter, which lies in `_parameters`, for the layer's own forward only.
        vars(layer)["weight"] = self.of(weight, torch.get_autocast_dtype(device))
        try:
            return forward(layer, *args, **kwargs)
        finally:
            del vars(layer)["weight"]
