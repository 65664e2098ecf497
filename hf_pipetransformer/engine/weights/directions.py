"""Weight prediction in place: W^ = W - (sum of the coming learning rates) * dW (PipeOptim, Eq. 5).

The direction dW depends on the optimizer (PipeOptim, Table I, plus the weight decay of AdamW):

    SGD with momentum        the momentum buffer as of the last update
    Adam, AdamW              m^ / (sqrt(v^) + eps), with the maximum v for amsgrad; for AdamW also + decay * W
    any other                (W before the last update - W after it) / learning rate of that update

`maximize` needs no special case: torch's optimizers negate the gradient before they update their state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from hf_pipetransformer.comm.staging import is_apart


if TYPE_CHECKING:
    from hf_pipetransformer.schedules.weight_kinds import DirectionName


Tensors = list[torch.Tensor]

CHUNK_WEIGHTS = 1 << 22
"""Elements per multi-tensor operation. It bounds the temporaries, which would otherwise be as large as the stage."""


class Buffers:
    """Pool of copies of the weights, because large allocations are slow."""

    def __init__(self, values: Tensors) -> None:
        self.values = values
        self.num_made = 0
        """Number of copies ever made; those given back are not freed."""
        self._spare: list[Tensors] = []

    def copy(self) -> Tensors:
        if not self._spare:
            self._spare.append([torch.empty_like(value) for value in self.values])
            self.num_made += 1
        copy = self._spare.pop()
        if self.values:
            torch._foreach_copy_(copy, self.values)
        return copy

    def give_back(self, copy: Tensors) -> None:
        self._spare.append(copy)


def exchange(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """Swap the values of two lists of tensors, one tensor at a time to save memory."""
    for one, other in zip(first, second, strict=True):
        values = one.clone()
        one.copy_(other)
        other.copy_(values)


def chunks(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Yield slices of a list of tensors with at most `CHUNK_WEIGHTS` elements each, but at least one tensor."""
    start, total = 0, 0
    for index, tensor in enumerate(tensors):
        if index > start and total + tensor.numel() > CHUNK_WEIGHTS:
            yield slice(start, index)
            start, total = index, 0
        total += tensor.numel()
    if start < len(tensors):
        yield slice(start, len(tensors))


CACHED_WEIGHTS = 1 << 17
"""Elements per operation on the CPU, chosen to stay in its cache."""


@dataclass(frozen=True)
class Part:
    """Weight to be moved in place (number `index` over all parameter groups), or a copy of some of its rows.

    For the whole weight `rows` is None; else `rows` is `(count,)` and `values` is `(count, ...)`.
    """

    index: int
    values: torch.Tensor
    rows: torch.Tensor | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Select from a tensor of the weight's shape what corresponds to `values`."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)


class Direction(ABC):
    """Source of dW for each parameter, made anew for each window."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def before_update(self) -> None:
        """Observe the gradients that the optimizer is about to use."""
        return None

    @abstractmethod
    def is_known(self) -> bool:
        """Return True if any parameter has a dW yet."""

    def go(self, rates: Sequence[float], parts: Sequence[Part]) -> None:
        """Move weights by the sum of the coming learning rates of each parameter group."""
        start = 0
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            own, end = group["params"], start + len(group["params"])
            pairs = [(own[part.index - start], part) for part in parts if start <= part.index < end]
            if rate and pairs:
                self._move(group, pairs, rate)
            start = end

    @abstractmethod
    def _move(self, group: dict[str, Any], pairs: Sequence[Pair], rate: float) -> None:
        """Move weights of one parameter group."""


Pair = tuple[torch.Tensor, Part]
"""Parameter and what of it is to be moved."""


def make_direction(
    name: DirectionName, optimizer: Optimizer, buffers: Buffers, rates_now: Callable[[], list[float]]
) -> Direction:
    """Choose the direction for an optimizer. `buffers` must copy the parameters of all groups, in order.

    `rates_now` returns the learning rate of each parameter group in the next update.
    """
    # Exact types only, because a subclass may override `step`.
    if type(optimizer) in (Adam, AdamW):
        return _Adam(optimizer, with_decay=name == "optimizer")
    if name == "adam":
        return _OwnMoments(optimizer)
    groups = optimizer.param_groups if type(optimizer) is SGD else []
    # With Nesterov's momentum an update is not the buffer alone.
    if groups and all(group["momentum"] != 0 and not group["nesterov"] for group in groups):
        return _Momentum(optimizer)
    return _LastUpdate(optimizer, buffers, rates_now)


class _FromState(Direction):
    """Base class of directions that need only the optimizer's state."""

    key: str
    """Entry that the state of a parameter has after its first update."""

    def is_known(self) -> bool:
        return any(state.get(self.key) is not None for state in self.optimizer.state.values())

    def with_state(self, pairs: Sequence[Pair]) -> tuple[list[Part], list[dict[str, Any]]]:
        # Parameters without state have never had a gradient, so they do not move.
        states = [(part, self.optimizer.state.get(parameter, {})) for parameter, part in pairs]
        found = [(part, state) for part, state in states if state.get(self.key) is not None]
        return [part for part, _ in found], [state for _, state in found]


class _Momentum(_FromState):
    key = "momentum_buffer"

    def _move(self, group: dict[str, Any], pairs: Sequence[Pair], rate: float) -> None:
        found, states = self.with_state(pairs)
        if found:
            buffers = _of(found, [state[self.key] for state in states])
            torch._foreach_add_([part.values for part in found], buffers, alpha=-rate)


class _Adam(_FromState):
    key = "exp_avg"

    def __init__(self, optimizer: Optimizer, with_decay: bool) -> None:
        super().__init__(optimizer)
        self.with_decay = with_decay

    def _move(self, group: dict[str, Any], pairs: Sequence[Pair], rate: float) -> None:
        found, states = self.with_state(pairs)
        if not found:
            return
        values = [part.values for part in found]
        # The coupled decay of Adam is in the gradients, and so in the moments.
        decay = float(group["weight_decay"]) if self.with_decay and group["decoupled_weight_decay"] else 0.0
        if decay:
            # AdamW, too, shrinks the weights before it takes its step.
            torch._foreach_mul_(values, 1 - rate * decay)
        first = _of(found, [state["exp_avg"] for state in states])
        second = _of(found, [state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"] for state in states])
        steps = [state["step"] for state in states]
        betas = tuple(float(beta) for beta in group["betas"])
        on_host = not isinstance(steps[0], torch.Tensor) or not is_apart(steps[0].device)
        moments = Moments(first, second, [float(step) for step in steps] if on_host else steps)
        adam_move(values, moments, betas, group["eps"], rate)


def _of(parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> Tensors:
    return [part.of(tensor) for part, tensor in zip(parts, tensors, strict=True)]


class _OwnMoments(Direction):
    """Adam direction for other optimizers: keeps its own moments, from this window, with Adam's default betas."""

    betas, eps = (0.9, 0.999), 1e-8

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_gradients = Counter[int]()

    def before_update(self) -> None:
        for index, (parameter, group) in enumerate((p, g) for g in self.optimizer.param_groups for p in g["params"]):
            if parameter.grad is None:
                continue
            # The own moments follow torch's, which take the negated gradient then.
            gradient = -parameter.grad if group.get("maximize") else parameter.grad
            zeros = torch.zeros_like
            first, second = self.moments.setdefault(index, (zeros(gradient), zeros(gradient)))
            first.lerp_(gradient, 1 - self.betas[0])
            second.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
            self._num_gradients[index] += 1

    def is_known(self) -> bool:
        return bool(self.moments)

    def _move(self, group: dict[str, Any], pairs: Sequence[Pair], rate: float) -> None:
        known = [part for _, part in pairs if part.index in self.moments]
        if known:
            first, second = (_of(known, [self.moments[part.index][which] for part in known]) for which in (0, 1))
            moments = Moments(first, second, [float(self._num_gradients[part.index]) for part in known])
            adam_move([part.values for part in known], moments, self.betas, self.eps, rate)


class _LastUpdate(Direction):
    """Direction of the last update in the window: weight difference divided by learning rate."""

    def __init__(self, optimizer: Optimizer, buffers: Buffers, rates_now: Callable[[], list[float]]) -> None:
        super().__init__(optimizer)
        self.buffers = buffers
        self.rates_now = rates_now
        self._before: Tensors = []
        self._rates: list[float] = []

    def before_update(self) -> None:
        # The weights before the last update but one are of no use any more.
        if self._before:
            self.buffers.give_back(self._before)
        self._before, self._rates = self.buffers.copy(), self.rates_now()

    def is_known(self) -> bool:
        return any(self._rates)

    def go(self, rates: Sequence[float], parts: Sequence[Part]) -> None:
        # A learning rate of 0, as in the first step of a warm-up, gives no direction.
        super().go([rate / last if last else 0.0 for rate, last in zip(rates, self._rates, strict=True)], parts)

    def _move(self, group: dict[str, Any], pairs: Sequence[Pair], rate: float) -> None:
        values = [part.values for _, part in pairs]
        before = [part.of(self._before[part.index]) for _, part in pairs]
        for some in chunks(values):
            back = torch._foreach_sub(before[some], values[some])
            torch._foreach_add_(values[some], back, alpha=-rate)


class Moments(NamedTuple):
    """Adam's moments m and v of some weights, and their numbers of updates."""

    first: Tensors
    second: Tensors
    counts: Sequence[float | torch.Tensor]


def adam_move(values: Tensors, moments: Moments, betas: Sequence[float], eps: float, rate: float) -> None:
    """Apply `values -= rate * m^ / (sqrt(v^) + eps)`, with the bias correction for the counts of updates.

    Counts on a GPU stay there, to avoid a synchronization.
    """
    for part in chunks(values):
        own, first, second = values[part], moments.first[part], moments.second[part]
        steps: list[Any] = list(moments.counts[part])
        if all(not is_apart(tensor.device) and tensor.is_contiguous() for tensor in [*own, *first, *second]):
            for value, m, v, step in zip(own, first, second, steps, strict=True):
                # In pieces small enough to stay in the CPU cache between operations.
                pieces = (tensor.view(-1).split(CACHED_WEIGHTS) for tensor in (value, m, v))
                correction, scale = (1 - betas[1] ** step) ** 0.5, -rate / (1 - betas[0] ** step)
                for piece, of_m, of_v in zip(*pieces, strict=True):
                    piece.addcdiv_(of_m, of_v.sqrt().div_(correction).add_(eps), value=scale)
            continue
        denominators = list(torch._foreach_sqrt(second))
        # Scales would have to be numbers, read from the GPU: so the rate goes into the denominators.
        if isinstance(steps[0], torch.Tensor):
            corrections = [1 - betas[1] ** step for step in steps]
            torch._foreach_div_(denominators, torch._foreach_sqrt(corrections))
            torch._foreach_add_(denominators, eps)
            torch._foreach_mul_(denominators, [(1 - betas[0] ** step) / -rate for step in steps])
            torch._foreach_addcdiv_(own, first, denominators)
        else:
            torch._foreach_div_(denominators, [(1 - betas[1] ** step) ** 0.5 for step in steps])
            torch._foreach_add_(denominators, eps)
            scales = [-rate / (1 - betas[0] ** step) for step in steps]
            torch._foreach_addcdiv_(own, first, denominators, scales)
