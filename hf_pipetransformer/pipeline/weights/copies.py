"""Copies of a stage's weights, and buffers for them that are used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


Tensors = list[torch.Tensor]

CHUNK_WEIGHTS = 1 << 22
"""What a multi-tensor operation works on at once: its temporaries are that large, not as large as the stage."""


class Buffers:
    """Hands out room for a copy of the weights and takes it back: large allocations are slow.

    Args:
        values: the weights of the stage.
    """

    def __init__(self, values: Tensors) -> None:
        self._values = values
        self._spare: list[Tensors] = []
        self._num_made = 0
        self._bytes = sum(value.numel() * value.element_size() for value in values)

    @property
    def bytes_held(self) -> int:
        """Of all that were handed out, also those that came back."""
        return self._num_made * self._bytes

    def copy(self) -> Tensors:
        """The weights as they are now, in room of their own."""
        if not self._spare:
            self._spare.append([torch.empty_like(value) for value in self._values])
            self._num_made += 1
        copy = self._spare.pop()
        if self._values:
            torch._foreach_copy_(copy, self._values)
        return copy

    def give_back(self, copy: Tensors) -> None:
        """Nobody needs that copy any more."""
        self._spare.append(copy)


def exchange(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """Each gets the other's values, with room for one tensor at a time."""
    for one, other in zip(first, second, strict=True):
        values = one.clone()
        one.copy_(other)
        other.copy_(values)


def chunks(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Which tensors to work on together: as many as fit in `CHUNK_WEIGHTS`, at least one."""
    start, total = 0, 0
    for index, tensor in enumerate(tensors):
        if index > start and total + tensor.numel() > CHUNK_WEIGHTS:
            yield slice(start, index)
            start, total = index, 0
        total += tensor.numel()
    if start < len(tensors):
        yield slice(start, len(tensors))
