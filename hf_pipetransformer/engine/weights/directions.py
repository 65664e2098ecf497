"""Direction of the next updates: W^ = W - (sum of the coming learning rates) * dW, in place (PipeOptim, Eq. 5).

dW by optimizer (PipeOptim, Table I, with the decay of AdamW added):

    SGD with momentum        the momentum buffer, from which the last update was made
    Adam, AdamW              m^ / (sqrt(v^) + eps), with amsgrad the largest v; AdamW + decay * W
    any other                (W before the last update - W after it) / its learning rate

`maximize` needs nothing: the optimizers' states are those of the negated gradient.
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


CACHED_WEIGHTS = 1 << 17
"""What an operation on the host works on at once."""


@dataclass(frozen=True)
class Part:
    """What is moved of a weight. Its rows alone become what they become with all of it.

    Args:
        index: of the weight, counted over all groups.
        values: they are moved in place.
        rows: `(count,)`, which of the weight's `values` are copies of, `(count, ...)`; None if they are all of it.
    """

    index: int
    values: torch.Tensor
    rows: torch.Tensor | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What belongs to `values` of something as large as the weight."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)


class Direction(Protocol):
    """Knows dW of each parameter."""

    def begin(self) -> None:
        """A window begins: what an update left is forgotten."""
        ...

    def before_update(self) -> None:
        """The gradients are those that the optimizer will use."""
        ...

    def after_update(self) -> None: ...

    def is_known(self) -> bool:
        """Whether any parameter has a dW yet."""
        ...

    def go(self, rates: Sequence[float], parts: Sequence[Part]) -> None:
        """Move parts of the weights.

        Args:
            rates: by how much: per parameter group the sum of the coming learning rates.
            parts: of current weights.
        """
        ...

    @property
    def bytes_held(self) -> int:
        """Of what it keeps itself."""
        ...


def make_direction(
    name: DirectionName, optimizer: Optimizer, buffers: Buffers, rates_now: Callable[[], list[float]]
) -> Direction:
    """How predictions go on for an optimizer.

    Args:
        buffers: for copies of the parameters of all groups in their order.
        rates_now: learning rate of each parameter group in the next update.
    """
    # A class derived from them may step in another way.
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
    """Each parameter group that moves, with its own of `parts`, each after its parameter, and its rate."""
    start = 0
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        own, end = group["params"], start + len(group["params"])
        pairs = [(own[part.index - start], part) for part in parts if start <= part.index < end]
        if rate and pairs:
            yield group, pairs, rate
        start = end


class _FromState:
    """What the directions share that need nothing but the optimizer's state."""

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
        """The parts that have a state, and that; weights that never had a gradient do not move."""
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
    """Adam's moments of the gradients of this window, beside an optimizer that has none. Its defaults."""

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
    """Goes on as the last update of the window went: dW is its finite difference over its learning rate."""

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
        # Where nothing was learnt, as at the first step of a warm-up, there is no direction.
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
    """`values -= rate * m^ / (sqrt(v^) + eps)`, bias-corrected.

    Args:
        first: m of each tensor.
        second: v of each.
        counts: updates that made them; on the device, they are not read from there.
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
    """`adam_move` of one tensor in pieces that stay in the processor's cache from operation to operation."""
    correction, scale = (1 - betas[1] ** count) ** 0.5, -rate / (1 - betas[0] ** count)
    parts = (each.view(-1).split(CACHED_WEIGHTS) for each in (value, first, second))
    for own, m, v in zip(*parts, strict=True):
        own.addcdiv_(m, v.sqrt().div_(correction).add_(eps), value=scale)
