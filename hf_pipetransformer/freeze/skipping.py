"""Which layers of a stage skip their weight gradients in a step: drawn at random, alike on all its replicas."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class SkippableLayer:
    """A layer that multiplies by a matrix, so that its weight gradients are a product too.

    Args:
        parameters: its own trained ones, the matrix first.
        size: elements of the matrix: the time of its gradient grows with them.
    """

    parameters: tuple[nn.Parameter, ...]
    size: int


def skippable_layers(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> list[SkippableLayer]:
    """The layers of a model whose weight gradients may be skipped, in the model's order.

    Linear layers and convolutions, of any class. The gradient of an embedding costs next to nothing, those of norms
    and of what stands alone little; a matrix that an embedding shares is not skipped either.

    Args:
        trained: by name the parameters that may be skipped.
    """
    allowed = {id(parameter) for parameter in trained.values()}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            allowed.discard(id(module.weight))
    found = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        weight = own.pop("weight", None)
        if weight is not None and weight.dim() > 1 and id(weight) in allowed:
            parameters = [weight, *(other for other in own.values() if id(other) in allowed)]
            allowed -= {id(parameter) for parameter in parameters}
            found.append(SkippableLayer(tuple(parameters), weight.numel()))
    return found


def draw_skipped(sizes: Sequence[int], share: float, seed: str) -> list[int]:
    """Which of some layers are skipped: in random order as many as `share` of all their elements holds. Pure.

    The layer across the bound is skipped with the probability of its part below it, so that on average exactly `share`
    of the elements is skipped.

    Args:
        sizes: elements of the layers.
        share: from 0 to 1.
        seed: the same gives the same draw on every machine.
    """
    generator = random.Random(seed)
    order = list(range(len(sizes)))
    generator.shuffle(order)
    left, skipped = share * sum(sizes), []
    for at in order:
        if left <= 0 or generator.random() * sizes[at] >= left:
            break
        skipped.append(at)
        left -= sizes[at]
    return sorted(skipped)


@contextmanager
def without_weight_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Forwards inside, and their backwards, give these parameters no gradient and do not compute one."""
    held = list(parameters)
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)
