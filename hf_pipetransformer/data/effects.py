"""Side effects of a forward: random numbers that it draws, and communication with other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import set_seed

from hf_pipetransformer.data.rng import CPU, random_state, same_states, set_random_state


EXTREMES = (0.0, 1 - 2**-24)
"""The least and the largest number that `torch.rand` gives in float32."""


class Draws(TorchDispatchMode):
    """Count the single uniform numbers that the CPU's generator gives inside the context.

    Such draws are those of layerdrop, which are made with probability 0, too.

    Args:
        forced: what they are instead; None for what the generator gives.
    """

    def __init__(self, forced: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0
        self._forced = forced

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.rand.default or found.dim() or found.device.type != "cpu":
            return found
        self.number += 1
        return found if self._forced is None else torch.full_like(found, self._forced)


def draw(number: int) -> None:
    """Take as many single numbers from the generator as `Draws` counted."""
    for _ in range(number):
        torch.rand(())


class Alone(TorchDispatchMode):
    """Refuse communication inside the context: processes that try a model do not do so in step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The collectives of torch.distributed, plain and functional.
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"the forward or the loss communicates with other processes ({func})")
        return func(*args, **(kwargs or {}))


class Buffers:
    """Buffers of a module as they are now. Forwards write into them, or put other tensors in their place."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [
            (each._buffers, name, buffer, buffer.clone())
            for each in module.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    def have_changed(self) -> bool:
        return any(
            owner.get(name) is not buffer or not torch.equal(buffer, before)
            for owner, name, buffer, before in self._kept
        )

    @torch.no_grad()
    def restore(self) -> None:
        for owner, name, buffer, before in self._kept:
            owner[name] = buffer
            # What has not changed may be an expanded tensor, which takes no values.
            if not torch.equal(buffer, before):
                buffer.copy_(before)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put back what forwards in training mode change of buffers, such as the statistics of batch normalization."""
    kept = Buffers(module)
    try:
        yield
    finally:
        kept.restore()


@contextmanager
def modes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules back into their modes, one by one, since a script may have put single ones into another mode."""
    modes = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass(frozen=True)
class Effects:
    """Effects of a computation besides its output.

    Args:
        why_not_repeatable: why its next output for the same inputs may be another one; None if it is the same.
        num_draws: single random numbers that it draws, whose values change nothing.
    """

    why_not_repeatable: str | None
    num_draws: int = 0


def effects_of(
    compute: Callable[[], Sequence[torch.Tensor]],
    module: nn.Module,
    are_alike: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], bool],
) -> Effects:
    """Run a computation a few times without gradients, and return what else it does; `module`'s buffers are put back.

    The global generators are left in another state.
    """

    @torch.no_grad()
    def seeded(seed: int) -> Sequence[torch.Tensor]:
        # Of Python and numpy too: layers may draw from any of these generators.
        set_seed(seed)
        return compute()

    kept = Buffers(module)
    first, second = seeded(1), seeded(2)
    if kept.have_changed():
        kept.restore()
        return Effects("keeps statistics of its batches (batch normalization in training mode)")
    # Whoever draws next, such as the order of an epoch, gets what a computation leaves in the generators. So it may be
    # left out only if its draws can be made up for without it, and if whatever they give changes nothing.
    device = first[0].device if first else CPU
    state = random_state(device)
    with torch.no_grad(), Draws() as draws:
        compute()
    after = random_state(device)
    set_random_state(*state, device)
    draw(draws.number)
    are_made_up_for = same_states(random_state(device), after)
    others = [second]
    for forced in EXTREMES if draws.number else ():
        # With the seed of `first`, so that nothing but these draws differs from it.
        with Draws(forced):
            others.append(seeded(1))
    if not are_made_up_for or not all(are_alike(first, other) for other in others):
        return Effects("draws random numbers (dropout)")
    return Effects(None, draws.number)
