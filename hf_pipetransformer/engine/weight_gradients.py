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
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_pipetransformer.comm.errors import PipelineError


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers whose weight gradients can be put off: linear ones, no subclasses, whose weight is a parameter.

    Old-style `weight_norm` and `spectral_norm` compute the weight from others.
    """
    return [m for m in model.modules() if type(m) is nn.Linear and isinstance(m.weight, nn.Parameter)]


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
        self.anchor = torch.empty(0, requires_grad=True)

    def clear(self) -> None:
        """Forget what was put off."""
        self._put_off.clear()

    @contextmanager
    def split_linears(self) -> Iterator[None]:
        """What the layers run inside has a backward whose weight gradients are put off: it must run in `put_off`."""
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
        """Backwards inside, those of micro-batch `index`, leave the weight gradients to `accumulate`.

        What they run again (the model's own activation checkpointing) is split as it was in the forward.
        """
        self._current = self._put_off.setdefault(index, deque())
        try:
            with self.split_linears():
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

    def take(self, entry: _PutOff) -> None:
        """Put the gradients of a layer's parameters off.

        Raises:
            PipelineError: the backward is none of the pipeline's.
        """
        if self._current is None:
            raise PipelineError(
                "A backward ran inside the model or compute_loss, while the schedule computes the weight gradients of "
                "linear layers apart. Use pipeline_schedule='1f1b' or 'interleaved_1f1b'."
            )
        self._current.append(entry)


def _split_linear(owner: WeightGradients, layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """`layer(input)`, under autocast too."""
    device, dtype = input.device.type, layer.weight.dtype
    if torch.is_autocast_enabled(device) and torch.float64 not in (input.dtype, dtype):
        dtype = torch.get_autocast_dtype(device)
        input = input.to(dtype)
    trained = tuple(p for p in (layer.weight, layer.bias) if p is not None and p.requires_grad)
    anchor = owner.anchor if trained and not input.requires_grad else None
    output: torch.Tensor = _SplitLinear.apply(input, anchor, layer, trained, dtype, owner)  # type: ignore[no-untyped-call]
    return output


class _SplitLinear(torch.autograd.Function):
    """A linear layer that hands its weight gradients to their owner.

    To autograd the parameters are no inputs: their hooks would be told of a gradient that is None. An anchor stands
    for them where nothing else has the output require a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        _anchor: torch.Tensor | None,
        layer: nn.Linear,
        trained: tuple[nn.Parameter, ...],
        dtype: torch.dtype,
        owner: WeightGradients,
    ) -> torch.Tensor:
        used = layer.weight.to(dtype)
        ctx.save_for_backward(hidden, used)
        ctx.trained, ctx.owner = trained, owner
        return functional.linear(hidden, used, None if layer.bias is None else layer.bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        hidden, used = ctx.saved_tensors
        if ctx.trained:
            ctx.owner.take(_PutOff(ctx.trained, hidden, gradient))
        return (gradient @ used if ctx.needs_input_grad[0] else None, None, None, None, None, None)
