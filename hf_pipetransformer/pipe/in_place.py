"""Inputs that a stage changes in place, where somebody else still needs what they were or are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


def may_be_separated(values: Sequence[Any], others: Sequence[Any]) -> set[int]:
    """Which of the values share memory with another tensor of the micro-batch.

    Between two stages each is given a place in autograd's graph, or a copy, of its own: a change in place of the one
    would no longer be one of the other.

    Args:
        values: what goes to the next stage.
        others: skip tensors on their way.
    """
    # A tensor that is given twice stays one.
    once = {id(value): value for value in values}.values()
    users = Counter(place for place in map(_memory, (*once, *others)) if place is not None)
    shared = {place for place, count in users.items() if count > 1}
    return {i for i, value in enumerate(values) if _memory(value) in shared}


def _memory(value: Any) -> int | None:
    """What tensors of the same memory have in common; None where there is none."""
    has_memory = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    return value.untyped_storage().data_ptr() if has_memory and value.numel() else None


class InPlaceCheck:
    """Compares the versions of a stage's inputs before and after its forward.

    Args:
        values: the stage's inputs.
        is_checkpointed: whether its forward will run again.
        shared: positions of those that others share.
    """

    def __init__(self, values: Sequence[Any], is_checkpointed: bool, shared: set[int]) -> None:
        self._is_checkpointed = is_checkpointed
        watched = [
            value
            for i, value in enumerate(values)
            if isinstance(value, torch.Tensor) and not value.is_inference() and (is_checkpointed or i in shared)
        ]
        self._before = [(tensor, tensor._version) for tensor in watched]

    def end(self) -> None:
        """The forward is over.

        Raises:
            RuntimeError: it changed one of them.
        """
        if all(tensor._version == version for tensor, version in self._before):
            return
        remedy = "Write the stage's first operation out of place (nn.ReLU() for nn.ReLU(inplace=True))"
        if self._is_checkpointed:
            raise RuntimeError(
                "A stage changes its input in place, which checkpointing would compute again from what is left of it. "
                f"{remedy}, or use checkpoint='never'."
            )
        raise RuntimeError(
            "A stage changes its input in place, and another tensor of the micro-batch, one that is stashed or "
            f"returned twice, is the same memory. {remedy}."
        )
