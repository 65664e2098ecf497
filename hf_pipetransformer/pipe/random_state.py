"""Random numbers that a forward draws again when it runs again.

Each GPU has its generator and is worked for by one thread at a time. The CPU has one generator for all: a forward that
draws from it, and the recomputation that sets it back, must not be interrupted by another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import Lock

import torch

from hf_pipetransformer.pipe.setting import Setting


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
