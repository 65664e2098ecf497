"""Weight prediction in place: W^ = W - (sum of the coming learning rates) * dW (PipeOptim, Eq. 5).

The direction dW depends on the optimizer (PipeOptim, Table I, plus the weight decay of AdamW):

    SGD with momentum        the momentum buffer as of the last update
    Adam, AdamW              m^ / (sqrt(v^) + eps), with the maximum v for amsgrad; for AdamW also + decay * W
    any other                (W before the last update - W after it) / learning rate of that update

`maximize` needs no special case: torch's optimizers negate the gradient before they update their state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from hf_pipetransformer.comm.staging import is_apart
from hf_pipetransformer.schedules.weight_kinds import DirectionName


Tensors = list[torch.Tensor]

CHUNK_WEIGHTS = 1 << 22
"""Elements per multi-tensor operation. It bounds the temporaries, which would otherwise be as large as the stage."""


class Buffers:
    """Pool of copies of the weights, because large allocations are slow."""

    def __init__(self, values: Tensors) -> None:
        self._values = values
        self._spare: list[Tensors] = []
        self._num_made = 0
        self._bytes = sum(value.numel() * value.element_size() for value in values)

    @property
    def bytes_held(self) -> int:
        """Bytes of all copies ever made; copies given back are not freed."""
        return self._num_made * self._bytes

    def copy(self) -> Tensors:
        if not self._spare:
            self._spare.append([torch.empty_like(value) for value in self._values])
            self._num_made += 1
        copy = self._spare.pop()
        if self._values:
            torch._foreach_copy_(copy, self._values)
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


class Direction(Protocol):
    """Source of dW for each parameter."""

    def begin(self) -> None:
        """Start a window: forget earlier updates."""
        ...

    def before_update(self) -> None:
        """Observe the gradients that the optimizer is about to use."""
        ...

    def after_update(self) -> None: ...

    def is_known(self) -> bool:
        """Return True if any parameter has a dW yet."""
        ...

    def go(self, rates: Sequence[float], parts: Sequence[Part]) -> None:
        """Move weights by the sum of the coming learning rates of each parameter group."""
        ...

    @property
    def bytes_held(self) -> int:
        """Bytes of state of this object, excluding the optimizer's state and copies from `Buffers`."""
        ...


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
    momentum = [group for group in optimizer.param_groups if type(optimizer) is SGD and _goes_by_buffer(group)]
    if momentum and len(momentum) == len(optimizer.param_groups):
        return _Momentum(optimizer)
    return _LastUpdate(optimizer, buffers, rates_now)


def _goes_by_buffer(group: dict[str, Any]) -> bool:
    return group["momentum"] != 0 and not group["nesterov"]


def _grouped(
    optimizer: Optimizer, parts: Sequence[Part], rates: Sequence[float]
) -> Iterator[tuple[dict[str, Any], list[tuple[torch.Tensor, Part]], float]]:
    start = 0
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        own, end = group["params"], start + len(group["params"])
        pairs = [(own[part.index - start], part) for part in parts if start <= part.index < end]
        if rate and pairs:
            yield group, pairs, rate
        start = end


class _FromState:
    """Base class of directions that need only the optimizer's state."""

    bytes_held = 0

    def __init__(self, optimizer: Optimizer, key: str) -> None:
        self.optimizer = optimizer
        self.key = key

    def begin(self) -> None:
        pass

    def before_update(self) -> None:
        pass

    def after_update(self) -> None:
        pass

    def is_known(self) -> bool:
        return any(state.get(self.key) is not None for state in self.optimizer.state.values())

    def with_state(self, pairs: Sequence[tuple[torch.Tensor, Part]]) -> tuple[list[Part], list[dict[str, Any]]]:
        # Parameters without state have never had a gradient, so they do not move.
        states = [(part, self.optimizer.state.get(parameter, {})) for parameter, part in pairs]
        found = [(part, state) for part, state in states if state.get(self.key) is not None]
        return [part for part, _ in found], [state for _, state in found]


class _Momentum(_FromState):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, "momentum_buffer")

    def go(self, rates: Sequence[float], parts: Sequence[Part]) -> None:
        for _, pairs, rate in _grouped(self.optimizer, parts, rates):
            found, states = self.with_state(pairs)
            if found:
                buffers = _of(found, [state["momentum_buffer"] for state in states])
                torch._foreach_add_([part.values for part in found], buffers, alpha=-rate)


class _Adam(_FromState):
    def __init__(self, optimizer: Optimizer, with_decay: bool) -> None:
        super().__init__(optimizer, "exp_avg")
        self.with_decay = with_decay

    def go(self, rates: Sequence[float], parts: Sequence[Part]) -> None:
        for group, pairs, rate in _grouped(self.optimizer, parts, rates):
            found, states = self.with_state(pairs)
            if not found:
                continue
            values = [part.values for part in found]
            decay = float(group["weight_decay"]) if self.with_decay and group["decoupled_weight_decay"] else 0.0
            if decay:
                torch._foreach_mul_(values, 1 - rate * decay)
            first = _of(found, [state["exp_avg"] for state in states])
            second = _of(found, [state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"] for state in states])
            steps = [state["step"] for state in states]
            betas = tuple(float(beta) for beta in group["betas"])
            on_host = not isinstance(steps[0], torch.Tensor) or not is_apart(steps[0].device)
            counts = [float(step) for step in steps] if on_host else steps
            adam_move(values, first, second, counts, betas, group["eps"], rate)


def _of(parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> Tensors:
    return [part.of(tensor) for part, tensor in zip(parts, tensors, strict=True)]


class _OwnMoments:
    """Adam direction for other optimizers: keeps its own moments, from this window, with Adam's default betas."""

    betas, eps = (0.9, 0.999), 1e-8

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_gradients: dict[int, int] = {}

    @property
    def bytes_held(self) -> int:
        return sum(m.numel() * m.element_size() for moments in self._moments.values() for m in moments)

    def begin(self) -> None:
        self._moments.clear()
        self._num_gradients.clear()

    def before_update(self) -> None:
        for index, (parameter, group) in enumerate((p, g) for g in self.optimizer.param_groups for p in g["params"]):
            if parameter.grad is None:
                continue
            gradient = -parameter.grad if group.get("maximize") else parameter.grad
            zeros = torch.zeros_like
            first, second = self._moments.setdefault(index, (zeros(gradient), zeros(gradient)))
            first.lerp_(gradient, 1 - self.betas[0])
            second.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
            self._num_gradients[index] = self._num_gradients.get(index, 0) + 1

    def after_update(self) -> None:
        pass

    def is_known(self) -> bool:
        return bool(self._moments)

    def go(self, rates: Sequence[float], parts: Sequence[Part]) -> None:
        for _, pairs, rate in _grouped(self.optimizer, parts, rates):
            known = [part for _, part in pairs if part.index in self._moments]
            if known:
                first, second = (_of(known, [self._moments[part.index][which] for part in known]) for which in (0, 1))
                counts = [float(self._num_gradients[part.index]) for part in known]
                adam_move([part.values for part in known], first, second, counts, self.betas, self.eps, rate)


class _LastUpdate:
    """Direction of the last update in the window: weight difference divided by learning rate."""

    def __init__(self, optimizer: Optimizer, buffers: Buffers, rates_now: Callable[[], list[float]]) -> None:
        self.optimizer = optimizer
        self.buffers = buffers
        self.rates_now = rates_now
        self._before: Tensors | None = None
        self._rates: list[float] = []

    bytes_held = 0  # Its copy is one of the buffers.

    def begin(self) -> None:
        if self._before is not None:
            self.buffers.give_back(self._before)
            self._before = None

    def before_update(self) -> None:
        self.begin()
        self._before, self._rates = self.buffers.copy(), self.rates_now()

    def after_update(self) -> None:
        pass

    def is_known(self) -> bool:
        return self._before is not None and any(self._rates)

    def go(self, rates: Sequence[float], parts: Sequence[Part]) -> None:
        assert self._before is not None
        # A learning rate of 0, as in the first step of a warm-up, gives no direction.
        updates = [rate / last if last else 0.0 for rate, last in zip(rates, self._rates, strict=True)]
        for _, pairs, num_updates in _grouped(self.optimizer, parts, updates):
            values = [part.values for _, part in pairs]
            before = [part.of(self._before[part.index]) for _, part in pairs]
            for some in chunks(values):
                back = torch._foreach_sub(before[some], values[some])
                torch._foreach_add_(values[some], back, alpha=-num_updates)


def adam_move(
    values: Tensors,
    first: Tensors,
    second: Tensors,
    counts: Sequence[float | torch.Tensor],
    betas: Sequence[float],
    eps: float,
    rate: float,
) -> None:
    """Apply `values -= rate * m^ / (sqrt(v^) + eps)`, with the bias correction for `counts` updates.

    `first` is m, `second` is v. Counts on a GPU stay there, to avoid a synchronization.
    """
    for part in chunks(values):
        steps: list[Any] = list(counts[part])
        if _is_on_host([*values[part], *first[part], *second[part]]):
            for each in zip(values[part], first[part], second[part], steps, strict=True):
                _adam_move_on_host(*each, betas, eps, rate)
            continue
        denominators = list(torch._foreach_sqrt(second[part]))
        if isinstance(steps[0], torch.Tensor):
            corrections = [1 - betas[1] ** step for step in steps]
            torch._foreach_div_(denominators, torch._foreach_sqrt(corrections))
            torch._foreach_add_(denominators, eps)
            torch._foreach_mul_(denominators, [(1 - betas[0] ** step) / -rate for step in steps])
            torch._foreach_addcdiv_(values[part], first[part], denominators)
        else:
            torch._foreach_div_(denominators, [(1 - betas[1] ** step) ** 0.5 for step in steps])
            torch._foreach_add_(denominators, eps)
            scales = [-rate / (1 - betas[0] ** step) for step in steps]
            torch._foreach_addcdiv_(values[part], first[part], denominators, scales)


def _is_on_host(tensors: Sequence[torch.Tensor]) -> bool:
    return all(not is_apart(tensor.device) and tensor.is_contiguous() for tensor in tensors)


def _adam_move_on_host(
    value: torch.Tensor, first: torch.Tensor, second: torch.Tensor, count: float, betas: Sequence[float], eps: float,
    rate: float,
) -> None:  # fmt: skip
    # In pieces small enough to stay in the CPU cache between operations.
    correction, scale = (1 - betas[1] ** count) ** 0.5, -rate / (1 - betas[0] ** count)
    parts = (each.view(-1).split(CACHED_WEIGHTS) for each in (value, first, second))
    for own, m, v in zip(*parts, strict=True):
        own.addcdiv_(m, v.sqrt().div_(correction).add_(eps), value=scale)
