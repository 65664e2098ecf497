"""The weight gradients of linear layers, computed apart from the backward that gives the gradient of the input.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2: others wait for the gradient of the input, nobody
waits for that of the weights. What is no linear layer (norms, embeddings, convolutions) gets its gradient at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers whose weight gradients can be put off: linear ones, no subclasses, whose forward may be their own."""
    return [module for module in model.modules() if type(module) is nn.Linear]


@dataclass(frozen=True)
class _PutOff:
    """Gives the gradients of one linear layer.

    Args:
        parameters: the trained ones of its weight `(out, in)` and bias `(out,)`.
        hidden: what entered, `(..., in)`.
        gradient: of what left, `(..., out)`.
    """

    parameters: tuple[nn.Parameter, ...]
    hidden: torch.Tensor
    gradient: torch.Tensor

    def gradients(self) -> Iterator[torch.Tensor]:
        """As many as there are parameters, in their dtype."""
        gradient, hidden = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (self.gradient, self.hidden))
        for parameter in self.parameters:
            found = gradient.T @ hidden if parameter.dim() == 2 else gradient.sum(0)
            yield found.to(parameter.dtype)


class WeightGradients:
    """Puts off the weight gradients of a stage's linear layers, per micro-batch.

    Args:
        layers: the linear layers.
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        self.layers = list(layers)
        self._put_off: dict[int, deque[_PutOff]] = {}
        self._current: deque[_PutOff] | None = None

    def clear(self) -> None:
        """Forget what was put off."""
        self._put_off.clear()

    @contextmanager
    def split_linears(self) -> Iterator[None]:
        """What the layers run inside has a backward whose weight gradients `put_off` can put off."""
        if not torch.is_grad_enabled():
            yield
            return
        # A layer that somebody else overrides (the stage view does for embeddings) stays as it is.
        split = [layer for layer in self.layers if "forward" not in vars(layer)]
        for layer in split:
            vars(layer)["forward"] = partial(_split_linear, self, layer)
        try:
            yield
        finally:
            for layer in split:
                del vars(layer)["forward"]

    @contextmanager
    def put_off(self, index: int) -> Iterator[None]:
        """Backwards inside, those of micro-batch `index`, leave the weight gradients to `accumulate`."""
        self._current = self._put_off.setdefault(index, deque())
        try:
            yield
        finally:
            self._current = None

    def accumulate(self, index: int) -> None:
        """Add what was put off for a micro-batch to the parameters: each gets one gradient, hooks see it as usual."""
        entries = self._put_off.pop(index, deque())
        left = Counter(id(parameter) for entry in entries for parameter in entry.parameters)
        sums: dict[int, torch.Tensor] = {}
        while entries:
            entry = entries.popleft()
            for parameter, gradient in zip(entry.parameters, entry.gradients(), strict=True):
                key = id(parameter)
                left[key] -= 1
                gradient = sums.pop(key) + gradient if key in sums else gradient
                if left[key]:
                    sums[key] = gradient
                else:
                    torch.autograd.backward(parameter, gradient)

    def take(self, entry: _PutOff) -> Iterator[torch.Tensor | None]:
        """The gradients of a layer's parameters for autograd; None for each if they are put off."""
        if self._current is None:
            yield from entry.gradients()
        else:
            self._current.append(entry)
            yield from [None] * len(entry.parameters)


def _split_linear(owner: WeightGradients, layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """`layer(hidden)`, under autocast too."""
    device, dtype = hidden.device.type, layer.weight.dtype
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, dtype):
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
    output: torch.Tensor = _SplitLinear.apply(hidden, layer.weight, layer.bias, dtype, owner)  # type: ignore[no-untyped-call]
    return output


class _SplitLinear(torch.autograd.Function):
    """A linear layer that hands its weight gradients to their owner."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        owner: WeightGradients,
    ) -> torch.Tensor:
        used = weight.to(dtype)
        ctx.save_for_backward(hidden, used)
        ctx.weight, ctx.bias, ctx.owner = weight, bias, owner
        return functional.linear(hidden, used, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        hidden, used = ctx.saved_tensors
        needs_input, *needs, _, _ = ctx.needs_input_grad
        trained = tuple(p for p, is_needed in zip((ctx.weight, ctx.bias), needs, strict=True) if is_needed)
        found = ctx.owner.take(_PutOff(trained, hidden, gradient)) if trained else iter(())
        own = [next(found) if is_needed else None for is_needed in needs]
        return (gradient @ used if needs_input else None, *own, None, None)
