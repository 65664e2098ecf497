"""Edges in autograd's graph that say which backward comes first, between tensors that have nothing to do with each other.

A stage takes the backwards of its micro-batches in the order of the schedule's table. That bounds what recomputation
holds at a time, keeps devices in step, and makes the sums of gradients the same in every run.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Held(torch.autograd.Function):
    """Tensors whose backward waits for the gradient of a token."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return *(tensor.detach() for tensor in tensors), tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients[:-1]


class _Releasing(torch.autograd.Function):
    """Tensors whose backward, when it is through, releases what waits for the tokens."""

    @staticmethod
    def forward(ctx: Any, num_tokens: int, *tokens_and_tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_tokens = num_tokens
        return tuple(tensor.detach() for tensor in tokens_and_tensors[num_tokens:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *([None] * ctx.num_tokens), *gradients


def _needing_gradients(values: Sequence[Any]) -> list[int]:
    return [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad]


def _replaced(values: Sequence[Any], where: Sequence[int], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    found = list(values)
    for i, tensor in zip(where, tensors, strict=True):
        found[i] = tensor
    return tuple(found)


def hold(values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """`values`, and a token: the backward of these values comes after that of what the token is released by.

    No token if nothing of them needs a gradient.
    """
    where = _needing_gradients(values)
    if not where:
        return tuple(values), ()
    *tensors, token = _Held.apply(*(values[i] for i in where))  # type: ignore[no-untyped-call]
    return _replaced(values, where, tensors), (token,)


def release(values: Sequence[Any], tokens: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """`values`, whose backward goes before that of what the tokens hold.

    Nothing is tied where no value needs a gradient: it would be computed for the order's sake alone.
    """
    where = _needing_gradients(values)
    if not where or not tokens:
        return tuple(values)
    return _replaced(values, where, _Releasing.apply(len(tokens), *tokens, *(values[i] for i in where)))  # type: ignore[no-untyped-call]
