"""Checkpointed forwards, run again in the backward from the same RNG state.

Each GPU has its generator and is served by one thread at a time. The CPU has one generator for all: a forward that
draws from it, and the recomputation that resets it, must not be interrupted by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, Token
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch.utils.checkpoint import checkpoint


Value = TypeVar("Value")


class Setting(Generic[Value]):
    """The variable has the value inside; entered again any number of times, as a kept graph computes again."""

    def __init__(self, variable: ContextVar[Value], value: Value) -> None:
        self._variable = variable
        self._value = value
        self._tokens: list[Token[Value]] = []

    def __enter__(self) -> Value:
        self._tokens.append(self._variable.set(self._value))
        return self._value

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._tokens.pop())


# Inside, another lock takes its place: for the threads of a pipeline within a stage.
_CPU_GENERATOR: ContextVar[Lock] = ContextVar("cpu_generator", default=Lock())  # noqa: B039


@contextmanager
def _alone() -> Iterator[None]:
    with _CPU_GENERATOR.get(), Setting(_CPU_GENERATOR, Lock()):
        yield


class Drawing:
    """Of one stage: which generators its forwards draw from.

    Args:
        device: of the stage.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of a stage on a GPU it shows at its first forward.
        self.is_on_cpu: bool | None = True if device.type == "cpu" else None

    @contextmanager
    def noted(self) -> Iterator[States]:
        """The states before what runs inside."""
        with ExitStack() as stack:
            if self.is_on_cpu is not False:
                stack.enter_context(_alone())
            states = States(self.device, self.is_on_cpu is not False)
            yield states
            if self.is_on_cpu is None and states.of_cpu is not None:
                self.is_on_cpu = not torch.equal(torch.get_rng_state(), states.of_cpu)


class States:
    """Of the generators of a device, now.

    Args:
        has_cpu: whether the CPU's is one of them.
    """

    def __init__(self, device: torch.device, has_cpu: bool) -> None:
        self.device = device
        self.of_cpu = torch.get_rng_state() if has_cpu else None
        self.of_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, numbers are drawn from these states on; outside nothing has been drawn."""
        with ExitStack() as stack:
            if self.of_cpu is not None:
                stack.enter_context(_alone())
                stack.callback(torch.set_rng_state, torch.get_rng_state())
                torch.set_rng_state(self.of_cpu)
            if self.of_cuda is not None:
                stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(self.device), self.device)
                torch.cuda.set_rng_state(self.of_cuda, self.device)
            yield


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
