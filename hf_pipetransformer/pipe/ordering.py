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


def _needing_gradients(values: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Each of them once: what is one tensor before must be one after, for whoever changes it in place."""
    return {id(value): value for value in values if isinstance(value, torch.Tensor) and value.requires_grad}


def _replaced(
    values: Sequence[Any], found: dict[int, torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    results = dict(zip(found, tensors, strict=True))
    return tuple(results.get(id(value), value) for value in values)


def hold(values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """`values`, and a token: the backward of these values comes after that of what the token is released by.

    No token if nothing of them needs a gradient.
    """
    found = _needing_gradients(values)
    if not found:
        return tuple(values), ()
    *tensors, token = _Held.apply(*found.values())  # type: ignore[no-untyped-call]
    return _replaced(values, found, tensors), (token,)


def release(values: Sequence[Any], tokens: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """`values`, whose backward goes before that of what the tokens hold, and the tokens that are still to be released.

    Those are all of them where no value needs a gradient: it would be computed for the order's sake alone.
    """
    found = _needing_gradients(values) if tokens else {}
    if not found:
        return tuple(values), tuple(tokens)
    tensors = _Releasing.apply(len(tokens), *tokens, *found.values())  # type: ignore[no-untyped-call]
    return _replaced(values, found, tensors), ()
