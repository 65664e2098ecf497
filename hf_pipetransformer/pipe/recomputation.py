"""Checkpointing of activations: a stage keeps its input, and is computed again when its backward comes near."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_pipetransformer.pipe.random_state import Drawing, States
from hf_pipetransformer.pipe.setting import Setting


MODES = ("always", "except_last", "never")

_IS_CHECKPOINTING: ContextVar[bool] = ContextVar("is_checkpointing", default=False)
_IS_RECOMPUTING: ContextVar[bool] = ContextVar("is_recomputing", default=False)


def is_checkpointing() -> bool:
    """Whether a forward is under way whose activations are dropped; it will run once more."""
    return _IS_CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Whether a forward is under way that has run before, for its backward."""
    return _IS_RECOMPUTING.get()


def _contexts() -> tuple[Setting[bool], Setting[bool]]:
    return Setting(_IS_CHECKPOINTING, True), Setting(_IS_RECOMPUTING, True)


def checkpointed(function: Callable[..., Any], *values: Any, drawing: Drawing | None = None) -> Any:
    """What `function(*values)` returns; nothing but `values` is kept for its backward.

    Random numbers are those of the first time when it runs again.

    Args:
        drawing: of the stage that it is the forward of; on the CPU unless given.
    """
    states: list[States] = []
    drawing = drawing or Drawing(torch.device("cpu"))

    def run(*values: Any) -> Any:
        if states:
            with states[0].restored():
                return function(*values)
        with drawing.noted() as found:
            states.append(found)
            return function(*values)

    # Its own way of keeping random states knows of no other thread that draws meanwhile.
    return checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)


class _Waking(torch.autograd.Function):
    """A node inside a checkpointed forward whose backward has that forward run again, and nothing else."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        # What is saved inside is computed again, all of it, when the first of it is asked for.
        ctx.saved_tensors  # noqa: B018


def waking(values: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """A token to release: the forward that gave `values` runs again then, and need not wait for its gradient.

    Called in the checkpointed function. A device that has nothing else to do computes again while the gradient is
    on its way (early recomputation, as in torchgpipe). No token if nothing of them needs a gradient.
    """
    needing = (value for value in values if isinstance(value, torch.Tensor) and value.requires_grad)
    first = next(needing, None)
    return () if first is None else (_Waking.apply(first),)  # type: ignore[no-untyped-call]


def num_checkpointed(mode: str, num_micro_batches: int) -> int:
    """How many of the first micro-batches are checkpointed."""
    return {"always": num_micro_batches, "except_last": num_micro_batches - 1, "never": 0}[mode]
