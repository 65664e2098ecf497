"""Asynchronous 1F1B as mathematics: micro-batch by micro-batch, with the weights of every version kept, and backwards
by hand.

Nothing is shared with the package: each stage computes `(linear, tanh, layer norm, linear)`, the first one behind an
embedding, from weights given to its forward and weights given to its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


aten = torch.ops.aten
WIDTH, INNER, VOCABULARY, ROWS = 6, 8, 11, 5
Weights = list[torch.Tensor]
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Stage(nn.Module):
    """A stage as torch has it."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        if is_first:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.is_first = is_first
        self.inner = nn.Linear(WIDTH, INNER)
        self.norm = nn.LayerNorm(INNER)
        self.outer = nn.Linear(INNER, WIDTH)

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(received) if self.is_first else received
        return self.outer(self.norm(torch.tanh(self.inner(hidden))))


def make_stages(num_stages: int) -> list[Stage]:
    torch.manual_seed(num_stages)
    stages = [Stage(is_first=k == 0) for k in range(num_stages)]
    for stage in stages:
        # As left by torch, a norm's weights of one would hide which version a backward took.
        nn.init.normal_(stage.norm.weight)
        nn.init.normal_(stage.norm.bias)
    return stages


def micro_batch_of_data(micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `(rows,)` and targets `(rows, width)`."""
    generator = torch.Generator().manual_seed(1000 + micro_batch)
    tokens = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    return tokens, torch.randn(ROWS, WIDTH, generator=generator)


def output_gradient(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of half the mean squared error."""
    return ((output.detach() - target) / ROWS).to(output.dtype)


def forward_by_hand(is_first: bool, weights: Weights, received: torch.Tensor, dtype: torch.dtype) -> Any:
    """What a stage gives, and what its backward needs of the forward beside weights."""
    embedding = weights[0] if is_first else None
    w1, b1, norm_w, norm_b, w2, b2 = weights[is_first:]
    hidden = received if embedding is None else embedding[received]
    x = hidden.to(dtype)
    y = torch.tanh(torch.addmm(b1.to(dtype), x, w1.to(dtype).t()))
    z, mean, scale = torch.native_layer_norm(y, (INNER,), norm_w, norm_b, 1e-5)
    output = torch.addmm(b2.to(dtype), z.to(dtype), w2.to(dtype).t())
    return output, (received, hidden.dtype, x, y, z.to(dtype), mean, scale)


def backward_by_hand(is_first: bool, weights: Weights, saved: Any, gradient: torch.Tensor) -> Any:
    """The gradient of what was received (None on the first stage) and those of the weights."""
    received, hidden_dtype, x, y, z, mean, scale = saved
    w1, b1, norm_w, norm_b, w2, b2 = weights[is_first:]
    into_z = gradient @ w2.to(gradient.dtype)
    into_w2, into_b2 = (gradient.t() @ z).to(w2.dtype), gradient.sum(0).to(b2.dtype)
    into_y, into_norm_w, into_norm_b = aten.native_layer_norm_backward(
        into_z, y, (INNER,), mean, scale, norm_w, norm_b, (True, True, True)
    )
    inner = aten.tanh_backward(into_y, y)
    into_x = (inner @ w1.to(inner.dtype)).to(hidden_dtype)
    into_w1, into_b1 = (inner.t() @ x).to(w1.dtype), inner.sum(0).to(b1.dtype)
    found = [into_w1, into_b1, into_norm_w, into_norm_b, into_w2, into_b2]
    if not is_first:
        return into_x, found
    return None, [aten.embedding_dense_backward(into_x, received, VOCABULARY, -1, False), *found]


@dataclass
class Snapshot:
    """A stage after so many updates of a window."""

    weights: Weights
    state: list[dict[str, Any]]
    before: Weights | None
    """The weights before the last update of the window."""

    last_rates: list[float]
    moments: list[tuple[torch.Tensor, torch.Tensor, int] | None]
    """XPipe's own."""


class SimulatedStage:
    """The history of a stage over a window."""

    def __init__(self, stage: Stage, make_optimizer: MakeOptimizer) -> None:
        self.is_first = stage.is_first
        self.parameters = [nn.Parameter(p.detach().clone()) for p in stage.parameters()]
        self.optimizer = make_optimizer(self.parameters)
        # Where a parameter is in the optimizer's groups.
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.group_of = [
            next(g for g in self.optimizer.param_groups if any(p is q for q in g["params"])) for p in self.parameters
        ]
        assert {id(p) for p in order} == {id(p) for p in self.parameters}
        self.history: list[Snapshot] = []

    def begin(self) -> None:
        self.history = [self.snapshot(None, [], [None] * len(self.parameters))]

    def snapshot(self, before: Any, last_rates: list[float], moments: list[Any]) -> Snapshot:
        state = [deepcopy(self.optimizer.state.get(p, {})) for p in self.parameters]
        return Snapshot([p.detach().clone() for p in self.parameters], state, before, last_rates, moments)

    def update(self, gradients: list[Weights], rate_factor: float) -> None:
        """A step with the sums of the gradients of its micro-batches."""
        last = self.history[-1]
        moments: list[Any] = []
        for p, group, own, *parts in zip(self.parameters, self.group_of, last.moments, *gradients, strict=True):
            p.grad = sum(parts[1:], start=parts[0])
            group["lr"] = group["initial_lr"] * rate_factor
            signed = -p.grad if group.get("maximize") else p.grad
            m, v, count = own or (torch.zeros_like(p), torch.zeros_like(p), 0)
            # m and v of Adam, each rounded as torch's operation rounds.
            m, v = m.lerp(signed, 1 - 0.9), (v * 0.999).addcmul(signed, signed, value=1 - 0.999)
            moments.append((m, v, count + 1))
        self.optimizer.step()
        rates = [group["lr"] for group in self.group_of]
        self.history.append(self.snapshot(last.weights, rates, moments))

    def predicted(self, version: int, factors: Sequence[float], with_adam: bool) -> Weights:
        """The weights as they are expected after updates whose rates are so many times the groups' own."""
        at = self.history[version]
        kind = type(self.optimizer).__name__
        result = []
        for index, (weight, state, group) in enumerate(zip(at.weights, at.state, self.group_of, strict=True)):
            rate = sum(group["initial_lr"] * factor for factor in factors)
            if not rate:
                result.append(weight)
            elif kind in ("Adam", "AdamW"):
                result.append(by_adam(weight, state, group, rate, with_decay=not with_adam) if state else weight)
            elif with_adam:
                own = at.moments[index]
                result.append(weight if own is None else adam_formula(weight, *own, (0.9, 0.999), 1e-8, rate))
            elif kind == "SGD" and group["momentum"] and not group["nesterov"]:
                result.append(weight.add(state["momentum_buffer"], alpha=-rate) if state else weight)
            elif at.before is not None and at.last_rates[index]:
                result.append(weight.add(at.before[index] - weight, alpha=-(rate / at.last_rates[index])))
            else:
                result.append(weight)
        return result


def by_adam(weight: torch.Tensor, state: Any, group: Any, rate: float, with_decay: bool) -> torch.Tensor:
    if with_decay and group["decoupled_weight_decay"]:
        weight = weight * (1 - rate * group["weight_decay"])
    second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    return adam_formula(weight, state["exp_avg"], second, state["step"].item(), group["betas"], group["eps"], rate)


def adam_formula(weight, m, v, count, betas, eps, rate):  # type: ignore[no-untyped-def]
    """`weight - rate * m^ / (sqrt(v^) + eps)`, rounded as torch's Adam rounds its own step."""
    denominator = v.sqrt() / (1 - betas[1] ** count) ** 0.5 + eps
    return weight.addcdiv(m, denominator, value=-rate / (1 - betas[0] ** count))


def simulate(
    kind: str,
    stages: list[Stage],
    make_optimizer: MakeOptimizer,
    windows: Sequence[Sequence[int]],
    micro_batches_per_step: int,
    schedule: Callable[[int], float],
    dtype: torch.dtype = torch.float32,
) -> list[Weights]:
    """The weights of every stage after windows of steps with so many micro-batches each."""
    simulated = [SimulatedStage(stage, make_optimizer) for stage in stages]
    num_micro_batches_before, num_steps_before = 0, 0
    for sizes in windows:
        for stage in simulated:
            stage.begin()
        step_of = [step for step, size in enumerate(sizes) for _ in range(size)]
        gradients: list[list[Weights]] = [[] for _ in stages]
        for micro_batch, step in enumerate(step_of):
            seen = [
                versions(
                    kind,
                    k,
                    len(stages),
                    micro_batch,
                    step_of,
                    micro_batches_per_step,
                    stage,
                    num_steps_before,
                    schedule,
                )
                for k, stage in enumerate(simulated)
            ]
            hidden, target = micro_batch_of_data(num_micro_batches_before + micro_batch)
            saved = []
            for stage, (forward_weights, _) in zip(simulated, seen, strict=True):
                hidden, kept = forward_by_hand(stage.is_first, forward_weights, hidden, dtype)
                saved.append(kept)
            gradient = output_gradient(hidden, target)
            for k in reversed(range(len(stages))):
                stage = simulated[k]
                gradient, found = backward_by_hand(stage.is_first, seen[k][1], saved[k], gradient)
                gradients[k].append(found)
            if step_of[micro_batch + 1 : micro_batch + 2] != [step]:
                for stage, sums in zip(simulated, gradients, strict=True):
                    stage.update(sums, schedule(num_steps_before + step))
                    sums.clear()
        num_micro_batches_before += len(step_of)
        num_steps_before += len(sizes)
    return [[p.detach() for p in stage.parameters] for stage in simulated]


def versions(
    kind: str,
    k: int,
    num_stages: int,
    micro_batch: int,
    step_of: Sequence[int],
    micro_batches_per_step: int,
    stage: SimulatedStage,
    num_steps_before: int,
    schedule: Callable[[int], float],
) -> tuple[Weights, Weights]:
    """The weights that the forward and the backward of a micro-batch see on stage k."""
    num_backwards = max(0, micro_batch - (num_stages - 1 - k))
    v_f, v_b = step_of[num_backwards], step_of[micro_batch]
    # The number of complete steps among those backwards.
    assert v_f == sum(step_of.count(step) == step_of[:num_backwards].count(step) for step in range(v_f + 1))

    def version(number: int) -> Weights:
        return stage.history[number].weights

    def ahead(now: int, target: int, with_adam: bool = False) -> Weights:
        return stage.predicted(now, [schedule(num_steps_before + step) for step in range(now, target)], with_adam)

    if kind == "pipeoptim":
        return ahead(v_f, v_b), version(v_b)
    if kind == "vanilla":
        return version(v_f), version(v_b)
    if kind == "stashing":
        return version(v_f), version(v_f)
    if kind == "double_buffer":
        delayed = version(min(max(0, v_b - 1), v_f))
        return delayed, delayed
    position = micro_batch - step_of.index(v_b)
    target = v_b + (position + k // 2) // micro_batches_per_step
    return ahead(v_f, target, kind == "xpipe"), ahead(v_b, target, kind == "xpipe")
