"""Matrix products of a stage: autocast's copies of weights are shared, and weight gradients may be deferred.

Autocast itself casts the weights once per forward, and the graph of every micro-batch in flight keeps its own copies.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2: the stage below waits for the input gradient, but
no stage waits for weight gradients. Other layers (norms, embeddings, convolutions) get theirs right away.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_pipetransformer.comm.errors import PipelineError


_CAST_BY_AUTOCAST = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def replaced_forwards(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> AbstractContextManager[None]:
    """Call `forward(module, ...)` instead of the modules' own forwards inside, where gradients are computed.

    Modules that are already overridden, for example by the stage view, are left alone.
    """
    own = [each for each in modules if "forward" not in vars(each)] if torch.is_grad_enabled() else []
    # Mostly there is nothing to replace, and each micro-batch passes here several times.
    return _replaced(own, forward) if own else nullcontext()


@contextmanager
def _replaced(own: list[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    for module in own:
        vars(module)["forward"] = partial(forward, module)
    try:
        yield
    finally:
        for module in own:
            del vars(module)["forward"]


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
            # The first forward may run without gradients, to be recomputed later, and those after it need the link.
            with torch.enable_grad():
                self._casts[key] = weight.to(dtype)
        return self._casts[key]

    def shared(self) -> AbstractContextManager[None]:
        """Make forwards inside use the shared casts wherever autograd would save a cast."""
        return replaced_forwards(self._layers, self._forward)

    def _forward(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward, weight = type(layer).forward, layer._parameters["weight"]
        assert weight is not None
        given, device = next(iter((*args, *kwargs.values()))), weight.device.type
        is_saved = torch.is_grad_enabled() and (weight.requires_grad or given.requires_grad)
        # As in autocast's own cache, only casts of float32 weights are kept.
        if not is_saved or not torch.is_autocast_enabled(device) or weight.dtype != torch.float32:
            return forward(layer, *args, **kwargs)
        # Shadows the parameter, which lies in `_parameters`, for the layer's own forward only.
        vars(layer)["weight"] = self.of(weight, torch.get_autocast_dtype(device))
        try:
            return forward(layer, *args, **kwargs)
        finally:
            del vars(layer)["weight"]


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers whose weight gradients can be deferred: exact `nn.Linear` whose weight is a parameter.

    With the old `weight_norm` and `spectral_norm` the weight is a plain tensor, computed from other parameters.
    """
    return [m for m in model.modules() if type(m) is nn.Linear and isinstance(m.weight, nn.Parameter)]


@dataclass(frozen=True)
class _PutOff:
    """Deferred gradients of the trained weight and bias of a linear layer.

    `hidden` is the input, `(..., in)`, `gradient` that of the output, `(..., out)`.
    """

    parameters: tuple[nn.Parameter, ...]
    hidden: torch.Tensor
    gradient: torch.Tensor

    def gradients(self) -> Iterator[torch.Tensor]:
        gradient, hidden = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (self.gradient, self.hidden))
        for parameter in self.parameters:
            found = gradient.T @ hidden if parameter.dim() == 2 else gradient.sum(0)
            # As the backward of autocast's cast does, which these gradients do not pass through.
            yield found.to(parameter.dtype)


class WeightGradients:
    """Deferred weight gradients of a stage's linear layers, by micro-batch.

    Under autocast the layers read their weights from `casts`.
    """

    def __init__(self, layers: Iterable[nn.Linear], casts: SharedCasts | None = None) -> None:
        self.layers = list(layers)
        self.casts = casts or SharedCasts()
        self._put_off: dict[int, deque[_PutOff]] = {}
        self._current: deque[_PutOff] | None = None
        self.anchor = torch.empty(0, requires_grad=True)

    def clear(self) -> None:
        """Drop all deferred gradients, and the casts of the weights."""
        self._put_off.clear()
        self.casts.clear()

    def split_linears(self) -> AbstractContextManager[None]:
        """Make forwards inside defer their weight gradients. Their backwards must then run inside `put_off`."""
        return replaced_forwards(self.layers, partial(_split_linear, self))

    def put_off(self, index: int) -> AbstractContextManager[None]:
        """Collect the weight gradients of backwards inside for `accumulate(index)`.

        Forwards recomputed inside (the model's own activation checkpointing) are deferred as well.
        """
        return self._collecting(index) if self.layers else nullcontext()

    @contextmanager
    def _collecting(self, index: int) -> Iterator[None]:
        self._current = self._put_off.setdefault(index, deque())
        try:
            with self.split_linears():
                yield
        finally:
            self._current = None

    def accumulate(self, index: int) -> None:
        """Add the deferred gradients of a micro-batch to `.grad`, firing each parameter's hooks once."""
        entries = self._put_off.pop(index, None)
        if entries is None:
            return
        # A layer may be called several times in a forward: hooks of its weight must not see a part of its gradient.
        left = Counter(id(parameter) for entry in entries for parameter in entry.parameters)
        sums: dict[int, torch.Tensor] = {}
        # One by one, so that each activation is freed as soon as its gradient is made.
        while entries:
            entry = entries.popleft()
            for parameter, gradient in zip(entry.parameters, entry.gradients(), strict=True):
                key = id(parameter)
                left[key] -= 1
                gradient = sums.pop(key) + gradient if key in sums else gradient
                if left[key]:
                    sums[key] = gradient
                else:
                    # Not `parameter.grad += gradient`, which would skip the post-accumulate hooks of the reducer.
                    torch.autograd.backward(parameter, gradient)

    def take(self, entry: _PutOff) -> None:
        """Defer the gradients of a layer's parameters.

        Raises:
            PipelineError: the backward runs outside `put_off`, so not under the engine's control.
        """
        if self._current is None:
            raise PipelineError(
                "A backward ran inside the model or compute_loss, while the schedule computes the weight gradients of "
                "linear layers apart. Use pipeline_schedule='1f1b' or 'interleaved_1f1b'."
            )
        self._current.append(entry)


def _split_linear(owner: WeightGradients, layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Compute `layer(input)`, with autocast's casts made by hand."""
    device, dtype = input.device.type, layer.weight.dtype
    # Autocast leaves float64 alone.
    if torch.is_autocast_enabled(device) and torch.float64 not in (input.dtype, dtype):
        dtype = torch.get_autocast_dtype(device)
        input = input.to(dtype)
    trained = tuple(p for p in (layer.weight, layer.bias) if p is not None and p.requires_grad)
    anchor = owner.anchor if trained and not input.requires_grad else None
    output: torch.Tensor = _SplitLinear.apply(input, anchor, layer, trained, dtype, owner)  # type: ignore[no-untyped-call]
    return output


class _SplitLinear(torch.autograd.Function):
    """Linear layer that passes its weight gradients to `WeightGradients`.

    The parameters are not inputs for autograd, because returning None for them would still fire their hooks. If the
    hidden input needs no gradient, an anchor tensor makes the output require one.
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
        # Detached, because the saved tensor would keep the graph of the cast alive.
        used = owner.casts.of(layer.weight, dtype).detach()
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
