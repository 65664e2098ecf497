"""Checkpointed forwards, recomputed in the backward from the same RNG state.

Each GPU has a generator and is served by one thread at a time. The CPU generator is shared by all threads: a lock
keeps forwards that draw from it, and recomputations that reset it, from interleaving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint


Value = TypeVar("Value")


@contextmanager
def setting(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """Give a context variable a value inside."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


# Lock of the CPU generator. Its owner puts another lock in its place inside: with the same one, the threads of a
# pipeline nested in a stage would deadlock.
_CPU_GENERATOR: ContextVar[Lock] = ContextVar("cpu_generator", default=Lock())  # noqa: B039


@contextmanager
def _alone() -> Iterator[None]:
    with _CPU_GENERATOR.get(), setting(_CPU_GENERATOR, Lock()):
        yield


class Drawing:
    """Record of the generators that the forwards of one stage draw from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # None for a stage on a GPU until its first forward shows it.
        self.is_on_cpu: bool | None = True if device.type == "cpu" else None

    @contextmanager
    def noted(self) -> Iterator[Restore]:
        """Yield what restores the present RNG states, for a forward that runs inside.

        It is alone on the CPU generator if it may use it.
        """
        may_use_cpu = self.is_on_cpu is not False
        with _alone() if may_use_cpu else nullcontext():
            of_cpu = torch.get_rng_state() if may_use_cpu else None
            of_cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
            yield partial(_restored, self.device, of_cpu, of_cuda)
            # Only a forward on a GPU is asked, once: where it leaves the CPU's generator alone, later ones need no
            # lock.
            if self.is_on_cpu is None and of_cpu is not None:
                self.is_on_cpu = not torch.equal(torch.get_rng_state(), of_cpu)


Restore = Callable[[], AbstractContextManager[None]]


@contextmanager
def _restored(device: torch.device, of_cpu: torch.Tensor | None, of_cuda: torch.Tensor | None) -> Iterator[None]:
    """Set RNG states inside, of the CPU if a forward may draw from it, and restore the present ones on exit."""
    with ExitStack() as stack:
        if of_cpu is not None:
            # Entered first, so left last: the present state is back before another thread may draw.
            stack.enter_context(_alone())
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_rng_state(of_cpu)
        if of_cuda is not None:
            stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
            torch.cuda.set_rng_state(of_cuda, device)
        yield


MODES = ("always", "except_last", "never")

_IS_CHECKPOINTING: ContextVar[bool] = ContextVar("is_checkpointing", default=False)
_IS_RECOMPUTING: ContextVar[bool] = ContextVar("is_recomputing", default=False)


def is_checkpointing() -> bool:
    """Return True in a checkpointed forward, whose activations are dropped and which will run again."""
    return _IS_CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Return True in a forward that runs again for its backward."""
    return _IS_RECOMPUTING.get()


def checkpointed(function: Callable[..., Any], *values: Any, drawing: Drawing | None = None) -> Any:
    """Call `function(*values)` and keep only `values` for its backward, which calls it again with the same RNG state.

    `drawing` names the generators of the stage, by default the CPU's.
    """
    restores: list[Restore] = []
    drawing = drawing or Drawing(torch.device("cpu"))

    def run(*values: Any) -> Any:
        # The first call is the forward; each later one recomputes, several times if the graph is retained.
        if restores:
            with restores[0](), setting(_IS_RECOMPUTING, True):
                return function(*values)
        with drawing.noted() as restore, setting(_IS_CHECKPOINTING, True):
            restores.append(restore)
            return function(*values)

    # torch's preserve_rng_state is not safe here: other threads draw from the CPU generator meanwhile.
    return checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False)


class _Waking(torch.autograd.Function):
    """Node in a checkpointed forward whose backward triggers the recomputation and nothing else."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        # The first access to any saved tensor of a checkpointed forward recomputes all of them.
        ctx.saved_tensors  # noqa: B018


def waking(values: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """Return a token whose release recomputes the forward of `values` before their gradient arrives.

    Call in the checkpointed function. An idle device recomputes while the gradient is in transit (early recomputation,
    as in torchgpipe). There is no token if no value needs a gradient.
    """
    needing = (value for value in values if isinstance(value, torch.Tensor) and value.requires_grad)
    first = next(needing, None)
    return () if first is None else (_Waking.apply(first),)  # type: ignore[no-untyped-call]


def num_checkpointed(mode: str, num_micro_batches: int) -> int:
    """Return the number of leading micro-batches that are checkpointed."""
    return {"always": num_micro_batches, "except_last": num_micro_batches - 1, "never": 0}[mode]
